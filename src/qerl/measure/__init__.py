"""Measurements of a GPU that need only the package; `bench` has more."""
