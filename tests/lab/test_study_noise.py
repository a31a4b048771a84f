"""What a batched run explores with, by step, sample, share and place, and how its loss corrects for that."""

import math
from itertools import pairwise

import pytest
import torch

from lab.study.arms import Run
from lab.study.batched import trainer as module
from lab.study.batched.temperature import GAIN, SMOOTHING, FollowingTemperature
from lab.study.followed import Followed
from qerl.errors import QeRLError
from qerl.noise.draw import unit_noise
from qerl.noise.norms import find_noise_norms, noisy_norms
from tests.support.batched import RATE, a_batch, an_arm, tiny_base, with_adapter

NOISY = 2
"""First step of `an_arm` with noise."""

OUTCOME_OF = module.Outcome.of


def noisy_step(monkeypatch, **changes):
    """A batch of two runs with one arm in its first noisy step: samples, outcome, exploration, records."""
    arm = an_arm(**changes)
    batch = a_batch(Run(arm, 7, RATE), Run(arm, 8, RATE))
    with torch.no_grad():  # as if trained: adapters that do something
        batch._trained.values_SE.add_(0.05 * torch.randn(batch._trained.values_SE.shape, generator=seeded()))
    batch.done = NOISY
    seen = {}
    generate, explore = batch._sampler.generate, batch._explorers.at

    def kept(name, function):
        def call(*args, **kwargs):
            seen[name] = function(*args, **kwargs)
            return seen[name]

        return call

    batch._sampler.generate = kept("samples", generate)
    batch._explorers.at = kept("exploration", explore)
    monkeypatch.setattr(module.Outcome, "of", kept("outcome", OUTCOME_OF))
    seen["before"] = batch._trained.values_SE.clone()
    seen["records"] = batch.step()
    return batch, seen


def seeded():
    return torch.Generator().manual_seed(3)


def policy_of(batch, values_SE, run):
    """transformers' model with the adapter of a run, as PEFT computes it."""
    batch._trained.values_SE.copy_(values_SE)
    base = tiny_base()
    for layer in base.model.layers:
        for place in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                      "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):  # fmt: skip
            parent, _, name = place.rpartition(".")
            packed = layer.get_submodule(place)
            dense = torch.nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None)
            dense.weight.data = packed.dense()
            if packed.bias is not None:
                dense.bias = packed.bias
            setattr(layer.get_submodule(parent), name, dense)
    return with_adapter(base, batch._trained, run)


@torch.no_grad()
def log_probabilities(model, prompt, completion, on_prompt, on_completion):
    """Of a completion's tokens, with offsets of the norms for the prompt and for the rest."""
    with noisy_norms(model, on_prompt):
        first = model(input_ids=torch.tensor([prompt]), use_cache=True)
    logits = [first.logits[0, -1:]]
    if len(completion) > 1:
        with noisy_norms(model, on_completion):
            ids = torch.tensor([completion[:-1]])
            logits.append(model(input_ids=ids, past_key_values=first.past_key_values).logits[0])
    logps = torch.cat(logits).log_softmax(-1)
    return logps.gather(-1, torch.tensor(completion)[:, None])[:, 0]


def offsets(batch, norms, run, variant):
    z_ND = norms.weights_NSVD[:, run, variant] - batch.model.norm_weights_ND
    return {name: z for name, z in zip(batch.model.norm_names, z_ND, strict=True) if bool((z != 0).any())}


