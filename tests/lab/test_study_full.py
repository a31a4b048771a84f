"""Full tuning in a batch: its steps are those of transformers and torch, and no run sees another."""

import pytest
import torch

from lab.study.arms import Run, contradiction
from lab.study.batched.model import BatchedModel
from lab.study.batched.trainer import BatchedTrainer, Settings
from lab.study.spec import make_study
from qerl.errors import QeRLError
from tests.support.batched import SIZES, TOKENIZER, Sums, a_batch, full_arm
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.slow

RATE, STEPS = 1e-3, 3


def full_batch(*seeds, rate=RATE, **changes):
    return a_batch(*(Run(full_arm(), seed, rate) for seed in seeds), **changes)


def log_probabilities(model, prompt, completion):
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def policy_loss(model, prompts, completions, sampled):
    """GRPO's loss of one step by its formula: advantages within groups of 4, each token times its ratio to
    the sampler, at most 3, mean over the tokens of a sample and then over samples."""
    texts = TOKENIZER.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor(Sums().rewards[0]([], texts)).view(-1, 4)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantages = (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
    losses = []
    for at, completion in enumerate(completions):
        logps = log_probabilities(model, prompts[at // 4], completion)
        ratio = (logps.detach() - sampled[at][: len(completion)]).exp().clamp(max=3)
        losses.append(-(advantages[at] * ratio * (logps - logps.detach()).exp()).mean())
    return torch.stack(losses).mean()


def flat(model):
    """All weights of a transformers model in the order of a row, by names of its modules."""
    decoder, parts = model.model, [model.model.embed_tokens.weight]
    if model.lm_head.weight is not decoder.embed_tokens.weight:
        parts.append(model.lm_head.weight)
    for layer in decoder.layers:
        parts += [layer.input_layernorm.weight, layer.post_attention_layernorm.weight]
    parts.append(decoder.norm.weight)
    for layer in decoder.layers:
        if hasattr(layer.self_attn, "q_norm"):
            parts += [layer.self_attn.q_norm.weight, layer.self_attn.k_norm.weight]
    for layer in decoder.layers:
        own, mlp = layer.self_attn, layer.mlp
        for linears in ((own.q_proj, own.k_proj, own.v_proj), (own.o_proj,), (mlp.gate_proj, mlp.up_proj),
                        (mlp.down_proj,)):  # fmt: skip
            parts += [linear.weight for linear in linears]
            parts += [linear.bias for linear in linears if linear.bias is not None]
    return parts


@pytest.mark.parametrize(("family", "changes"), [
    ("llama", {}), ("llama", {"tie_word_embeddings": False}), ("qwen2", {}), ("qwen3", {}),
])  # fmt: skip
def test_steps_of_a_run_are_those_of_transformers_and_torch(family, changes):
    model = make_tiny_model(family, **changes)
    runs = [Run(full_arm(), 7, RATE), Run(full_arm(), 8, RATE)]
    batch = BatchedTrainer(make_tiny_model(family, **changes), TOKENIZER, Sums(), runs, Settings(**SIZES))
    samples, gradients = [], []
    generate, step = batch._sampler.generate, batch._optimizer.step
    batch._sampler.generate = lambda *args: samples.append(generate(*args)) or samples[-1]
    batch._optimizer.step = lambda *args: (
        gradients.append(batch._trained.gradients_SE[0].clone()) or step(*args)
    )
    assert sum(p.numel() for p in model.parameters()) == batch._trained.values_SE.shape[1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    start = torch.cat([part.detach().flatten() for part in flat(model)])
    assert torch.equal(batch._trained.values_SE[0], start)
    for at in range(STEPS):
        record = batch.step()[0]
        drawn = samples[at]
        loss = policy_loss(model, drawn.prompts[0], drawn.completions()[0], drawn.logprobs_SRC[0])
        loss.backward()
        found = torch.cat([part.grad.flatten() for part in flat(model)])
        assert float((gradients[at] - found).norm() / found.norm()) < 1e-5
        assert record["loss"] == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    ended = torch.cat([part.detach().flatten() for part in flat(model)])
    moved = batch._trained.values_SE[0] - start
    # Adam makes a large difference of a small one where a gradient is nearly zero.
    assert float((moved - (ended - start)).norm() / (ended - start).norm()) < 1e-3


def test_each_of_three_runs_is_a_run_by_itself():
    together = full_batch(7, 8, 9, tokens_per_forward=40)
    records = [together.step() for _ in range(STEPS)]
    for index, seed in enumerate((7, 8, 9)):
        alone = full_batch(seed)
        for row in records:
            assert row[index] == pytest.approx(alone.step()[0], rel=1e-3, abs=1e-4)


def test_evaluation_begins_with_the_base_and_ends_elsewhere():
    batch = full_batch(7, 8, rate=2e-2)
    start = batch.evaluate(Sums().test())
    assert start[0] == start[1] and batch._trained.do_nothing
    batch.step()
    assert not batch._trained.do_nothing
    end = batch.evaluate(Sums().test())
    assert end[0]["entropy"] != pytest.approx(end[1]["entropy"], rel=1e-4)
    moved = batch._trained.values_SE.clone()
    with batch.model.base_only():
        assert batch._trained.do_nothing
    assert torch.equal(batch._trained.values_SE, moved)


def test_a_resumed_batch_goes_on_bit_by_bit(tmp_path):
    through, stopped, resumed = (full_batch(7, 8) for _ in range(3))
    expected = [through.step() for _ in range(STEPS)]
    first = [stopped.step() for _ in range(STEPS - 1)]
    torch.save(stopped.state(), tmp_path / "state.pt")
    resumed.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [*first, resumed.step()] == expected


def test_a_batch_in_bfloat16_has_the_gradient_of_one_in_float32():
    wide, narrow = (full_batch(7, 8, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    samples, seen = [], []
    generate = wide._sampler.generate
    wide._sampler.generate = lambda *args: samples.append(generate(*args)) or samples[-1]
    narrow._sampler.generate = lambda *_: samples[-1]
    for batch in (wide, narrow):
        step = batch._optimizer.step
        batch._optimizer.step = lambda *args, step=step, batch=batch: (
            seen.append(batch._trained.gradients_SE.clone()) or step(*args)
        )
        batch.step()
    assert narrow._trained.values_SE.dtype == torch.float32
    assert narrow._trained.cast_SE.dtype == torch.bfloat16
    assert float((seen[1] - seen[0]).norm() / seen[0].norm()) < 0.15  # bfloat16 of a model that rounds badly


def test_what_full_tuning_cannot_be_is_refused():
    for changes, words in (
        ({"weights": "nvfp4"}, "cannot train packed nvfp4 weights"),
        ({"lora_r": 8}, "lora_r, the rank of adapters"),
        ({"noise": True}, "gives each run its own norms, and noise in norms"),
    ):
        assert words in contradiction(full_arm(**changes), 4)
    assert contradiction(full_arm(), 4) is None
    assert BatchedModel(make_tiny_model(), 1, 4, [0]).trained.do_nothing


def test_an_arm_has_a_grid_of_learning_rates_of_its_own():
    values = {
        "model": "x", "task": "arithmetic", "learning_rates": [1e-4, 2e-4], "tuning_seeds": 2,
        "test_seeds": 3, "arms": {"lora": {}, "full": {
            "tuning": "full", "weights": "bf16", "learning_rates": [1e-6, 1e-5, 1e-4]}},
    }  # fmt: skip
    study = make_study(values)
    full = study.arms["full"]
    assert [run.learning_rate for run in study.tuning_runs(full)] == [1e-6, 1e-6, 1e-5, 1e-5, 1e-4, 1e-4]
    assert study.chooses(full) and study.count(full) == 9 and study.count(study.arms["lora"]) == 7
    with pytest.raises(QeRLError, match="a grid, but the study does not tune"):
        make_study(values | {"tuning_seeds": 0})
    values["arms"]["full"]["learning_rate"] = 1e-5
    with pytest.raises(QeRLError, match="learning_rates, a grid; choose one"):
        make_study(values)
