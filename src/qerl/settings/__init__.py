"""Settings: types and ranges, the fields of the parent classes, recipes in YAML, and tables of fields."""
