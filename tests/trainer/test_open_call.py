"""Groups of one open call: which start, which are taken, and that neither depends on who ends first."""

import asyncio
import random
import threading
from contextlib import contextmanager

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.seeding import generator
from qerl.settings.config import QeRLConfig
from qerl.trainer.dynamic_sampling import Intake
from qerl.trainer.grpo import QeRLTrainer
from tests.support.models import move_adapter
from tests.support.sessions import WholeTurns
from tests.support.trainer import GROUP, ScriptedEngine, logged, logged_of, rollout_of, samples_of, settings

DATA = Dataset.from_dict({"prompt": [f"prompt {i}" for i in range(40)]})
WANTED = 4


def place_of(prompt):
    return int(prompt.split()[1])


# Which start, and which are taken


def play(intake, alive, room, order):
    """Run groups through an intake; ``order`` picks which of those that run ends next. Gives how many ran."""
    running, most = [], 0
    while intake.last is None:
        running += intake.start(room - len(running))
        most = max(most, len(running))
        group = running.pop(order(len(running)))
        intake.judge(group, alive[group])
    return most


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("wanted", "batches"), [(1, 1), (4, 1), (8, 2), (16, 3)])
def test_what_is_taken_are_the_first_groups_with_a_signal_whichever_ends_first(share, wanted, batches):
    draw = random.Random(wanted)
    for _ in range(20):
        most = wanted * (1 + batches)
        alive = [draw.random() < share for _ in range(most)]
        first = [group for group in range(most) if alive[group]][:wanted]  # one after another
        last = first[-1] + 1 if len(first) == wanted else most
        for order in (lambda n: 0, lambda n: n - 1, draw.randrange):
            intake = Intake(wanted, most)
            assert play(intake, alive, wanted, order) <= wanted
            assert intake.last == last and last <= intake.started <= most
            places = intake.places()
            assert [group for group in places if alive[group]] == [
                group for group in places if group in first
            ]
            assert sorted(group for group in places if alive[group]) == first
            kept = [group for place, group in enumerate(places) if place == group]
            assert kept == [g for g in range(wanted) if alive[g] or g in places]
            replaced = [group for place, group in enumerate(places) if place != group]
            assert replaced == sorted(replaced), "in order of start"


def test_no_group_starts_in_vain_where_all_have_a_signal():
    intake = Intake(8, 24)
    assert play(intake, [True] * 24, 8, lambda n: 0) == 8
    assert intake.started == 8 and intake.places() == list(range(8))


def test_as_many_start_as_are_missing_if_the_share_with_a_signal_stays():
    intake = Intake(8, 40)
    assert intake.start(8) == range(8)
    intake.judge(3, True)
    assert intake.start(1) == range(8, 8), "1 and 7 that run make 8"
    intake.judge(0, False)
    # 1 of 2 has a signal, so the chance is 5 / 6: 1 + 6 x 5 / 6 = 6, and 1 + 9 x 5 / 6 is the first above 8.
    assert intake.start(2) == range(8, 10), "no more than have room"
    assert intake.start(9) == range(10, 11)
    assert intake.last is None


def test_the_share_of_the_step_before_counts_as_four_groups():
    intake = Intake(8, 40, share=0.25)
    assert intake.start(20) == range(20), "32 would be needed"
    for group in range(4):
        intake.judge(group, True)
    # (4 + 1) / (4 + 4) of 16 that run are 10, and 4 are there.
    assert intake.start(20) == range(20, 20)
    for group in range(4, 16):
        intake.judge(group, False)
    # (4 + 1) / (16 + 4) of 4 is 1: of 16 it would be the 4 that are missing.
    assert intake.start(20) == range(20, 32)


def test_a_call_that_is_stopped_takes_proposed_groups_alone():
    intake = Intake(2, 6)
    intake.start(2)
    intake.judge(0, False)
    assert intake.start(1) == range(2, 3)
    intake.judge(2, True)
    assert not intake.has_judged_proposed
    intake.judge(1, False)
    assert intake.has_judged_proposed and intake.last is None
    intake.stop()
    assert intake.last == 2 and intake.places() == [0, 1] and not intake.start(2)


