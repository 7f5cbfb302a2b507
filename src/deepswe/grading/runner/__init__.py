"""Programs that run tests inside a sandbox. They are sent as text, so they import nothing of this package."""
