"""An optimizer step's gradients, loss and metrics are those of plain passes of its samples, however it is cut
into chunks.

The reference runs the model on each sample alone, without masks, positions or rows that samples share, and
gives each microbatch's loss all of its log-probabilities at once.

Legend: B samples of a microbatch, C completion columns.
"""

import contextlib
import math
import random
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from accelerate import Accelerator

from qerl.families.parts import base_model
from qerl.lora.adapter import add_lora
from qerl.settings.config import QeRLConfig
from qerl.trainer import update_step
from qerl.trainer.ready import ready_for_rows
from qerl.trainer.update_step import Microbatch, UpdateStep, policy_loss
from qerl.update.packed_row import Lengths
from qerl.update.policy_loss import Correction, Share, Tokens, gathered, high_entropy
from tests.support.models import move_adapter
from tests.support.samples import samples_of
from tests.support.trainer import settings

GROUP, VOCABULARY = 4, 128
ENTROPY = 4.0


class Graph:
    """Lives as long as the graph of a pass."""


class Watched(torch.autograd.Function):
    """Changes nothing, and lets the graph that it is part of hold something."""

    @staticmethod
    def forward(ctx, values, graph):
        ctx.graph = graph
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Step:
    """An update of a tiny model, and what passes it makes.

    Attributes:
        passes: Tokens of each forward pass.
        most_alive: How many passes' graphs there were at a time.
    """

    def __init__(self, model, folder, **changes):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = move_adapter(add_lora(model, rank=4, alpha=8, dropout=0.0)).train()
        self.args = QeRLConfig(**settings(folder, **changes))
        path, accelerator = ready_for_rows(self.model, self.args), Accelerator(cpu=True)
        base = base_model(self.model)
        self.updates = UpdateStep(self.args, base, path, accelerator, lambda: False)
        self.passes, self.alive, self.most_alive = [], 0, 0
        base.get_input_embeddings().register_forward_hook(self.watch)

    def watch(self, module, inputs, output):
        self.passes.append(inputs[0].numel())
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        graph = Graph()
        weakref.finalize(graph, self.gone)
        return Watched.apply(output.detach().requires_grad_(), graph)

    def gone(self):
        self.alive -= 1

    def run(self, samples, microbatches):
        """Loss, gradients and metrics of the samples as so many microbatches."""
        self.model.zero_grad()
        self.passes.clear()
        self.most_alive = 0
        loss = self.updates.run(self.model, parts(samples, microbatches), 1)
        return loss.item(), gradients(self.model), self.updates.metrics()


@pytest.fixture
def step(tiny_model, tmp_path):
    """``step(**changes)``: a `Step` with these settings, always of the same weights."""
    return lambda **changes: Step(tiny_model("llama", vocab_size=VOCABULARY), tmp_path, **changes)


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def parts(samples, microbatches):
    size = len(samples) // microbatches
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    return [Microbatch(samples[at : at + size], tokens, ENTROPY) for at in range(0, len(samples), size)]


