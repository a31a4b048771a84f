"""Rows refilled across steps: which groups train when, how old tokens are, and by what they were drawn."""

import copy
import json
import logging
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from qerl.errors import QeRLError
from qerl.rollout.engine import Begun, RolloutEngine, SamplingParams, Session
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.portable.engine import PortableEngine
from qerl.seeding import derive_seed
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.refill import UNDER_WAY_FILE, StalenessWindow, _of_plain, _plain
from tests.support.machine import Eager
from tests.support.models import move_adapter
from tests.support.trainer import GROUP, ScriptedEngine, logged, settings, sum_reward

WANTED = 2
DATA = Dataset.from_dict({"prompt": [f"prompt {i} " + "x" * (i % 5) for i in range(9)]})
LETTERS = [*"abcdefghijklmnopqrstuvw"]
"""Each ends a completion, so that lengths differ: 23 of 100 tokens."""
OLDEST = 2
"""Largest age of a token in these trainings where it is not bounded: 3 and 4 bound nothing here."""
BLOCKS = 7
"""Room for so many blocks of keys, of which each sample and each prompt needs one at least."""


# Which groups start


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("wanted", [1, 3])
def test_groups_start_in_order_and_at_most_so_many_steps_early(wanted, max_staleness):
    draw, steps = random.Random(wanted), 12
    window, running, started_in, over = StalenessWindow(wanted, max_staleness), [], {}, set()
    for step in range(steps):
        while not set(window.needed(step)) <= over:
            numbers = window.start(step, steps, wanted - len(running))
            started_in |= dict.fromkeys(numbers, step)
            running += numbers
            assert len(running) <= wanted, "no more run than train in a step"
            over.add(running.pop(draw.randrange(len(running))))
    assert sorted(started_in) == [*started_in] == list(range(wanted * steps)), "each once, in order"
    assert all(0 <= n // wanted - step <= max_staleness for n, step in started_in.items())
    assert not running, "nothing is begun that no step trains on"


# In the trainer


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    """Makes a trainer of a model that is always the same, by name of its engine."""

    def build(engine="portable", folder="run", eval_dataset=None, **changes):
        torch.manual_seed(1)
        model = tiny_model("llama", vocab_size=len(tiny_tokenizer), num_hidden_layers=1)
        model = move_adapter(
            get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]))
        )
        fields = {
            "max_staleness": 2, "max_steps": 6, "per_device_train_batch_size": WANTED * GROUP,
            "max_completion_length": 16, "stop_strings": LETTERS, "learning_rate": 0.05, "signal": "reward",
            "disable_tqdm": True,
        }  # fmt: skip
        args = QeRLConfig(**settings(tmp_path / folder, **fields | changes))
        made = PortableEngine(model, tiny_tokenizer.pad_token_id)
        if engine == "paged":
            if torch.cuda.is_available():
                pytest.skip("tests/gpu runs the engine itself")
            pace = Pace(round_steps=2, spare_rounds=1, prefill_tokens=(64,))
            made = PagedEngine(model, tiny_tokenizer.pad_token_id, 8, machine=Eager(), pace=pace)
        return QeRLTrainer(
            model, [sum_reward], args, DATA, eval_dataset, engine=made, processing_class=tiny_tokenizer
        )

    return build


