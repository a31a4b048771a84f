"""TRL's loss on given tensors, without a model: `GRPOTrainer._compute_loss` on a stub of its trainer."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from trl import GRPOTrainer

_TRAINER = {
    "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "beta": 0.0, "use_vllm": True,
    "vllm_importance_sampling_correction": True, "importance_sampling_level": "token", "loss_type": "dapo",
    "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": 8, "aux_loss_enabled": False,
    "current_gradient_accumulation_steps": 1, "_entropy_bonus_enabled": False, "entropy_coef": 0.0,
    "use_adaptive_entropy": False, "_last_world_entropy": float("inf"), "_entropy_window_stats": None,
}  # fmt: skip
_ARGS = {
    "delta": None, "steps_per_generation": 1, "use_bias_correction_kl": True, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "entropy_target": 0.2, "entropy_coef_delta": 0.005, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}  # fmt: skip


def trl_loss(
    logps_BC: torch.Tensor, entropy_BC: torch.Tensor, batch: dict[str, torch.Tensor], **settings: Any
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """TRL's loss and the metrics that it logs.

    Args:
        logps_BC, entropy_BC: What the policy would have given.
        batch: Masks, advantages, other policies' log-probabilities, under TRL's keys.
        settings: Attributes of TRL's trainer, and of its arguments.
    """
    trainer: Any = MagicMock()
    attributes = _TRAINER | {name: value for name, value in settings.items() if name not in _ARGS}
    attributes |= {name: getattr(GRPOTrainer, name) for name in ("get_off_policy_mask", "get_gamma_weights")}
    trainer.configure_mock(**attributes)
    trainer.args = SimpleNamespace(**_ARGS | {k: v for k, v in settings.items() if k in _ARGS})
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather = lambda values: values
    trainer.accelerator.pad_across_processes = lambda values, **_: values
    trainer.accelerator.reduce = lambda values, **_: values
    trainer._metrics = {"train": defaultdict(list)}
    trainer.get_high_entropy_mask = lambda *args: GRPOTrainer.get_high_entropy_mask(trainer, *args)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps_BC, entropy_BC, None)
    prompt = torch.ones(len(logps_BC), 1)
    unused = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": batch["completion_mask"]}
    loss = GRPOTrainer._compute_loss(
        trainer, None, {"num_items_in_batch": torch.tensor(1.0)} | unused | batch
    )
    return loss, dict(trainer._metrics["train"])
