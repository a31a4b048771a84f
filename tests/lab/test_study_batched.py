"""A run of a batch is a run of the trainer, and the runs of a batch do not see each other."""

import os
import signal
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch

from lab.study.arms import Run
from lab.study.batched import model as model_of_batches
from lab.study.batched.adapters import Adapters
from lab.study.batched.draw import by_kernel, drawing
from lab.study.batched.evaluation import pass_at
from lab.study.batched.model import BatchedModel, dense_weight
from lab.study.batched.rewards import Judges, Problems
from lab.study.batched.sampler import Samples, clean_norms
from lab.study.batched.score import Texts, score
from lab.study.batched.trainer import BatchedTrainer
from lab.study.followed import Followed
from qerl.errors import QeRLError
from qerl.models.chat import Chat
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from tests.support.batched import (
    RATE,
    TOKENIZER,
    Sums,
    a_batch,
    an_arm,
    full_arm,
    matrices_of,
    the_trainer,
    tiny_base,
    with_adapter,
)
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.slow

BOUND = 1e-5
"""Relative difference of FP32 losses and gradients that are the same by other sums."""


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.detach() - expected.detach()).norm() / expected.detach().norm())


def watch(batch: BatchedTrainer) -> tuple[list, list]:
    """Lists that get the completions of each rollout, and the gradients of each step by PEFT's names."""
    completions, gradients = [], []
    generate, step = batch._sampler.generate, batch._optimizer.step

    def generated(*args, **kwargs):
        samples = generate(*args, **kwargs)
        completions.append(samples.completions())
        return samples

    def stepped(*args):
        gradients.append(batch._trained.gradients_SE.clone())
        return step(*args)

    batch._sampler.generate, batch._optimizer.step = generated, stepped
    return completions, gradients


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_one_run_is_a_run_of_the_trainer(family, tmp_path):
    batch, trainer = a_batch(family=family), the_trainer(tmp_path, 7, family)
    completions, gradients = watch(batch)
    theirs, their_gradients = [], []
    generate, norm = trainer.engine.generate, trainer._get_grad_norm

    def generated(*args):
        result = generate(*args)
        theirs.append([completion.token_ids for completion in result.completions])
        return result

    def normed(model, grad_norm=None):
        their_gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        return norm(model, grad_norm=grad_norm)

    trainer.engine.generate, trainer._get_grad_norm = generated, normed
    trainer.train()
    records = [batch.step()[0] for _ in range(4)]
    assert [own for (own,) in completions] == theirs
    logged = [row for row in trainer.state.log_history if "loss" in row]
    for name in ("loss", "reward", "rewards/accuracy/mean", "grad_norm", "rollout/entropy", "noise/sigma"):
        expected = [row[name] for row in logged]
        assert [row[name] for row in records] == pytest.approx(expected, rel=BOUND, abs=1e-6), name
    assert {row["noise/sigma"] for row in records} == {0.0, 0.05}
    # Adam turns a difference of 1e-7 into a larger one where a gradient is nearly zero: later steps drift.
    for own_SE, expected, record in zip(gradients[:1], their_gradients, records, strict=False):
        clipped_SE = own_SE * min(1.0, 1 / record["grad_norm"])  # as theirs are already
        found = matrices_of(batch._trained, clipped_SE)
        errors = [relative(found[n], expected[n]) for n in found if expected[n].norm() > 0]
        print(f"{family}: largest relative error of a gradient {max(errors):.1e}")
        assert max(errors) < BOUND