def steps_of(trainer, **how):
    """Trains; the samples of each step, and the adapter with which the rollout of each was drawn."""
    samples, adapters = [], []
    run, draw = trainer.updates.run, trainer.rollouts._refill.draw

    def drawn(*args):
        adapters.append(
            {n: p.detach().clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
        )
        return draw(*args)

    def updated(model, microbatches, step):
        samples.append(copy.deepcopy([each for part in microbatches for each in part.samples]))
        return run(model, microbatches, step)

    trainer.updates.run, trainer.rollouts._refill.draw = updated, drawn
    trainer.train(**how)
    return samples, adapters


def prompts_in_order(trainer, steps):
    rows = [trainer._rows_of_step(step) for step in range(steps)]
    return [[trainer.processing_class(row["prompt"])["input_ids"] for row in of_step] for of_step in rows]


@pytest.mark.parametrize("max_staleness", [1, 2, 3, 4])
def test_each_group_trains_once_in_order_and_no_token_is_too_old(make, max_staleness):
    """Nine prompts in rollouts of two: the groups of coming steps are those of later epochs, too."""
    trainer = make(max_staleness=max_staleness)
    samples, _ = steps_of(trainer)
    check_order(trainer, samples, max_staleness)


def check_order(trainer, samples, max_staleness):
    """Of six steps: their groups are those of the data, and ages are bounded, and are what is logged."""
    assert [[s.prompt for s in each] for each in samples] == prompts_in_order(trainer, 6)
    ages = [[age for s in each for age in s.ages] for each in samples]
    assert all(len(s.ages) == len(s.tokens) for each in samples for s in each)
    assert all(s.ages == sorted(s.ages, reverse=True) for each in samples for s in each)
    assert all(min(each) >= 0 and max(each) <= min(step, max_staleness) for step, each in enumerate(ages))
    assert max(map(max, ages)) == min(max_staleness, OLDEST), "rows are free often enough"
    assert any(len(set(s.ages)) > 1 for each in samples for s in each), "some span an update"
    rows = logged(trainer)
    assert [row["staleness/max"] for row in rows] == [max(each) for each in ages]
    assert [row["staleness/mean"] for row in rows] == pytest.approx([sum(each) / len(each) for each in ages])
    assert any(row["staleness/samples_under_way"] for row in rows[:-1])
    assert rows[-1]["staleness/samples_under_way"] == 0
    assert all(0 < row["sampling/ratio/effective_sample_size"] <= 1 for row in rows)
    refill = trainer.rollouts._refill
    assert not (refill._ended or refill._begun or refill._drawn_in or refill._call)


# By what tokens were drawn


@torch.no_grad()
def oracle(trainer, adapters, sample, prompt_read_in, drawn_in):
    """Log-probabilities of a sample's tokens, forced through transformers' own cache in double precision.

    A token's keys are those of the adapter by which the token behind it was drawn, since a token is read when
    the next one is wanted.

    Args:
        trainer: Whose model it is.
        adapters: Of each step.
        sample: Its prompt and tokens.
        prompt_read_in: Step in which the prompt but its last token was read, as it is supposed.
        drawn_in: The step in which each token was drawn, likewise.
    """
    model = copy.deepcopy(trainer.model).double().eval()
    text = [*sample.prompt, *sample.tokens[:-1]]
    read_in = [prompt_read_in] * (len(sample.prompt) - 1) + list(drawn_in)
    found, cache, begin = [], None, 0
    for end in range(1, len(text) + 1):
        if end < len(text) and read_in[end] == read_in[begin]:
            continue
        for name, parameter in model.named_parameters():
            if name in adapters[read_in[begin]]:
                parameter.copy_(adapters[read_in[begin]][name])
        output = model(input_ids=torch.tensor([text[begin:end]]), past_key_values=cache, use_cache=True)
        found.append(output.logits[0].log_softmax(-1))
        cache, begin = output.past_key_values, end
    logps_TV = torch.cat(found)[len(sample.prompt) - 1 :]
    return logps_TV.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]


def test_kept_logprobs_are_those_of_the_adapters_that_drew_each_token(make):
    trainer = make(max_steps=5)
    check_logprobs(trainer, *steps_of(trainer))


def check_logprobs(trainer, samples, adapters):
    """Each token's is that of the adapter of its step, and not of one adapter for all."""
    spanning, wrong = 0, []
    for step, of_step in enumerate(samples):
        drawn_in = [[step - age for age in sample.ages] for sample in of_step]
        for place, sample in enumerate(of_step):
            own, group = drawn_in[place], place // GROUP * GROUP
            # Of samples that wait for memory the prompt is that of the first.
            read_in = min(each[0] for each in drawn_in[group : group + GROUP])
            expected = oracle(trainer, adapters, sample, read_in, own)
            assert sample.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
            spanning += len(set(own)) > 1
            others = {own[0], own[-1], step} if len(set(own)) > 1 else {step} - set(own)
            for other in others:  # as if one adapter had drawn all, and computed all keys
                found = oracle(trainer, adapters, sample, other, [other] * len(own))
                wrong.append(float((found - expected).abs().max()))
    assert spanning >= 3 and min(wrong) > 1e-3, "the oracle tells adapters apart"


