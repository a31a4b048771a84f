"""Memory and time of a run, planned from a model's config.json before anything is loaded."""
