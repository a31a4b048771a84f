"""The adapters that clients train, by model id: parameters, gradients, optimizer and snapshots of each.

One adapter is used at a time. Its FP32 matrices, their gradients and AdamW's moments, 16 bytes per parameter,
are then on the base's device; the most recently used others stay there too, and the rest wait in the host's
memory.

A snapshot is the state of a model for a sampler, copied on write. Until its model changes, it shares the
model's parameters; just before they change they are copied to the host, once for all samplers of that state,
where the copy waits until it is sampled from. A snapshot without a sampler is not copied.
"""

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from qerl.errors import QeRLError
from qerl_serve.seats import Matrices, Seats, Shape
from qerl_serve.types import AdamParams

HOST = torch.device("cpu")


@dataclass(eq=False)
class Snapshot:
    """The policy of a model at one moment.

    Attributes:
        shape, matrices: Its adapter.
        seed: Seed of its model.
        steps: Optimizer steps that its model had taken.
        number: Unique in this process.
    """

    shape: Shape
    matrices: Matrices
    seed: int
    steps: int
    number: int = field(default_factory=count().__next__)

    def on(self, device: torch.device) -> Matrices:
        """Return the matrices on a device, copied if they are elsewhere."""
        return {name: _parameter(matrix.detach().to(device)) for name, matrix in self.matrices.items()}

    def keep(self) -> None:
        """Copy the matrices to the host, because their model is about to change them."""
        self.matrices = {
            name: _parameter(matrix.detach().to(HOST, copy=True)) for name, matrix in self.matrices.items()
        }