def drawn(others=False, seed=0):
    """Four groups, one without any advantage; a sample that is masked, one that others wrote in, one whose
    sampler is not known."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, VOCABULARY) for _ in range(draw.randint(1, 9))] for _ in range(4)]
    completions = [
        [draw.randrange(5, VOCABULARY) for _ in range(draw.randint(2, 9))] for _ in range(4 * GROUP)
    ]
    samples = samples_of([prompt for prompt in prompts for _ in range(GROUP)], completions)
    near = lambda sample: [-4.85 + 0.4 * draw.gauss(0, 1) for _ in sample.tokens]  # noqa: E731
    for place, sample in enumerate(samples):
        sample.logprobs, sample.entropies = near(sample), [4.5] * len(sample.tokens)
        sample.advantage = 0.0 if place // GROUP == 1 else draw.gauss(0, 1)
        if others:
            sample.old_logprobs, sample.reference_logprobs = near(sample), near(sample)
    samples[2].masked = True
    samples[9].written = [at % 2 for at in range(len(samples[9].tokens))]
    samples[13].logprobs = [math.nan] * len(samples[13].tokens)
    for at, sample in enumerate(samples):
        group = samples[at - at % GROUP :][:GROUP]
        sample.group_tokens = sum(sum(each.loss_mask) for each in group) / GROUP
    return samples


def of_samples(values, like):
    """Values of samples as rows [B, C], padded with 0."""
    width = max(len(sample.tokens) for sample in like)
    return torch.tensor([[*map(float, row), *[0.0] * (width - len(row))] for row in values])


def plainly(model, microbatch, args, count, chosen_BC=None):
    """Loss and metrics of a microbatch, by a pass for each of its samples."""
    samples, logps, entropies = microbatch.samples, [], []
    width = max(len(sample.tokens) for sample in samples)
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample.prompt + sample.tokens])).logits[0]
        all_logps = (logits[len(sample.prompt) - 1 : -1] / args.temperature).log_softmax(-1)
        own = all_logps.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        gap = (0, width - len(sample.tokens))
        logps.append(torch.nn.functional.pad(own, gap))
        entropies.append(torch.nn.functional.pad(-(all_logps.exp() * all_logps).sum(-1), gap))
    logps_BC, entropy_BC = torch.stack(logps), torch.stack(entropies)
    mask_BC = of_samples([sample.loss_mask for sample in samples], samples)
    has_old, has_reference = samples[0].old_logprobs is not None, samples[0].reference_logprobs is not None
    old_BC = of_samples([s.old_logprobs for s in samples], samples) if has_old else None
    sampler_BC = of_samples([sample.logprobs for sample in samples], samples)
    mode = "vllm_importance_sampling_"
    names = ("correction", "mode", "clip_min", "clip_max")
    correction = Correction(
        *(getattr(args, mode + name) for name in names),
        *(args.use_rollout_logprobs, args.rollout_rs, args.rollout_rs_threshold),
    )
    trainer_BC = logps_BC.detach() if old_BC is None else old_BC
    ratio = correction.ratio(trainer_BC, sampler_BC, mask_BC)
    if args.use_rollout_logprobs:
        old_BC = torch.where(sampler_BC.isnan(), trainer_BC, sampler_BC)
    threshold = entropy_BC.detach()[mask_BC.bool()].quantile(1 - args.top_entropy_quantile)
    tokens = Tokens(
        mask_BC=mask_BC, advantages_B=torch.tensor([sample.advantage for sample in samples]),
        logps_BC=logps_BC, entropy_BC=entropy_BC, old_BC=old_BC, sampler_BC=sampler_BC,
        reference_BC=of_samples([s.reference_logprobs for s in samples], samples) if has_reference else None,
        correction=correction.weight(ratio),
        high_entropy_BC=high_entropy(entropy_BC.detach(), mask_BC, threshold),
        kept_B1=correction.kept(trainer_BC, sampler_BC, mask_BC), chosen_BC=chosen_BC,
        group_tokens_B=torch.tensor([sample.group_tokens for sample in samples]),
    )  # fmt: skip
    seen = microbatch.rollout_tokens * count / args.steps_per_generation
    share = Share(count, seen, microbatch.counted)
    return policy_loss(args)(tokens, share, args.entropy_coef)


def compare(found, wanted):
    (loss, gradient, metrics), (other_loss, other, numbers) = found, wanted
    assert loss == pytest.approx(other_loss, rel=1e-4, abs=1e-6)
    assert gradient.keys() == other.keys() and gradient
    for name, values in other.items():
        error = (gradient[name] - values).norm() / values.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"
    for name in numbers:
        assert metrics[name] == pytest.approx(numbers[name], rel=1e-4, abs=1e-6, nan_ok=True), name


def _width(microbatch):
    return max(len(sample.tokens) for sample in microbatch.samples)


OPTIONS = {
    "dapo": {"loss_type": "dapo"},
    "grpo": {"loss_type": "grpo", "vllm_importance_sampling_mode": "sequence_mask"},
    "gspo": {"loss_type": "bnpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 2.0},
    "vespo": {"loss_type": "vespo"},
    "others": {"beta": 0.1, "loss_type": "dr_grpo", "off_policy_mask_threshold": 0.1},
    "bonus": {"entropy_coef": 0.1},
    "quantile": {"top_entropy_quantile": 0.4},
    "temperature": {"temperature": 0.7},
    "dppo": {"algorithm": "dppo", "epsilon": 0.002, "kl_tau": 0.1},
    "dppo_kl": {
        "loss_type": "dppo_kl", "epsilon": 0.01, "epsilon_high": 0.02, "loss_agg_mode": "prompt-mean",
        "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.06,
    },
    "rejected, ratio to the sampler": {
        "loss_type": "grpo", "use_rollout_logprobs": True, "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": 1.1,
    },
    "clip_cov": {"loss_type": "clip_cov", "clip_cov_ratio": 0.2, "clip_cov_lb": 0.05, "epsilon": 1.0},
    "kl_cov": {"loss_type": "kl_cov", "kl_cov_ratio": 0.2, "use_rollout_logprobs": True},
}  # fmt: skip


# All samples, half of a group each, and once a whole group.
@pytest.mark.parametrize(("name", "microbatches"), [*product(OPTIONS, (1, 8)), ("dapo", 4)])
def test_a_step_is_that_of_plain_passes_however_it_is_cut(step, name, microbatches):
    options = OPTIONS[name] | {"gradient_accumulation_steps": microbatches}
    options |= {"per_device_train_batch_size": 4 * GROUP // microbatches}
    samples = drawn(others=name == "others")
    reference = step(**options)
    updates, seen = reference.updates, sum(sum(sample.loss_mask) for sample in samples)
    chosen = updates._chosen(update_step.Inputs.of(samples, torch.device("cpu")), seen, 1)
    assert (chosen is not None) == name.endswith("_cov")
    losses = [
        plainly(
            *(reference.model, part, reference.args, microbatches),
            None if chosen is None else chosen[(size := len(part.samples)) * at :][:size, : _width(part)],
        )
        for at, part in enumerate(parts(samples, microbatches))
    ]
    total = torch.stack([loss for loss, _ in losses]).sum()
    total.backward()
    numbers = gathered([metrics for _, metrics in losses], lambda own: own)
    wanted = total.item(), gradients(reference.model), {
        name: values for name, values in numbers.items() if not name.startswith("entropy_bonus/")
    }  # fmt: skip
    rows = reference.updates.rows(samples)
    lengths = Lengths.of(samples)
    for limit in (None, 40, 1, 10**6):
        cut = step(tokens_per_forward=limit, **options)
        found = cut.run(samples, microbatches)
        compare(found, wanted)
        forward = cut.passes[: len(cut.passes) // 2] if name == "quantile" else cut.passes
        assert cut.most_alive == 1, "one chunk is in memory at a time"
        if limit == 10**6:
            assert forward == [lengths.tokens(rows)], "one pass for all microbatches, each prompt once"
        elif limit is None:
            size = len(samples) // microbatches
            assert len(forward) == len({row // size for row in rows})
        else:
            longest = max(lengths.tokens([row]) for row in rows)
            assert max(forward) <= max(limit, longest)
            assert len(forward) == len(rows) if limit == 1 else len(forward) < len(rows)


@pytest.mark.parametrize("limit", [None, 30])
def test_what_is_measured_of_the_sampler_is_that_of_all_chunks(step, limit):
    """Chunks and microbatches change no logged number; tokens that are not computed are not counted."""
    samples = drawn()
    whole, cut = step(), step(tokens_per_forward=limit, gradient_accumulation_steps=4)
    (_, _, wanted), (_, _, found) = whole.run(samples, 1), cut.run(samples, 4)
    names = [name for name in wanted if name.startswith(("sampling/", "entropy"))]
    assert len(names) == 13
    for name in names:
        assert found[name] == pytest.approx(wanted[name], rel=1e-4), name
    kept = [samples[row] for row in whole.updates.rows(samples)]
    known = [sample for sample in kept if not math.isnan(sample.logprobs[0])]
    assert 0 < len(known) < len(kept) < len(samples)
    with torch.no_grad():
        logps = whole.updates.logprobs(whole.model, samples)
    gaps = [
        abs(a - b)
        for sample, row in zip(samples, logps, strict=True)
        if sample in known
        for a, b, seen in zip(row, sample.logprobs, sample.loss_mask, strict=True)
        if seen
    ]
    (mean,) = found["sampling/sampling_logp_difference/mean"]
    assert mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-4)


def test_metrics_are_those_of_the_newest_step_and_are_given_once(step):
    made = step()
    assert made.updates.metrics() == {}
    _, _, first = made.run(drawn(), 1)
    assert first and made.updates.metrics() == {}
    made.updates.run(made.model, parts(drawn(seed=1), 1), 2)
    made.updates.run(made.model, parts(drawn(), 1), 3)
    again = made.updates.metrics()
    assert again.keys() == first.keys()
    assert all(again[name] == pytest.approx(first[name]) for name in first)


@pytest.mark.parametrize("limit", [None, 40])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_step_without_any_gradient(step, limit, microbatches):
    """Nothing is computed, the optimizer sees zeros, and the log has no number of what was not computed."""
    made = step(tokens_per_forward=limit)
    samples = [replace(sample, advantage=0.0) for sample in drawn()]
    loss, found, metrics = made.run(samples, microbatches)
    assert loss == 0.0 and made.passes == []
    trained = {name for name, p in made.model.named_parameters() if p.requires_grad}
    assert found.keys() == trained and not any(gradient.any() for gradient in found.values())
    assert metrics["clip_ratio/region_mean"] == [0.0] * microbatches
    assert math.isnan(metrics["sampling/kl"][0])


@pytest.mark.parametrize("limit", [None, 30])
def test_microbatches_of_which_nothing_is_computed_are_reported_too(step, limit):
    made = step(tokens_per_forward=limit, loss_type="grpo")
    _, _, metrics = made.run(drawn(), 4)
    assert len(metrics["clip_ratio/low_mean"]) == 4, "the second of the groups has no advantage"


def test_gradients_are_added_to_those_that_are_there(step):
    made = step()
    _, once, _ = made.run(drawn(), 1)
    made.updates.run(made.model, parts(drawn(), 1), 1)
    for name, gradient in gradients(made.model).items():
        torch.testing.assert_close(gradient, 2 * once[name])


def test_several_processes_compute_a_sample_even_without_gradient(step, monkeypatch):
    """Each must run a backward pass for gradients to be averaged; that of this sample is zero."""
    made = step()
    samples = [replace(sample, advantage=0.0) for sample in drawn()]
    assert made.updates.rows(samples) == []
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    (row,) = made.updates.rows(samples)
    assert sum(samples[row].loss_mask) == max(sum(sample.loss_mask) for sample in samples)
    _, found, _ = made.run(samples, 4)
    assert made.passes == [Lengths.of(samples).tokens([row])]
    assert found and not any(gradient.any() for gradient in found.values())
    unseen = [replace(sample, masked=True) for sample in drawn()]
    assert len(made.updates.rows(unseen)) == 1
    _, found, _ = made.run(unseen, 1)
    assert found and not any(gradient.any() for gradient in found.values())


def test_all_chunks_of_a_step_but_the_last_stay_with_their_process(step, monkeypatch):
    """Gradients are averaged over processes once a step, whatever microbatches its chunks are of."""
    made, apart = step(tokens_per_forward=30), []
    backward = made.updates._accelerator.backward

    @contextlib.contextmanager
    def no_sync(model):
        apart.append("apart")
        yield
        apart.append("end")

    monkeypatch.setattr(made.updates._accelerator, "no_sync", no_sync)
    monkeypatch.setattr(
        made.updates._accelerator, "backward", lambda loss: apart.append("backward") or backward(loss)
    )
    made.run(drawn(), 4)
    chunks = len(made.passes)
    assert chunks > 2
    assert apart == ["apart", "backward", "end"] * (chunks - 1) + ["backward"]


@pytest.mark.parametrize("limit", [None, 25])
def test_log_probabilities_of_samples_are_those_of_plain_passes(step, limit):
    made, samples = step(tokens_per_forward=limit, temperature=0.7), drawn()
    made.model.zero_grad()
    found = made.updates.logprobs(made.model, samples)
    assert not gradients(made.model)
    for sample, values in zip(samples, found, strict=True):
        with torch.no_grad():
            logits = made.model(input_ids=torch.tensor([sample.prompt + sample.tokens])).logits[0]
        logps = (logits[len(sample.prompt) - 1 : -1] / 0.7).log_softmax(-1)
        wanted = logps.gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]
        if sample.masked:
            wanted = torch.zeros_like(wanted)
        torch.testing.assert_close(torch.tensor(values), wanted, rtol=0, atol=2e-5)


def test_what_losses_read_is_padded_behind_completions(step):
    samples = drawn(others=True)
    inputs = update_step.Inputs.of(samples, torch.device("cpu"))
    assert torch.equal(inputs.mask_BC, of_samples([sample.loss_mask for sample in samples], samples))
    for name in ("old", "reference"):
        wanted = of_samples([getattr(sample, f"{name}_logprobs") for sample in samples], samples)
        assert torch.equal(getattr(inputs, f"{name}_BC"), wanted)
    part = inputs.part(slice(4, 8))
    assert torch.equal(part.sampler_BC, of_samples([s.logprobs for s in samples], samples)[4:8])
    assert update_step.Inputs.of(drawn(), torch.device("cpu")).old_BC is None


def test_a_sample_that_is_not_computed_has_a_ratio_of_1(step):
    """Its tokens may be so unlikely that their ratio to a log-probability of 0 is infinite."""
    samples = drawn()
    samples[13].logprobs = samples[12].logprobs[:1] * len(samples[13].tokens)
    for sample in samples:
        sample.old_logprobs = list(sample.logprobs)
        if sample.advantage == 0.0:
            sample.old_logprobs = [-200.0] * len(sample.tokens)
    assert any(sample.advantage == 0.0 for sample in samples)
    assert math.isfinite(step().run(samples, 1)[0])
