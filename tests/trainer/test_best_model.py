"""The best checkpoint is chosen by the reward of evaluations, and is what the trainer ends with."""

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.models.load import load_model
from qerl.settings.config import QeRLConfig
from qerl.trainer.grpo import QeRLTrainer
from tests.support.trainer import DATA, ScriptedEngine, settings

pytestmark = pytest.mark.slow

BY_STEP = [0.2, 0.9, 0.5, 0.4]
"""Rewards of the evaluations after each step."""
SAVING = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture
def trainer(tiny_model, tiny_tokenizer, tmp_path):
    """``trainer(eval_set, callbacks, **changes)``: packed weights; evaluations' rewards are `BY_STEP`."""
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)

    def make(eval_set=DATA, callbacks=None, **changes):
        model = add_lora(load_model(folder, "nvfp4", torch.float32, "cpu"), rank=4, alpha=8, dropout=0.0)
        args = QeRLConfig(
            **settings(
                tmp_path / "run", learning_rate=1e-2, per_device_eval_batch_size=16, **SAVING | changes
            )
        )

        # The reward of training depends on the sample, that of an evaluation on the step alone.
        def reward(completion_ids, trainer_state, **kwargs):
            if this.model.training:
                return [float(sum(ids) % 7) for ids in completion_ids]
            return [BY_STEP[trainer_state.global_step - 1]] * len(completion_ids)

        engine = ScriptedEngine(model.config.vocab_size, tiny_tokenizer.eos_token_id)
        this = QeRLTrainer(
            model,
            [reward],
            args,
            DATA,
            eval_set,
            engine=engine,
            processing_class=tiny_tokenizer,
            callbacks=callbacks,
        )
        return this

    return make


def test_the_best_adapter_is_the_one_at_the_end(trainer, tmp_path):
    one = trainer(load_best_model_at_end=True)
    assert one.args.metric_for_best_model == "eval_reward" and one.args.greater_is_better
    one.train()
    assert one.state.best_metric == pytest.approx(0.9)
    best, last = (
        load_file(tmp_path / "run" / f"checkpoint-{step}" / "adapter_model.safetensors") for step in (2, 4)
    )
    assert any(not best[name].equal(last[name]) for name in best)
    for name, parameter in one.model.named_parameters():
        if parameter.requires_grad:
            assert parameter.equal(best[name.replace(".default", "")]), name


def test_training_stops_early_by_the_reward(trainer):
    one = trainer(callbacks=[EarlyStoppingCallback(1)], load_best_model_at_end=True)
    one.train()
    assert one.state.global_step == 3


def test_a_setting_stops_training_early_and_its_metric_is_the_reward(trainer, caplog):
    one = trainer(early_stopping_patience=2)
    one.train()
    assert one.state.global_step == 4, "0.9 at step 2, then twice less"
    assert "Training ends after step 4: eval_reward was not better in 2 evaluations in a row" in caplog.text
    two = trainer(early_stopping_patience=1, early_stopping_threshold=0.8)
    two.train()
    assert two.state.global_step == 2, "0.9 is not better than 0.2 by more than 0.8"


def test_a_resumed_run_counts_on(trainer, tmp_path):
    one = trainer(early_stopping_patience=2, max_steps=3)
    one.train()
    assert one.state.global_step == 3
    again = trainer(early_stopping_patience=2, max_steps=8)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert again.state.global_step == 4


def test_of_several_evaluation_sets_one_stops_training(trainer, caplog):
    sets = {"easy": DATA, "hard": DATA}
    one = trainer(sets, early_stopping_patience=1, metric_for_best_model="eval_hard_reward")
    one.train()
    assert one.state.global_step == 3 and "early stopping is disabled" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"early_stopping_patience": 1, "eval_strategy": "no"}, "goes by evaluations, and there are none"),
        ({"early_stopping_threshold": 0.1}, "acts with early_stopping_patience"),
        ({"early_stopping_patience": 0}, "early_stopping_patience is 0"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(tmp_path, changes, message):
    with pytest.raises(QeRLError, match=message):
        QeRLConfig(**settings(tmp_path, **SAVING | changes))


def test_a_metric_that_evaluations_do_not_have_is_a_sentence(trainer):
    one = trainer(load_best_model_at_end=True, metric_for_best_model="eval_rewrad")
    with pytest.raises(QeRLError, match=r"is eval_rewrad, which .* do not report; .* eval_reward"):
        one.train()


def test_several_evaluation_sets_have_metrics_of_their_own(trainer):
    sets = {"easy": DATA, "hard": Dataset.from_dict({"prompt": ["nine", "ten", "one", "two"]})}
    with pytest.raises(QeRLError, match="eval_easy_reward, eval_hard_reward"):
        trainer(sets, load_best_model_at_end=True)
    one = trainer(sets, load_best_model_at_end=True, metric_for_best_model="eval_hard_reward")
    one.train()
    assert one.state.best_metric == pytest.approx(0.9)
    rows = [row for row in one.state.log_history if "eval_easy_reward" in row]
    assert [row["eval_easy_reward"] for row in rows] == pytest.approx(BY_STEP)
    assert not any("eval_reward" in row for row in one.state.log_history)


@pytest.mark.parametrize("name", ["loss", "eval_loss"])
def test_the_loss_of_an_evaluation_is_minus_its_reward(trainer, name):
    one = trainer(load_best_model_at_end=True, metric_for_best_model=name)
    one.train()
    assert one.state.best_metric == pytest.approx(-0.9) and one.state.best_global_step == 2
    rows = [row for row in one.state.log_history if "eval_reward" in row]
    assert [row["eval_loss"] for row in rows] == pytest.approx([-reward for reward in BY_STEP])


def test_a_learning_rate_on_a_plateau_goes_by_the_reward(tmp_path):
    config = QeRLConfig(
        **settings(tmp_path, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=1)
    )
    assert config.metric_for_best_model == "eval_reward" and config.greater_is_better
