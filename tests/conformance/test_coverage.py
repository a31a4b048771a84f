"""Nothing of TRL's is accepted and ignored: it is compared here, tested elsewhere, replaced or refused."""

import dataclasses
import inspect

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import QeRLError
from qerl.settings.config import QeRLConfig
from qerl.settings.parents import REFUSED, REPLACED
from qerl.trainer.grpo import QeRLTrainer
from tests.conformance.harness import OWN, SHARED, Bench
from tests.conformance.test_rewards_and_data import REWARDS
from tests.conformance.test_updates import CASES, INERT, MOVING

COMPARED = {
    name for options in [*CASES.values(), *INERT.values(), *REWARDS.values(), MOVING] for name in options
}
COMPARED |= {"chat_template_kwargs", "log_completions", "num_generations_eval", "mask_truncated_completions"}

# Fields of TRL that act and are compared nowhere here.
ELSEWHERE = {
    "num_generations": "every test has it",
    "shuffle_dataset": "on purpose another order, keyed by the epoch: tests/trainer/resume/test_resume.py",
    "top_p": "the engine draws: tests/rollout/test_sampling.py",
    "top_k": "the engine draws: tests/rollout/test_sampling.py",
    "min_p": "the engine draws: tests/rollout/test_sampling.py",
    "generation_kwargs": "set fields of sampling: tests/settings/test_adapter.py",
    "model_init_kwargs": "set the loader's fields: tests/settings/test_adapter.py",
    "trust_remote_code": "the loader's: tests/models/test_load.py",
    "router_aux_loss_coef": "must be 0 for a mixture of experts: below",
    "max_tool_calling_iterations": "bounds trajectories: tests/agents/test_loop.py",
    "num_completions_to_print": "how TRL's code prints the same table",
    "log_unique_prompts": "how TRL's code sends the same table",
    "log_completions_hub_repo": "where TRL's code sends the same table",
}

# Settings that are each valid and together refused.
TOGETHER = [
    ({"sync_ref_model": True, "beta": 0.1}, "sync_ref_model needs tuning: full"),
    (
        {"sync_ref_model": True, "tuning": "full", "weights": "bf16"},
        "sync_ref_model has no reference to move",
    ),
    ({"loss_type": "cispo"}, "cispo takes epsilon_high as the largest ratio itself"),
    (
        {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"},
        "vespo needs ratios per token",
    ),
    ({"tuning": "full", "weights": "nvfp4"}, "tuning: full cannot train packed"),
    ({"backward_dtype": "fp8", "weights": "nf4"}, "is for weights in nvfp4 or mxfp4, and these are nf4"),
    (
        {"backward_dtype": "fp8", "tuning": "full", "weights": "bf16"},
        "and these are bf16; set backward_dtype",
    ),
    ({"per_device_train_batch_size": 6}, "num_generations"),
]


def test_every_field_of_trl_is_compared_replaced_or_refused() -> None:
    fields = {f.name for f in dataclasses.fields(GRPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    refused = REFUSED.keys() | REPLACED.keys()
    assert fields - COMPARED - ELSEWHERE.keys() == fields & refused
    assert not (COMPARED | ELSEWHERE.keys()) & refused
    assert ELSEWHERE.keys() <= fields - COMPARED


def test_the_constructor_takes_what_trl_takes_in_trls_order() -> None:
    theirs, ours = (inspect.signature(trainer).parameters for trainer in (GRPOTrainer, QeRLTrainer))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [ours[name].default for name in theirs] == [theirs[name].default for name in theirs]
    added = list(ours)[len(theirs) :]
    assert added == ["engine", "acted_on"]
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in added)


@pytest.mark.parametrize("options, message", TOGETHER)
def test_settings_that_contradict_each_other_are_refused(tmp_path, options, message) -> None:
    values = OWN | SHARED | {"output_dir": str(tmp_path)} | options
    with pytest.raises(QeRLError, match=message):
        QeRLConfig(**values)


def test_a_router_loss_is_refused(bench: Bench) -> None:
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    mixture = dataclasses.replace(bench, model=Qwen3MoeForCausalLM(config))
    with pytest.raises(QeRLError, match="router_aux_loss_coef=0"):
        mixture.trainer(True, "full")
    mixture.trainer(True, "full", router_aux_loss_coef=0.0)
