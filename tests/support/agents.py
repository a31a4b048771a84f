"""What tests of trajectories share: a tokenizer with tools, a tool, and an engine that says given texts."""

from collections.abc import Callable
from contextlib import contextmanager

from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_chat_template

from qerl.rollout.engine import Completion, RolloutEngine
from qerl.rollout.session import Track, TrackedSession
from tests.support.models import EOS, make_tiny_tokenizer


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


class SayingEngine(RolloutEngine):
    """Says scripted texts, each ended by the stop token unless there is no room.

    Args:
        tokenizer: Of the texts.
        say: The text of a sequence's next turn, given its books and what it has so far as text.

    Attributes:
        calls: (params, norm_offsets) of each session.
    """

    def __init__(self, tokenizer, say: Callable[[Track, str], str], positions: int | None = None) -> None:
        self.tokenizer, self.say, self.positions = tokenizer, say, positions
        self.calls: list = []

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None):
        raise AssertionError("one turn was asked for")

    @contextmanager
    def session(self, params, norm_offsets=None):
        self.calls.append((params, norm_offsets))
        yield _SayingSession(self, params)


class _SayingSession(TrackedSession):
    def __init__(self, engine: SayingEngine, params) -> None:
        super().__init__(params, positions=engine.positions, pad_token_id=0)
        self._engine = engine

    def _draw(self, tracks):
        return [self._turn(track) for track in tracks]

    def _turn(self, track: Track) -> Completion:
        tokenizer = self._engine.tokenizer
        text = self._engine.say(track, tokenizer.decode(track.token_ids))
        ids = tokenizer(text + EOS)["input_ids"]
        cut = ids[: track.room]
        logprobs = [-4.0 - (token % 7) / 8 for token in cut]
        return Completion(cut, logprobs, [4.0] * len(cut), "stop" if len(cut) == len(ids) else "length")
