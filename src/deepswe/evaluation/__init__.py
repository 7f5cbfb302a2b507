"""How good a policy is, with intervals."""
