"""A tiny policy, trained here, whose right strategy has a known probability, and its task."""