# In the trainer


class Unordered(ScriptedEngine):
    """Completions that depend on their seed and prompt alone, and end one by one in an order of its own."""

    def __init__(self, vocabulary, order, **options):
        super().__init__(vocabulary, **options)
        self.order, self.most, self.started = random.Random(order), 0, []

    @contextmanager
    def session(self, params, norm_offsets=None, growing=False, longest_prompt=None):
        self.longest_prompt = longest_prompt
        yield UnorderedSession(self, params)


class UnorderedSession(WholeTurns):
    def __init__(self, engine, params):
        super().__init__(params, positions=None)
        self._engine = engine

    def start(self, prompts, *args, **kwargs):
        self._engine.started += map(tuple, prompts)
        return super().start(prompts, *args, **kwargs)

    def turn(self, sequence):
        return self._engine.draw(sequence.room, generator("scripted", *sequence.key))

    def _decode(self, meanwhile):
        self._engine.most = max(self._engine.most, self._drawing)
        self._engine.order.shuffle(self._waiting)
        *rest, self._waiting = [*self._waiting[1:]], self._waiting[:1]
        (ended,) = super()._decode(meanwhile)
        self._waiting = rest[0]
        return [ended]


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def build(rewards, engine=None, data=DATA, **changes):
        torch.manual_seed(1)
        model = move_adapter(
            get_peft_model(tiny_model("llama", vocab_size=len(tiny_tokenizer)), LoraConfig(r=4))
        )
        fields = {"dynamic_sampling_batches": 2, "max_steps": 2, "shuffle_dataset": False, "signal": "reward"}
        args = QeRLConfig(**settings(tmp_path, **fields | changes))
        made = PortableEngine(model, tiny_tokenizer.pad_token_id, 6) if engine is None else engine
        return QeRLTrainer(model, rewards, args, data, engine=made, processing_class=tiny_tokenizer)

    return build


def rows_of(prompts=WANTED):
    return [DATA[i] for i in range(prompts) for _ in range(GROUP)]


def every_third(prompts, completion_ids, **_):
    """Two of three groups are dead, whoever asks; the others are rewarded by their tokens."""
    assert len(set(prompts)) == 1 and len(prompts) == GROUP, "a group is scored by itself"
    return [float(sum(ids) + i) * (place_of(prompts[0]) % 3 == 0) for i, ids in enumerate(completion_ids)]


def taken(trainer):
    return [(s.prompt, s.tokens, s.logprobs, s.rewards) for s in samples_of(rollout_of(trainer, rows_of()))]


def test_a_step_trains_on_what_one_group_after_another_would_have_given(make):
    """The reference starts a group once all before it are over, with the same seeds."""
    trainer = make([every_third])
    found = taken(trainer)
    reference = make([every_third])
    reference.model.train()
    reference.rollouts.begin_training(None, reference._prompt_choice())
    choice = reference.rollouts._prompts
    rows, _ = choice.chosen(rows_of(), 0)
    rows += choice.others(2 * WANTED)
    alive, places = [], [None] * WANTED
    with reference.rollouts.sampler.open_call(rows, GROUP) as call:
        for group in range(3 * WANTED):
            if len(alive) == WANTED:
                break
            call.start(range(group, group + 1))
            ((number, drawn),) = call.next(False)
            assert number == group and not call.busy
            if place_of(drawn.prompts[0]) % 3 == 0:
                alive.append(drawn)
            if group < WANTED:
                places[group] = drawn
    assert len(alive) == WANTED, "enough of the fresh ones have a signal"
    others = iter(alive[sum(place in alive for place in places) :])
    expected = [drawn if drawn in alive else next(others) for drawn in places]
    samples = [sample for drawn in expected for sample in drawn.samples]
    assert [(s.prompt, s.tokens) for s in samples] == [(prompt, tokens) for prompt, tokens, _, _ in found]
    for sample, (_, _, logprobs, _) in zip(samples, found, strict=True):
        assert sample.logprobs == pytest.approx(logprobs, abs=1e-4)  # other rows decoded beside them


