"""Losses of token log-probabilities: the inputs of each, and its formula.

A loss is a sum over the tokens of a sequence and over sequences. Nothing is divided by a number of tokens or
samples: the caller scales weights or advantages. So the loss of a batch does not depend on how the batch was
divided.

Names, formulas and thresholds are those of the Tinker API, as its documentation has them (Loss Functions,
https://tinker-docs.thinkingmachines.ai/tinker/losses); each function names the paper behind it. With p the
model's log-probability of a target and q the sampler's, r = exp(p - q) is the importance ratio and A the
advantage. A token whose advantage is 0 adds nothing, whatever its ratio: q is a placeholder on prompts.

A custom loss needs no entry here: take the log-probabilities of a forward pass, differentiate the loss with
respect to them, and run `cross_entropy` backward with `weights` = minus those gradients.

Losses are computed in float64 on the CPU from float32 log-probabilities: these are a few numbers per token,
while the model took billions of products for them.

Legend: T tokens of a datum, K targets of a position.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qerl.errors import QeRLError
from qerl.update.policy_loss import clipped, weighted

TARGETS = "target_tokens"


@dataclass(frozen=True)
class Datum:
    """A training sequence with its per-token loss inputs.

    Attributes:
        tokens: [T] int64, what the model reads; position i predicts `target_tokens[i]`.
        inputs: By name: `target_tokens` [T], or [T, K] for soft targets, int64; all else float32 of the same
            shape: `weights`, `logprobs`, `advantages` and so on, as the loss asks for.
    """

    tokens: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class LossOutput:
    """The result of a pass over some data.

    Attributes:
        logprobs: For each datum the log-probabilities of its targets in nats, [T] or [T, K], float32 on the
            CPU.
        metrics: Numbers by `name:reduction`, where the reduction says how to combine the numbers of two
            calls; `loss:sum` is always present.
    """

    logprobs: list[torch.Tensor]
    metrics: dict[str, float]


def cross_entropy(logps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """- sum w p: negative log-likelihood; distillation if w are a teacher's probabilities of [T, K] targets.

    The gradient with respect to p is -w, so with w = -dC/dp it is that of any loss C of log-probabilities.
    """
    return -(weights * logps).sum()


def importance_sampling(
    logps_T: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
) -> torch.Tensor:
    """- sum r A: REINFORCE with the ratio of trainer and sampler, unbounded (Williams 1992)."""
    return -(_ratio(logps_T, logprobs, advantages) * advantages).sum()


def ppo(
    logps_T: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low_threshold: torch.Tensor,
    clip_high_threshold: torch.Tensor,
) -> torch.Tensor:
    """- sum min(r A, clip(r, low, high) A), token by token (PPO, Schulman et al., arXiv 1707.06347).

    Thresholds bound the ratio itself; the defaults are 0.8 and 1.2.
    """
    ratio_T = _ratio(logps_T, logprobs, advantages)
    return clipped(ratio_T, advantages, clip_low_threshold, clip_high_threshold).sum()


def cispo(
    logps_T: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low_threshold: torch.Tensor,
    clip_high_threshold: torch.Tensor,
) -> torch.Tensor:
    """- sum sg(clip(r, low, high)) p A: the clipped ratio weights the gradient, so every token keeps one
    (CISPO, MiniMax-M1, arXiv 2506.13585; one-sided as in ScaleRL, arXiv 2510.13786).

    The default thresholds are 0, which is no lower bound, and 4.
    """
    ratio_T = _ratio(logps_T, logprobs, advantages)
    return weighted(ratio_T.clamp(clip_low_threshold, clip_high_threshold), logps_T, advantages).sum()


def dro(
    logps_T: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """- sum (p A - beta / 2 (p - q)^2): a quadratic penalty towards the sampler instead of a ratio (DRO,
    Richemond et al., arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599). The advantage is the soft one, computed
    by the client.

    The penalty applies to every token, prompts included, so prompts need the sampler's `logprobs` too. `beta`
    defaults to 0.05, the value of the documentation's example.
    """
    return -(logps_T * advantages - 0.5 * beta * (logps_T - logprobs).square()).sum()


def gspo(
    logps_T: torch.Tensor,
    logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequence_ratio_mask: torch.Tensor,
    clip_low_threshold: torch.Tensor,
    clip_high_threshold: torch.Tensor,
) -> torch.Tensor:
    """PPO's loss with one ratio s per sequence, the geometric mean of its token ratios (GSPO-token, Zheng et
    al., arXiv 2507.18071): - sum min(s_t A, clip(s_t, low, high) A), s_t = sg(s) pi_t / sg(pi_t), pi = e^p.

    The mean is over the tokens where `sequence_ratio_mask` is not 0, the sampled ones. The loss is a sum over
    tokens; for the paper's mean per sequence, divide advantages by the number of tokens. The default
    thresholds are the paper's, 0.9997 and 1.0004.
    """
    in_ratio_T = sequence_ratio_mask != 0
    log_ratio = (logps_T.detach() - logprobs)[in_ratio_T].mean()
    ratio_T = torch.exp(log_ratio + logps_T - logps_T.detach())
    return clipped(ratio_T, advantages, clip_low_threshold, clip_high_threshold).sum()


def _ratio(logps_T: torch.Tensor, logprobs_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
    return torch.where(advantages_T == 0, 0.0, logps_T - logprobs_T).exp()


@dataclass(frozen=True)
class Loss:
    """A loss by name.

    Attributes:
        function: Maps log-probabilities of the targets, inputs by name and options by name, all float64, to a
            scalar.
        inputs: Names of the datum's inputs that it reads beside the targets.
        pull: Name of the input that scales a token's gradient: where it is 0, the token has none. None if
            every token has a gradient.
        options: Numbers that a call may set, with their defaults; a datum may have its own for each token.
        soft: Whether a position may have several targets.
    """

    function: Callable[..., torch.Tensor]
    inputs: tuple[str, ...]
    pull: str | None
    options: Mapping[str, float] = field(default_factory=dict)
    soft: bool = False

    def __call__(
        self, logps: torch.Tensor, datum: Datum, config: Mapping[str, float]
    ) -> tuple[float, torch.Tensor]:
        """Return the loss of one datum, and its gradient with respect to the log-probabilities.

        Args:
            logps: Log-probabilities of the targets, [T] or [T, K].
            datum: A datum that has passed `check`.
            config: Options that the call sets.
        """
        given = {name: value.double() for name, value in datum.inputs.items() if name != TARGETS}
        options = {
            name: torch.as_tensor(config.get(name, value), dtype=torch.float64)
            for name, value in self.options.items()
        }
        logps = logps.detach().double().requires_grad_()
        with torch.enable_grad():
            loss = self.function(logps, **(options | given))
        (gradient,) = torch.autograd.grad(loss, logps)
        return float(loss.detach()), gradient

    def pulls(self, datum: Datum) -> bool:
        """Return True if any token of a datum may have a gradient."""
        return self.pull is None or bool(datum.inputs[self.pull].any())

    def check_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Raise for options that this loss does not have, and for invalid values.

        Raises:
            QeRLError: An option is unknown or not a finite number, or the lower threshold is above the upper.
        """
        for option, value in config.items():
            if option not in self.options:
                known = f"it has {_list(self.options)}" if self.options else "it has none"
                raise QeRLError(f"The loss {name} has no option {option!r}; {known}.")
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < float("inf"):
                raise QeRLError(f"Option {option} of the loss {name} is {value!r}; set a finite number.")
        low, high = (config.get(x, self.options.get(x, 0.0)) for x in _THRESHOLDS)
        if low > high:
            raise QeRLError(
                f"The loss {name} has clip_low_threshold {low:g} above clip_high_threshold {high:g}; "
                "exchange them."
            )

    def check(self, name: str, datum: Datum, config: Mapping[str, float]) -> None:
        """Raise unless a datum has this loss's inputs and no unread ones, finite and in the right shapes.

        Raises:
            QeRLError: The message begins with what is wrong; the caller puts the datum's index in front.
        """
        tokens, given = datum.tokens, datum.inputs
        if tokens.ndim != 1 or not len(tokens):
            raise QeRLError(f"its tokens have shape {list(tokens.shape)}; send at least one, in one row.")
        missing = [x for x in (TARGETS, *self.inputs) if x not in given]
        if missing:
            raise QeRLError(f"the loss {name} needs {_list(missing)}; add them to its inputs.")
        unread = [x for x in given if x not in (TARGETS, *self.inputs, *self.options)]
        if unread:
            reads = _list((TARGETS, *self.inputs, *self.options))
            raise QeRLError(f"the loss {name} does not read {_list(unread)}, only {reads}; leave it out.")
        targets = given[TARGETS]
        if targets.ndim not in ((1, 2) if self.soft else (1,)) or len(targets) != len(tokens):
            wanted = f"[{len(tokens)}]" + (f" or [{len(tokens)}, K]" if self.soft else "")
            raise QeRLError(f"{TARGETS} have shape {list(targets.shape)} where {name} needs {wanted}.")
        if not targets.numel():
            raise QeRLError(f"{TARGETS} have shape {list(targets.shape)}; each position needs a target.")
        for role, ids in (("tokens", tokens), (TARGETS, targets)):
            if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
                raise QeRLError(f"{role} are {str(ids.dtype).removeprefix('torch.')}; send int64.")
        for key, value in given.items():
            if key == TARGETS:
                continue
            if value.shape != targets.shape:
                raise QeRLError(
                    f"{key} have shape {list(value.shape)} where {TARGETS} have {list(targets.shape)}; send "
                    "one number for each target."
                )
            if not value.isfinite().all():
                raise QeRLError(f"{key} are not all finite; replace NaN and infinity.")
        low, high = (
            torch.as_tensor(given.get(x, config.get(x, self.options.get(x, 0.0)))) for x in _THRESHOLDS
        )
        if (low > high).any():
            raise QeRLError("its clip_low_threshold is above its clip_high_threshold; exchange them.")
        if "sequence_ratio_mask" in self.inputs and not given["sequence_ratio_mask"].any():
            raise QeRLError("sequence_ratio_mask marks no token; set it to 1 on the sampled ones.")


_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
_RL = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), "weights", soft=True),
    "importance_sampling": Loss(importance_sampling, _RL, "advantages"),
    "ppo": Loss(ppo, _RL, "advantages", dict(zip(_THRESHOLDS, (0.8, 1.2), strict=True))),
    "cispo": Loss(cispo, _RL, "advantages", dict(zip(_THRESHOLDS, (0.0, 4.0), strict=True))),
    "dro": Loss(dro, _RL, None, {"beta": 0.05}),
    "gspo": Loss(
        gspo,
        (*_RL, "sequence_ratio_mask"),
        "advantages",
        dict(zip(_THRESHOLDS, (0.9997, 1.0004), strict=True)),
    ),
}
"""The losses by name."""


def find_loss(name: str) -> Loss:
    """Return the loss of this name.

    Raises:
        QeRLError: No loss has this name.
    """
    if name not in LOSSES:
        raise QeRLError(f"There is no loss {name!r}; take one of {', '.join(LOSSES)}.")
    return LOSSES[name]


def _list(names: Any) -> str:
    return ", ".join(names)
