"""What settings go through: types and ranges, the parents' fields, recipes in YAML, and their tables."""
