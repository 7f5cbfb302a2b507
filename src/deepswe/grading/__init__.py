"""What the work is worth: a patch is tested in a fresh sandbox."""
