"""Pure functions: they know neither sandbox nor process."""
