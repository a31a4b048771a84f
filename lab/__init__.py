"""The laboratory: studies, and what writes results into the docs. It lies in a clone and not in the wheel.

It imports the package `qerl` and `bench`, and neither imports it.
"""
