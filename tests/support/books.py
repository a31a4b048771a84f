"""The paged engine's own session, scheduler and blocks, over a machine that says scripted texts."""

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from qerl.families.sizes import Sizes
from qerl.kernels.limits import PAGE
from qerl.rollout.engine import RolloutEngine
from qerl.rollout.paged.blocks import KnownPages
from qerl.rollout.paged.limits import KVGeometry
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.paged.session import EngineParts, PagedSession
from tests.support.agents import Row
from tests.support.models import EOS

ONE_NUMBER = SimpleNamespace(
    sizes=Sizes.uniform(1, 1, 1, 1, 1, 1, 1),
    dtype=torch.float32,
    embedding_VD=torch.empty(0),
)
"""As much of a decoder as its cache reads: one layer with one head of one number."""


def blocks_of(prompt_tokens: int, max_tokens: int) -> int:
    """Blocks that one sequence fills: the fewest with which a call can run."""
    return -(-(prompt_tokens - 1) // PAGE) + -(-max_tokens // PAGE)


class SayingPages(RolloutEngine):
    """Says scripted texts, a few tokens a round, each ended by the stop token unless there is no room.

    Attributes:
        parts: Of its sessions; cache and graphs are always enough.

    Args:
        tokenizer, say: As in `tests.support.agents.SayingEngine`.
        blocks: Blocks of the cache.
        rows: Sequences that run side by side at most.
        positions: Positions of the model.
    """

    def __init__(self, tokenizer, say: Callable[[Row, str], str], blocks: int, rows: int, positions: int):
        self.tokenizer, self.say, self.positions = tokenizer, say, positions
        step = SimpleNamespace(rows=_Rows(self), attend=_nothing, decode=self.decode)
        self.parts = EngineParts(
            cache=SimpleNamespace(
                blocks=(blocks,),
                geometry=KVGeometry.of(ONE_NUMBER.sizes, 4),
                serves=_yes,
                take_back=_nothing,
                known=KnownPages(),
            ),
            graphs=SimpleNamespace(serves=_yes, fit=self._fit),
            prefill=SimpleNamespace(run=_nothing),
            budget=lambda _: 0,
            max_sequences=rows,
            pace=Pace(round_steps=7, spare_rounds=1),
        )
        self.step, self.running = step, {}

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None):
        raise AssertionError("one turn was asked for")

    @contextmanager
    def session(
        self, params, norm_offsets=None, growing=False, longest_prompt=None, going_on=None, policy=None
    ):
        if going_on is None:
            going_on = PagedSession(params, self.positions, 0, self.parts, growing, longest_prompt, policy)
        else:
            going_on.enter(False, longest_prompt, policy)
        yield going_on

    def _fit(self, step, scheduler, entering):
        self.running = scheduler.running
        return self.step

    def decode(self, steps: int) -> None:
        """Let everything that runs say its next tokens."""
        for sequence in self.running.values():
            row = Row(sequence.prompt.number, sequence.sample, sequence.prompt.token_ids)
            so_far = self.tokenizer.decode(sequence.token_ids[: sequence.turn_start])
            text = self.tokenizer(self.say(row, so_far) + EOS)["input_ids"]
            said = len(sequence.token_ids) - sequence.turn_start
            new = text[said : said + min(steps, sequence.room)]
            sequence.token_ids += new
            sequence.logprobs += [-4.0] * len(new)
            sequence.entropies += [4.0] * len(new)
            ended = said + len(new) == len(text)
            sequence.finish_reason = "stop" if ended else "length"


class _Rows:
    """Stands in for the rows on a GPU; sequences have their tokens at once."""

    def __init__(self, engine: SayingPages) -> None:
        self._stop = engine.tokenizer.eos_token_id

    def place(self, entering) -> None:
        pass

    def end(self, preempted) -> None:
        pass

    def read(self, running):
        generated = {row: len(sequence.token_ids) for row, sequence in running.items()}
        ended = [
            row
            for row, sequence in running.items()
            if sequence.token_ids[-1] == self._stop or not sequence.room
        ]
        return generated, ended, []


def _yes(*_) -> bool:
    return True


def _nothing(*_) -> None:
    pass
