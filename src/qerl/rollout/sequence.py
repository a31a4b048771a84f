"""What an engine knows of a completion in the making: plain Python, no torch.

A completion is made in turns. In a turn the policy draws tokens until it stops; then others may write some,
and the next turn begins. What both have written is one list of tokens with one limit.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from qerl.rollout.stops import Cut, FinishReason, Stop, first_cut

if TYPE_CHECKING:  # the contract needs torch
    from qerl.rollout.engine import SamplingParams

Stage = Literal["drawing", "between turns", "finished"]
"""Whose turn it is: the policy's, that of others, nobody's any more."""


@dataclass(eq=False)
class Prompt:
    """What sequences begin with.

    Attributes:
        number: Position in the call or session, from 0.
        token_ids: All its tokens.
        finished: Token ids of sequences that were finished, where drafts are looked for in them.
        blocks: In the paged engine, blocks of its keys and values, shared by its sequences; None while none
            of them holds any.
        readers: Sequences that hold them.
    """

    number: int
    token_ids: list[int]
    finished: list[list[int]] = field(default_factory=list)
    blocks: list[int] | None = None
    readers: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens in the blocks: all but the last, which each sequence decodes itself."""
        return len(self.token_ids) - 1


@dataclass(eq=False)
class Sequence:
    """One completion in the making.

    Attributes:
        index: Position in the call or session, from 0.
        prompt: The prompt that it continues.
        sample: Number among the prompt's sequences, from 0.
        params: How its tokens are drawn, and which end its turns.
        max_tokens: Tokens that it may have, drawn or written, as its parameters and the model's positions
            say; at most 0 for one without room.
        key: Seed, prompt and sample by which its uniform numbers are keyed.
        stops: What the host looks for beside the end tokens that the drawing engine looks for itself.
        token_ids, logprobs, entropies: What it has, the latter two 0.0 where others wrote.
        turn_start: Tokens that it had when its turn began.
        finish_reason: Why its last turn ended.
        stage: Whose turn it is.
        generated: In the paged engine, which reads `token_ids` and the rest when the sequence leaves its row
            (of one that has stops, the tokens after each round), tokens that it has, as the host knows it.
        cached: Of its own tokens, which begin with the prompt's last, those whose keys and values its blocks
            held when it left its row.
        blocks: Blocks of its own tokens, which it may keep while others write.
        row: Row of the batch while it runs.
    """

    index: int
    prompt: Prompt
    sample: int
    params: "SamplingParams"
    max_tokens: int
    key: tuple[int, int, int] = (0, 0, 0)
    stops: tuple[Stop, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turn_start: int = 0
    finish_reason: FinishReason = "length"
    stage: Stage = "drawing"
    generated: int = 0
    cached: int = 0
    blocks: list[int] = field(default_factory=list)
    row: int | None = None

    @property
    def room(self) -> int:
        """Tokens that it may still have; 0 after logits that were not finite."""
        return 0 if self.finish_reason == "error" else max(0, self.max_tokens - len(self.token_ids))

    @property
    def last_token(self) -> int:
        """The token that the next decode step reads."""
        return self.token_ids[-1] if self.token_ids else self.prompt.token_ids[-1]

    def own_tokens_after(self, steps: int) -> int:
        """Tokens that its own blocks must hold after so many more steps, and for the token after them.

        The prompt's last token and all of its own are cached, except the very last.
        """
        return min(self.generated + steps + 1, self.max_tokens)

    def cut(self, checked: int) -> Cut | None:
        """Where its stops end its turn, if they do; so many of its tokens are known not to."""
        return first_cut(self.stops, self.prompt.token_ids, self.token_ids, self.turn_start, checked)

    def write(self, token_ids: list[int]) -> None:
        """Append what others wrote, and begin the next turn."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.entropies += [0.0] * len(token_ids)
        self.turn_start, self.stage = len(self.token_ids), "drawing"


def new_sequences(
    prompts: list[list[int]],
    params: "list[SamplingParams]",
    positions: int | None = None,
    first: int = 0,
    first_prompt: int = 0,
) -> list[Sequence]:
    """Sequences of as many samples of each prompt, numbered on.

    Args:
        prompts: Token ids of each.
        params: Of each sequence, prompts in order, the samples of a prompt next to each other.
        positions: Positions that the model has, None where it sets no limit.
        first, first_prompt: Numbers of the first sequence and of the first prompt.
    """
    samples = len(params) // len(prompts)
    made: list[Sequence] = []
    for number, token_ids in enumerate(prompts, first_prompt):
        prompt = Prompt(number, token_ids)
        for sample in range(samples):
            own = params[len(made)]
            most = own.max_tokens
            limit = most if positions is None else min(most, positions - len(token_ids))
            made.append(Sequence(first + len(made), prompt, sample, own, limit, stops=own.stops))
    return made
