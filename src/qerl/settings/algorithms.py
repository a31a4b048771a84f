"""Presets of papers: what an algorithm sets, and what is set without one."""

from collections.abc import Mapping
from typing import Any

CLIPPED: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon": 0.2,
    "delta": None,
    "importance_sampling_level": "token",
    "use_rollout_logprobs": False,
    "scale_rewards": "group",
    "overlong_buffer": 0.0,
    "dynamic_sampling_batches": 0,
    "signal": "reward",
    "beta": 0.0,
    "use_bias_correction_kl": True,
}
"""Values of fields for a loss that clips the ratio to the policy before its update: TRL's defaults where it
has them."""

EPSILON = {"dppo_kl": 0.05, "clip_cov": 1.0}
"""Clip distances that belong to a loss: for "dppo_kl" in nats, from SkyRL's runs, where 0.2 is a change of
probability; for "clip_cov", which holds tokens back by their covariance instead, from its authors' recipe
(arXiv 2505.22617)."""

UNSAID = CLIPPED | {
    "loss_type": "dppo_kl",
    "epsilon": EPSILON["dppo_kl"],
    "delta": 20.0,
    "use_rollout_logprobs": True,
}
"""Values of fields that neither the user nor an algorithm sets: a loss that in a study here (docs/method.md)
learned better than truncation where the sampler was four steps behind, and as well where it was not."""


def implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of fields that follow from the name of the default loss; empty for another loss.

    Args:
        settings: Fields by name, of which the algorithm, the loss and `epsilon` are read.
    """
    if settings.get("algorithm") is not None or settings.get("loss_type") != UNSAID["loss_type"]:
        return {}
    values = {name: value for name, value in UNSAID.items() if name != "loss_type"}
    return values | {"epsilon_high": settings.get("epsilon", values["epsilon"])}


OF_RATIO = (
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "use_rollout_logprobs",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)
"""Fields that decide how a ratio is bounded or corrects. If one of them is set to a value other than its
default, and no loss is, the loss is TRL's, with which these fields have their usual meaning."""

_OF_DAPO = {"dynamic_sampling_batches": 2, "overlong_buffer": 0.2, "signal": "accuracy"}

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": CLIPPED | {"loss_type": "grpo"},
    "dr_grpo": CLIPPED | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": CLIPPED | _OF_DAPO | {"epsilon_high": 0.28},
    "gspo": CLIPPED
    | {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": CLIPPED | _OF_DAPO | {"loss_type": "cispo", "epsilon_high": 5.0},
    "dppo": CLIPPED
    | {"loss_type": "dppo_tv", "delta": 20.0, "use_rollout_logprobs": True, "scale_rewards": "none"},
    "distill": CLIPPED,
    "sft": UNSAID,
}
"""Fields that an algorithm sets unless they are set otherwise.

- "grpo": arXiv 2402.03300, without its KL to the reference: most leave that out since DAPO, and TRL's weight
  of it is 0. The paper's is ``beta: 0.04`` with ``use_bias_correction_kl: false``.
- "dr_grpo": arXiv 2503.20783: no division by lengths or by standard deviations, no KL.
- "dapo": arXiv 2503.14476, sections 3.1 (clip-higher) to 3.4 (soft overlong punishment, whose interval there
  is a fifth of the longest response). Its authors punish truncated samples instead of masking them; both at
  once would leave short wrong answers with an advantage and nothing against it.
- "gspo": arXiv 2507.18071, with its clip distances.
- "cispo": MiniMax-M1, arXiv 2506.13585, which takes dynamic sampling and the length penalty from DAPO. It
  does not say its upper bound; 5 is one of those of ScaleRL (arXiv 2510.13786), and TRL's recommendation.
- "dppo": arXiv 2602.04879. The mask by total variation, to the sampler, is the paper's; its threshold of 0.2
  and plain centred advantages are those of prime-rl, the largest ratio of 20 is that of the authors' code in
  verl.
- "distill": TRL's loss for rewards, if there are any beside the `teacher`, from which alone it learns by
  default.
- "sft": only the values that are in effect anyway; it has no rewards.

The papers' budgets (samples per prompt, batches, lengths) and learning rates, which were chosen for training
all weights and are too small for adapters, are not set.
"""
