"""Word problems of four to six operations; the answer writes down each operation, some 50 tokens.

The problems are those of `qerl.tasks.arithmetic` with more operations. The prompt has no worked example, so a
study begins with a model that `lab/worked/sft.yaml` has trained on solutions.
"""

from qerl.errors import QeRLError
from qerl.tasks.arithmetic import Arithmetic, Level


class Worked(Arithmetic):
    """Generated word problems of several operations on numbers up to 9.

    Args:
        shortest, longest: Minimum and maximum number of operations of a problem; column ``steps`` of a row
            has the number.
        seed, train_size, test_size: As in :class:`Arithmetic`.
    """

    def __init__(
        self,
        shortest: int = 4,
        longest: int = 6,
        seed: int = 0,
        train_size: int = 4096,
        test_size: int = 256,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise QeRLError(f"shortest is {shortest} and longest {longest}; use 1 <= shortest <= longest.")
        super().__init__("wp2", examples=0, seed=seed, train_size=train_size, test_size=test_size)
        self.level = Level(tuple(range(shortest, longest + 1)), 9)
