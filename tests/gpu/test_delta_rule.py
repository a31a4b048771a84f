"""The gated delta rule over many tokens on a GPU, in BF16: against FP64, twice the same, and its memory."""

import time
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.kernels import delta_rule
from qerl.kernels.delta_rule import chunked_delta_rule
from tests.support.kernels import error

NAMES = "outputs", "states", "dq", "dk", "dv", "ddecay", "dbeta", "dinitial"
SIZE = 128


def drawn(lengths, key_heads, heads, alike=0.0):
    """q, k, v in BF16; decay, beta and first states in FP32; some heads forget within a chunk.

    ``alike`` is how much all keys have of one.
    """
    torch.manual_seed(0)
    rows = sum(lengths)
    q, k, v = (torch.randn(rows, n, SIZE, device="cuda") for n in (key_heads, key_heads, heads))
    k += alike * torch.randn(key_heads, SIZE, device="cuda")
    rates = torch.logspace(-3, 1, heads, device="cuda")
    decay = -rates * torch.randn(rows, heads, device="cuda").exp()
    beta = torch.randn(rows, heads, device="cuda").sigmoid()
    initial = 0.1 * torch.randn(len(lengths), heads, SIZE, SIZE, device="cuda")
    inputs = [x.requires_grad_() for x in (*(x.bfloat16() for x in (q, k, v)), decay, beta, initial)]
    pulls = torch.randn(rows, heads, SIZE, device="cuda").bfloat16(), torch.randn_like(initial)
    return inputs, pulls, [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def computed(inputs, pulls, offsets, dtype=None):
    """Outputs, states and gradients, in the inputs' dtypes or all in one."""
    given = [x if dtype is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    pulls = pulls if dtype is None else [x.to(dtype) for x in pulls]
    *tensors, initial = given
    results = chunked_delta_rule(*tensors, offsets, initial)
    return [*(x.detach() for x in results), *torch.autograd.grad(results, given, pulls)]


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_the_rule_and_its_gradients_are_near_to_float64_and_the_same_each_time(alike):
    inputs, pulls, offsets = drawn([3000, 1, 1095], 16, 32, alike)
    found, again = computed(inputs, pulls, offsets), computed(inputs, pulls, offsets)
    truth = computed(inputs, pulls, offsets, torch.float64)
    gaps = {name: error(one, other) for name, one, other in zip(NAMES, found, truth, strict=True)}
    print(f"keys alike by {alike}:", ", ".join(f"{name} {gap:.1e}" for name, gap in gaps.items()))
    for name, one, other in zip(NAMES, found, again, strict=True):
        assert torch.equal(one, other), name
    # Rounding to BF16 is an error of 1.7e-3; states are never rounded. Gradients of products in TF32.
    bounds = {"outputs": 2.5e-3, "states": 5e-5, "ddecay": 1e-2, "dbeta": 5e-3, "dinitial": 5e-5}
    assert all(gap < bounds.get(name, 4e-3) for name, gap in gaps.items())


def test_what_is_rounded_least_is_token_by_token():
    """FP32 inputs show what the kernels themselves err; the truth is not computed by chunks."""
    inputs, _, offsets = drawn([130, 70], 2, 4)
    *tensors, initial = (x.detach().float() for x in inputs)
    out, final = chunked_delta_rule(*tensors, offsets, initial)
    q, k, v, decay, beta = (x.double() for x in tensors)
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(2, dim=1) for x in (q / SIZE**0.5, k))
    for n, (start, stop) in enumerate(pairwise(offsets)):
        state, outs = initial[n].double(), []
        for t in range(start, stop):
            state = state * decay[t].exp()[:, None, None]
            written = beta[t, :, None] * (v[t] - torch.einsum("vk,vke->ve", k[t], state))
            state = state + k[t, :, :, None] * written[:, None]
            outs.append(torch.einsum("vk,vke->ve", q[t], state))
        assert error(out[start:stop], torch.stack(outs)) < 5e-5
        assert error(final[n], state) < 5e-5


def test_a_long_row_needs_two_gigabytes_besides_inputs_and_gradients():
    """16,384 tokens, 48 value heads: all heads at once would hold five times as much."""
    inputs, pulls, offsets = drawn([4096] * 4, 16, 48)
    computed(*drawn([64], 16, 48))  # compilation and workspaces
    *tensors, initial = inputs
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = chunked_delta_rule(*tensors, offsets, initial)
    forward = torch.cuda.max_memory_allocated() - before
    gradients = torch.autograd.grad(results, inputs, pulls)
    peak = torch.cuda.max_memory_allocated() - before
    given = sum(x.numel() * x.element_size() for x in (*results, *gradients))
    print(f"forward {forward / 1e9:.2f} GB, both {peak / 1e9:.2f} GB, of which {given / 1e9:.2f} are results")
    assert peak - given < 2e9


@pytest.mark.parametrize("lengths", [[16384], [512] * 8 + [1024] * 12], ids=["one sequence", "20 sequences"])
@pytest.mark.parametrize("heads", [32, 48])
def test_time(lengths, heads):
    """Printed, and compared with nothing."""
    inputs, pulls, offsets = drawn(lengths, 16, heads)
    *tensors, initial = inputs

    def seconds(run):
        run()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(5):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 5

    with torch.no_grad():
        forward = seconds(lambda: chunked_delta_rule(*tensors, offsets, initial))
    both = seconds(lambda: computed(inputs, pulls, offsets))
    chunks = delta_rule.Chunks.of(offsets, initial.device)
    groups = len(delta_rule._groups(delta_rule._Inputs(*inputs), chunks, keep=True))
    print(
        f"{sum(lengths)} tokens in {len(lengths)} sequences, {heads} value heads: "
        f"forward {forward * 1e3:.2f} ms, with backward {both * 1e3:.2f} ms in {groups} groups of heads"
    )
