"""Losses and gradients of several turns are those of TRL's own trainer."""

import copy

import pytest
import torch
from trl import GRPOTrainer

from tests.support.agents import multiply, tool_tokenizer
from tests.support.models import EOS
from tests.support.tools import (
    DATA,
    make_args,
    make_trainer,
    rows_of,
    sampled,
    written_reward,
)
from tests.support.trainer import (
    as_batch,
    fed_by,
    logged_of,
    reported,
    same_gradients,
    trl_step,
    update_of,
)

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
    return fed_by(trainer, SayingClient(ours.engine))


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
    expected, loss = trl_step(reference, rows_of())
    parts = sampled(ours)
    found = as_batch(parts, ours.processing_class.pad_token_id)
    same_loss = update_of(ours, parts)
    for name in (
        "prompt_ids",
        "completion_ids",
        "tool_mask",
        "sampling_per_token_logps",
        "num_items_in_batch",
    ):
        torch.testing.assert_close(expected[name].float(), found[name].float(), msg=name)
    mask = found["completion_mask"]
    assert (mask.bool() & (found["tool_mask"] == 0)).any(), "a tool has written"
    assert same_loss.item() == pytest.approx(loss, rel=1e-5, abs=1e-7)
    same_gradients(reference.model, ours.model)
    logged = logged_of(ours) | reported(ours)
    for name in ("tools/call_frequency", "tools/failure_frequency", "completions/mean_length", "kl"):
        values = reference._metrics["train"].get(name)
        assert logged.get(name) == (values and pytest.approx(values[-1])), name
