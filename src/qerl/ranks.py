"""The process of a run that logs.

Messages that all processes of a run would log are logged once, by the first. torchrun gives each process its
number in the environment, so it is known without torch, before the processes have joined.
"""

import os


def is_first_process() -> bool:
    """Return True in the process of rank 0, which may be the only one."""
    return os.environ.get("RANK", "0") == "0"
