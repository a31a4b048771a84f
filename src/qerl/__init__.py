"""QeRL: reinforcement learning of large language models on few GPUs.

A frozen base model in NVFP4 (4-bit floats, two-level scaling), LoRA adapters in 16 or 32 bits, GRPO or DAPO,
and noise in the RMSNorm weights during rollouts that is annealed in stages (arXiv 2510.11696). One packed
copy of the weights serves rollout and training.
"""

__version__ = "0.1.0"
