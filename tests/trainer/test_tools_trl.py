"""Losses and gradients of several turns are those of TRL's own trainer."""

import copy

import pytest
import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.support.agents import multiply, tool_tokenizer
from tests.support.models import EOS
from tests.support.tools import (
    DATA,
    make_args,
    make_trainer,
    own_rollout,
    sampled,
    written_reward,
)
from tests.support.trainer import same_gradients

pytestmark = pytest.mark.slow


class SayingClient:
    """TRL's vLLM client that says what the engine says, turn by turn."""

    def __init__(self, engine):
        self.engine, self.rows = engine, {}

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        decode = self.engine.tokenizer.decode
        ids, logprobs = [], []
        for index, prompt in enumerate(prompts):
            if num_generations > 1:
                track = Row(index // num_generations, index % num_generations, prompt)
                so_far = ""
            else:
                track, so_far = self.find(prompt)
            text = self.engine.say(track, so_far)
            self.rows[(*prompt, *self.engine.tokenizer(text + EOS)["input_ids"])] = track
            ids.append(self.engine.tokenizer(text + EOS)["input_ids"][: 300 if so_far == "" else None])
            logprobs.append([[-4.0 - (token % 7) / 8] for token in ids[-1]])
        assert decode
        return prompts, ids, logprobs, None

    def find(self, prompt):
        """The row whose tokens so far begin this prompt."""
        begun = max((row for row in self.rows if list(row) == prompt[: len(row)]), key=len)
        track = self.rows[begun]
        return track, self.engine.tokenizer.decode(prompt[len(track.prompt) :])


class Row:
    def __init__(self, prompt_number, sample, prompt):
        self.prompt_number, self.sample, self.prompt = prompt_number, sample, prompt


def trl_reference(ours, folder, tools=(multiply,), **changes):
    """TRL's own trainer on a copy of the model, whose client says the same."""
    model = copy.deepcopy(ours.model)
    model.base_model.model.__dict__.pop("forward", None)  # the fused head is added anew to the copy
    if "ref" in model.peft_config:
        model.delete_adapter("ref")
    args = make_args(folder, ours=False, **changes)
    args.epsilon_high = ours.args.epsilon_high
    trainer = GRPOTrainer(
        model, [written_reward], args, DATA, processing_class=tool_tokenizer(), tools=list(tools)
    )
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = SayingClient(ours.engine)
    return trainer


OPTIONS = {
    "grpo": {"loss_type": "grpo", "vllm_importance_sampling_mode": "token_truncate"},
    "masked sequences": {"loss_type": "dapo", "vllm_importance_sampling_mode": "sequence_mask"},
    "sequence ratio": {"loss_type": "bnpo", "vllm_importance_sampling_mode": "sequence_truncate"},
    "KL": {"loss_type": "dr_grpo", "beta": 0.1, "vllm_importance_sampling_mode": "token_mask"},
    "entropy": {"loss_type": "grpo", "entropy_coef": 0.1, "vllm_importance_sampling_mode": "token_truncate"},
    "quantile": {
        "loss_type": "dapo", "top_entropy_quantile": 0.3, "vllm_importance_sampling_mode": "token_truncate"
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_loss_and_gradients_of_several_turns_equal_trl(tmp_path, options):
    ours = make_trainer(tmp_path, **options)
    reference = trl_reference(ours, tmp_path, **options)
    losses, batches = [], []
    for trainer in (reference, ours):
        batches.append(sampled(trainer))
        loss = trainer.compute_loss(trainer.model, dict(batches[-1]))
        loss.backward()
        losses.append(loss.item())
    for name in (
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "sampling_per_token_logps",
        "num_items_in_batch",
    ):
        torch.testing.assert_close(batches[0][name].float(), batches[1][name].float(), msg=name)
    mask = batches[1]["completion_mask"]
    assert (mask.bool() & (batches[1]["tool_mask"] == 0)).any(), "a tool has written"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5, abs=1e-7)
    same_gradients(reference.model, ours.model)
    ours._metrics["train"] |= ours._metrics_of_losses()
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "kl"):
        theirs, found = (trainer._metrics["train"].get(name) for trainer in (reference, ours))
        assert found == pytest.approx(theirs), name


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_truncate"])
def test_a_rollout_function_trains_as_with_trl(tmp_path, mode):
    data = Dataset.from_dict({"prompt": ["one", "two"]})
    seen = []

    def reward(completion_ids, seen=seen, **columns):
        seen.append(columns.get("written_tokens"))
        return written_reward(completion_ids)

    options = {"vllm_importance_sampling_mode": mode, "loss_type": "grpo"}
    ours = make_trainer(tmp_path, rewards=(reward,), tools=(), data=data, rollout_func=own_rollout, **options)
    model = copy.deepcopy(ours.model)
    model.base_model.model.__dict__.pop("forward", None)
    args = make_args(tmp_path, ours=False, **options)
    args.epsilon_high = ours.args.epsilon_high
    theirs = GRPOTrainer(
        model, [written_reward], args, data, processing_class=tool_tokenizer(), rollout_func=own_rollout
    )
    theirs.use_vllm, theirs.vllm_mode, theirs._last_loaded_step = True, "server", 0
    for trainer in (theirs, ours):
        trainer.compute_loss(trainer.model, sampled(trainer, data)).backward()
    same_gradients(theirs.model, ours.model)
