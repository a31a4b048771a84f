"""Word problems of four to six operations, each of which the answer writes down: some 50 tokens.

Problems are those of `qerl.tasks.arithmetic` with more operations. No worked example is in the prompt, so a
study begins with a model that `lab/worked/sft.yaml` has shown some solutions.
"""

from qerl.errors import QeRLError
from qerl.tasks.arithmetic import Arithmetic, Level


class Worked(Arithmetic):
    """Generated word problems of several operations on numbers up to 9.

    Args:
        shortest, longest: Fewest and most operations of a problem; column ``steps`` of a row has them.
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
