"""The machine under the paged engine: whether a model can run, memory, and captured steps.

`Cuda` is a GPU. Tests have another machine, on which Triton's interpreter runs the same kernels on the CPU.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from qerl.gpu_memory import free_bytes, total_bytes
from qerl.rollout.paged.binding import why_not
from qerl.rollout.paged.limits import CACHE_SHARE, cache_budget
from qerl.rollout.paged.memory import Memory, SwitchedMemory


class Graphs(Protocol):
    """Captured steps that share one pool of memory and never run at the same time."""

    def capture(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Capture the launches of ``run``, and return a function that replays them."""


class Machine(Protocol):
    """A machine that the engine runs on."""

    def why_not(self, model: nn.Module) -> str | None:
        """Return why this model cannot run here; None if it can."""

    def cache_bytes(self, model: nn.Module, freed: int = 0) -> int:
        """Return the bytes that the KV cache may take.

        Args:
            model: The model that shares the memory.
            freed: Bytes that are held now and will be free by then.
        """

    def memory(self, size: int) -> Memory:
        """Return a range of ``size`` bytes at fixed addresses."""

    def graphs(self) -> Graphs:
        """Return a new pool for captured steps."""


@dataclass(frozen=True)
class Cuda:
    """The current GPU.

    Attributes:
        cache_share: Share of the memory left by the model and its training state that the KV cache may take.
    """

    cache_share: float = CACHE_SHARE

    def why_not(self, model: nn.Module) -> str | None:
        """See `Machine.why_not`."""
        return why_not(model)

    def cache_bytes(self, model: nn.Module, freed: int = 0) -> int:
        """Return a share of the memory that a run leaves, or of the memory now free if that is less."""
        torch.cuda.empty_cache()
        gpu = torch.device("cuda", torch.cuda.current_device())
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        free = free_bytes(gpu, freed)
        return cache_budget(total_bytes(gpu), held, trained, free, self.cache_share)

    def memory(self, size: int) -> Memory:
        """Return memory that can be given up and taken back."""
        return SwitchedMemory(size)

    def graphs(self) -> Graphs:
        """Return a new pool of CUDA graphs."""
        return CudaGraphs()


class CudaGraphs:
    """CUDA graphs that share one pool of graph memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """See `Graphs.capture`. The first run, which compiles every kernel, happens outside the graph."""
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                run()
        finally:  # what comes next may reuse what an interrupted run still writes to
            torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's watchdog asks for events.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the capture stream of one GPU; torch's own default belongs to the GPU that captured first."""
    return torch.cuda.Stream(device)
