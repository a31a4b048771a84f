"""Sequences of the paged engine, and what its scheduler asks of the memory that they hold between tokens.

Plain Python, no tensors.
"""

from dataclasses import dataclass, field
from typing import Protocol

from qerl.rollout import sequence as common


@dataclass(eq=False)
class Prompt(common.Prompt):
    """A prompt and, while any of its sequences holds keys and values, its blocks.

    Attributes:
        blocks: Blocks of its keys and values, shared by its sequences; None while none of them holds any.
        readers: Sequences that hold them.
    """

    blocks: list[int] | None = None
    readers: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1


@dataclass(eq=False)
class Sequence(common.Sequence):
    """One completion in the making, from the first plan to its last token.

    What it has (`token_ids` and the rest) is read when it leaves its row; the tokens of one that has stops,
    after each round.

    Attributes:
        prompt: The prompt that it continues.
        generated: Tokens that it has, drawn or written, as the host knows it.
        cached: Of its own tokens, which begin with the prompt's last, those whose keys and values its blocks
            held when it left its row.
        blocks: Blocks of its own tokens, which it may keep while others write.
        row: Row of the batch while it runs.
    """

    prompt: Prompt
    generated: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    def own_tokens_after(self, steps: int) -> int:
        """Tokens that its own blocks must hold after so many more steps, and for the token after them.

        The prompt's last token and all of its own are cached, except the very last.
        """
        return min(self.generated + steps + 1, self.max_tokens)


class SequenceMemory(Protocol):
    """Who holds how much of the memory in which a model keeps what it has read of sequences.

    Keys and values in pages are one kind (`qerl.rollout.paged.blocks.BlockManager`), whose unit is a page. A
    mixer that carries a state has one of a slot per sequence, in which `copy` also has the prompt's state
    copied, because a state is overwritten and a page is not. The numbers lie in `KVCache`.

    Attributes:
        count: Units in all.
    """

    count: int

    @property
    def free(self) -> int:
        """Units that nobody holds."""

    def check(self, prompt: Prompt, limit: int) -> None:
        """Raise for a prompt of which one sequence with so many tokens of its own exceeds all memory.

        Raises:
            QeRLError: It does.
        """

    def held(self, sequence: Sequence) -> int:
        """Units that a sequence holds beside its prompt's."""

    def missing(self, sequence: Sequence, steps: int) -> int:
        """Units that a sequence lacks for so many steps; it never needs more than its last token does."""

    def prompt_missing(self, sequence: Sequence) -> int:
        """Units that the prompt of a sequence lacks; 0 where another sequence has it there."""

    def copy(self, sequence: Sequence) -> bool:
        """Let an entering sequence have what its prompt left, unless it has it still.

        Returns:
            Whether the prompt must be computed first.
        """

    def reserve(self, sequence: Sequence, steps: int) -> None:
        """Give a sequence what it lacks for so many steps, which must be free.

        Raises:
            QeRLError: It is not.
        """

    def give_up(self, sequence: Sequence) -> None:
        """Take back all that a sequence holds, its share of its prompt's included."""