def test_the_order_in_which_samples_end_changes_nothing_that_trains(make, tiny_tokenizer):
    found, started = [], set()
    for order in range(6):
        engine = Unordered(len(tiny_tokenizer), order)
        trainer = make([every_third], engine)
        found.append(taken(trainer))
        metrics = logged_of(trainer)
        assert metrics["dynamic_sampling/groups_without_signal"] == 0.5
        assert metrics["dynamic_sampling/replaced_groups"] == 2
        started.add(metrics.pop("dynamic_sampling/started_groups"))
        assert engine.most <= WANTED * GROUP, "no more run than the plan has memory for"
        assert len(engine.started) == len(set(engine.started)) <= 3 * WANTED
        assert engine.longest_prompt == max(map(len, engine.started))
        timeless = {name: v for name, v in metrics.items() if "per_second" not in name}
        share = trainer.rollouts._prompts.share
        found[-1].append((timeless, trainer.state.num_input_tokens_seen, share))
    assert all(each == found[0] for each in found)
    assert len(started) > 1, "it is the number of those that were started in vain that varies"


def test_the_share_of_a_step_is_in_the_checkpoint_for_the_next(make, tiny_tokenizer, tmp_path):
    trainer = make([every_third], Unordered(len(tiny_tokenizer), 0))
    taken(trainer)
    share = trainer.rollouts._prompts.share
    last = next(n for n in range(WANTED, 12) if share == WANTED / n)
    assert last >= 6, "two of the first four have a signal"
    trainer.rollouts.save(tmp_path / "checkpoint")
    other = make([every_third], Unordered(len(tiny_tokenizer), 0))
    assert other.rollouts._prompts.share == 1.0
    other.rollouts.load(tmp_path / "checkpoint")
    assert other.rollouts._prompts.share == share


def test_groups_start_in_the_same_order_whoever_ends_first(make, tiny_tokenizer):
    orders = []
    for order in range(4):
        engine = Unordered(len(tiny_tokenizer), order)
        taken(make([every_third], engine))
        orders.append(engine.started)
    shortest = min(map(len, orders))
    assert all(each[:shortest] == orders[0][:shortest] for each in orders)


def test_a_curriculum_learns_of_no_group_behind_the_last_that_is_taken(make, tiny_tokenizer):
    learned = []
    for order in range(5):
        trainer = make([every_third], Unordered(len(tiny_tokenizer), order), curriculum=True)
        taken(trainer)
        learned.append(dict(trainer.rollouts._prompts._curriculum._settled))
    assert all(each == learned[0] for each in learned) and learned[0]


def test_places_keep_groups_without_signal_where_too_few_have_one(make, tiny_tokenizer):
    def one(prompts, completion_ids, **_):
        return [float(i * (prompts[0] == "prompt 2")) for i in range(len(prompts))]

    trainer = make([one], Unordered(len(tiny_tokenizer), 0))
    samples = samples_of(rollout_of(trainer, rows_of()))
    alive = [any(s.advantage for s in samples[at : at + GROUP]) for at in range(0, len(samples), GROUP)]
    assert alive == [False, False, True, False]
    assert logged_of(trainer)["dynamic_sampling/started_groups"] == 3 * WANTED


# Rewards meanwhile


def test_a_function_that_fails_on_all_proposed_groups_ends_the_run_without_asking_for_all(
    make, tiny_tokenizer
):
    asked = []

    def broken(prompts, **_):
        asked.append(prompts[0])
        raise ValueError("no such column")

    trainer = make([broken], Unordered(len(tiny_tokenizer), 0), dynamic_sampling_batches=9)
    with pytest.raises(
        QeRLError, match=r"'broken' failed on all 16 samples of a step; its first .* no such column"
    ):
        rollout_of(trainer, rows_of())
    assert len(set(asked)) < 10 * WANTED
    tolerant = make([broken], Unordered(len(tiny_tokenizer), 0), reward_errors="tolerate")
    assert not any(sample.advantage for sample in samples_of(rollout_of(tolerant, rows_of())))


