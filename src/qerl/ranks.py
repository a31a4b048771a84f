"""Which of a run's processes speaks.

What all processes of a run find alike is said once, by the first. torchrun tells each its number before any
of them has joined the others, so it is known from the first line on and without torch.
"""

import os


def is_first_process() -> bool:
    """Whether this process says what all of them find: the only one, or that of rank 0."""
    return os.environ.get("RANK", "0") == "0"