class TrainedAdapter:
    """A client's adapter with its gradients and its AdamW optimizer.

    Args:
        shape: Rank and layers of the adapter.
        matrices: Its parameters, which are trained in place.
        seed: Seed of its initial weights.

    Attributes:
        shape, matrices, seed: As given.
        steps: Optimizer steps taken.
        optimizer: AdamW over the matrices in FP32, with torch's own arithmetic.
    """

    def __init__(self, shape: Shape, matrices: Matrices, seed: int) -> None:
        self.shape, self.matrices, self.seed = shape, matrices, seed
        self.steps = 0
        self._bytes = sum(matrix.nbytes for matrix in matrices.values())
        self.optimizer = torch.optim.AdamW(matrices.values(), lr=0.0)
        self._snapshot: weakref.ref[Snapshot] | None = None

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the present state; the same object until the adapter changes."""
        found = self._snapshot() if self._snapshot is not None else None
        if found is None:
            found = Snapshot(self.shape, self.matrices, self.seed, self.steps)
            self._snapshot = weakref.ref(found)
        return found

    def step(self, adam: AdamParams) -> dict[str, float]:
        """Take one optimizer step, which consumes the gradients; return the norm of all gradients before
        clipping, and the number of steps.

        Raises:
            QeRLError: There are no gradients, one is not finite, or the step would make weights that are not
                finite. The weights are unchanged then; the gradients are dropped, because no step can be
                taken with them.
        """
        gradients = [matrix.grad for matrix in self.matrices.values() if matrix.grad is not None]
        if not gradients:
            raise QeRLError(
                "There are no gradients, so no step was taken; call forward_backward before each optim_step."
            )
        norm = get_total_norm(gradients)
        if not bool(norm.isfinite()):
            self.drop_gradients()
            raise QeRLError(
                "The gradients are not finite, so no step was taken and they were dropped; look at the "
                "advantages and log-probabilities that were sent."
            )
        if adam.grad_clip_norm > 0:
            clip_grads_with_norm_(self.matrices.values(), adam.grad_clip_norm, norm)
        self.optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._before_change()
        matrices = [matrix.detach().clone() for matrix in self.matrices.values()]
        state = {
            matrix: {kind: value.clone() for kind, value in found.items()}
            for matrix, found in self.optimizer.state.items()
        }
        finite = False
        try:
            self.optimizer.step()
            finite = bool(get_total_norm(self.matrices.values()).isfinite())
        finally:
            self.drop_gradients()
            if not finite:
                self._take_back(matrices, state)
        if not finite:
            raise QeRLError(
                "The step would have made weights whose norm is not finite, so it was not taken and the "
                "gradients were dropped; look at learning_rate, weight_decay and eps."
            )
        self.steps += 1
        return {"grad_norm": float(norm), "optim_steps": float(self.steps)}

    @torch.no_grad()
    def _take_back(
        self, matrices: Sequence[torch.Tensor], state: dict[torch.Tensor, dict[str, torch.Tensor]]
    ) -> None:
        """Restore the matrices and the optimizer's state from before a step."""
        for matrix, before in zip(self.matrices.values(), matrices, strict=True):
            matrix.copy_(before)
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def drop_gradients(self) -> bool:
        """Drop the gradients; return True if there were any."""
        found = any(matrix.grad is not None for matrix in self.matrices.values())
        for matrix in self.matrices.values():
            matrix.grad = None
        return found

    @torch.no_grad()
    def load(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor], steps: int
    ) -> None:
        """Replace the state; gradients are dropped.

        Args:
            weights: New matrices, with the names and shapes of the present ones.
            moments: From :meth:`moments`; empty for an optimizer that has not stepped.
            steps: Optimizer steps taken up to that state.

        Raises:
            QeRLError: The state is not that of an adapter of this shape; nothing has changed then.
        """
        self._check(weights, moments)
        states: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for name, moment in moments.items():
            of, _, kind = name.rpartition("/")
            matrix = self.matrices[of]
            device = HOST if kind == "step" else matrix.device  # where AdamW keeps them
            states.setdefault(matrix, {})[kind] = moment.to(device, copy=True)
        self._before_change()
        for name, matrix in self.matrices.items():
            matrix.copy_(weights[name])
        self.drop_gradients()
        self.optimizer.state.clear()
        self.optimizer.state.update(states)
        self.steps = steps

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer's state by "matrix/kind"; empty before the first step."""
        return {
            f"{name}/{kind}": value
            for name, matrix in self.matrices.items()
            for kind, value in self.optimizer.state.get(matrix, {}).items()
        }

    def move(self, device: torch.device) -> None:
        """Move matrices, gradients and moments to a device; AdamW keeps its counts of steps on the host."""
        for matrix in self.matrices.values():
            matrix.data = matrix.data.to(device)
            if matrix.grad is not None:
                matrix.grad = matrix.grad.to(device)
            state = self.optimizer.state.get(matrix, {})
            for kind in state.keys() - {"step"}:
                state[kind] = state[kind].to(device)

    @property
    def bytes(self) -> int:
        """Bytes of matrices, gradients and moments."""
        first = next(iter(self.matrices.values()))
        return self._bytes * (1 + (first.grad is not None) + 2 * (first in self.optimizer.state))

    def _check(self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
        """Raise if a state does not fit this adapter."""
        shapes = {name: matrix.shape for name, matrix in self.matrices.items()}
        of_moments = {
            f"{name}/{kind}": torch.Size() if kind == "step" else shape
            for name, shape in shapes.items()
            for kind in ("step", "exp_avg", "exp_avg_sq")
        }
        for what, found, expected in (
            ("weights", weights, shapes), ("moments of the optimizer", moments, of_moments),
        ):  # fmt: skip
            if not found and what != "weights":
                continue
            for name in sorted(found.keys() | expected.keys()):
                shape = tuple(found[name].shape) if name in found else None
                wanted = tuple(expected[name]) if name in expected else None
                if shape != wanted:
                    raise QeRLError(
                        f"The saved {what} have {_shown(shape)} for {name}, but this model has "
                        f"{_shown(wanted)}; load a checkpoint that was trained on this base."
                    )

    def _before_change(self) -> None:
        held = self._snapshot() if self._snapshot is not None else None
        if held is not None:
            held.keep()
        self._snapshot = None


class Adapters:
    """All adapters of a server, by the ids of their models.

    Args:
        seats: Seats of the base.
        max_adapters: Maximum number of adapters.
        resident: Number of adapters that stay on the base's device between uses, including the one in use.
    """

    def __init__(self, seats: Seats, max_adapters: int, resident: int) -> None:
        self._seats, self._max_adapters, self._resident = seats, max_adapters, max(1, resident)
        self._by_id: dict[str, TrainedAdapter] = {}
        self._on_device: OrderedDict[str, TrainedAdapter] = OrderedDict()  # the last used at the end

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._by_id

    @property
    def resident(self) -> int:
        """Number of adapters on the base's device."""
        return len(self._on_device)

    @property
    def bytes(self) -> int:
        """Bytes of all adapters with gradients and moments, wherever they are."""
        return sum(adapter.bytes for adapter in self._by_id.values())

    def create(self, model_id: str, shape: Shape, seed: int) -> TrainedAdapter:
        """Create and return a fresh adapter.

        Raises:
            QeRLError: The server is full, the id is taken, or this model has no adapters of that shape.
        """
        if model_id in self._by_id:
            raise QeRLError(f"There is a model {model_id} already; ask for another id.")
        if len(self._by_id) >= self._max_adapters:
            raise QeRLError(
                f"This server has {len(self._by_id)} models, which is its limit; end a session that trains "
                "one, or start the server with a larger --max_models."
            )
        self._seats.check(shape)
        adapter = TrainedAdapter(shape, self._seats.fresh(shape, seed), seed)
        self._by_id[model_id] = adapter
        self._touch(model_id, adapter)
        return adapter

    def get(self, model_id: str) -> TrainedAdapter:
        """Return an adapter, on whichever device it is.

        Raises:
            QeRLError: The id is unknown.
        """
        if model_id not in self._by_id:
            raise QeRLError(
                f"There is no model {model_id} on this server; it may have expired with its session: create "
                "a new one, from saved weights if there are any."
            )
        return self._by_id[model_id]

    def use(self, model_id: str) -> TrainedAdapter:
        """Move an adapter to the base's device and return it.

        Raises:
            QeRLError: The id is unknown.
        """
        adapter = self.get(model_id)
        self._touch(model_id, adapter)
        adapter.move(self._seats.device)
        return adapter

    def drop(self, model_id: str) -> None:
        """Drop an adapter; its snapshots stay.

        Raises:
            QeRLError: The id is unknown.
        """
        self.get(model_id)
        del self._by_id[model_id]
        self._on_device.pop(model_id, None)

    def _touch(self, model_id: str, adapter: TrainedAdapter) -> None:
        self._on_device[model_id] = adapter
        self._on_device.move_to_end(model_id)
        while len(self._on_device) > self._resident:
            self._on_device.popitem(last=False)[1].move(HOST)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else f"the shape {list(shape)}"


def _parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
