"""Nothing of TRL's is accepted and ignored: it is compared here, tested elsewhere, replaced or refused."""

import dataclasses
import inspect

import pytest
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from qerl.errors import QeRLError
from qerl.settings.parents import REFUSED, REPLACED
from qerl.trainer.grpo import QeRLTrainer
from tests.conformance.harness import Bench
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
