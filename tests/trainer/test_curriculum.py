"""Problems that are solved always or never are sampled less, and come back with the first other outcome."""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.seeding import problem_key
from qerl.settings.config import QeRLConfig
from qerl.trainer import prompt_choice
from qerl.trainer.curriculum import Curriculum, settled_groups
from qerl.trainer.dynamic_sampling import FreshPrompts, fresh_rows
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.prompt_choice import PromptChoice
from tests.support.trainer import GROUP, ScriptedEngine, settings

pytestmark = pytest.mark.slow

DATA = Dataset.from_dict({"prompt": [f"p{i}" for i in range(8)], "answer": [str(i) for i in range(8)]})
NAN = float("nan")


def learned(*settled, floor=0.1, times=1):
    """A curriculum to which these problems were settled so many times."""
    curriculum = Curriculum(DATA, floor, seed=3)
    for _ in range(times):
        curriculum.observe([problem_key(DATA[i]) for i in settled], [True] * len(settled))
    return curriculum


def chances(curriculum):
    return curriculum.chances().tolist()


def test_a_group_is_settled_where_all_of_its_judged_samples_are_right_or_all_are_wrong():
    verdicts = torch.tensor([1, 1, 1, 0, 0, 0, 0.5, NAN, NAN, 1, NAN, NAN, -1, 0])
    assert settled_groups(verdicts, 2) == [True, False, True, True, True, None, True]


def test_the_chance_halves_with_each_settled_visit_down_to_the_floor_and_one_other_outcome_restores_it():
    assert chances(learned(1, 2)) == [1.0, 0.5, 0.5, *[1.0] * 5]
    assert chances(learned(1, times=3))[1] == 0.125
    curriculum = learned(1, times=40)
    assert chances(curriculum)[1] == 0.1 and curriculum.settled == 1
    curriculum.observe([problem_key(DATA[1])], [None])
    assert chances(curriculum)[1] == 0.1, "nobody judged it"
    curriculum.observe([problem_key(DATA[1])], [False])
    assert chances(curriculum) == [1.0] * 8 and curriculum.settled == 0


def test_a_problem_keeps_its_place_with_its_chance_and_none_is_lost():
    curriculum, kept, taken = learned(0, times=9), 0, Counter()
    for rollout in range(400):
        fresh = FreshPrompts(DATA, 3, curriculum.chances)
        fresh.note(rollout, [DATA[0]["prompt"], DATA[1]["prompt"]])
        first, second = curriculum.choose([DATA[0], DATA[1]], fresh, rollout, 0)
        kept += first == DATA[0]
        taken[first["prompt"]] += 1
        assert second == DATA[1]
    assert 20 <= kept <= 60, "a tenth"
    assert set(taken) == {f"p{i}" for i in range(8)} - {"p1"}, "the step samples p1 already"


def test_the_same_rollout_chooses_the_same_rows():
    def run(rollout):
        curriculum = learned(*range(6), times=2)
        fresh = FreshPrompts(DATA, 3, curriculum.chances)
        fresh.note(rollout, DATA["prompt"][:4])
        return curriculum.choose(list(DATA)[:4], fresh, rollout, 0)

    assert [run(i) for i in range(5)] == [run(i) for i in range(5)]
    assert len({json.dumps(run(i)) for i in range(5)}) > 1


def test_fresh_prompts_are_drawn_in_proportion_to_their_chances():
    weights = torch.ones(8, dtype=torch.double)
    weights[:4] = 0.1
    drawn = Counter(fresh_rows(DATA, [], 1, seed, chances=weights)[0]["prompt"] for seed in range(600))
    often = sum(drawn[f"p{i}"] for i in range(4, 8))
    assert 0.87 < often / 600 < 0.95, "4 of 4.4"
    every = fresh_rows(DATA, [], 8, 0, chances=weights)
    assert {row["prompt"] for row in every} == set(DATA["prompt"])


def test_what_was_learned_is_kept_by_content_in_a_checkpoint(tmp_path):
    learned(1, 2, times=2).save(tmp_path)
    turned = Curriculum(DATA.select(range(7, -1, -1)), 0.1, seed=3)
    turned.load(tmp_path)
    assert chances(turned) == [1.0] * 5 + [0.25, 0.25, 1.0]
    nothing = Curriculum(DATA, 0.1, seed=3)
    nothing.load(tmp_path / "made without a curriculum")
    assert chances(nothing) == [1.0] * 8


