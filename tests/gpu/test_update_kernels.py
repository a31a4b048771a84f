"""Kernels of the update and their gradients against torch, on a GPU or in Triton's interpreter."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.kernels.update.rms_norm import rms_norm
from qerl.kernels.update.rotary import rotated_heads
from qerl.kernels.update.swiglu import swiglu
from tests.support.kernels import DEVICE, EPS, HALF, error, half


def with_gradient(*shape):
    return half(*shape).requires_grad_()


def test_rms_norm_and_its_gradient():
    x, w, dy = with_gradient(2, 5, 100), torch.rand(100, device=DEVICE).to(HALF) + 0.5, half(2, 5, 100)
    y = rms_norm(x, w, EPS)
    y.backward(dy)
    x64 = x.detach().double().requires_grad_()
    truth = x64 / (x64.square().mean(-1, keepdim=True) + EPS).sqrt() * w.double()
    truth.backward(dy.double())
    assert error(y.detach(), truth.detach()) < 6e-3
    assert error(x.grad, x64.grad) < 8e-3


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


@pytest.mark.parametrize("joint", [False, True])
def test_swiglu_and_its_gradients(joint):
    gate, up, dout = with_gradient(3, 5, 1100), with_gradient(3, 5, 1100), half(3, 5, 1100)
    out = swiglu(torch.cat([gate, up], -1)) if joint else swiglu(gate, up)
    out.backward(dout)
    gate64, up64 = (t.detach().double().requires_grad_() for t in (gate, up))
    truth = torch.nn.functional.silu(gate64) * up64
    truth.backward(dout.double())
    assert error(out.detach(), truth.detach()) < 6e-3
    assert error(gate.grad, gate64.grad) < 8e-3
    assert error(up.grad, up64.grad) < 8e-3


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
