"""Convolution and recurrence of gated delta nets, against their definitions and transformers' own."""

from itertools import pairwise

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from qerl.kernels import delta_rule
from qerl.kernels.delta_rule import CHUNK, chunked_delta_rule, short_conv

U, K, V, E = 2, 5, 6, 7
LENGTHS = [CHUNK + 9, 1, 3 * CHUNK, 20]


def offsets_of(lengths):
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def drawn(lengths, seed=0, dtype=torch.float64):
    """q, k, v, decay, beta and initial states; some heads forget within a chunk."""
    rng = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    q, k, v = draw(rows, U, K), draw(rows, U, K), draw(rows, V, E)
    decay = -torch.logspace(-3, 1, V, dtype=torch.float64) * draw(rows, V).exp()
    tensors = q, k, v, decay, draw(rows, V).sigmoid(), draw(len(lengths), V, K, E)
    return [x.to(dtype).requires_grad_() for x in tensors]


def token_by_token(q, k, v, decay, beta, offsets, initial):
    """The definition, in FP64."""
    outs, finals = [], []
    for n, (start, stop) in enumerate(pairwise(offsets)):
        state = torch.zeros(V, K, E, dtype=torch.float64) if initial is None else initial[n].double()
        for t in range(start, stop):
            unit = [
                x[t].double() / (x[t].double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)
            ]
            one_q, one_k = (x.repeat_interleave(V // U, dim=0) for x in unit)
            state = state * decay[t].double().exp()[:, None, None]
            written = beta[t].double()[:, None] * (v[t].double() - torch.einsum("vk,vke->ve", one_k, state))
            state = state + one_k[..., None] * written[:, None]
            outs.append(torch.einsum("vk,vke->ve", one_q, state) / K**0.5)
        finals.append(state)
    return torch.stack(outs), torch.stack(finals)


def gradients(results, inputs):
    pulls = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype) for x in results]
    total = sum((x * pull).sum() for x, pull in zip(results, pulls, strict=True))
    return torch.autograd.grad(total, inputs)


@pytest.mark.parametrize("lengths", [LENGTHS, [5], [CHUNK], [1, 1, 2]], ids=str)
@pytest.mark.parametrize("begins", ["zeros", "states"])
def test_chunks_are_the_tokens_one_after_the_other(lengths, begins):
    *tensors, initial = drawn(lengths)
    inputs = [*tensors, initial] if begins == "states" else tensors
    call = *tensors, offsets_of(lengths), initial if begins == "states" else None
    found, wanted = chunked_delta_rule(*call), token_by_token(*call)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    for one, other in zip(gradients(found, inputs), gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_each_sequence_is_what_transformers_computes():
    *tensors, initial = (x.detach() for x in drawn(LENGTHS, dtype=torch.float32))
    offsets = offsets_of(LENGTHS)
    out, final = chunked_delta_rule(*tensors, offsets, initial)
    assert out.dtype == final.dtype == torch.float32
    for n, (start, stop) in enumerate(pairwise(offsets)):
        one, state = qwen.torch_recurrent_gated_delta_rule(
            *(x[None, start:stop] for x in tensors),
            initial_state=initial[n : n + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out[start:stop], one[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(final[n], state[0], rtol=1e-4, atol=1e-5)


def test_16_bit_inputs_are_computed_in_float32():
    *tensors, initial = (x.detach() for x in drawn(LENGTHS, dtype=torch.bfloat16))
    call = offsets_of(LENGTHS), initial.float()
    out, final = chunked_delta_rule(*tensors, *call)
    wanted, state = token_by_token(*tensors, *call)
    assert out.dtype == torch.bfloat16 and final.dtype == torch.float32
    torch.testing.assert_close(final.double(), state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.double(), wanted, rtol=2**-8, atol=1e-5)


def taps_of(lengths, width):
    """Of sequences by themselves."""
    rows = []
    for start, stop in pairwise(offsets_of(lengths)):
        rows += [
            [t if t >= start else -1 for t in range(at - width + 1, at + 1)] for at in range(start, stop)
        ]
    return torch.tensor(rows)


def convolution(dtype=torch.float64):
    rng = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    return [x.to(dtype).requires_grad_() for x in (draw(10, 6), draw(6, 4))]


def test_a_convolution_is_that_of_transformers_for_each_sequence():
    lengths = [6, 1, 3]
    x, weight = convolution(torch.float32)
    found = short_conv(x, weight, taps_of(lengths, 4))
    wanted = [
        qwen.causal_conv1d_fn(x[start:stop].T[None], weight, activation="silu")[0].T
        for start, stop in pairwise(offsets_of(lengths))
    ]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-6)


def test_taps_may_read_any_rows_and_gradients_add_up():
    x, weight = convolution()
    taps = torch.randint(-1, 10, (17, 4), generator=torch.Generator().manual_seed(2))
    assert (taps < 0).any()
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w, taps), (x, weight))


def test_a_convolution_of_16_bits_is_rounded_once():
    x, weight = (tensor.detach() for tensor in convolution(torch.bfloat16))
    taps = taps_of([10], 4)
    found, wanted = short_conv(x, weight, taps), short_conv(x.double(), weight.double(), taps)
    assert torch.equal(found, wanted.bfloat16())


def test_a_row_is_computed_by_as_many_heads_as_the_bound_allows(monkeypatch):
    *tensors, initial = drawn(LENGTHS)
    call = *tensors, offsets_of(LENGTHS), initial
    groups, computed = [], delta_rule._groups
    monkeypatch.setattr(
        delta_rule, "_groups", lambda *given, keep: groups.append(computed(*given, keep=keep)) or groups[-1]
    )
    whole = chunked_delta_rule(*call)
    wanted = [*whole, *gradients(whole, [*tensors, initial])]
    assert groups == [[slice(0, U)]] * 2
    monkeypatch.setattr(delta_rule, "WORKING_BYTES", 1)
    parts = chunked_delta_rule(*call)
    found = [*parts, *gradients(parts, [*tensors, initial])]
    assert groups[2:] == [[slice(0, 1), slice(1, 2)]] * 2
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("used", [0, 1], ids=["outputs", "states"])
def test_gradients_of_one_of_the_results_are_those_of_the_definition(used):
    """A sequence whose state nobody reads has no gradient of it, nor one whose outputs nobody reads."""
    *tensors, initial = drawn(LENGTHS)
    call = *tensors, offsets_of(LENGTHS), initial
    inputs = [*tensors[1:], initial]  # q has no part in the states
    found, wanted = (gradients([run(*call)[used]], inputs) for run in (chunked_delta_rule, token_by_token))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)


def test_the_precision_of_other_products_stays():
    """torch's older and newer name for it are both as before, also where they were set."""
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision
    seen = lambda: (setting.fp32_precision, setting.allow_tf32, torch.get_float32_matmul_precision())  # noqa: E731
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            found = seen()
            with delta_rule._tf32():
                assert setting.fp32_precision == "tf32" and setting.allow_tf32
            assert seen() == found
    finally:
        torch.set_float32_matmul_precision("highest")
        setting.fp32_precision = before
