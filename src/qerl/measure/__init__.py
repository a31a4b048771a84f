"""Measurements of a GPU that need nothing but the package; `bench` has more of them."""
