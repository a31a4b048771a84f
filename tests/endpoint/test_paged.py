"""The endpoint on the paged engine, in Triton's interpreter: the portable engine's tokens, no block kept."""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if torch.cuda.is_available():
    pytest.skip("the interpreter is on while there is no GPU", allow_module_level=True)

from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import KVGeometry, Pages
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from tests.support.endpoint import chat, message_of, play, user
from tests.support.machine import Eager

pytestmark = pytest.mark.slow

BLOCK_BYTES = KVGeometry((None,), (Pages(0, 2, 16, 4),) * 1).bytes((1,))


class WatchedPages(PagedEngine):
    """Notes after each round how many blocks nobody has, of how many."""

    free: tuple[int, int]

    @contextmanager
    def session(self, *args, **kwargs):
        with super().session(*args, **kwargs) as session:
            finish = session.finish

            def noting(index):
                finish(index)
                memory = session._scheduler.memory
                self.free = memory.free, memory.count

            session.finish = noting
            yield session


def agent(endpoint, row):
    first = chat(endpoint, [user(row["word"])], max_tokens=3, stop=["zz"])
    begun = [user(row["word"]), message_of(first)]
    chat(endpoint, [*begun, user("b")], max_tokens=3, stream=False)
    chat(endpoint, [*begun, user("c")], max_tokens=2, n=2)
    return 1.0


def test_the_paged_engine_draws_what_the_portable_one_draws_and_keeps_nothing(tiny_model):
    model = tiny_model("qwen3", vocab_size=100, num_hidden_layers=1)
    rows = [{"word": word} for word in "ab"]
    _, expected = play(agent, rows, engine=PortableEngine(model, 0), max_tokens=120)
    pace = Pace(round_steps=2, spare_rounds=0, prefill_tokens=(8, 72))
    engine = WatchedPages(model, 0, machine=Eager(40 * BLOCK_BYTES), pace=pace)
    environments, found = play(agent, rows, engine=engine, max_tokens=120)
    assert [each.error for each in environments] == [None, None]
    assert engine.free[0] == engine.free[1]
    for mine, its in zip(found, expected, strict=True):
        for one, other in zip((mine, *mine.forks), (its, *its.forks), strict=True):
            assert one.token_ids == other.token_ids
            assert one.written == other.written
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
