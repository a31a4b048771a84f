"""What tests of interpreted kernels share."""

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers():
    torch.manual_seed(0)


@pytest.fixture
def in_bounds(monkeypatch):
    """In Triton's interpreter, a kernel that reads or writes where none of its arguments is fails. On a GPU
    this says nothing."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    builder, executor = interpreter.interpreter_builder, interpreter.GridExecutor
    arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    ranges = []

    def remember(self, args, kwargs):
        found = arguments(self, args, kwargs)
        tensors = [each for each in found[0] if isinstance(each, torch.Tensor)]
        ranges[:] = [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors]
        return found

    def check(pointers, mask):
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        inside = [(at >= begin) & (at < end) for begin, end in ranges]
        assert np.any(inside, axis=0).all(), "a kernel reads or writes outside of its arguments"

    def checked_load(pointers, mask, *rest):
        check(pointers, mask)
        return load(pointers, mask, *rest)

    def checked_store(pointers, value, mask, *rest):
        check(pointers, mask)
        return store(pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", remember)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
