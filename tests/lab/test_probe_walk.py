"""Walks under a perturbation, their calibration, and the numbers that are kept of them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from lab.study.probe.calibrate import find_strengths
from lab.study.probe.measure import Judge, by_problem, on_prefixes, on_solutions
from lab.study.probe.perturb import CLEAN, NormNoise, Perturbation, normals
from lab.study.probe.walk import Rows, Walker
from qerl.errors import QeRLError
from qerl.eval.interval import pass_at
from qerl.noise.norms import find_noise_norms, noisy_norms
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from qerl.tasks import get_task

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
STOP, TOKENS = 1, 8
AQN = Perturbation("noise")
KINDS = {
    "absolute": AQN,
    "relative": Perturbation("noise", "relative"),
    "sample": Perturbation("noise", "relative", "sample"),
    "decode": Perturbation("noise", "relative", "sample", "decode"),
    "logits": Perturbation("logits_noise"),
    "temperature": Perturbation("temperature"),
}


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model()


@pytest.fixture
def walker(model):
    return Walker(model, PROMPTS, [STOP], 0, TOKENS, seed=3, batch_rows=24)


@pytest.mark.parametrize("stops", [(STOP,), tuple(range(60))], ids=["few end early", "most end early"])
@pytest.mark.parametrize("kind", [CLEAN, AQN], ids=["clean", "with twins"])
def test_a_clean_walk_is_what_the_engine_samples(model, stops, kind):
    """Also where rows leave the batch because they have ended."""
    walker = Walker(model, PROMPTS, stops, 0, TOKENS, seed=3, batch_rows=24)
    walk = walker.walk(Rows.of(range(3), 4), kind)
    params = SamplingParams(TOKENS, stop_token_ids=stops, seed=3)
    for row, completion in enumerate(PortableEngine(model, 0).generate(PROMPTS, 4, params).completions):
        valid = walk.valid[row]
        assert walk.tokens[row][valid].tolist() == completion.token_ids
        assert walk.mu[row][valid] == pytest.approx(completion.logprobs, abs=2e-5)
        assert walk.entropy[row][valid] == pytest.approx(completion.entropies, abs=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_strength_zero_is_the_clean_policy(walker, name):
    rows = Rows.of(range(3), 4)
    walk, clean = walker.walk(rows, KINDS[name]), walker.walk(rows)
    assert (walk.tokens == clean.tokens).all() and (walk.valid == clean.valid).all()
    assert np.abs(walk.kl).max() < 2e-6
    judged = by_problem(rows, walk, Judge(get_task("arithmetic"), Reader(), problems("1", "1", "1")))
    assert judged["ess"] == pytest.approx([1] * 3, abs=1e-5)
    assert judged["ratio"] == pytest.approx(judged["tokens"], abs=1e-3)


@pytest.mark.parametrize("name", KINDS)
def test_kl_and_probabilities_against_a_direct_computation(model, walker, name):
    """Each row by itself, without a cache: prompt and completion in one forward pass, with Z of its unit."""
    kind = KINDS[name]
    strength = {"logits": 0.5, "temperature": 0.7}.get(name, 0.2)
    rows = Rows.of(range(3), 3, [strength])
    walk = walker.walk(rows, kind)
    assert walk.kl[walk.valid].mean() > 1e-3
    for row in (0, 4, 8):
        problem, length = int(rows.problem[row]), int(walk.valid[row].sum())
        ids = torch.tensor([[*PROMPTS[problem], *walk.tokens[row][:length].tolist()]])
        start = len(PROMPTS[problem]) - 1
        with torch.no_grad():
            clean = model(ids).logits[0, start:-1].log_softmax(-1)
        noisy = _sampler_logits(model, walker, kind, strength, rows, row, ids, start).log_softmax(-1)
        kl = (noisy.exp() * (noisy - clean)).sum(-1)
        tokens = ids[0, start + 1 :, None]
        assert walk.kl[row][:length] == pytest.approx(kl.numpy(), abs=2e-5)
        assert walk.mu[row][:length] == pytest.approx(noisy.gather(1, tokens)[:, 0].numpy(), abs=5e-5)
        assert walk.pi[row][:length] == pytest.approx(clean.gather(1, tokens)[:, 0].numpy(), abs=5e-5)


@torch.no_grad()
def _sampler_logits(model, walker, kind, strength, rows, row, ids, start):
    problem, sample = int(rows.problem[row]), int(rows.sample[row])
    unit = [kind.unit(problem, sample)]
    if kind.kind == "temperature":
        return model(ids).logits[0, start:-1] / (1 + strength)
    if kind.kind == "logits_noise":
        return model(ids).logits[0, start:-1] + strength * normals(3, "logits", unit, 128, model.device)[0]
    norms = NormNoise(model)
    eps = normals(3, "norms", unit, norms.width, model.device)
    one = torch.zeros(1, dtype=torch.long), torch.tensor([strength])
    offsets = norms.offsets(eps, *one, kind.noise_scale)
    assert list(offsets) == find_noise_norms(model)
    if kind.noise_where == "decode":
        cached = model(ids[:, : start + 1], use_cache=True)
        with noisy_norms(model, offsets):
            rest = model(ids[:, start + 1 : -1], past_key_values=cached.past_key_values).logits[0]
        return torch.cat([cached.logits[0, -1:], rest])
    with noisy_norms(model, offsets):
        return model(ids).logits[0, start:-1]


def test_relative_noise_has_the_size_of_the_weight(model):
    norms = NormNoise(model)
    eps = normals(0, "norms", [(0, -1), (1, -1)], norms.width, model.device)
    rows = torch.tensor([1, 0, 1]), torch.tensor([0.5, 0.25, 0.0])
    absolute, relative = (norms.offsets(eps, *rows, scale) for scale in ("absolute", "relative"))
    at = 0
    for name, z in absolute.items():
        weight = model.get_submodule(name).weight
        mine = eps[:, at : at + len(weight)]
        at += len(weight)
        assert torch.equal(z[:, 0], torch.stack([0.5 * mine[1], 0.25 * mine[0], 0 * mine[1]])), name
        assert torch.equal(relative[name], z * weight.abs()), name
    assert at == norms.width and len(absolute) == 4


def test_a_draw_belongs_to_a_problem_or_to_a_sample(walker):
    """Along the same tokens the samples of a problem have one policy, or one each."""
    forced = np.tile(np.arange(20, 20 + TOKENS), (6, 1))
    rows = Rows.of([0, 0], 3, [0.2])
    shared, own = (walker.walk(rows, KINDS[name], forced) for name in ("relative", "sample"))
    assert np.ptp(shared.mu, axis=0).max() < 1e-5
    assert np.ptp(own.mu[:3], axis=0).min() > 1e-3
    assert own.mu[:3] == pytest.approx(own.mu[3:], abs=1e-5), "the draw goes by problem and sample alone"
    logits = walker.walk(rows, KINDS["logits"], forced)
    assert np.ptp(logits.mu, axis=0).max() < 1e-5 < np.abs(logits.mu - logits.pi).max()


def test_what_a_row_writes_does_not_depend_on_its_batch(model):
    rows = Rows.of(range(3), 4, [0.1])
    together = Walker(model, PROMPTS, [STOP], 0, TOKENS, seed=3).walk(rows, KINDS["sample"])
    apart = Walker(model, PROMPTS, [STOP], 0, TOKENS, seed=3, batch_rows=6).walk(rows, KINDS["sample"])
    assert (together.tokens * together.valid == apart.tokens * apart.valid).all()


def test_the_model_is_left_as_it_was(model, walker):
    before = {name: (id(parameter), parameter.clone()) for name, parameter in model.named_parameters()}
    walker.walk(Rows.of([0], 2, [0.3]), AQN)
    assert all(before[name][0] == id(parameter) for name, parameter in model.named_parameters())
    assert all(torch.equal(before[name][1], parameter) for name, parameter in model.named_parameters())
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["absolute", "temperature", "logits"])
def test_calibration_hits_its_targets(walker, name):
    kind = KINDS[name]

    def measure(strengths):
        rows = Rows.of(range(3), 8, strengths)
        walk = walker.walk(rows, kind)
        return [
            float(walk.kl[at][walk.valid[at]].mean())
            for at in (rows.strength == np.float32(s) for s in strengths)
        ]

    found = find_strengths(measure, [0.02, 0.1], *kind.range)
    assert found.measured == pytest.approx([0.02, 0.1], rel=0.031)
    assert found.strengths[0] < found.strengths[1]
    assert measure(found.strengths) == pytest.approx(found.measured)
    assert set(zip(found.strengths, found.measured, strict=True)) <= set(found.curve)


def test_calibration_of_a_power_law_and_of_one_out_of_reach():
    asked = []

    def measure(strengths):
        asked.extend(strengths)
        return [3 * s**2 for s in strengths]

    (strength,) = find_strengths(measure, [0.05], 1e-4, 2.0).strengths
    assert strength == pytest.approx(math.sqrt(0.05 / 3), rel=0.016) and len(asked) <= 9
    with pytest.raises(QeRLError, match=r"No strength between 0\.0001 and 2 gives 50"):
        find_strengths(measure, [50.0], 1e-4, 2.0)


class Reader:
    """A tokenizer whose tokens are their own numbers."""

    def batch_decode(self, completions, skip_special_tokens=True):
        return ["#### " + " ".join(str(token) for token in ids if token != STOP) for ids in completions]


def problems(*answers):
    return [{"prompt": [], "answer": answer} for answer in answers]


def walk_of(tokens, mu, pi):
    """A walk [R, T] that wrote these tokens with these probabilities; -1 stands for nothing."""
    tokens = np.array(tokens)
    valid = tokens >= 0
    mu, pi = (np.log(np.array(p, dtype=np.float32)) * np.ones(tokens.shape, np.float32) for p in (mu, pi))
    from lab.study.probe.walk import Walk

    return Walk(np.maximum(tokens, 0), valid, mu, pi, mu - pi, -mu, -pi)


def test_numbers_of_a_cell_by_hand():
    rows = Rows.of(range(2), 2)
    walk = walk_of([[7, STOP], [8, -1], [7, -1], [9, -1]], 0.5, [[0.25] * 2, [0.5] * 2, [0.5] * 2, [1.0] * 2])
    numbers = by_problem(rows, walk, Judge(get_task("arithmetic"), Reader(), problems("7", "5")))
    assert numbers["right"] == [1, 0] and numbers["answers"] == [2, 2] and numbers["tokens"] == [3, 2]
    assert numbers["kl"] == pytest.approx([2 * math.log(2), -math.log(2)], rel=1e-4)
    assert numbers["ratio"] == pytest.approx([2.0, 3.0]) and numbers["ratio_squared"] == pytest.approx(
        [1.5, 5.0]
    )
    # Weights of whole completions: 1/4 and 1; 1 and 2.
    assert numbers["ess"] == pytest.approx([1.25**2 / (2 * (1 / 16 + 1)), 9 / (2 * 5)], rel=1e-4)


def test_pass_at_k_by_hand():
    assert pass_at(4, 1, 2) == pytest.approx(1 - 3 / 6) and pass_at(64, 0, 8) == 0 and pass_at(8, 8, 1) == 1


def test_the_shift_of_decisive_tokens_by_hand(walker):
    rows = Rows.of([0], 2)
    walk = walk_of([[7, 8], [7, 8]], [[0.3, 0.99], [0.1, 0.99]], [[0.2, 0.95], [0.2, 0.95]])
    numbers = on_solutions(rows, walk)
    odds = [math.log(0.3 / 0.7) - math.log(0.25), math.log(0.1 / 0.9) - math.log(0.25)]
    assert numbers["problem"] == [0] and numbers["p"] == pytest.approx([0.2], rel=1e-4)
    assert numbers["shift"] == pytest.approx([np.mean(odds)], rel=1e-3)
    assert numbers["spread"] == pytest.approx([np.std(odds, ddof=1)], rel=1e-3)
    assert numbers["lift"] == pytest.approx([math.log(0.2 / 0.2)], abs=1e-5)


def test_entropy_along_given_prefixes(model, walker):
    rows = Rows.of(range(3), 4)
    writer = walker.walk(rows)
    again = walker.walk(rows, forced=writer.tokens)
    numbers = on_prefixes(rows, again, writer)
    assert sum(numbers["entropy"]) == pytest.approx(writer.entropy[writer.valid].sum(), rel=1e-5)
    assert numbers["kl"] == pytest.approx([0] * 3, abs=1e-5)
    hot = walker.walk(replace(rows, strength=rows.strength + 0.5), KINDS["temperature"], writer.tokens)
    warmer = on_prefixes(rows, hot, writer)
    assert sum(warmer["entropy"]) > sum(numbers["entropy"]) and min(warmer["kl"]) > 0
    assert warmer["tokens"] == numbers["tokens"]


def test_clean_is_no_perturbation():
    assert not CLEAN.on_norms and CLEAN.unit(3, 4) == (3, -1) and KINDS["sample"].unit(3, 4) == (3, 4)
