"""Kernels of the update and their gradients against torch, on a GPU or in Triton's interpreter."""

from functools import partial

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.kernels.update.gated_norm import gated_norm
from qerl.kernels.update.rms_norm import rms_norm
from qerl.kernels.update.rotary import rotated_heads
from qerl.kernels.update.swiglu import swiglu
from qerl.update.path import norms
from tests.support.kernels import DEVICE, EPS, HALF, error, half


def with_gradient(*shape):
    return half(*shape).requires_grad_()


@pytest.mark.parametrize("added", [0.0, 1.0])
@pytest.mark.parametrize("rounds_unit", [False, True])
def test_rms_norm_and_its_gradient(added, rounds_unit):
    x, w, dy = with_gradient(2, 5, 100), torch.rand(100, device=DEVICE).to(HALF) + 0.5, half(2, 5, 100)
    y = rms_norm(x, w, EPS, added, rounds_unit)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    truth = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * (added + w.double())
    truth.backward(dy.double())
    assert error(y.detach(), truth.detach()) < 6e-3
    assert error(x.grad, x64.grad) < 8e-3


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, Gemma4RMSNorm, Olmo3RMSNorm])
def test_norms_round_as_their_own_code(kind):
    """What differs on a GPU are sums in FP32 in another order, and with them a rounding here and there."""
    dtype = HALF if HALF.itemsize == 2 else torch.float16
    norm = kind(100, EPS).to(DEVICE).requires_grad_(False)
    norm.weight += 0.2 * torch.randn(100, device=DEVICE)
    ((_, formula),) = norms(norm.to(dtype))
    x = torch.randn(2, 500, 100, device=DEVICE).to(dtype)
    wanted = norm(x)
    for rounds_unit in (formula.rounds_unit, not formula.rounds_unit):
        found = rms_norm(x, norm.weight, formula.eps, formula.added, rounds_unit)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-5)
        apart = (found != wanted).float().mean()
        assert apart < 1e-2 if rounds_unit == formula.rounds_unit else apart > 0.1


def test_rms_norm_keeps_noise_below_the_spacing_of_its_dtype():
    """The mean over tokens sees an FP32 weight of 1 + Z; rounded before the product, Z would be lost."""
    x, dy = with_gradient(2, 128, 100), half(2, 128, 100)
    w = 1 + 1e-3 * torch.randn(100, device=DEVICE)
    y = rms_norm(x, w, EPS)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    unit = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt()
    (unit * w.double()).backward(dy.double())
    unit, y = unit.detach().flatten(0, 1), y.detach().flatten(0, 1)
    seen = (y.double() * unit).sum(0) / unit.square().sum(0)
    assert y.dtype == x.dtype
    assert error(seen - 1, w.double() - 1) < 0.4
    assert error(x.grad, x64.grad) < 8e-3


@pytest.mark.parametrize("shape", [(3, 1, 1, 100), (3, 4, 1, 100), (3, 4, 2, 100)])
def test_each_part_of_the_tokens_is_normed_with_its_own_weight(shape):
    x, w, dy = with_gradient(3, 4, 2, 100), torch.rand(shape, device=DEVICE) + 0.5, half(3, 4, 2, 100)
    found = rms_norm(x, w, EPS)
    found.backward(dy)
    for at in range(3):
        own = x.detach()[at].requires_grad_()
        each = [w[at].expand(4, 2, 100)[i, j] for i in range(4) for j in range(2)]
        alone = torch.stack([rms_norm(t, one, EPS) for t, one in zip(own.flatten(0, 1), each, strict=True)])
        alone.backward(dy[at].flatten(0, 1))
        assert torch.equal(found[at].flatten(0, 1), alone)
        assert torch.equal(x.grad[at], own.grad)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
def test_swiglu_and_its_gradients(joint, gelu):
    gate, up, dout = with_gradient(3, 5, 1100), with_gradient(3, 5, 1100), half(3, 5, 1100)
    out = swiglu(torch.cat([gate, up], -1), None, gelu) if joint else swiglu(gate, up, gelu)
    out.backward(dout)
    gate64, up64 = (t.detach().double().requires_grad_() for t in (gate, up))
    activation = partial(functional.gelu, approximate="tanh") if gelu else functional.silu
    truth = activation(gate64) * up64
    truth.backward(dout.double())
    limits = (6e-3, 8e-3) if HALF.itemsize == 2 else (1e-6, 1e-6)
    assert error(out.detach(), truth.detach()) < limits[0]
    assert error(gate.grad, gate64.grad) < limits[1]
    assert error(up.grad, up64.grad) < limits[1]


@pytest.mark.parametrize("heads,kv_heads,size,tables", [(6, 2, 64, 1), (28, 4, 128, 1), (3, 3, 24, 2)])
def test_rotary_embedding_and_its_gradients(heads, kv_heads, size, tables):
    """Against transformers' in double precision; its tables, and values, which are only moved."""
    counts = heads, kv_heads, kv_heads
    qkv = with_gradient(2, 7, sum(counts) * size)
    angles = torch.randn(tables, 7, size, device=DEVICE)  # halves differ: each element has its own
    cos, sin = angles.cos().to(HALF), angles.sin().to(HALF)
    found = rotated_heads(qkv, cos, sin, heads, kv_heads)
    gradients = [half(*out.shape) for out in found]
    torch.autograd.backward(found, gradients)
    qkv64 = qkv.detach().double().requires_grad_()
    q, k, v = (
        part.view(2, 7, -1, size).transpose(1, 2)
        for part in qkv64.split([count * size for count in counts], -1)
    )
    truth = [*apply_rotary_pos_emb(q, k, cos.double(), sin.double()), v]
    torch.autograd.backward(truth, [dout.double().transpose(1, 2) for dout in gradients])
    for out, wanted in zip(found, truth, strict=True):
        assert error(out.detach(), wanted.detach().transpose(1, 2)) < 4e-3
    assert error(qkv.grad, qkv64.grad) < 4e-3
    assert torch.equal(found[2].detach().flatten(-2), qkv.detach()[..., -kv_heads * size :])


@pytest.mark.parametrize(("rows", "size"), [(7, 128), (100, 64), (3, 48)])
def test_gated_norm_and_its_gradients(rows, size):
    x, z, dy = with_gradient(rows, size), with_gradient(rows, size), half(rows, size)
    w = torch.rand(size, device=DEVICE).to(HALF) + 0.5
    y = gated_norm(x, z, w, EPS)
    y.backward(dy)
    x64, z64 = (each.detach().double().requires_grad_() for each in (x, z))
    unit = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt()
    truth = unit * w.double() * functional.silu(z64)
    truth.backward(dy.double())
    assert error(y.detach(), truth.detach()) < 6e-3
    assert error(x.grad, x64.grad) < 8e-3
    assert error(z.grad, z64.grad) < 8e-3
