"""A machine without a GPU on which a captured step fails if its replay is not what was captured.

A CUDA graph holds addresses, sizes and numbers as they were when it was captured. Here a step is run instead
of replayed, and the run is recorded: every launch of a kernel and every operation of torch, with the place
and shape of each tensor and each number that they are given. A tensor that the step itself allocated is known
by its order, since a graph gives it the same memory each time.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from tests.support.machine import Forgetful

_WAITS = ("aten._local_scalar_dense.default", "aten.is_nonzero.default")


class Replaying(Forgetful):
    """See the module."""

    def graphs(self):
        return Replays()


class Replays:
    """Steps that are run, and compared with the run in which they were captured."""

    def capture(self, run, device):
        run()  # as outside of a graph, where kernels are compiled
        captured = _Record()
        captured.of(run)
        waits = [what for what, _ in captured.calls if what in _WAITS]
        assert not waits, f"{run.__self__} waits for the GPU while it is captured: {waits}"

        def replay():
            replayed = _Record(captured.calls)
            replayed.of(run)
            assert len(replayed.calls) == len(captured.calls)

        return replay


class _Record(TorchDispatchMode):
    """Records launches and operations while it is active, each before it runs.

    Args:
        expected: What they must be; None for anything.
    """

    _active: "_Record | None" = None

    def __init__(self, expected: list[tuple[str, Any]] | None = None) -> None:
        super().__init__()
        self._expected = expected
        self.calls: list[tuple[str, Any]] = []
        self._own: dict[int, str] = {}  # names of memory that was allocated meanwhile
        self._kept: list[torch.Tensor] = []  # so that no memory is given out twice

    def of(self, run):
        try:
            _Record._active = self
            with self:
                run()
        finally:
            _Record._active = None

    def add(self, what: str, given: Any) -> None:
        number, call = len(self.calls), (what, tree_map(self._described, given))
        if self._expected is not None:
            assert [call] == self._expected[number : number + 1], (
                f"call {number}, {what}, is not what was captured"
            )
        self.calls.append(call)

    def _described(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        address = value.untyped_storage().data_ptr()
        where = self._own.get(address, address), value.storage_offset()
        return where, tuple(value.shape), value.stride(), value.dtype

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = args, kwargs or {}
        if _Record._active is not self:  # inside of a kernel
            return function(*args, **given[1])
        self.add(str(function), given)
        known = {each.untyped_storage().data_ptr() for each in tree_leaves(given) if _is_tensor(each)}
        results = function(*args, **given[1])
        for result in filter(_is_tensor, tree_leaves(results)):
            address = result.untyped_storage().data_ptr()
            if address not in known:
                self._own[address] = f"new {len(self._kept)}"
                self._kept.append(result)
        return results


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


_launch = interpreter.GridExecutor.__call__


def _recorded(self, *args, **kwargs):
    record = _Record._active
    if record is None:
        return _launch(self, *args, **kwargs)
    grid = self.grid if not callable(self.grid) else "by its arguments"
    record.add(self.fn.__name__, (grid, args, kwargs))
    _Record._active = None
    try:
        return _launch(self, *args, **kwargs)
    finally:
        _Record._active = record


interpreter.GridExecutor.__call__ = _recorded
