"""Presets of papers: what an algorithm sets, and what is set without one."""

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
"""What fields hold beside a clipped ratio to the policy before its update: TRL's defaults where it has
them."""

EPSILON = {"dppo_kl": 0.05, "clip_cov": 1.0}
"""Clip distances that belong to a loss: of "dppo_kl" in nats, that of SkyRL's runs, where 0.2 is a change of
probability; of "clip_cov", which holds tokens back by their covariance instead, that of its authors' recipe
(arXiv 2505.22617)."""

UNSAID = CLIPPED | {
    "loss_type": "dppo_kl",
    "epsilon": EPSILON["dppo_kl"],
    "delta": 20.0,
    "use_rollout_logprobs": True,
}
"""What fields hold that neither the user nor an algorithm sets: the loss that learned best in a study here
where the sampler was behind (docs/method.md), and equally well where it was not."""

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
"""Fields that say how a ratio is bounded or corrects. Who sets one without a loss means that of TRL, where
they have their usual meaning."""

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
"""What an algorithm sets where nobody has set the field.

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
- "distill": TRL's loss of rewards, where there are any beside the `teacher`, which teaches alone with it.
- "sft": nothing but what stands anyway; it has no rewards.

What papers say of the budget (samples of a prompt, batches, lengths) and learning rates, which they chose for
training all weights and which are too small for adapters, is not set.
"""
