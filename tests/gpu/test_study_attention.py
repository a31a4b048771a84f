"""The fused attention of batched studies on a GPU, against FP64 on a CPU, by itself and in a graph."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from lab.study.batched.attention import attend_prompts, attend_samples, bias_of

GROUPS, SHARING, WIDTH, FRONT = 3, 3, 64, 203
"""Key heads, query heads of each, their width, and tokens of the longest prompt."""


def arguments(prompts: int, samples: int, queries: int, own: int):
    """Queries, keys and values, FP64 numbers that BF16 has too, and what hides keys."""
    draw = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(shape, generator=draw).bfloat16().double()

    keys = prompts, GROUPS, FRONT + samples * own, WIDTH
    q = numbers(prompts, samples, queries, GROUPS * SHARING, WIDTH)
    lengths_U = FRONT - 60 * torch.arange(prompts)  # of the last one a block of keys and more is hidden
    hidden_UP = torch.arange(FRONT) >= lengths_U[:, None]
    hidden_CO = torch.arange(own) > own - queries + torch.arange(queries)[:, None]
    return q, numbers(*keys), numbers(*keys), hidden_UP, hidden_CO


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(
    "sizes", [(4, 8, 23, 23), (4, 8, 1, 23), (3, 1, 31, 31)], ids=["update", "step", "one"]
)
def test_samples_attend_as_in_fp64_with_their_gradients(sizes, dtype, bound):
    *qkv, hidden_UP, hidden_CO = arguments(*sizes)
    if sizes[1] == 1:
        hidden_UP = torch.zeros(1, FRONT, dtype=torch.bool)  # the rest of a prompt, with one bias for all
    pull, found = None, []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        bias = bias_of(hidden_UP.to(device), hidden_CO.to(device), sizes[1], SHARING, kind)
        own = [x.to(device, kind, copy=True).requires_grad_() for x in qkv]
        out = attend_samples(*own, bias)
        pull = torch.randn(out.shape).bfloat16() if pull is None else pull
        out.backward(pull.to(device, kind))
        found.append([out.detach(), *(x.grad for x in own)])
    for exact, other in zip(*found, strict=True):
        assert torch.isfinite(other).all()
        error = float((other.cpu().double() - exact).norm() / exact.norm())
        print(f"{error:.1e}")
        assert error < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of", ["samples", "prompts"])
def test_gradients_have_the_same_bits_each_time(of, dtype):
    """Where many blocks of keys meet in a query, and by no kernel of cuDNN, whose order cannot be set."""
    q, k, v, *hidden = arguments(64, 32, 23, 23)  # 939 keys of a group
    if of == "prompts":
        q, k, v = (
            x.transpose(1, 2).repeat(1, 1, sharing, 1) for x, sharing in ((k, SHARING), (k, 1), (v, 1))
        )
    q, k, v = (x.to("cuda", dtype).requires_grad_() for x in (q, k, v))
    bias = bias_of(*(x.cuda() for x in hidden), 32, SHARING, dtype)

    def gradients() -> list[torch.Tensor]:
        out = attend_samples(q, k, v, bias) if of == "samples" else attend_prompts(q, k, v)
        return list(torch.autograd.grad(out.square().sum(), (q, k, v)))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        first = gradients()
    assert not [event.key for event in trace.key_averages() if "cudnn" in event.key.lower()]
    others = [gradients() for _ in range(8)]
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


def test_a_captured_step_sees_what_its_bias_says_when_it_is_replayed():
    q, k, v, hidden_UP, _ = (x.cuda() for x in arguments(4, 8, 1, 23))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    at, columns = torch.zeros(1, dtype=torch.long, device="cuda"), torch.arange(23, device="cuda")

    def step() -> torch.Tensor:
        return attend_samples(q, k, v, bias_of(hidden_UP, (columns > at)[None], 8, SHARING, q.dtype))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = step()
    for place in (0, 7, 22):
        at.fill_(place)
        graph.replay()
        assert torch.equal(out, step())
