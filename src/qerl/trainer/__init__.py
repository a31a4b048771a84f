"""The trainer: a run from its settings, the two halves of a step, checkpoints, and what is logged."""
