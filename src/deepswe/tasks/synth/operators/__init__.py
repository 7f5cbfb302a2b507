"""Kinds of mutation, located on the concrete syntax tree."""
