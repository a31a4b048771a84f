"""Each loss has the value and the gradient of its formula, written out token by token, and of TRL's where TRL
has it; what a loss cannot use is refused with a sentence.
"""

import math

import pytest
import torch

from qerl.errors import QeRLError
from qerl.update.losses import LOSSES, Datum, find_loss
from tests.support.trl_loss import trl_loss

T = 9
CLIPS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.15}


def sequence(seed: int, loss: str, tokens: int = T) -> tuple[torch.Tensor, Datum]:
    """Random log-probabilities, and a datum whose ratios are on both sides of any threshold."""
    draw = torch.Generator().manual_seed(seed)
    logps = -torch.rand(tokens, generator=draw, dtype=torch.float64) * 4
    inputs = {
        "weights": torch.rand(tokens, generator=draw) - 0.2,
        "logprobs": (logps + torch.randn(tokens, generator=draw) * 0.4).float(),
        "advantages": torch.randn(tokens, generator=draw) * (torch.arange(tokens) > 2),
        "sequence_ratio_mask": (torch.arange(tokens) > 2).float(),
    }
    targets = torch.randint(50, (tokens,), generator=draw)
    read = {name: inputs[name] for name in LOSSES[loss].inputs}
    return logps, Datum(targets, {"target_tokens": targets} | read)


def by_hand(name: str, p: list[float], datum: Datum, options: dict[str, float]) -> list[tuple[float, float]]:
    """(loss, its derivative) of each token, from the published formulas, in Python's floats."""
    given = {key: value.double().tolist() for key, value in datum.inputs.items()}
    if name == "cross_entropy":
        return [(-w * x, -w) for w, x in zip(given["weights"], p, strict=True)]
    low, high = options.get("clip_low_threshold", 0.0), options.get("clip_high_threshold", 0.0)
    rows = list(zip(p, given["logprobs"], given["advantages"], strict=True))
    if name == "gspo":
        marked = [x - q for (x, q, _), m in zip(rows, given["sequence_ratio_mask"], strict=True) if m]
        s = math.exp(sum(marked) / len(marked))
    out = []
    for x, q, a in rows:
        r = s if name == "gspo" else math.exp(x - q)
        bounded = min(max(r, low), high)
        if name == "importance_sampling":
            out.append((-r * a, -r * a))
        elif name in ("ppo", "gspo"):
            unclipped = r * a <= bounded * a
            out.append((-min(r * a, bounded * a), -r * a if unclipped else 0.0))
        elif name == "cispo":
            out.append((-bounded * x * a, -bounded * a))
        else:
            beta = options["beta"]
            out.append((-(x * a - beta / 2 * (x - q) ** 2), -(a - beta * (x - q))))
    return out


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name, seed):
    loss = find_loss(name)
    for config in ({}, {key: value for key, value in (CLIPS | {"beta": 0.3}).items() if key in loss.options}):
        logps, datum = sequence(seed, name)
        loss.check(name, datum, {})
        loss.check_config(name, config)
        value, gradient = loss(logps, datum, config)
        wanted = by_hand(name, logps.tolist(), datum, dict(loss.options) | config)
        assert value == pytest.approx(sum(v for v, _ in wanted), rel=1e-12, abs=1e-12)
        torch.testing.assert_close(
            gradient, torch.tensor([g for _, g in wanted], dtype=torch.float64), rtol=1e-11, atol=1e-13
        )


def test_soft_targets_weigh_each_log_probability():
    logps = torch.log_softmax(torch.randn(T, 3, dtype=torch.float64), -1)
    weights = torch.rand(T, 3)
    datum = Datum(torch.ones(T).long(), {"target_tokens": torch.ones(T, 3).long(), "weights": weights})
    value, gradient = find_loss("cross_entropy")(logps, datum, {})
    assert value == pytest.approx(float(-(weights.double() * logps).sum()), rel=1e-12)
    assert torch.equal(gradient, -weights.double())


@pytest.mark.parametrize("name", [name for name in LOSSES if "clip_low_threshold" in LOSSES[name].options])
def test_thresholds_may_differ_from_token_to_token(name):
    loss = find_loss(name)
    logps, datum = sequence(5, name)
    whole, _ = loss(logps, datum, CLIPS)
    each = {key: torch.full((T,), value, dtype=torch.float64) for key, value in CLIPS.items()}
    assert loss(logps, Datum(datum.tokens, {**datum.inputs, **each}), {})[0] == pytest.approx(
        whole, rel=1e-12
    )
    none = {"clip_low_threshold": torch.zeros(T), "clip_high_threshold": torch.full((T,), 1e9)}
    free, _ = loss(logps, Datum(datum.tokens, {**datum.inputs, **none}), CLIPS)
    assert free == pytest.approx(
        sum(v for v, _ in by_hand(name, logps.tolist(), datum, {"clip_high_threshold": 1e9})), rel=1e-6
    )


@pytest.mark.parametrize("name", [name for name in LOSSES if LOSSES[name].pull == "advantages"])
def test_a_token_without_advantage_pulls_at_nothing_whatever_its_ratio(name):
    """Prompts carry made-up log-probabilities; 0 times an infinite ratio would be NaN."""
    logps, datum = sequence(1, name)
    before = find_loss(name)(logps, datum, {})
    made_up = datum.inputs["logprobs"].clone()
    made_up[:3] = -5000.0
    after = find_loss(name)(logps, Datum(datum.tokens, {**datum.inputs, "logprobs": made_up}), {})
    assert after[0] == before[0] and torch.equal(after[1], before[1])


# TRL


