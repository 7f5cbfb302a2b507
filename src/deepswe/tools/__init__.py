"""What the agent can do: each tool is declared once."""