@pytest.mark.parametrize(
    "changes",
    [
        {"noise_per": "sample"},
        {"noise_where": "decode"},
        {"noise_share": 0.5},
        {"noise_per": "sample", "noise_share": 0.25, "noise_where": "decode", "noise_scale": "relative"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_samples_are_drawn_with_their_own_noise(monkeypatch, changes):
    batch, seen = noisy_step(monkeypatch, **changes)
    samples, norms = seen["samples"], seen["exploration"].norms
    group, share = 4, changes.get("noise_share", 1.0)
    variants = set()
    for run in (0, 1):
        model = policy_of(batch, seen["before"], run)
        for row, completion in enumerate(samples.completions()[run]):
            noisy = row % group < share * group
            own = offsets(batch, norms, run, norms.of_own_R[row])
            assert bool(own) == noisy
            variants.add(norms.of_own_R[row])
            on_prompt = {} if changes.get("noise_where") == "decode" else own
            expected = log_probabilities(
                model, samples.prompts[run][row // group], completion, on_prompt, own
            )
            found = samples.logprobs_SRC[run, row][samples.mask_SRC[run, row]]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    by_sample = changes.get("noise_per") == "sample"
    assert len(variants) == (share * 8 if by_sample else 1) + (share < 1)
    assert not torch.equal(norms.weights_NSVD[:, 0, -1], norms.weights_NSVD[:, 1, -1])


def test_noise_by_step_is_the_trainers(monkeypatch):
    for scale in ("absolute", "relative"):
        batch, seen = noisy_step(monkeypatch, noise_scale=scale)
        model, norms = batch.model, seen["exploration"].norms
        assert model.norm_names == find_noise_norms(tiny_base())
        for index, clean_D in enumerate(model.norm_weights_ND):
            size = clean_D.abs() if scale == "relative" else 1.0
            expected = clean_D + unit_noise(64, 8, NOISY, index) * size * 0.05
            torch.testing.assert_close(norms.weights_NSVD[index, 1, 0], expected, rtol=0, atol=1e-7)


def test_noise_in_the_loss_makes_the_ratio_one(monkeypatch):
    for place in ("all", "decode"):
        _, seen = noisy_step(monkeypatch, noise_in_loss=True, noise_where=place)
        for record in seen["records"]:
            assert record["sampling/kl"] > 1e-2  # of the clean policy
            assert record["sampling/ratio/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
        _, clean = noisy_step(monkeypatch, noise_where=place)
        assert clean["records"][0]["sampling/kl"] == pytest.approx(
            seen["records"][0]["sampling/kl"], rel=1e-3
        )
        assert clean["records"][0]["grad_norm"] != pytest.approx(seen["records"][0]["grad_norm"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("correction", ["none", "token_truncate", "token_one_sided", "token_balance"])
def test_weights_of_the_loss(monkeypatch, correction):
    share = 0.5 if correction == "token_balance" else 1.0
    batch, seen = noisy_step(monkeypatch, correction=correction, correction_max=1.2, noise_share=share)
    outcome, samples, norms = seen["outcome"], seen["samples"], seen["exploration"].all_noisy
    checked = 0
    for run in (0, 1):
        model = policy_of(batch, seen["before"], run)
        for row, completion in enumerate(samples.completions()[run]):
            prompt = samples.prompts[run][row // 4]
            z = offsets(batch, norms, run, -1)  # a clean sample is judged by the noisy policy too
            pi, mu = (log_probabilities(model, prompt, completion, each, each).exp() for each in ({}, z))
            expected = {
                "none": torch.ones_like(pi),
                "token_truncate": (pi / mu).clamp(max=1.2),
                "token_balance": pi / (0.5 * mu + 0.5 * pi),
                "token_one_sided": (pi / mu).clamp(1.0, 1.2)
                if outcome.advantages_SR[run, row] > 0
                else (pi / mu).clamp(max=1.0),
            }[correction]
            found = outcome.weights_SRC[run, row][outcome.mask_SRC[run, row]]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
            checked += int((expected - 1).abs().max() > 0.05)
    assert checked > 4 or correction == "none"
    beyond = [record["sampling/ratio/truncated"] for record in seen["records"]]
    if correction in ("none", "token_balance"):  # which have no bound
        assert beyond == [0.0, 0.0]
    else:
        assert all(0 < share < 1 for share in beyond)


def test_logits_noise_and_its_target():
    drawn = []
    arm = an_arm(noise=False, logits_noise=0.3, noise_target_kl=0.02)
    batch = a_batch(Run(arm, 7, RATE))
    for step in range(3):
        exploration = batch._explorers.at(step)
        drawn.append(exploration.logits_noise_SV)
        batch._explorers.observe(step, [0.08], [1.0])
    assert drawn[0] is None and drawn[1] is None
    assert drawn[2].std() == pytest.approx(0.3, rel=0.2)
    # KL is the fourfold of the target and goes with the square: half of the way to half of the noise.
    assert batch._explorers.at(3).sigma_S[0] == pytest.approx(0.3 * 0.5**0.5, rel=1e-6)
    assert batch.step()[0]["noise/sigma"] == 0.0


def followed(entropy, clean=2, name="other"):
    """A run with noise after so many steps."""
    return Followed(name, list(entropy), [0.0] * clean + [0.1] * (len(entropy) - clean))


def test_a_temperature_follows_the_entropy_of_noise():
    run = Run(an_arm(noise=False, match_entropy="other"), 7, RATE)
    own = a_batch(Run(an_arm(noise=False), 7, RATE))
    curve = [own.step()[0]["rollout/entropy"] for _ in range(4)]
    same = a_batch(run, followed=[followed(curve)])
    rows = [same.step()[0] for _ in range(4)]
    assert [row["temperature"] for row in rows] == [1.0] * 4
    assert [row["temperature/error"] for row in rows] == [0.0] * 4
    # Twice the entropy in all steps is another model's; only what noise adds to it is followed.
    other = a_batch(run, followed=[followed([2 * e for e in curve[:2]] + [2.2 * e for e in curve[2:]])])
    rows = [other.step()[0] for _ in range(4)]
    assert [row["temperature"] for row in rows[:3]] == [1.0] * 3
    assert [row["temperature/error"] for row in rows[:2]] == pytest.approx([0, 0], abs=1e-9)
    assert rows[2]["temperature/error"] == pytest.approx(math.log(1.1))
    assert rows[3]["temperature"] == pytest.approx(1.1 ** (GAIN * SMOOTHING))
    assert rows[3]["sampling/kl"] > 1e-6, "the policy itself stays at its own temperature"
    with pytest.raises(
        QeRLError, match="follows the entropy of other, whose run is missing or has fewer than 4 steps"
    ):
        a_batch(run, followed=[followed(curve[:2])])


def test_a_temperature_by_stage_is_the_samplers_alone():
    arm = an_arm(noise=False, temperature=1.5, temperature_stages=[1.0, 1.2])
    rows = [row for batch in [a_batch(Run(arm, 7, RATE))] for _ in range(4) for row in batch.step()]
    assert [row["temperature"] for row in rows] == pytest.approx([1.5, 1.5, 1.8, 1.8])
    assert rows[0]["sampling/kl"] < 1e-6 < rows[2]["sampling/kl"], "the policy stays at its own temperature"


def test_sigma_by_stage_is_the_noise_of_a_schedule_with_these_numbers():
    scheduled = a_batch(Run(an_arm(noise_stages=2, noise_sigma_start=0.05), 7, RATE))
    fixed = a_batch(Run(an_arm(noise_sigma_stages=[0.0, 0.05]), 7, RATE))
    both = [[row for _ in range(4) for row in batch.step()] for batch in (scheduled, fixed)]
    assert [row["noise/sigma"] for row in both[1]] == [0.0, 0.0, 0.05, 0.05]
    assert both[0] == both[1] and both[1][2]["sampling/kl"] > 1e-6


def test_a_temperature_is_one_wherever_the_followed_run_has_no_noise():
    temperature = FollowingTemperature(Followed("x", [1.0, 2.0, 2.0, 2.0], [0.0, 0.1, 0.0, 0.1]))
    factors = []
    for step in range(4):
        factors.append(temperature.factor(step))
        temperature.observe(step, 1.0)
    assert factors[:3] == [1.0, 1.0, 1.0] and factors[3] == pytest.approx(2 ** (GAIN * SMOOTHING))


@pytest.mark.parametrize("power", [1.5, 3.5])
def test_a_temperature_tracks_a_noisy_curve_without_swinging(power):
    """An entropy goes with a power of the temperature, and is measured with an error of a tenth."""
    draw = torch.Generator().manual_seed(0)
    steps, clean = 48, 8
    curve = [1.3 * 0.95**step * (1.0 if step < clean else 1.5) for step in range(steps)]
    temperature = FollowingTemperature(followed(curve, clean))
    factors, errors = [], []
    for step in range(steps):
        factors.append(temperature.factor(step))
        error = 0.1 * torch.randn((), generator=draw).item()
        errors.append(temperature.observe(step, 1.3 * 0.95**step * factors[-1] ** power * math.exp(error)))
    assert factors[:clean] == [1.0] * clean
    assert max(abs(math.log(b / a)) for a, b in pairwise(factors)) < 0.06
    late = factors[clean + 12 :]
    assert sum(late) / len(late) == pytest.approx(1.5 ** (1 / power), rel=0.05)
    assert max(late) / min(late) < 1.25
    assert abs(sum(errors[clean + 12 :])) / len(late) < 0.05


def test_a_step_without_entropy_teaches_a_temperature_nothing():
    temperature = FollowingTemperature(Followed("x", [1.0, None, 1.0, 1.0], [0.0, 0.1, 0.1, 0.1]))
    before = temperature.state()
    assert math.isnan(temperature.observe(1, 1.0))
    assert math.isnan(temperature.observe(2, 0.0)) and math.isnan(temperature.observe(2, math.nan))
    assert temperature.state() == before


def test_arms_that_need_other_passes_are_no_batch():
    runs = Run(an_arm(), 7, RATE), Run(an_arm(name="b", noise_per="sample"), 7, RATE)
    with pytest.raises(QeRLError, match="Arms arm and b differ"):
        a_batch(*runs)
    with pytest.raises(QeRLError, match="Arm arm has the correction token_balance"):
        a_batch(Run(an_arm(correction="token_balance"), 7, RATE))