def test_a_function_that_fails_on_some_groups_is_counted_in_those_that_were_proposed(make, tiny_tokenizer):
    def some(prompts, **_):
        if place_of(prompts[0]) in (1, *range(4, 40, 2)):
            raise ValueError("hard one")
        return [float(i) for i in range(len(prompts))]

    trainer = make([some], Unordered(len(tiny_tokenizer), 0))
    samples = samples_of(rollout_of(trainer, rows_of()))
    assert all(any(s.advantage for s in samples[at : at + GROUP]) for at in range(0, 4 * GROUP, GROUP))
    assert trainer._log.metrics["train"]["rewards/some/mean"] == [1.5 * 0.75]
    assert trainer.rollouts._scorer.metrics([]) == {}


def test_slow_functions_are_waited_for_beside_the_decoding(make, tiny_tokenizer, monkeypatch):
    """The reward of the first group comes only once a further one has begun, which another's makes enter."""
    monkeypatch.setattr("qerl.tasks.together.PATIENCE", 0.01)
    further = threading.Event()

    class Watched(Unordered):
        @contextmanager
        def session(self, *args, **kwargs):
            with super().session(*args, **kwargs) as session:
                start = session.start

                def told(prompts, *args, **kwargs):
                    if self.started:
                        further.set()
                    return start(prompts, *args, **kwargs)

                session.start = told
                yield session

    async def slow(prompts, completion_ids, **_):
        while prompts[0] == "prompt 0" and not further.is_set():
            await asyncio.sleep(0.01)
        return [float(i) * (place_of(prompts[0]) % 3 == 0) for i in range(len(prompts))]

    trainer = make([slow], Watched(len(tiny_tokenizer), 0), reward_timeout=30)
    samples = samples_of(rollout_of(trainer, rows_of()))
    assert further.is_set() and all(sample.rewards == [float(i % 4)] for i, sample in enumerate(samples))
    assert logged_of(trainer)["rewards/slow/failed"] == 0


def test_a_prompt_without_room_is_refused_as_in_any_call(make):
    trainer = make([every_third])
    trainer.args.max_completion_length = 100_000
    with pytest.raises(QeRLError, match="exceed the 512 positions of the model"):
        rollout_of(trainer, rows_of())


def test_an_engine_of_whole_completions_alone_is_refused(make, tiny_tokenizer):
    class Whole(ScriptedEngine):
        session = PortableEngine.__mro__[1].session

    trainer = make([every_third], Whole(len(tiny_tokenizer)))
    with pytest.raises(QeRLError, match="dynamic sampling need an engine with sessions"):
        rollout_of(trainer, rows_of())


def test_lists_of_a_rollout_func_enter_one_after_another(tiny_model, tiny_tokenizer, tmp_path):
    asked = []

    def lists(prompts, trainer):
        asked.append(prompts[::GROUP])
        ids = [[5 + i % 7, place_of(prompt) + 5] for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [[7, 8]] * len(ids),
            "completion_ids": ids,
            "logprobs": [[-1.0, -1.0]] * len(ids),
        }

    args = QeRLConfig(
        **settings(tmp_path, dynamic_sampling_batches=3, signal="reward", max_steps=1),
        tuning="full", weights="bf16", shuffle_dataset=False,
    )  # fmt: skip
    trainer = QeRLTrainer(
        tiny_model("llama"), [every_third], args, DATA, rollout_func=lists, processing_class=tiny_tokenizer
    )
    samples = samples_of(rollout_of(trainer, rows_of()))
    assert len(asked) > 1 and asked[0] == [f"prompt {i}" for i in range(WANTED)]
    assert all(any(s.advantage for s in samples[at : at + GROUP]) for at in range(0, 4 * GROUP, GROUP))


def test_a_run_is_repeated_bit_for_bit(make):
    runs = []
    for _ in range(2):
        trainer = make([every_third], max_steps=3)
        trainer.train()
        rows = [{k: v for k, v in row.items() if "per_second" not in k} for row in logged(trainer)]
        assert any(row["dynamic_sampling/replaced_groups"] for row in rows)
        runs.append((rows, [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]))
    assert repr(runs[0][0]) == repr(runs[1][0])
    assert all(torch.equal(*pair) for pair in zip(runs[0][1], runs[1][1], strict=True))
