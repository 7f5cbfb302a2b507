"""Micro repositories: generated code with one bug each, small enough for a model of a million parameters."""
