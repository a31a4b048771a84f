"""What the paged engine asks of the machine: whether a model runs, memory, and steps that are replayed.

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
    """Recorded steps that share one pool of memory, none of which runs at the same time as another."""

    def capture(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """Record what ``run`` launches; the result launches it again."""


class Machine(Protocol):
    """What the engine runs on."""

    def why_not(self, model: nn.Module) -> str | None:
        """Why this model cannot run here; None where it can."""

    def cache_bytes(self, model: nn.Module, freed: int = 0) -> int:
        """Bytes that keys and values may take.

        Args:
            model: The model beside which they lie.
            freed: Bytes that are held now and will be free by then.
        """

    def memory(self, size: int) -> Memory:
        """A range of ``size`` bytes at fixed addresses."""

    def graphs(self) -> Graphs:
        """A new pool for recorded steps."""


@dataclass(frozen=True)
class Cuda:
    """The current GPU.

    Attributes:
        cache_share: Share of the memory beside the model and its training state that keys and values may
            take.
    """

    cache_share: float = CACHE_SHARE

    def why_not(self, model: nn.Module) -> str | None:
        """See `Machine.why_not`."""
        return why_not(model)

    def cache_bytes(self, model: nn.Module, freed: int = 0) -> int:
        """A share of what a run leaves, or of what is free now if that is less."""
        torch.cuda.empty_cache()
        gpu = torch.device("cuda", torch.cuda.current_device())
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        free = free_bytes(gpu, freed)
        return cache_budget(total_bytes(gpu), held, trained, free, self.cache_share)

    def memory(self, size: int) -> Memory:
        """Memory that can be given up and taken back."""
        return SwitchedMemory(size)

    def graphs(self) -> Graphs:
        """CUDA graphs."""
        return CudaGraphs()


class CudaGraphs:
    """CUDA graphs that share one pool of graph memory."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None], device: torch.device) -> Callable[[], None]:
        """See `Graphs.capture`. The first run, which compiles every kernel, happens outside the graph."""
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's watchdog asks for events.
        with torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which steps of one GPU are captured; torch's own is of the GPU that captured first."""
    return torch.cuda.Stream(device)
