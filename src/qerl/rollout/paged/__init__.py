"""The rollout engine for CUDA: keys and values in pages, continuous batching, captured decode steps."""
