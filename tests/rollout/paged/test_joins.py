"""Random joins, turns, refusals and gifts of memory on the paged engine's own session, cache, rows and steps.

Only the arithmetic of the GPU is played: a page holds tokens and their positions where it would hold keys and
values, and the next token is a number made of all that its row's attention is told to read. So a page that is
lost, shared by mistake, read too far or not computed again changes the tokens that come after.
"""

import random
from collections import Counter
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE
from qerl.rollout.engine import SamplingParams, uniform_streams
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.memory import PlainMemory
from qerl.rollout.paged.rows import Rows
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.paged.session import EngineParts, PagedSession
from qerl.rollout.stops import Stop
from tests.support.books import ONE_NUMBER, blocks_of
from tests.support.machine import Eager

pytestmark = pytest.mark.slow

BLOCK_BYTES = 2 * PAGE * 4
POSITIONS, TOKENS = 700, 89
FEW, MANY = (7,), (7, *range(60, 78), 3)  # stop tokens of sequences, of which rows have room for 16


def following(tokens, uniform):
    """The token behind all these."""
    tokens = np.asarray(tokens, np.int64)
    return int(tokens @ (31 * np.arange(1, len(tokens) + 1) + 17) + int(uniform * 1000)) % TOKENS


class Switched(PlainMemory):
    """Memory that can be given up; what was held is spoiled then."""

    def __init__(self, size, machine):
        super().__init__(size, "cpu")
        self.machine, self.given_up = machine, False

    def give_up(self):
        self._bytes.fill_(255)
        self.given_up = True

    def take_back(self):
        if self.machine.free_blocks() * BLOCK_BYTES < len(self._bytes):
            raise QeRLError("Keys and values need more than is free.")
        self.given_up = False

    def close(self):
        self._bytes.fill_(255)
        super().close()


class Step:
    """Takes the place of a captured step, with its rows."""

    def __init__(self, decoder, cache, rows, max_new, table_width, graphs):
        self.rows, self.cache = Rows(rows, max_new, table_width, 1, 1, torch.device("cpu")), cache
        self.state, self.settings = (
            SimpleNamespace(**{each.name: getattr(of, each.name).numpy() for each in fields(of)})
            for of in (self.rows.state, self.rows.settings)
        )
        self.tables_GB = self.rows.inputs.tables[0].numpy()
        self.item_4, self.order = (each.numpy() for each in self.rows.inputs.items[0])
        self.table_T = self.rows.inputs.table_T.numpy()

    def attend(self, running):
        self.rows.attend(running, [1 + len(running) % 3])

    def decode(self, steps):
        assert (self.state.done_T == 0).any(), "a round in which nothing runs would never end"
        for _ in range(steps):
            for row in (self.state.done_T == 0).nonzero()[0]:
                self._decode(row)

    def _decode(self, row):
        """As the kernels do: write the token, read what the items say, draw, and prepare the next step."""
        state = self.state
        place, at = divmod(state.limit_2T[1, row] - 1, PAGE)
        write(
            self.cache,
            self.tables_GB[self.table_T[row], place],
            at,
            state.token_T[row],
            state.position_T[row],
        )
        read = {}
        for start, count, table, own in self.item_4:
            if row in self.order[start : start + count]:
                assert own not in read
                read[own] = held(self.cache, self.tables_GB[table], state.limit_2T[own, row])
        tokens, positions = np.concatenate([read[own] for own in sorted(read)], axis=1)
        assert [*positions] == [*range(state.position_T[row] + 1)]
        place = state.generated_T[row]
        token = following(tokens, state.uniform_TM[row, place])
        state.out_token_TM[row, place], state.out_stats_2TM[:, row, place] = token, (-token, token)
        state.generated_T[row] += 1
        ends, full = token in self.settings.stop_TK[row], place + 1 >= state.max_new_T[row]
        state.done_T[row] = 1 if ends else 2 * full
        if state.done_T[row]:
            state.limit_2T[1, row] = 0
            return
        state.token_T[row] = token
        state.position_T[row] += 1
        state.limit_2T[1, row] += 1


def write(cache, block, offset, token, position):
    keys, values = cache.layers[0]
    keys.numpy()[block, 0, offset, 0] = token
    values.numpy()[block, 0, offset, 0] = position


