"""Tasks made from code: generated micro repositories and mutations of real ones."""