@pytest.mark.parametrize("engine", ["portable", pytest.param("paged", marks=pytest.mark.slow)])
def test_a_policy_that_does_not_move_draws_what_each_group_draws_alone(make, engine):
    """Whenever a group starts, is refilled or begun again: seeds are of groups and samples, not of steps."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": DATA.select(range(1))}
    trainer = make(engine, learning_rate=0.0, max_steps=3, per_device_eval_batch_size=GROUP, **evaluated)
    samples, _ = steps_of(trainer)
    params = trainer.rollouts.sampler._params(derive_seed("refilled", trainer.args.seed, 0))
    alone = PortableEngine(trainer.model, trainer.processing_class.pad_token_id)
    for number in range(3 * WANTED):
        group = samples[number // WANTED][number % WANTED * GROUP :][:GROUP]
        seeds = [derive_seed("open call", params.seed, number, place) for place in range(GROUP)]
        found = alone.generate([group[0].prompt], GROUP, params, seeds=seeds).completions
        assert [sample.tokens for sample in group] == [each.token_ids for each in found]
        for sample, each in zip(group, found, strict=True):
            assert sample.logprobs == pytest.approx(each.logprobs, abs=1e-4)


@pytest.mark.slow
def test_the_paged_engine_keeps_order_and_log_probabilities_and_frees_what_has_ended(make):
    """All of one run: the interpreter takes its time. No block is held by a sample that has ended."""
    trainer = make("paged")
    held = []

    def watch(*args):
        found = draw(*args)
        session = refill._call.session
        memory, sequences = session._scheduler.memory, [*session._scheduler.running.values()]
        own = sum(memory.held(each) for each in sequences)
        prompts = {each.prompt: sum(map(len, each.prompt.blocks.values())) for each in sequences}
        held.append((memory.count - memory.free, own + sum(prompts.values()), len(sequences)))
        return found

    refill = trainer.rollouts._refill
    draw, refill.draw = refill.draw, watch
    samples, adapters = steps_of(trainer)
    assert all(taken == known for taken, known, _ in held)
    assert any(running for _, _, running in held) and held[-1][0] == 0
    check_order(trainer, samples, trainer.args.max_staleness)
    check_logprobs(trainer, samples, adapters)


# Saves and evaluations


def adapters_of(trainer):
    return [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]


@pytest.mark.parametrize("engine", ["portable", pytest.param("paged", marks=pytest.mark.slow)])
def test_a_run_that_is_resumed_ends_with_the_bits_of_one_that_was_not_stopped(make, engine, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make(engine, "whole", **changes)
    expected, _ = steps_of(whole)
    stopped = adapters_of(make(engine, "never", **changes))
    file = tmp_path / "whole" / "checkpoint-2" / UNDER_WAY_FILE
    assert any(each["finish_reason"] is None and each["token_ids"] for each in samples_in(file))
    assert any(each["finish_reason"] for each in samples_in(file)), "some have ended and wait"
    resumed = make(engine, "whole", **changes)
    found, _ = steps_of(resumed, resume_from_checkpoint=str(file.parent))
    assert found == expected[2:]
    assert all(torch.equal(*pair) for pair in zip(adapters_of(whole), adapters_of(resumed), strict=True))
    assert not all(torch.equal(*pair) for pair in zip(adapters_of(whole), stopped, strict=True))


def samples_in(file):
    return [each for group in json.loads(file.read_text()) for each in group["samples"]]


@pytest.mark.parametrize("engine", ["portable", pytest.param("paged", marks=pytest.mark.slow)])
def test_behind_a_save_and_an_evaluation_keys_are_those_of_the_adapters_of_then(make, engine):
    """What was drawn stays; what is drawn next sees keys of one adapter."""
    trainer = make(
        engine, max_steps=3, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=1,
        per_device_eval_batch_size=GROUP, eval_dataset=DATA.select(range(1)),
    )  # fmt: skip
    samples, adapters = steps_of(trainer)
    spanning = 0
    for step, of_step in enumerate(samples):
        for sample in of_step:
            own = [step - age for age in sample.ages]
            for then in sorted(set(own)):
                places = [place for place, each in enumerate(own) if each == then]
                expected = oracle(trainer, adapters, sample, then, [then] * len(own))
                kept = [sample.logprobs[place] for place in places]
                assert kept == pytest.approx([float(expected[place]) for place in places], abs=2e-5)
            spanning += len(set(own)) > 1
    assert spanning


@pytest.mark.parametrize("engine", ["portable", pytest.param("paged", marks=pytest.mark.slow)])
def test_whoever_samples_between_steps_changes_no_token(make, engine):
    """What was drawn stays, and what follows is that of a run without, up to rounding."""

    class Curious(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            under_way.append(trainer.rollouts._refill.under_way)
            if state.global_step % 2:
                trainer.rollout([[5, 6, 7]], 3)
            else:
                trainer.engine.generate([[5, 6, 7]], 3, SamplingParams(4))

    fields = {"learning_rate": 0.0, "max_steps": 3}
    expected, _ = steps_of(make(engine, **fields))
    trainer, under_way = make(engine, **fields), []
    trainer.add_callback(Curious())
    found, _ = steps_of(trainer)
    assert under_way[0] and under_way[1]
    for one, other in zip(found, expected, strict=True):
        assert [s.tokens for s in one] == [s.tokens for s in other]
        assert [s.ages for s in one] == [s.ages for s in other]
        for a, b in zip(one, other, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("engine", ["portable", pytest.param("paged", marks=pytest.mark.slow)])
def test_memory_that_runs_out_in_the_update_takes_the_keys_first(make, engine, caplog):
    """The step is redone, the samples go on, and no limit is lowered for the rest of the run."""
    fields = {"learning_rate": 0.0, "max_steps": 4}
    expected, _ = steps_of(make("portable", **fields))
    trainer, failed, released = make(engine, **fields), [], []
    attempt, release = trainer.updates._attempt, trainer.engine.release

    def scarce(model, microbatches, step):
        if trainer.rollouts._refill._call is not None and trainer.rollouts._refill._call.busy:
            failed.append(step)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return attempt(model, microbatches, step)

    trainer.updates._attempt = scarce
    trainer.engine.release = lambda: (released.append(trainer.state.global_step + 1), release())
    found, _ = steps_of(trainer)
    assert len(failed) >= 2 and set(failed) <= set(released)
    assert trainer.updates.retry.max_tokens is None and not trainer.updates.retry._recomputes
    assert "keys and values of unfinished samples are dropped" in caplog.text
    assert [[s.tokens for s in each] for each in found] == [[s.tokens for s in each] for each in expected]


@pytest.mark.parametrize("changes", [{"save_only_model": True}, {"save_steps": 4}])
def test_a_save_that_nobody_resumes_from_drops_no_key(make, tmp_path, changes):
    trainer, reset = (
        make("portable", save_strategy="steps", **{"save_steps": 2, "max_steps": 4} | changes),
        [],
    )
    trainer.engine.reset = lambda: reset.append(trainer.state.global_step)
    trainer.train()
    assert (tmp_path / "run" / "checkpoint-4").is_dir() and not reset
    assert not [*(tmp_path / "run").rglob(UNDER_WAY_FILE)]


def test_samples_under_way_of_other_prompts_are_refused(make, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make("portable", "whole", **changes).train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    other = make("portable", "whole", seed=5, **changes)
    with pytest.raises(QeRLError, match=r"unfinished samples of other prompts .* max_staleness: 0"):
        other.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(QeRLError, match=r"unfinished samples .* num_generations 4 -> 2; .* max_staleness: 0"):
        make("portable", "whole", num_generations=2, **changes).train(resume_from_checkpoint=checkpoint)
    for given_up in ({}, {"num_generations": 2}):
        without = make("portable", "whole", max_staleness=0, **changes | given_up)
        without.train(resume_from_checkpoint=checkpoint)
        assert without.state.global_step == 4


def test_what_runs_together_and_when_keys_are_computed_again_is_said(make, tmp_path, caplog):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make("portable", "whole", **changes).train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    for max_staleness, said in ((2, True), (0, False)):
        caplog.clear()
        other = {"save_steps": 3, "eval_delay": 1, "logging_steps": 7}
        trainer = make("portable", "whole", **changes | other | {"max_staleness": max_staleness})
        trainer.train(resume_from_checkpoint=checkpoint)
        (told,) = (
            m for m in map(logging.LogRecord.getMessage, caplog.records) if "These settings differ" in m
        )
        assert ("save_steps 2 -> 3" in told) == ("eval_delay" in told) == said
        assert "logging_steps" not in told


@pytest.mark.parametrize(("changes", "redrawn"), [({"max_staleness": 1}, True), ({"max_steps": 3}, False)])
def test_a_resume_gives_up_what_the_new_settings_would_not_have(make, tmp_path, changes, redrawn):
    """What is too old for a lower bound, and groups that no step trains on, or that would begin too early."""
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    make("portable", "whole", **saved).train()
    file = tmp_path / "whole" / "checkpoint-2" / UNDER_WAY_FILE
    first = json.loads(file.read_text())[0]
    assert all(each["token_ids"] for each in first["samples"])
    trainer = make("portable", "whole", **saved | changes)
    trainer.get_train_dataloader()
    prompts = [prompt for step in prompts_in_order(trainer, 6) for prompt in step[::GROUP]]
    aged = [{**each, "drawn_in": [0] * len(each["token_ids"])} for each in first["samples"]]
    groups = [{"group": number, "prompt": prompts[number], "samples": aged} for number in range(4, 10)]
    (tmp_path / UNDER_WAY_FILE).write_text(json.dumps(groups))  # the checkpoint's manifest knows its own
    load = trainer.rollouts._refill.load
    trainer.rollouts._refill.load = lambda folder: load(tmp_path)
    samples, _ = steps_of(trainer, resume_from_checkpoint=str(file.parent))
    last = changes.get("max_steps", 6)
    assert trainer.state.global_step == last
    assert [[s.prompt for s in each] for each in samples] == prompts_in_order(trainer, last)[2:]
    refound = [
        s.tokens[: len(a["token_ids"])] == a["token_ids"]
        for s, a in zip(samples[0], aged * WANTED, strict=True)
    ]
    ages = [age for each in samples for s in each for age in s.ages]
    if redrawn:
        assert max(ages) <= 1 and not all(refound)
    else:
        assert max(ages) == 2 and all(refound)


@pytest.mark.parametrize("damage", ["lost", "twice"])
def test_a_checkpoint_without_a_group_that_is_needed_is_refused(make, tmp_path, damage):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make("portable", "whole", **changes).train()
    file = tmp_path / "whole" / "checkpoint-2" / UNDER_WAY_FILE
    groups = json.loads(file.read_text())
    groups = groups[1:] if damage == "lost" else [groups[0] | {"group": groups[0]["group"] - 1}, *groups]
    file.write_text(json.dumps(groups))
    refill = (trainer := make("portable", "whole", **changes)).rollouts._refill
    refill.load(file.parent)
    trainer.get_train_dataloader()
    with pytest.raises(QeRLError, match=r"samples of the groups .* but step 3 begins with group 4; resume"):
        refill.draw(trainer._rows_of_step(2), 2, 4)


def test_an_epoch_that_is_ended_early_is_said(make):
    class Impatient(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step == 2

    trainer = make()
    trainer.add_callback(Impatient())
    with pytest.raises(QeRLError, match=r"Step 3 has other prompts .* a callback has ended an epoch early"):
        trainer.train()


def test_a_training_that_ends_early_holds_nothing(make):
    class Stopper(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2

    trainer, released = make(), []
    trainer.engine.release = lambda: released.append(True)
    trainer.add_callback(Stopper())
    trainer.train()
    refill = trainer.rollouts._refill
    assert released == [True] and refill._call is None and not refill._drawn_in
    trainer.train()
    assert released == [True] * 2 and refill._call is None and not refill._drawn_in


def test_another_training_begins_with_nothing_under_way(make):
    """And trains on the groups of its first steps, behind one that was stopped with others under way."""

    class Stopper(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop |= stops and state.global_step == 2

    stops, trainer = True, make()
    trainer.add_callback(Stopper())
    trainer.train()
    stops = False
    seen, _ = steps_of(trainer)
    assert trainer.state.global_step == 6
    assert [[s.prompt for s in each] for each in seen] == prompts_in_order(trainer, 6)
    assert {age for s in seen[0] for age in s.ages} == {0}


def test_a_reward_that_fails_leaves_nothing_that_a_next_training_would_go_on_with(make):
    trainer, calls = make(), []
    score = trainer.rollouts._score

    def failing(*part):
        calls.append(part)
        if len(calls) == 3:
            raise KeyError("reward")
        return score(*part)

    trainer.rollouts._score = failing
    with pytest.raises(KeyError):
        trainer.train()
    refill = trainer.rollouts._refill
    assert refill._call is None and not (refill._drawn_in or refill._ended or refill._begun)
    samples, _ = steps_of(trainer)
    assert [[s.prompt for s in each] for each in samples] == prompts_in_order(trainer, 6)


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"gradient_accumulation_steps": 2, "per_device_train_batch_size": GROUP}, 6),
        ({"num_train_epochs": 2, "max_steps": -1}, 8),
    ],
    ids=["accumulation", "epochs"],
)
def test_microbatches_and_epochs_are_as_without(make, changes, steps):
    trainer = make(**changes)
    samples, _ = steps_of(trainer)
    assert trainer.state.global_step == steps
    assert [[s.prompt for s in each] for each in samples] == prompts_in_order(trainer, steps)
    assert max(age for each in samples for s in each for age in s.ages) == 2
    assert not trainer.rollouts._refill._drawn_in


def test_what_no_old_sample_did_is_not_laid_to_them(make, caplog):
    trainer = make()
    for oldest, said in ((0.0, False), (1.0, True)):
        trainer._log.metrics["train"]["staleness/max"] = [2.0, oldest]
        trainer._warn_of_staleness(0.1)
        assert ("effective sample size" in caplog.text) == said


@pytest.mark.slow
def test_samples_wait_for_memory_and_draw_the_same(make):
    """A cache with room for fewer samples than may run: groups of coming steps start all the same."""
    fields = {"learning_rate": 0.0, "max_steps": 3}
    trainer = make("paged", **fields)
    machine, block = trainer.engine._machine, trainer.engine.cache.geometry.bytes((1,))
    object.__setattr__(machine, "bytes_for_cache", BLOCKS * block)
    samples, _ = steps_of(trainer)
    assert trainer.engine.cache.is_limited and trainer.engine.cache.blocks == (BLOCKS,)
    expected, _ = steps_of(make("portable", **fields))
    assert max(age for each in samples for s in each for age in s.ages) > 0
    assert [[s.tokens for s in each] for each in samples] == [[s.tokens for s in each] for each in expected]


# What is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_iterations": 2}, "num_iterations cannot be combined with max_staleness"),
        ({"algorithm": "dapo"}, "set dynamic_sampling_batches: 0 or max_staleness: 0"),
        ({"curriculum": True}, "curriculum cannot be combined with max_staleness"),
        ({"noise": True, "noise_stages": 2}, "under the noise of several steps; set noise: false"),
        ({"thinking_budget": 4}, "thinking_budget cannot be combined with max_staleness"),
        ({"tools": ["calculator"]}, "tools cannot be combined with max_staleness"),
        ({"environment": "calculator"}, "environment cannot be combined with max_staleness"),
        ({"ignore_data_skip": True}, "in the order of the data"),
        ({"steps_per_generation": 2}, "steps_per_generation is 2 with gradient_accumulation_steps: 1"),
        (
            {"loss_type": "dapo", "vllm_importance_sampling_correction": False},
            "samples of older policies, which this loss does not correct for",
        ),
        ({"algorithm": "distill", "teacher": "t"}, "a loss from the teacher alone does not correct for"),
        ({"max_staleness": 5}, "max_staleness is 5; it must be"),
    ],
)
def test_settings_that_stale_samples_do_not_go_with(tmp_path, changes, said):
    fields = {"max_staleness": 1} | changes
    with pytest.raises(QeRLError, match=said):
        QeRLConfig(**settings(tmp_path, **fields))


def test_demonstrations_are_never_stale(tmp_path):
    with pytest.raises(QeRLError, match="max_staleness has no effect with algorithm: sft"):
        QeRLConfig(output_dir=str(tmp_path), algorithm="sft", max_staleness=1, use_cpu=True)


def test_a_ratio_to_the_sampler_is_enough(tmp_path):
    """In the loss, or as a factor of it."""
    for changes in (
        {"loss_type": "dapo"},
        {"loss_type": "dppo_kl", "vllm_importance_sampling_correction": False},
        {"loss_type": "dapo", "use_rollout_logprobs": True, "vllm_importance_sampling_correction": False},
    ):
        assert QeRLConfig(**settings(tmp_path, max_staleness=1, **changes)).max_staleness == 1


def test_whoever_samples_or_answers_by_itself_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    fields = settings(tmp_path, max_staleness=1, tuning="full", weights="bf16")

    def made(data=DATA, **more):
        return QeRLTrainer(
            tiny_model("llama"),
            [sum_reward],
            QeRLConfig(**fields),
            data,
            processing_class=tiny_tokenizer,
            **more,
        )

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        return a + b

    with pytest.raises(QeRLError, match="rollout_func samples by itself; set max_staleness: 0"):
        made(rollout_func=lambda prompts, trainer: {})
    with pytest.raises(QeRLError, match="tools or environments answer the policy; set max_staleness: 0"):
        made(Dataset.from_dict({"prompt": [[{"role": "user", "content": "1 + 1"}]] * 4}), tools=[add])
    with pytest.raises(QeRLError, match="in advance, which an IterableDataset does not support"):
        made(DATA.to_iterable_dataset())


def test_several_processes_are_refused(make, monkeypatch):
    monkeypatch.setattr(QeRLConfig, "world_size", 2)
    with pytest.raises(QeRLError, match="max_staleness needs a single process, and there are 2"):
        make()


def test_samples_that_say_little_of_the_policy_are_warned_of_once(make, caplog):
    for rate, times in ((0.05, 1), (1e-4, 0)):
        caplog.clear()
        trainer = make(learning_rate=rate)
        trainer.train()
        least = min(row["sampling/ratio/effective_sample_size"] for row in logged(trainer))
        assert (least < 0.5) == bool(times)
        said = [each.getMessage() for each in caplog.records if "effective sample size" in each.getMessage()]
        assert len(said) == times
    assert not said


def test_what_is_under_way_is_read_as_it_was_written():
    choices = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    for begun in (
        Begun([1, 2], [-0.1, -1e-30], [0.3, 1 / 3]),
        Begun([7], [-2.5], [float("nan")], "stop", choices),
        Begun([], [], []),
    ):
        plain = json.loads(json.dumps(_plain(begun, [3] * len(begun.token_ids))))
        assert plain.pop("drawn_in") == [3] * len(begun.token_ids)
        read = _of_plain(plain)
        assert repr(read) == repr(begun)
        assert (read.choices is None) == (begun.choices is None)
        if begun.choices is not None:
            assert np.array_equal(read.choices, choices)


class HandsOn(PortableEngine):
    """Whatever it is asked, it is asked of another."""

    changed = staticmethod(lambda session: session)

    @contextmanager
    def session(self, *args, **kwargs):
        with super().session(*args, **kwargs) as session:
            yield self.changed(session)


class Older(Session):
    """A session as it was before samples were kept over updates."""

    def __init__(self, session):
        self._session = session

    def start(self, prompts, samples_per_prompt, params=None, seeds=None):
        return self._session.start(prompts, samples_per_prompt, params, seeds)

    def go_on(self, index, token_ids):
        return self._session.go_on(index, token_ids)

    def room(self, index):
        return self._session.room(index)

    def finish(self, index):
        return self._session.finish(index)

    def next(self, one_round=False):
        return self._session.next(one_round)

    @property
    def busy(self):
        return self._session.busy


class WithMethods(Older):
    def length(self, index):
        return self._session.length(index)

    def leave(self):
        return self._session.leave()


def test_an_engine_that_hands_its_arguments_on_is_taken(make, monkeypatch):
    monkeypatch.setattr("tests.trainer.test_refill.PortableEngine", HandsOn)
    trainer = make(max_steps=3)
    trainer.train()
    assert type(trainer.engine) is HandsOn and trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Older, "Older has no method length"),
        (WithMethods, "argument `begun` of start, which WithMethods.start lacks"),
    ],
)
def test_sessions_that_cannot_go_on_are_refused_before_anything_is_drawn(make, monkeypatch, kind, said):
    """And serve dynamic sampling as before."""
    monkeypatch.setattr("tests.trainer.test_refill.PortableEngine", HandsOn)
    monkeypatch.setattr(HandsOn, "changed", staticmethod(kind))
    with pytest.raises(QeRLError, match=said):
        make().train()
    trainer = make(max_staleness=0, dynamic_sampling_batches=1, max_steps=1)
    trainer.train()
    assert trainer.state.global_step == 1


def test_an_engine_without_sessions_is_refused(tiny_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(ScriptedEngine, "session", RolloutEngine.session)
    test_an_engine_whose_sessions_cannot_go_on_is_refused(tiny_model, tiny_tokenizer, tmp_path)


def test_an_engine_whose_sessions_cannot_go_on_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    args = QeRLConfig(**settings(tmp_path, max_staleness=1, tuning="full", weights="bf16"))
    with pytest.raises(
        QeRLError, match="`session` takes the argument `going_on`, and that of ScriptedEngine does not"
    ):
        QeRLTrainer(
            tiny_model("llama"), [sum_reward], args, DATA, engine=ScriptedEngine(100),
            processing_class=tiny_tokenizer,
        )  # fmt: skip