def held(cache, blocks, tokens):
    """Tokens and positions [2, tokens] in the first places of some blocks."""
    places = blocks[: -(-tokens // PAGE)], 0, slice(None), 0
    return np.stack([each.numpy()[places].reshape(-1)[:tokens] for each in cache.layers[0]])


class Filled:
    """Takes the place of prefill."""

    def __init__(self, cache):
        self.cache = cache

    def run(self, spans):
        cache = self.cache
        for span in spans:
            _, seen = held(cache, span.prompt_blocks.get(0, []), span.prompt_tokens)
            before = held(cache, span.blocks[0], span.start)[1] if span.start else np.empty(0)
            assert [*seen, *before] == list(range(span.position))
            for i, token in enumerate(span.token_ids):
                place = span.start + i
                write(cache, span.blocks[0][place // PAGE], place % PAGE, token, span.position + i)

    def forget(self):
        pass


class Gone(Stop):
    """Ends a turn as soon as nobody waits for it."""

    reads_tokens = False

    def __init__(self):
        self.now = False

    def end(self, prompt_ids, token_ids, start, checked):
        return checked + 1 if self.now else None


class Machine:
    """An engine without a model on a machine with so many blocks of memory, some of which others hold."""

    def __init__(self, rng):
        self.blocks, self.others = rng.choice([6, 8, 11, 14, 20, 40]), 0
        self.cache = KVCache(ONE_NUMBER, None, lambda size: Switched(size, self))
        graphs = DecodeGraphs(ONE_NUMBER, self.cache, Eager(), rng.choice([1, 4]))
        pace = Pace(round_steps=rng.choice([3, 16, 40]), spare_rounds=rng.randint(0, 2))
        rows = rng.choice([1, 3, 12])
        self.parts = EngineParts(self.cache, graphs, Filled(self.cache), self.budget, rows, pace)

    def budget(self, freed):
        return self.free_blocks() * BLOCK_BYTES + freed

    def free_blocks(self):
        return self.blocks - self.others - self.cache.held_bytes // BLOCK_BYTES


class Game:
    """One session: what was started, what it must draw, and what it holds."""

    def __init__(self, machine, rng, seen):
        self.machine, self.rng, self.seen = machine, rng, seen
        params = SamplingParams(max_tokens=rng.randint(1, 300), seed=3, stop_token_ids=FEW)
        self.session = PagedSession(params, POSITIONS, 0, machine.parts, growing=rng.random() < 0.5)
        self.texts, self.limits, self.gone, self.between = {}, {}, {}, []

    def start(self):
        rng, session = self.rng, self.session
        samples = rng.randint(1, 4)
        lengths = rng.choices([1, 40, 65, 300, POSITIONS], [6, 6, 6, 6, 1], k=rng.randint(1, 3))
        prompts = [rng.choices(range(TOKENS), k=length) for length in lengths]
        each = [prompt for prompt in prompts for _ in range(samples)]
        asked = [rng.choice([1, 60, 150, 300]) for _ in each]
        seeds = rng.choice([None, [rng.randrange(99) for _ in each]])
        gone = [Gone() for _ in each]
        stops = [rng.choice([(), (one,)]) for one in gone]
        limits = [min(most, POSITIONS - len(prompt)) for prompt, most in zip(each, asked, strict=True)]
        params = [
            replace(session._params, max_tokens=most, stops=own, stop_token_ids=rng.choice([FEW, MANY]))
            for most, own in zip(asked, stops, strict=True)
        ]
        filled = [blocks_of(len(p), limit) for p, limit in zip(each, limits, strict=True) if limit]
        present, before = self.present(), self.books()
        try:
            indices = session.start(prompts, samples, params, seeds)
        except QeRLError as error:
            self.refused(error, filled + present, before)
            return
        if filled:
            assert max(filled + present) <= self.machine.cache.blocks[0]
        grown = before["keys"] is not self.machine.cache.layers
        self.seen["grown while others ran"] += grown and bool(before["running"])
        for index, prompt, limit, one in zip(indices, each, limits, gone, strict=True):
            self.texts[index], self.limits[index], self.gone[index] = ([*prompt], len(prompt)), limit, one

    def present(self):
        """Blocks that each sequence fills."""
        present = self.session._scheduler.present
        return [blocks_of(len(each.prompt.token_ids), each.max_tokens) for each in present]

    def books(self):
        """What a join that is refused leaves as it is."""
        session, scheduler = self.session, self.session._scheduler
        return {
            "keys": self.machine.cache.layers, "step": session._step, "samples": session._samples,
            "manager": scheduler.memory, "free": scheduler.memory.free,
            "running": dict(scheduler.running), "waiting": [*scheduler.waiting], "idle": dict(scheduler.idle),
            "blocks": {each.index: [*each.blocks.get(0, [])] for each in scheduler.present},
        }  # fmt: skip

    def refused(self, error, filled, before):
        if "than is free" in str(error):  # what was given up cannot be taken back
            return
        machine = self.machine
        assert max(filled) > machine.blocks - machine.others
        if before["blocks"]:
            now = self.books()
            assert now.pop("keys") is before.pop("keys") and now == before
            self.seen["refused beside others"] += 1

    def next(self):
        session, rng = self.session, self.rng
        for ended in session.next(one_round=rng.random() < 0.8):
            self.check_turn(ended.index, ended.completion)
            self.between.append(ended.index)

    def check_turn(self, index, found):
        text, prompt = self.texts[index]
        sequence = self.session._sequences[index]
        assert found.logprobs == [-token for token in found.token_ids]
        assert found.entropies == found.token_ids
        uniforms = uniform_streams([sequence.key], max(1, self.limits[index]))[0].float()
        ends = {*sequence.params.stop_token_ids}
        for token in found.token_ids:
            assert token == following(text, uniforms[len(text) - prompt])
            text.append(token)
        assert not ends & set(found.token_ids[:-1])
        if len(text) - prompt < self.limits[index] and not self.gone[index].now:
            assert found.finish_reason == "stop" and found.token_ids[-1] in ends

    def answer(self):
        """Others write to one whose turn has ended, or it is finished."""
        index = self.between.pop(self.rng.randrange(len(self.between)))
        room = self.session.room(index)
        if room < 2 or self.gone[index].now or self.rng.random() < 0.4:
            self.session.finish(index)
            return
        written = self.rng.choices(range(TOKENS), k=self.rng.randint(0, min(room - 1, 90)))
        self.texts[index][0].extend(written)
        self.session.go_on(index, written)

    def forget_one(self):
        self.rng.choice([*self.gone.values()] or [Gone()]).now = True

    def give(self):
        """Others take memory or give it back."""
        machine = self.machine
        held = machine.cache.held_bytes // BLOCK_BYTES
        machine.others = self.rng.randint(0, max(0, machine.blocks - max(held, 2)))

    def check(self):
        """Every block is held by whom it is said to be, and by nobody else."""
        scheduler, session = self.session._scheduler, self.session
        present = scheduler.present
        holding = [each for each in present if each.blocks.get(0)]
        prompts = {id(each.prompt): each.prompt for each in holding}
        used = [block for each in (*holding, *prompts.values()) for block in each.blocks[0]]
        assert len(used) == len(set(used)) and len(used) + scheduler.memory.free == scheduler.memory.count
        for prompt in prompts.values():
            assert scheduler.memory._readers[prompt] == sum(each.prompt is prompt for each in holding)
        assert len(present) == len({each.index for each in present})
        assert {each.index for each in present} <= set(session._sequences)
        if holding:
            assert scheduler.memory.count == self.machine.cache.blocks[0]
        assert len(scheduler.running) <= self.machine.parts.max_sequences


def play(game, starts):
    """Random calls until all that was started has ended and was finished."""
    rng, session = game.rng, game.session
    for _ in range(2000):
        calls = [game.next] * 3 * session.busy + [game.answer] * 2 * bool(game.between)
        calls += [game.start] * (starts > 0)
        if not calls:
            break
        chosen = rng.choice([*calls, *rng.sample([game.forget_one, game.give, session.give_up_idle], 1)])
        starts -= chosen == game.start
        chosen()
        game.check()
    assert not (calls or session._sequences or session._scheduler.present)
    assert session._scheduler.memory.free == session._scheduler.memory.count


def test_random_joins_turns_and_refusals_draw_what_each_would_draw_alone(monkeypatch):
    monkeypatch.setattr("qerl.rollout.paged.decode.DecodeStep", Step)
    seen = Counter()
    for seed in range(64):
        rng = random.Random(seed)
        machine = Machine(rng)
        for _ in range(3):
            game = Game(machine, rng, seen)
            play(game, starts=4)
            machine.cache.give_up()
            game.give()
    print(dict(seen))
    assert min(seen["grown while others ran"], seen["refused beside others"]) > 4