@pytest.mark.parametrize(
    ("family", "arm"),
    [
        ("llama", an_arm()),
        ("llama", an_arm(noise_share=0.5, noise_in_loss=True)),
        ("llama", full_arm()),
        ("qwen3", an_arm()),
    ],
)
def test_with_the_kernels_of_a_gpu_it_is_the_same(family, arm, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU does not interpret kernels")
    runs, seen = (Run(arm, 7, RATE), Run(arm, 8, RATE)), []
    for kernels in (False, True):
        monkeypatch.setattr(model_of_batches, "is_16bit_cuda", lambda x, kernels=kernels: kernels)
        batch = a_batch(*runs, family=family)
        batch._trained.values_SE.add_(0.02)
        completions, gradients = watch(batch)
        batch.done = 2  # the first step with noise
        batch.step()
        seen.append((completions, gradients[0]))
    assert seen[0][0] == seen[1][0]
    assert 0 < relative(seen[1][1], seen[0][1]) < BOUND


@pytest.mark.parametrize("greedy", [False, True])
def test_the_kernel_draws_what_torch_draws(greedy):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = (40, 5000, greedy)
    logits_BV = 4 * torch.randn(sizes[:2], generator=torch.Generator().manual_seed(0))
    logits_BV[7, 11] = torch.nan
    uniforms_B = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    temperature_B = torch.ones(40) if greedy else torch.linspace(0.3, 2.0, 40)
    arguments = logits_BV, uniforms_B, temperature_B
    expected = drawing(*sizes, torch.device("cpu"))(*arguments)
    draw = by_kernel(*sizes, device)
    for _ in range(2):  # a draw leaves nothing behind
        found = draw(*(x.to(device) for x in arguments))
        assert found.finite_B.tolist() == expected.finite_B.tolist() == [row != 7 for row in range(40)]
        for one, other in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(one.cpu()[expected.finite_B], other[expected.finite_B])


def test_a_uniform_just_below_one_draws_no_token_that_weighs_next_to_nothing():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logits_BV = torch.full((1, 9000), -34.0, device=device)
    logits_BV[0, 1] = 0.0  # all tokens behind it weigh 2e-11 together
    uniforms_B = torch.full((1,), 1 - 2.0**-26, dtype=torch.float64, device=device)  # in FP32 it is 1
    drawn = by_kernel(1, 9000, False, device)(logits_BV, uniforms_B, torch.ones(1, device=device))
    assert drawn.tokens_B.tolist() == [1]


LOSSES = {
    "token_truncate": {"loss_type": "dapo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "use_rollout_logprobs": True},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.02, "use_rollout_logprobs": True},
    "gspo": {
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "use_rollout_logprobs": True,
    },
    "dppo_tv": {"loss_type": "dppo_tv", "epsilon": 1e-3, "delta": 20.0, "use_rollout_logprobs": True},
    "dppo_kl": {"loss_type": "dppo_kl", "epsilon": 1e-4, "delta": 20.0, "use_rollout_logprobs": True},
}
"""Losses with bounds that the noise of a step crosses."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_trainers(name, tmp_path):
    fields = LOSSES[name]
    arm = an_arm(**fields, correction="none" if "use_rollout_logprobs" in fields else "token_truncate")
    batch, trainer = a_batch(Run(arm, 7, RATE)), the_trainer(tmp_path, 7, "llama", **fields)
    trainer.train()
    records = [batch.step()[0] for _ in range(4)]
    logged = [row for row in trainer.state.log_history if "loss" in row]
    # Rewards of the last step depend on all former gradients by what was sampled.
    for key, bound in (("loss", 1e-4), ("reward", 0), ("grad_norm", 1e-3)):
        expected = [row[key] for row in logged]
        assert [row[key] for row in records] == pytest.approx(expected, rel=bound, abs=1e-6), key
    key = "cispo_clip_ratio" if name == "cispo" else "clip_ratio/region_mean"
    assert [row["clip_ratio"] for row in records] == pytest.approx([row[key] for row in logged], abs=1e-6)
    assert name in ("token_truncate", "dapo") or records[3]["clip_ratio"] > 0  # noise moved it beyond a bound


@pytest.mark.parametrize("staleness", [1, 2])
def test_a_stale_sampler_has_the_adapter_of_former_steps(staleness, tmp_path):
    runs = [Run(an_arm(staleness=staleness), seed, RATE) for seed in (7, 8)]
    batch, trained, sampled = a_batch(*runs), [], []
    generate = batch._sampler.generate

    def generated(*args, **kwargs):
        sampled.append(batch._trained.values_SE.clone())
        return generate(*args, **kwargs)

    batch._sampler.generate = generated
    records = []
    for _ in range(4):
        trained.append(batch._trained.values_SE.clone())
        records.append(batch.step())
    assert not torch.equal(trained[1], trained[0])
    for step, values_SE in enumerate(sampled):
        assert torch.equal(values_SE, trained[max(0, step - staleness)])
    assert records[0][0]["sampling/kl"] < 1e-6 < records[1][0]["sampling/kl"]
    stopped, resumed = a_batch(*runs), a_batch(*runs)
    for _ in range(3):
        stopped.step()
    torch.save(stopped.state(), tmp_path / "state.pt")
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.step() == records[3]


def test_four_runs_are_four_times_one_run():
    arms = [an_arm(), an_arm(noise=False, temperature=1.3), an_arm(correction="none"), an_arm(pass_at_k=2)]
    runs = [
        Run(arm, seed, rate)
        for arm, seed, rate in zip(arms, (7, 8, 7, 9), (1e-2, 3e-3, 1e-2, 2e-2), strict=True)
    ]
    together = a_batch(*runs)
    records = [together.step() for _ in range(4)]
    for index, run in enumerate(runs):
        alone = a_batch(run)
        for row in records:
            expected = alone.step()[0]
            assert row[index] == pytest.approx(expected, rel=1e-4, abs=1e-5, nan_ok=True)
        values = alone._trained.values_SE[0]
        assert relative(together._trained.values_SE[index], values) < 1e-4


def test_pieces_have_the_gradient_of_the_whole():
    run = Run(an_arm(entropy_bonus=0.01), 7, RATE)
    whole, pieces = (
        a_batch(run, replace(run, seed=8)),
        a_batch(run, replace(run, seed=8), tokens_per_forward=1),
    )
    gradients = [watch(batch)[1] for batch in (whole, pieces)]
    records = [batch.step() for batch in (whole, pieces)]
    assert relative(gradients[1][0], gradients[0][0]) < BOUND
    for one, other in zip(*records, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("tokens", "sizes"), [(60, [2, 2, 1]), (120, [3, 2]), (1000, [5]), (1, [1] * 5)])
def test_pieces_are_of_nearly_one_size(tokens, sizes):
    texts = Texts.of(fixed(5, [[5, 9], [7, 30]], [[11, 3, 20, 6]] * 8), torch.device("cpu"))
    pieces = list(texts.pieces(tokens))  # a prompt with its samples has 2 + 4 * 3 tokens, a run 28
    found = [piece.runs.stop - piece.runs.start for piece in pieces if piece.prompts.start == 0]
    assert found == sizes
    assert sum(piece.prompts.stop - piece.prompts.start for piece in pieces) == 2 * len(found)


def test_a_resumed_batch_goes_on_bit_by_bit(tmp_path):
    arm = an_arm(noise_target_kl=0.05, match_entropy="other")
    runs = Run(arm, 7, RATE), Run(arm, 8, RATE)
    curves = [Followed("other", [3.5] * 4, [0.0, 0.1, 0.1, 0.1])] * 2
    through = a_batch(*runs, followed=curves)
    expected = [through.step() for _ in range(4)]
    stopped, resumed = (a_batch(*runs, followed=curves) for _ in range(2))
    first = [stopped.step() for _ in range(3)]
    torch.save(stopped.state(), tmp_path / "state.pt")
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [*first, resumed.step()] == expected
    assert torch.equal(resumed._trained.values_SE, through._trained.values_SE)
    with pytest.raises(QeRLError, match="another batch"):
        a_batch(runs[0], followed=curves[:1]).load_state(stopped.state())


@pytest.mark.parametrize("arms", [[an_arm()] * 2, [an_arm(temperature=1.3), an_arm()], [full_arm()] * 2])
def test_a_run_that_diverges_stays_as_it_is_and_the_others_go_on(arms):
    """With a temperature or a head of its own it scores its tokens by itself, and has none."""
    runs = Run(arms[0], 7, RATE), Run(arms[1], 8, RATE)
    batch, alone = a_batch(*runs), a_batch(runs[1])
    batch.step(), alone.step()
    batch._trained.values_SE[0, 0] = torch.inf
    before = batch._trained.values_SE[0].clone()
    records, expected = batch.step(), alone.step()
    assert [row["diverged"] for row in records] == [1.0, 0.0]
    assert torch.equal(batch._trained.values_SE[0], before)
    assert batch._optimizer.mean_SE.isfinite().all()
    assert records[1] == pytest.approx(expected[0], rel=1e-4, abs=1e-5)
    batch._trained.values_SE[0, 0] = 0.0  # healthy again, but it has diverged
    assert batch.step()[0]["diverged"] == 1.0


def test_an_adapter_computes_as_one_of_peft():
    batch = a_batch(Run(an_arm(), 7, RATE), Run(an_arm(), 8, RATE))
    for _ in range(3):
        batch.step()
    model = with_adapter(make_tiny_model(), batch._trained, 1)
    prompt, completion = [5, 9, 7, 30], [11, 3, 20, 6]
    dense = BatchedModel(make_tiny_model(), 2, 4, [7, 8])
    dense.trained.values_SE.copy_(batch._trained.values_SE)
    expected = log_probabilities(model, prompt, completion)
    assert relative(scored(dense, prompt, completion)[1], expected) < BOUND
    assert relative(scored(dense, prompt, completion)[0], expected) > 1e-3


def log_probabilities(model, prompt, completion):
    """Of a completion's tokens, by transformers' own forward pass."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def scored(model, prompt, completion, norms=None):
    """The same of every run of a batched model, [S, C]."""
    samples = fixed(model.runs, [prompt], [completion])
    texts = Texts.of(samples, model.device)
    norms = norms or clean_norms(model, 1)
    return score(model, texts, norms, [1.0] * model.runs, 10**6)[0][:, 0]


def fixed(runs, prompts, completions):
    """Completions of one length as samples of each run."""
    tokens = torch.tensor([completions] * runs)
    zeros = torch.zeros(tokens.shape)
    per_prompt = len(completions) // len(prompts)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    return Samples(
        [prompts] * runs, per_prompt, tokens, mask, zeros, zeros, torch.ones(runs, dtype=torch.bool)
    )


def test_evaluation_scores_what_the_engine_answers():
    runs = Run(an_arm(), 7, RATE), Run(an_arm(), 8, RATE)
    batch, task = a_batch(*runs, rows_at_once=8), Sums()
    start = batch.evaluate(task.test())
    assert start[0] == pytest.approx(start[1])  # the adapters do nothing yet
    ids = [Chat(TOKENIZER).ids(row["prompt"]) for row in task.test()]
    params = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(TOKENIZER.eos_token_id,))
    engine = PortableEngine(tiny_base(), TOKENIZER.pad_token_id)
    answers = [completion.token_ids for completion in engine.generate(ids, 1, params).completions]
    texts = TOKENIZER.batch_decode(answers, skip_special_tokens=True)
    right = torch.tensor(task.rewards[0]([], texts)) > 0
    assert start[0]["accuracy"] == pytest.approx(right.float().mean())
    assert start[0]["accuracy/steps_2"] == pytest.approx(right[1::2].float().mean())
    before = batch.step(), batch.state()
    scores = batch.evaluate(task.test(), samples=4)
    assert scores == batch.evaluate(task.test(), samples=4)
    assert scores[0]["entropy"] != pytest.approx(scores[1]["entropy"], rel=1e-4)
    assert scores[0]["pass@1"] == pytest.approx(scores[0]["sampled_accuracy"])
    assert scores[0]["pass@1"] < scores[0]["pass@2"] <= scores[0]["pass@4"] <= 1
    assert batch.state()["values"].equal(before[1]["values"])


