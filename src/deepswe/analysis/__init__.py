"""What happened: curves and reports."""
