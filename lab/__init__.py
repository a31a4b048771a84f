"""The laboratory: studies, and code that writes results into the docs. It is in a clone, not in the wheel.

It imports the package `qerl` and `bench`, and neither imports it.
"""