def test_what_an_evaluation_samples_depends_on_no_batch():
    runs = Run(an_arm(), 7, RATE), Run(an_arm(), 8, RATE)
    together, alone = a_batch(*runs, rows_at_once=20), a_batch(runs[1], rows_at_once=1000)
    for batch in (together, alone):
        batch.model.trained.values_SE.add_(0.02)
    seen = []
    for batch in (together, alone):
        generate, calls = batch._sampler.generate, []

        def kept(*args, generate=generate, calls=calls, **kwargs):
            calls.append(generate(*args, **kwargs))
            return calls[-1]

        batch._sampler.generate = kept
        scores = batch.evaluate(Sums().test(), samples=4)[-1]
        drawn = [ids for call in calls if call.per_prompt == 4 for ids in call.completions()[-1]]
        seen.append((scores, drawn))
    assert seen[0][0] == pytest.approx(seen[1][0])
    assert seen[0][1][:24] == seen[1][1] and len(seen[1][1]) == 24
    assert len({tuple(ids) for ids in seen[1][1]}) > 12


@pytest.mark.parametrize(("runs", "greedy", "prefixes"), [(1, 6, 6), (2, 8, 6), (4, 8, 8), (8, 8, 8)])
def test_runs_share_the_evaluation_of_the_base(runs, greedy, prefixes, monkeypatch):
    chosen = [Run(an_arm(), 7 + index, RATE) for index in range(runs)]
    scores, rows = [], []
    for shared in (True, False):
        batch = a_batch(*chosen, rows_at_once=runs * 2)
        generate, asked = batch._sampler.generate, []
        rows.append(asked)

        def counted(prompts, *args, generate=generate, asked=asked):
            asked.extend(prompt for run in prompts for prompt in run)
            return generate(prompts, *args)

        batch._sampler.generate = counted
        if not shared:
            monkeypatch.setattr(Adapters, "do_nothing", False)
        scores.append(batch.evaluate(Sums().test()))
        batch.step()
        batch.model.trained.values_SE.add_(0.02)
        scores[-1] += batch.evaluate(Sums().test())
        monkeypatch.undo()
    for one, other in zip(*scores, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    first, second = scores[0][0], scores[0][runs]
    assert all(own == first for own in scores[0][:runs])
    assert 0 < first["accuracy"] < 1 and second["entropy"] != pytest.approx(first["entropy"], rel=1e-4)
    training, every = 2 * runs, 6 * runs
    assert len(rows[0]) == greedy + prefixes + training + every
    assert len(rows[1]) == every + prefixes + training + every


def test_pass_at_k_and_frozen_noise():
    right_Pk = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    assert pass_at(right_Pk, 1) == pytest.approx(0.25)
    assert pass_at(right_Pk, 2) == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert pass_at(right_Pk, 4) == pytest.approx(2 / 3)
    clean, noisy = (BatchedModel(tiny_base(), 1, 4, [0], noise) for noise in (0.0, 0.1))
    for clean_layer, noisy_layer in zip(clean._products, noisy._products, strict=True):
        for one, other in zip(clean_layer, noisy_layer, strict=True):
            assert relative(other.weight_NK, one.weight_NK) == pytest.approx(0.1, rel=0.05)


def test_models_of_another_kind_are_refused():
    sliding = make_tiny_model("mistral", sliding_window=4)
    with pytest.raises(QeRLError, match="attends to a sliding window; train them one by one"):
        BatchedModel(sliding, 1, 4, [0])


def test_judging_processes_give_the_rewards_of_this_one():
    problems = Problems(Sums(), list(Sums().train()), TOKENIZER)
    asked, texts = [index % 6 for index in range(200)], [f"{index} apples" for index in range(200)]
    beside = Judges(problems, 2)
    expected = problems.rewards_of(asked, texts)
    assert beside(asked, texts) == expected
    assert beside._pool is not None
    assert len({reward for (reward,) in expected}) == 5


def test_a_judging_process_that_dies_ends_the_batch(monkeypatch):
    problems = Problems(Sums(), list(Sums().train()), TOKENIZER)
    monkeypatch.setattr(problems, "rewards_of", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    judges, asked = Judges(problems, 2), ([0] * 200, ["1 apples"] * 200)
    with pytest.raises(BrokenProcessPool):
        judges(*asked)
    monkeypatch.undo()
    assert judges(*asked) == problems.rewards_of(*asked)  # the next one has new processes


def test_dense_weights_of_nf4_are_what_its_layers_multiply_with(to_nf4):
    dense, rounded = make_tiny_model(), to_nf4(make_tiny_model())
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        layer = rounded.model.layers[1].get_submodule(name)
        found = dense_weight(layer, torch.float32)
        torch.testing.assert_close(layer(torch.eye(layer.in_features)).T, found, rtol=1e-5, atol=1e-6)
        assert 0.05 < relative(found, dense.model.layers[1].get_submodule(name).weight) < 0.15
    model = BatchedModel(rounded, 1, 4, [0])
    prompt, completion = [5, 9, 7, 30], [11, 3, 20, 6]
    expected = log_probabilities(rounded, prompt, completion)
    assert relative(scored(model, prompt, completion)[0], expected) < 1e-4


def test_a_batch_in_bfloat16_learns_what_one_in_float32_does():
    runs = Run(an_arm(noise=False), 7, RATE), Run(an_arm(noise=False), 8, RATE)
    wide, narrow = a_batch(*runs), a_batch(*runs, dtype=torch.bfloat16)
    samples, (_, gradients) = [], watch(wide)
    generate = wide._sampler.generate
    wide._sampler.generate = lambda *args: samples.append(generate(*args)) or samples[-1]
    narrow._sampler.generate = lambda *_: samples[-1]
    _, rounded = watch(narrow)
    for batch in (wide, narrow):
        batch._trained.values_SE.add_(0.02)
        batch.step()
    assert narrow.model.dtype == torch.bfloat16
    assert narrow._trained.values_SE.dtype == torch.float32
    assert relative(rounded[0], gradients[0]) < 0.15  # bfloat16 weights of a model that rounds badly
    assert torch.equal(narrow._trained.gradients_SE, torch.zeros_like(rounded[0]))
