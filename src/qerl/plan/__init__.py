"""What fits on one GPU, said from a model's config.json before anything is loaded."""
