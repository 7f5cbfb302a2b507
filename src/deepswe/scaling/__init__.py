"""Test-time scaling: candidates, verifiers and the choice among candidates."""
