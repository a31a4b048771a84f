"""A packed row of each family, with windows, sinks, states or no rotary embedding, is the samples in it.

Against transformers' own forward pass of one sample at a time, with adapters and noise: values in FP32, and
gradients in FP64, from which those of a delta net in FP32 are half as far as two of them are apart. The row
goes both ways: along segments, with the kernels' definition in the kernels' place, and through dense masks.
"""

import copy

import pytest
import torch

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.noise.draw import AdaptiveNoise, magnitude
from qerl.noise.norms import find_noise_norms, noisy_norms
from qerl.noise.schedule import NoiseSchedule
from qerl.update import attention
from qerl.update.delta_net import read_sequences
from qerl.update.head import score
from qerl.update.packed_row import pack_row
from tests.support.families import DELTA_NETS, NAMES, WINDOW, tiny
from tests.support.models import move_adapter
from tests.support.samples import samples_of
from tests.support.segments import use_dense_segments

TEMPERATURE = 0.8
LENGTHS = (29, [9, 3, 14]), (13, [5]), (2, [21, 1])
"""Tokens of each prompt and of its completions; windows end in the one, in the other, and before both."""
SCHEDULE = NoiseSchedule(sigma_start=0.1, sigma_end=0.1, stages=2, total_steps=2)
NORMS = {"gemma3_text": 8, "gemma4_text": 8, "olmo3": 0}  # of others, 2 in front of each layer's parts


def drawn():
    rng = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(3, 128, (n,), generator=rng).tolist()  # noqa: E731
    return [(prompt, draw(n)) for tokens, rest in LENGTHS for prompt in [draw(tokens)] for n in rest]


SAMPLES = drawn()


def adapted(name):
    torch.manual_seed(0)
    return move_adapter(add_lora(tiny(name).requires_grad_(False), rank=4, alpha=8, dropout=0.0)).train()


def offsets(model):
    return AdaptiveNoise(model, SCHEDULE, seed=0, scale="relative").offsets(1)


def plain(model):
    """Log-probabilities and entropies of all completions, one sample after the other."""
    logps, entropies = [], []
    for prompt, completion in SAMPLES:
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits
        logps_NV = (logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logps.append(logps_NV.gather(1, torch.tensor(completion)[:, None])[:, 0])
        entropies.append(-(logps_NV.exp() * logps_NV).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def gradients(model, logps, entropies):
    model.zero_grad()
    pulls = torch.randn(2, len(logps), generator=torch.Generator().manual_seed(1))
    (logps @ pulls[0] + entropies @ pulls[1]).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("way", ["segments", "masks"])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_the_samples_in_it(monkeypatch, name, way):
    use_dense_segments(monkeypatch)
    assert max(len(prompt) for prompt, _ in SAMPLES) > 3 * WINDOW
    model = adapted(name)
    base = model.get_base_model()
    read_sequences(base)
    noise = {} if name == "olmo3" else offsets(model)
    with noisy_norms(model, noise):
        wanted = plain(model)
        exact = copy.deepcopy(model).double()
        truth = gradients(exact, *(each.float() for each in plain(exact)))
        row = pack_row(samples_of(*zip(*SAMPLES, strict=True)), range(len(SAMPLES)), torch.device("cpu"))
        by_segment = way == "segments"
        if by_segment:
            assert attention.use_branch_attention(base) is None
        found = score(model, base, row, by_segment, TEMPERATURE, entropy_has_gradient=True)
        made = gradients(model, *found)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-5)
        assert made.keys() == truth.keys() and truth
        for parameter, gradient in truth.items():
            error = (made[parameter] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{parameter}: {error:.1e}"
        again = plain(model)  # attention without a packed row is the model's own
    for one, other in zip(again, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_noise_reaches_the_norms_in_front_of_linears_in_their_own_scale(name):
    model = tiny(name)
    if not NORMS.get(name, 8):
        with pytest.raises(QeRLError, match="turn noise off"):
            find_noise_norms(model)
        return
    drawn_Z, norms = offsets(model), find_noise_norms(model)
    after = ("post_attention_layernorm", "post_feedforward_layernorm") if "gemma" in name else ()
    assert len(norms) == 8 and not any(
        norm.endswith(("q_norm", "k_norm", "v_norm", *after)) for norm in norms
    )
    norm = model.get_submodule(norms[0])
    factor = (
        (1 + norm.weight if name in ("gemma3_text", DELTA_NETS, "qwen3_5_moe_text") else norm.weight)
        .detach()
        .abs()
    )
    torch.testing.assert_close(magnitude(norm), factor)
    clean, x = norm(torch.ones(1, 64)), torch.ones(1, 64)
    with noisy_norms(model, drawn_Z):
        torch.testing.assert_close(norm(x), clean + drawn_Z[norms[0]], rtol=1e-4, atol=1e-5)
