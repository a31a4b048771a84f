"""Means to compute rewards other than by comparing answers: programs in a sandbox, a judge model."""
