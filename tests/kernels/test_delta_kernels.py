"""The kernels of the gated delta rule against their definition in torch, in FP64.

They run on a GPU or in Triton's interpreter. Each case draws random inputs; what is written is poisoned.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from qerl.kernels import delta_kernels, delta_rule, delta_scan
from qerl.kernels.delta_rule import chunked_delta_rule
from qerl.kernels.delta_scan import CHUNK, Chunks, Local
from tests.support.kernels import DEVICE, GPU, error, poison

pytestmark = pytest.mark.usefixtures("in_bounds")
EXACT = 3e-5 if GPU else 2e-6
"""Of products with 16 binary digits; the interpreter's have 24."""
GRADIENTS = 1e-3 if GPU else EXACT
"""Where torch multiplies in TF32 behind the kernels."""


@pytest.fixture(autouse=True)
def poisoned():
    """Where memory is not written yet, torch puts NaN."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def draw(*shape):
    return torch.randn(*shape, device=DEVICE)


def local_of(chunks, key_heads, heads, size):
    """Numbers of the size that the rule makes of its inputs."""
    unit = [torch.nn.functional.normalize(draw(chunks, key_heads, CHUNK, size), dim=-1) for _ in range(2)]
    sums = (-torch.rand(chunks, heads, CHUNK, device=DEVICE) * 0.1).cumsum(-1)
    squares = (draw(chunks, heads, CHUNK, CHUNK).tril() * CHUNK**-0.5 for _ in range(2))
    return Local(*unit, sums, *squares)


SHAPES = [  # lengths, key heads, value heads, K, E
    ([CHUNK + 9, 1, 3 * CHUNK, 20], 2, 4, 5, 7),
    ([70], 1, 3, 32, 48),
    ([5, 2 * CHUNK], 2, 2, 48, 80),
]


@pytest.mark.parametrize(("lengths", "key_heads", "heads", "key_size", "size"), SHAPES)
@pytest.mark.parametrize("begins", [False, True])
def test_a_pass_and_its_gradients_are_those_of_the_loop(lengths, key_heads, heads, key_size, size, begins):
    chunks = Chunks.of([sum(lengths[:n]) for n in range(len(lengths) + 1)], torch.device(DEVICE))
    count = chunks.first[-1]
    local = local_of(count, key_heads, heads, key_size)
    v, dout = draw(count, CHUNK, heads, size), draw(count, CHUNK, heads, size)
    states = draw(len(lengths), heads, key_size, size) if begins else None
    exact = Local(*(x.double() for x in local))
    wide = None if states is None else states.double()
    *wanted, kept = delta_scan.scan(exact, v.double(), wide, chunks, keep=True)
    *found, mine = delta_kernels.scan(local, v, states, chunks, keep=True)
    for one, other in zip([*found, *mine], [*wanted, *kept], strict=True):
        assert error(one, other) < EXACT
    *again, nothing = delta_kernels.scan(local, v, states, chunks, keep=False)
    assert nothing is None and all(map(torch.equal, again, found))
    pulls = delta_kernels.scan_backward(local, dout, states, chunks)
    for one, other in zip(pulls, delta_scan.scan_backward(exact, dout.double(), wide, chunks), strict=True):
        assert error(one, other) < EXACT


def test_the_inverse_keeps_its_digits_where_keys_are_alike():
    """Of all keys equal the powers of the matrix have numbers of 18 digits; its inverse has ones."""
    alike = torch.full((CHUNK, CHUNK), 0.999, device=DEVICE)
    system = torch.stack([draw(CHUNK, CHUNK) * 0.3, alike, torch.zeros_like(alike)])
    system = (system.tril(-1) + poison(CHUNK, CHUNK).triu())[:, None].contiguous()  # the rest is not read
    found = delta_kernels.inverse(system)
    one = torch.eye(CHUNK, dtype=torch.float64, device=DEVICE)
    wanted = torch.linalg.solve_triangular(
        system.tril(-1).nan_to_num().double(), one, upper=False, unitriangular=True
    )
    for mine, other in zip(found, wanted, strict=True):
        assert error(mine, other) < 1e-5


@pytest.mark.parametrize("bound", [delta_rule.WORKING_BYTES, 1])
def test_the_rule_on_the_kernels_is_the_rule(monkeypatch, bound):
    """All of it, whose parts the other tests have; also by one key head at a time."""
    monkeypatch.setattr(delta_rule, "WORKING_BYTES", bound)
    offsets, key_heads, heads, size = [0, 70, 75], 2, 4, 16
    tokens = draw(75, key_heads, size), draw(75, key_heads, size), draw(75, heads, size)
    gates = -torch.rand(75, heads, device=DEVICE) * 0.1, torch.rand(75, heads, device=DEVICE)
    inputs = [x.requires_grad_() for x in (*tokens, *gates, draw(2, heads, size, size))]
    pulls = draw(75, heads, size), draw(2, heads, size, size)

    def run(dtype):
        *rest, initial = (x.to(dtype) for x in inputs)
        results = chunked_delta_rule(*rest, offsets, initial)
        pulled = [x.to(dtype) for x in pulls]
        return [*results, *torch.autograd.grad(results, inputs, pulled)]

    wanted = run(torch.float64)
    if not GPU:
        monkeypatch.setattr(delta_rule, "_steps", lambda _: delta_kernels)
    for number, (one, other) in enumerate(zip(run(torch.float32), wanted, strict=True)):
        assert error(one.detach(), other.detach()) < (EXACT if number < 2 else GRADIENTS)


def test_few_heads_have_programs_for_each_multiprocessor_and_many_have_wide_ones():
    device = torch.device(DEVICE)
    many = 10_000
    assert delta_kernels.block_e(many, 128, device) == 32
    assert delta_kernels.block_e(1, 128, device) == 16
    assert delta_kernels.block_e(many, 7, device) == 16
