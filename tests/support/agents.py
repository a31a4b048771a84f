"""What tests of trajectories share: a tokenizer with tools, a tool, and an engine that says given texts."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from qerl.rollout.engine import Completion, RolloutEngine
from tests.support.models import EOS, make_tiny_tokenizer
from tests.support.sessions import WholeTurns


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer with Qwen3's chat template."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def multiply(a: int, b: int) -> int:
    """Multiplies two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        The product of the two integers.
    """
    return a * b


def call(name: str, **arguments) -> str:
    """What a model writes to call a tool."""
    pairs = ", ".join(f'"{key}": {value}' for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{pairs}}}}}\n</tool_call>'


class Row(NamedTuple):
    """What a script goes by, beside what a sequence has: its prompt, and its number among the samples."""

    prompt_number: int
    sample: int
    prompt: list[int]


class SayingEngine(RolloutEngine):
    """Says scripted texts, each ended by the stop token unless there is no room.

    Args:
        tokenizer: Of the texts.
        say: The text of a sequence's next turn, given its row and what it has so far as text.

    Attributes:
        calls: (params, norm_offsets) of each session.
    """

    def __init__(self, tokenizer, say: Callable[[Row, str], str], positions: int | None = None) -> None:
        self.tokenizer, self.say, self.positions = tokenizer, say, positions
        self.calls: list = []

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None):
        raise AssertionError("one turn was asked for")

    @contextmanager
    def session(self, params, norm_offsets=None, growing=False, longest_prompt=None, policy=None):
        self.calls.append((params, norm_offsets))
        yield _SayingSession(self, params)


class _SayingSession(WholeTurns):
    def __init__(self, engine: SayingEngine, params) -> None:
        super().__init__(params, engine.positions)
        self._engine = engine

    def turn(self, sequence) -> Completion:
        tokenizer, prompt = self._engine.tokenizer, sequence.prompt
        row = Row(prompt.number, sequence.sample, prompt.token_ids)
        text = self._engine.say(row, tokenizer.decode(sequence.token_ids))
        ids = tokenizer(text + EOS)["input_ids"]
        cut = ids[: sequence.room]
        logprobs = [-4.0 - (token % 7) / 8 for token in cut]
        return Completion(cut, logprobs, [4.0] * len(cut), "stop" if len(cut) == len(ids) else "length")
