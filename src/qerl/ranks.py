"""The process of a run that logs.

Messages that all processes of a run would log are logged once, by the first. torchrun tells each its number
before any of them has joined the others, so it is known from the first line on and without torch.
"""

import os


def is_first_process() -> bool:
    """True in the only process, or that of rank 0."""
    return os.environ.get("RANK", "0") == "0"
