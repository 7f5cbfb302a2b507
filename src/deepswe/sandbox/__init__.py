"""Where code runs: one protocol, one opener, several backends."""