def test_processes_choose_for_all_and_take_their_own_part(monkeypatch, tmp_path):
    """Two processes with two groups each: together they sample what one process with four groups does."""
    args = QeRLConfig(**settings(tmp_path, num_generations=2, per_device_train_batch_size=8, curriculum=True))
    proposed = [DATA[i] for i in (0, 1, 2, 3)]
    monkeypatch.setattr(prompt_choice, "gather_object", lambda _: gathered)

    def process(rank, processes):
        nonlocal gathered
        gathered = proposed
        choice = PromptChoice(args, DATA, SimpleNamespace(process_index=rank, num_processes=processes))
        own = proposed[rank * 2 : rank * 2 + 4 // processes]
        gathered = list(zip(map(problem_key, proposed), [True, True, True, False], strict=True))
        choice.observe([row for row in own for _ in range(2)], [True] * len(own))
        gathered = proposed
        rows, logged = choice.chosen([row for row in own for _ in range(2)], step=5)
        return [row["prompt"] for row in rows], logged, [row["prompt"] for row in choice.others(1)]

    gathered = []
    both, logged, _ = process(0, 1)
    (first, log_0, other_0), (second, log_1, other_1) = process(0, 2), process(1, 2)
    assert first + second == both and both != [row["prompt"] for row in proposed for _ in range(2)]
    assert log_0 == log_1 == logged and logged["curriculum/settled"] == 3.0
    assert other_0[0] == other_0[1] != other_1[0]
    assert not {*other_0, *other_1} & {*both}


def trained(tiny_model, tiny_tokenizer, folder, reward, **changes):
    """The trainer, and how often each problem was sampled."""
    model = add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0)
    sampled = Counter()

    def accuracy(prompts, completions, answer, **_):
        sampled.update(answer[::GROUP])
        return [reward(int(one), sample) for sample, one in enumerate(answer)]

    config = settings(folder, max_steps=16, per_device_train_batch_size=2 * GROUP, curriculum=True)
    trainer = QeRLTrainer(
        model,
        accuracy,
        QeRLConfig(**(config | changes)),
        DATA,
        engine=ScriptedEngine(model.config.vocab_size),
        processing_class=tiny_tokenizer,
    )
    trainer.train()
    return trainer, sampled


@pytest.mark.parametrize("rounds", [0, 1])
def test_training_samples_settled_problems_less(tiny_model, tiny_tokenizer, tmp_path, rounds):
    """Problems 0 to 2 are always right, 3 to 5 always wrong, 6 and 7 are solved by every other sample."""

    def reward(problem, sample):
        return float(problem < 3) if problem < 6 else float(sample % 2)

    trainer, sampled = trained(
        tiny_model, tiny_tokenizer, tmp_path, reward, dynamic_sampling_batches=rounds, curriculum_floor=0.05
    )
    settled, others = sum(sampled[str(i)] for i in range(6)) / 6, (sampled["6"] + sampled["7"]) / 2
    assert others > 2 * settled and min(sampled.values()) > 0
    logged = trainer.state.log_history
    assert logged[0]["curriculum/passed_over"] == 0.0, "an epoch begins with problems that nobody knows"
    assert any(row.get("curriculum/passed_over", 0) > 0 for row in logged)
    assert logged[15]["curriculum/settled"] == 6.0


def test_a_second_training_begins_with_a_curriculum_that_knows_nothing(tiny_model, tiny_tokenizer, tmp_path):
    trainer, sampled = trained(tiny_model, tiny_tokenizer, tmp_path, lambda *_: 0.0, max_steps=4)
    first = dict(sampled)
    sampled.clear()
    trainer.train()
    assert sampled == first


def test_data_that_come_as_a_stream_have_no_curriculum(tiny_model, tiny_tokenizer, tmp_path):
    with pytest.raises(QeRLError, match="load it as a Dataset or set curriculum: false"):
        QeRLTrainer(
            add_lora(tiny_model("llama"), rank=4, alpha=8, dropout=0.0),
            lambda completions, **_: [0.0] * len(completions),
            QeRLConfig(**settings(tmp_path, curriculum=True)),
            DATA.to_iterable_dataset(),
            processing_class=tiny_tokenizer,
        )
