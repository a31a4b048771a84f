"""Where there is no GPU, kernels written in Triton run in its interpreter.

Triton looks at this when it is first imported, so it is set here, before any test module or fixture is.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