def trl_sum(logps_BT, old_BT, advantages_B, mask_BT, **settings) -> torch.Tensor:
    """TRL's loss as a sum over tokens."""
    batch = {"completion_mask": mask_BT, "advantages": advantages_B, "old_per_token_logps": old_BT}
    batch["importance_sampling_ratio"] = torch.ones_like(mask_BT)
    options = {"loss_type": "dr_grpo", "max_completion_length": mask_BT.size(1)} | settings
    loss, _ = trl_loss(logps_BT, torch.zeros_like(logps_BT), batch, **options)
    return loss if options["loss_type"] == "cispo" else loss * mask_BT.numel()


TRL = {
    "ppo": ({"epsilon_low": 0.1, "epsilon_high": 0.15}, CLIPS),
    "importance_sampling": ({"epsilon_low": 1.0, "epsilon_high": 1e9}, {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.15}, {"clip_high_threshold": 1.15}),
    "gspo": ({"importance_sampling_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
             {"clip_low_threshold": 0.99, "clip_high_threshold": 1.02}),
}  # fmt: skip


@pytest.mark.parametrize("name", TRL)
def test_a_loss_that_trl_has_is_trls(name):
    settings, config = TRL[name]
    lengths, draw = [4, 9, 6, 1], torch.Generator().manual_seed(3)
    mask_BT = (torch.arange(9) < torch.tensor(lengths)[:, None]).double()
    logps_BT = (-torch.rand(4, 9, generator=draw, dtype=torch.float64)).requires_grad_()
    old_BT = logps_BT.detach() + torch.randn(4, 9, generator=draw, dtype=torch.float64).float() * 0.3
    old_BT = old_BT.float().double()
    advantages_B = torch.tensor([1.5, -0.5, 0.25, -1.0], dtype=torch.float64)
    wanted = trl_sum(logps_BT, old_BT, advantages_B, mask_BT, **settings)
    (gradient_BT,) = torch.autograd.grad(wanted, logps_BT)
    total = 0.0
    for row, n in enumerate(lengths):
        inputs = {
            "target_tokens": torch.ones(n).long(),
            "logprobs": old_BT[row, :n].float(),
            "advantages": advantages_B[row].float().expand(n),
            "sequence_ratio_mask": torch.ones(n),
        }
        read = ("target_tokens", *LOSSES[name].inputs)
        datum = Datum(torch.ones(n).long(), {key: inputs[key] for key in read})
        value, gradient = find_loss(name)(logps_BT[row, :n], datum, config)
        total += value
        torch.testing.assert_close(gradient, gradient_BT[row, :n], rtol=1e-10, atol=1e-12)
    assert total == pytest.approx(float(wanted.detach()), rel=1e-10)


# What is refused

ONES = torch.ones(4)
IDS = torch.ones(4).long()
BAD = {
    "missing": ("ppo", {"target_tokens": IDS, "logprobs": ONES}, "the loss ppo needs advantages"),
    "no targets": ("cross_entropy", {"weights": ONES}, "needs target_tokens"),
    "unread": (
        "ppo",
        {"target_tokens": IDS, "logprobs": ONES, "advantages": ONES, "mask": ONES},
        "does not read mask",
    ),
    "short": ("cross_entropy", {"target_tokens": IDS[:3], "weights": ONES[:3]}, r"shape \[3\].*needs \[4\]"),
    "weights": ("cross_entropy", {"target_tokens": IDS, "weights": ONES[:3]}, r"weights have shape \[3\]"),
    "soft": (
        "ppo",
        {"target_tokens": IDS[:, None], "logprobs": ONES[:, None], "advantages": ONES[:, None]},
        r"where ppo needs \[4\]",
    ),
    "no target": (
        "cross_entropy",
        {"target_tokens": IDS[:, None][:, :0], "weights": ONES[:, None][:, :0]},
        "each position needs a target",
    ),
    "nan": (
        "cross_entropy",
        {"target_tokens": IDS, "weights": ONES * math.nan},
        "weights are not all finite",
    ),
    "infinite": (
        "dro",
        {"target_tokens": IDS, "logprobs": -ONES / 0, "advantages": ONES},
        "logprobs are not all finite",
    ),
    "floats": ("cross_entropy", {"target_tokens": ONES, "weights": ONES}, "target_tokens are float32"),
    "thresholds": (
        "ppo",
        {"target_tokens": IDS, "logprobs": ONES, "advantages": ONES, "clip_low_threshold": 5 * ONES},
        "clip_low_threshold is above",
    ),
    "no sampled token": (
        "gspo",
        {"target_tokens": IDS, "logprobs": ONES, "advantages": ONES, "sequence_ratio_mask": ONES * 0},
        "marks no token",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_with_a_sentence(case):
    name, inputs, message = BAD[case]
    with pytest.raises(QeRLError, match=message):
        find_loss(name).check(name, Datum(IDS, inputs), {})


def test_a_datum_without_tokens_is_refused():
    with pytest.raises(QeRLError, match="at least one"):
        find_loss("cross_entropy").check("cross_entropy", Datum(IDS[:0], {}), {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("cross_entropy", {"beta": 1.0}, "no option 'beta'; it has none"),
        ("ppo", {"epsilon": 0.2}, "it has clip_low_threshold, clip_high_threshold"),
        ("dro", {"beta": math.nan}, "set a finite number"),
        ("dro", {"beta": "0.1"}, "set a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "above clip_high_threshold 1.2"),
    ],
)
def test_bad_options_are_refused_with_a_sentence(name, config, message):
    with pytest.raises(QeRLError, match=message):
        find_loss(name).check_config(name, config)


def test_an_unknown_loss_is_refused():
    with pytest.raises(QeRLError, match="no loss 'stable_reinforce'; take one of cross_entropy, "):
        find_loss("stable_reinforce")
