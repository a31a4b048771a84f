"""A step for which the GPU's memory does not suffice is redone in smaller chunks, and these do fit."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.update.chunks import MemoryRetry
from qerl.update.packed_row import Lengths

ROWS, DEPTH, SIZE = 8, 16, 2**22
LENGTHS = Lengths(own_B=[100] * ROWS, shared_B=[0] * ROWS, group_B=[0] * ROWS)


@pytest.fixture
def limit():
    """``limit(bytes)`` more than now may be allocated."""
    total = torch.cuda.get_device_properties(0).total_memory

    def set_limit(size: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)

    yield set_limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("fits, tokens", [(5, 400), (3, 200)])
def test_a_step_that_does_not_fit(limit, fits: int, tokens: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(SIZE, device="cuda", requires_grad=True)
    expected = torch.zeros_like(weight)

    def forward(rows: list[int]) -> torch.Tensor:
        total = torch.zeros(ROWS, 1, device="cuda")
        for row in rows:
            x = weight * (row + 1)
            for _ in range(DEPTH):
                x = (x * weight).sin()
            total = total.index_put((torch.tensor([row], device="cuda"),), x.sum())
        return total

    for row in range(ROWS):
        expected += torch.autograd.grad(forward([row]).sum(), weight)[0]

    retry = MemoryRetry()

    def update() -> None:
        for chunk in retry.split(list(range(ROWS)), LENGTHS):
            retry.note_forward(chunk, LENGTHS)
            forward(chunk).sum().backward()

    def undo_step() -> None:
        weight.grad = None

    kept_by_a_row = 2 * DEPTH * SIZE * 4  # 537 MB: every product and its sine, which the next product needs
    limit(fits * kept_by_a_row)
    retry.run(1, update, undo_step)
    assert retry.max_tokens == tokens
    error = (weight.grad - expected).norm() / expected.norm()
    assert error < 1e-5
