"""Single-use environments: an attempt at one task, from the first message to the grade."""
