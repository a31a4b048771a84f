"""Word problems of one to eight operations, each a line of the answer, so that completions vary in length.

At each level of `qerl.tasks.arithmetic` answers are alike in length, and a small model that is shown examples
of several lines writes one line. So prompts have no example, and a policy first learns the form from
demonstrations.
"""

from qerl.tasks.arithmetic import Arithmetic, Level

CHAINS = Level((1, 1, 1, 1, 2, 2, 2, 3, 3, 4, 6, 8), 9)


class Chains(Arithmetic):
    """Word problems of `CHAINS`.

    Args:
        seed, train_size, test_size: As in `DrawnTask`.
    """

    def __init__(self, seed: int = 0, train_size: int = 4096, test_size: int = 256) -> None:
        super().__init__(examples=0, seed=seed, train_size=train_size, test_size=test_size)
        self.level = CHAINS
