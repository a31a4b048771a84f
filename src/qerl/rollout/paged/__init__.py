"""The rollout engine for CUDA: paged KV cache, continuous batching, one CUDA graph a decode step."""
