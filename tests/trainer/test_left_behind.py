"""What is cut off (a training, an evaluation, an epoch) leaves nothing behind for what comes after it."""

import pandas as pd
import pytest
from transformers import TrainerCallback

from qerl.errors import QeRLError
from qerl.rollout.portable.engine import PortableEngine
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from qerl.trainer.step_log import print_table
from tests.support.trainer import DATA, settings


class Stopped(Exception):
    pass


def length(completion_ids, **_):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


@pytest.fixture
def make(tiny_model, tiny_tokenizer, tmp_path):
    def build(reward=length, callbacks=None, trainer=QeRLTrainer, **changes):
        model = tiny_model("llama")
        values = {"max_steps": 2, "learning_rate": 1e-2, **changes}
        return trainer(
            model, [reward], QeRLConfig(**settings(tmp_path, **values)), DATA, callbacks=callbacks,
            engine=PortableEngine(model, tiny_tokenizer.pad_token_id), processing_class=tiny_tokenizer,
        )  # fmt: skip

    return build


class Once(TrainerCallback):
    """Does something at the first event of a name."""

    def __init__(self, event, act):
        self.act = act
        setattr(self, event, self.once)

    def once(self, args, state, control, **kwargs):
        act, self.act = self.act, lambda control: None
        return act(control)


def test_a_training_that_was_cut_off_is_in_no_line_of_the_next(make):
    plus = [100.0]

    def reward(completion_ids, log_metric, **_):
        log_metric("own", plus[0])
        return [plus[0] + i % 2 for i in range(len(completion_ids))]

    def cut_off(*_):
        raise Stopped

    trainer = make(reward)
    run, trainer.updates.run = trainer.updates.run, cut_off
    with pytest.raises(Stopped):
        trainer.train()
    trainer.updates.run, plus[0] = run, 0.0
    trainer.train()
    first = next(line for line in trainer.state.log_history if "loss" in line)
    assert first["reward"] == 0.5 and first["own"] == 0.0


def test_an_evaluation_that_was_cut_off_is_in_no_number_of_the_next(make):
    seen = []

    def reward(completion_ids, **_):
        seen.append(len(completion_ids))
        return [50.0 if len(seen) == 1 else 1.0] * len(completion_ids)

    trainer = make(reward, per_device_eval_batch_size=4)
    evaluated = trainer.rollouts.evaluate

    def cut_off(rows):
        evaluated(rows)
        raise Stopped

    trainer.rollouts.evaluate = cut_off
    with pytest.raises(Stopped):
        trainer.evaluate(DATA)
    trainer.rollouts.evaluate = evaluated
    assert trainer.evaluate(DATA)["eval_reward"] == 1.0


def test_an_epoch_that_a_callback_ends_within_a_step_takes_its_samples_with_it(make):
    def end_epoch(control):
        control.should_epoch_stop = True
        return control

    trainer = make(
        callbacks=[Once("on_substep_end", end_epoch)], gradient_accumulation_steps=4, steps_per_generation=2,
        per_device_train_batch_size=4,
    )  # fmt: skip
    sizes, run = [], trainer.updates.run

    def spy(model, microbatches, step):
        sizes.append(len(microbatches))
        groups = {}
        for sample in (sample for part in microbatches for sample in part.samples):
            groups.setdefault(sample.group, set()).add(tuple(sample.prompt))
        assert all(len(prompts) == 1 for prompts in groups.values())
        return run(model, microbatches, step)

    trainer.updates.run = spy
    trainer.train()
    assert sizes and set(sizes) == {4}


def test_an_evaluation_within_a_step_changes_no_seed_of_its_rollouts(make):
    def seeds(callbacks):
        trainer = make(
            callbacks=callbacks, gradient_accumulation_steps=4, steps_per_generation=2, max_steps=1,
            per_device_train_batch_size=4, per_device_eval_batch_size=4,
        )  # fmt: skip
        for callback in callbacks:
            callback.act = lambda control: trainer.evaluate(DATA) and None
        found, generate = [], trainer.engine.generate

        def spy(prompts, samples, params, *rest):
            found.append(params.seed)
            return generate(prompts, samples, params, *rest)

        trainer.engine.generate = spy
        trainer.train()
        return found

    plain, within = seeds([]), seeds([Once("on_substep_end", None)])
    assert len(set(plain)) == 2 and within[0] == plain[0] and within[-1] == plain[1]


def test_a_finished_run_that_is_resumed_keeps_its_table(make, tmp_path):
    changes = {"log_completions": True, "save_strategy": "steps", "save_steps": 2}
    make(**changes).train()
    (table,) = tmp_path.rglob("completions_00002.parquet")
    written = pd.read_parquet(table)
    make(**changes).train(resume_from_checkpoint=True)
    assert len(written) > 0 and pd.read_parquet(table).equals(written)


def test_what_stands_in_brackets_is_no_markup(capsys):
    texts = {"prompt": ["[INST] one [/INST]"], "completion": ["[bold]x[/]"], "[reward/]": [1.0]}
    print_table(pd.DataFrame({"step": [1], **texts}), 1, None)
    shown = "".join(capsys.readouterr().out.split())
    assert all(text in shown for text in ("[INST]one[/INST]", "[bold]x[/]", "[reward/]"))


@pytest.mark.parametrize(
    ("evaluation", "title"),
    [("", "Step 2"), ("eval", "Evaluation, step 2"), ("eval_hard", "Evaluation of hard, step 2"),
     ("test", "Evaluation of test, step 2")],
)  # fmt: skip
def test_a_table_says_whether_it_is_of_an_evaluation(evaluation, title, capsys):
    print_table(pd.DataFrame({"step": [2], "prompt": ["a"], "completion": ["b"]}), 2, None, evaluation)
    assert capsys.readouterr().out.splitlines()[0].strip() == title


def test_tables_of_training_and_evaluation_are_told_apart(make, capsys):
    trainer = make(log_completions=True, per_device_eval_batch_size=4, max_steps=1)
    trainer.train()
    trainer.evaluate(DATA)
    titles = [line.strip() for line in capsys.readouterr().out.splitlines() if "tep 1" in line]
    assert {*titles[:-1]} == {"Step 1"} and titles[-1] == "Evaluation, step 1"


def test_an_evaluation_of_parts_of_groups_is_refused(make):
    with pytest.raises(
        QeRLError, match="per_device_eval_batch_size is 6, which is not a multiple of the 4 samples"
    ):
        make(per_device_eval_batch_size=6).evaluate(DATA)


def test_an_evaluation_of_nothing_says_what_is_missing(make):
    with pytest.raises(QeRLError, match="give eval_dataset"):
        make(per_device_eval_batch_size=4).evaluate()
    with pytest.raises(QeRLError, match="no data set called 'mine'"):
        make(per_device_eval_batch_size=4).evaluate("mine")


@pytest.mark.parametrize("name", ["compute_loss", "_calculate_rewards"])
def test_a_subclass_whose_method_would_not_be_called_is_refused(make, name):
    own = type("Own", (QeRLTrainer,), {name: lambda self, *_, **__: None})
    with pytest.raises(QeRLError, match=f"Own overrides {name}, which QeRLTrainer does not call"):
        make(trainer=own)
