"""Log-probabilities and gradients of arbitrary sequences under an arbitrary loss, from plain Python.

`LossDriver` is the update without a trainer: it takes sequences of any length with a loss of
`qerl.update.losses`, and gives log-probabilities, the loss, and gradients in `.grad`; the optimizer is the
caller's. It is built from the parts of GRPO's update. Sequences with a common prefix are found
(`qerl.update.prefixes`) and share a packed row, which holds the prefix once (`qerl.update.packed_row`). A row
with more than `tokens_per_forward` tokens is divided into chunks, each run forward and backward before the
next (`qerl.update.chunks`). The head never holds the logits of a row (`qerl.update.head`). When memory runs
out, the call is repeated with smaller chunks (`qerl.update.chunks.MemoryRetry`).

Sequences whose loss has no gradient, because all advantages are 0, run forward only.

The loss of a sequence depends on that sequence alone and is a sum, so any division of the data gives the same
gradient up to rounding. The same call gives the same bits; two calls with half of the data each do not give
the bits of one call, because they add in another order. Given up: rows cut such that each half is a row of
its own, which would compute a shared prompt in both.

    driver = LossDriver(model)
    output = driver.forward_backward(data, "cross_entropy")
    optimizer.step()
    optimizer.zero_grad()

Legend: B data, T tokens of a datum, K targets of a position, L tokens of a packed row, D hidden size, P pairs
of a position in the row and a target.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model, eval_mode, train_mode
from qerl.families.sizes import positions_of
from qerl.fp4.linear import dense_weights_kept
from qerl.update.chunks import MemoryRetry
from qerl.update.head import Head, head_backward, hidden_states, score, target_logps
from qerl.update.kernels import use_kernels
from qerl.update.losses import TARGETS, Datum, Loss, LossOutput, find_loss
from qerl.update.packed_row import IGNORE, Lengths, PackedRow, RowBuilder
from qerl.update.path import UpdatePath
from qerl.update.prefixes import shared_prefixes
from qerl.update.row_check import check_packed_row

logger = logging.getLogger(__name__)

CPU_TOKENS = 512
"""Default limit of tokens per forward pass on a CPU.

On a CPU, attention computes all pairs of tokens of a packed row, across sequences too, and no error comes in
time when memory runs out. With SmolLM2-135M, 256 sequences that are 2,240 tokens joined took 23 s of one core
and 3.0 GB in chunks of 512, 30 s and 4.6 GB in chunks of 1024, 39 s and 7.0 GB whole.
"""

_ADVICE = "send shorter sequences, turn on model.gradient_checkpointing_enable() or take a smaller LoRA rank"


@dataclass(frozen=True)
class _Pass:
    """The inputs of a call, common to all of its chunks."""

    data: Sequence[Datum]
    lengths: Lengths
    loss: Loss
    config: Mapping[str, float]

    def evaluate(self, at: int, logps: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return the loss of a datum and its gradient with respect to the log-probabilities.

        Raises:
            QeRLError: The loss or its gradient is not finite.
        """
        value, gradient = self.loss(logps, self.data[at], self.config)
        if not (math.isfinite(value) and gradient.isfinite().all()):
            raise QeRLError(
                f"Datum {at} of {len(self.data)}: its loss is {value:g}, or its gradient is not finite; "
                "check that its logprobs and the model's own are finite."
            )
        return value, gradient


class LossDriver:
    """Forward and backward passes of a model over sequences with a loss.

    Args:
        model: A decoder-only transformer on its training device, with its adapter if it has one. On a GPU it
            is switched to the kernels of the update; a layer that gets its adapter later keeps its old code.
        tokens_per_forward: Largest number of tokens in one forward pass; None is no limit on a GPU, until
            memory runs out, and `CPU_TOKENS` on a CPU.
        advice: What to do about a single sequence that does not fit in memory; part of an error message.
        recompute_every_layer: Turns on recomputation of every layer and returns True if it was off; tried
            first when memory runs out.

    Attributes:
        update_path: Which parts of the model run on this project's kernels, and why others do not.
        retry: Divides calls into chunks, and halves the chunks when memory runs out. Forward passes without
            gradients have a limit of their own, never above this one: they keep nothing for backward, so
            running out of memory in one of them does not lower the limit of training.

    Raises:
        QeRLError: Sequences have other log-probabilities in a packed row than alone.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokens_per_forward: int | None = None,
        advice: str = _ADVICE,
        recompute_every_layer: Callable[[], bool] = lambda: False,
    ) -> None:
        if tokens_per_forward is not None and tokens_per_forward < 1:
            raise QeRLError(f"tokens_per_forward is {tokens_per_forward}; set at least 1, or None.")
        self._model, self._base = model, base_model(model)
        self.update_path: UpdatePath = use_kernels(self._base)
        if tokens_per_forward is None and self._base.device.type == "cpu":
            tokens_per_forward = CPU_TOKENS
        self.retry = MemoryRetry(
            tokens_per_forward, recompute_every_layer=recompute_every_layer, advice=advice
        )
        self._forward_retry = MemoryRetry(tokens_per_forward, advice=advice)
        self._calls = 0
        with self._dense_weights_kept():
            check_packed_row(model, lambda row: score(model, self._base, row, self.update_path.by_segment)[0])
        if self.update_path.is_slow:
            logger.warning(self.update_path.sentence())

    @property
    def tokens_per_forward(self) -> int | None:
        """The current limit of tokens per forward pass; lowered when memory runs out."""
        return self.retry.max_tokens

    def forward_backward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """Add the gradients of a loss to `.grad` of every parameter that trains.

        Args:
            data: At least one sequence; each may have a length of its own.
            loss: A name in `qerl.update.losses.LOSSES`.
            config: Options of the loss.

        Returns:
            Log-probabilities under the model as it was, and the loss.

        Raises:
            QeRLError: No parameter trains, the data are invalid, the loss is not finite, or one sequence
                alone does not fit in memory. Gradients are then unchanged, as after any other exception.
        """
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        if not trained:
            raise QeRLError("No parameter of the model trains; give it an adapter, or call forward.")
        one = self._checked(data, loss, config)
        with (
            self._dense_weights_kept(),
            train_mode(self._model),
            torch.enable_grad(),
            _new_gradients(trained) as undo,
        ):
            return self._retried(self.retry, one, undo)

    def forward(
        self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None = None
    ) -> LossOutput:
        """Return what `forward_backward` returns, without gradients; arguments and errors are the same, but
        no parameter has to train."""
        one = self._checked(data, loss, config)
        self._forward_retry.lower_to(self.retry.max_tokens)
        with self._dense_weights_kept(), eval_mode(self._model), torch.no_grad():
            return self._retried(self._forward_retry, one, lambda: None)

    def _checked(self, data: Sequence[Datum], loss: str, config: Mapping[str, float] | None) -> _Pass:
        """Check the arguments of a call, and find the shared prefixes of its data."""
        found, config = find_loss(loss), dict(config or {})
        found.check_config(loss, config)
        if not data:
            raise QeRLError("There are no data; send at least one sequence.")
        decoder = self._base.config.get_text_config(decoder=True)
        here = [Datum(one.tokens.cpu(), {name: x.cpu() for name, x in one.inputs.items()}) for one in data]
        for at, datum in enumerate(here):
            try:
                found.check(loss, datum, config)
                _check_model(datum, decoder)
            except QeRLError as error:
                raise QeRLError(f"Datum {at} of {len(data)}: {error}") from None
        grouping = shared_prefixes([datum.tokens for datum in here])
        own_B = [len(datum.tokens) - n for datum, n in zip(here, grouping.shared_B, strict=True)]
        return _Pass(here, Lengths(own_B, grouping.shared_B, grouping.group_B), found, config)

    def _retried(self, retry: MemoryRetry, one: _Pass, undo: Any) -> LossOutput:
        self._calls += 1
        return retry.run(self._calls, lambda: self._run(retry, one), undo)

    def _run(self, retry: MemoryRetry, one: _Pass) -> LossOutput:
        """Run all chunks of a call."""
        logprobs = [torch.empty(0)] * len(one.data)
        pulling: list[int] = []
        quiet: list[int] = []
        for at, datum in enumerate(one.data):
            (pulling if one.loss.pulls(datum) else quiet).append(at)
        total = 0.0
        for rows, with_graph in ((pulling, torch.is_grad_enabled()), (quiet, False)):
            for chunk in retry.split(rows, one.lengths) if rows else []:
                retry.note_forward(chunk, one.lengths)
                with torch.set_grad_enabled(with_graph):
                    total += self._run_chunk(one, chunk, logprobs)
        return LossOutput(logprobs, {"loss:sum": total})

    def _run_chunk(self, one: _Pass, chunk: list[int], logprobs: list[torch.Tensor]) -> float:
        """Run some data forward and, if gradients are enabled, backward; return the sum of their losses."""
        row, places = _join(one, chunk, self._base.device)
        hidden_LD = hidden_states(self._base.base_model, row, self.update_path.by_segment)
        head = Head.of(self._base)
        targets = [one.data[at].inputs[TARGETS].long() for at in chunk]
        position_P = torch.cat([_like(*pair).flatten() for pair in zip(places, targets, strict=True)])
        target_P = torch.cat([target.flatten() for target in targets])
        logps_P = target_logps(head, hidden_LD.detach(), position_P, target_P).cpu()
        total, gradients = 0.0, []
        of_data = logps_P.split([target.numel() for target in targets])
        for at, target, logps in zip(chunk, targets, of_data, strict=True):
            logprobs[at] = logps.view(target.shape).clone()
            value, gradient = one.evaluate(at, logprobs[at])
            total += value
            gradients.append(gradient.flatten())
        if torch.is_grad_enabled():
            gradient_P = torch.cat(gradients)
            gradient_LD = head_backward(head, hidden_LD, position_P, target_P, gradient_P)
            if hidden_LD.requires_grad:  # False where only the head trains
                hidden_LD.backward(gradient_LD)
        return total

    def _dense_weights_kept(self) -> contextlib.AbstractContextManager[None]:
        """On a CPU, dequantize each weight once per call instead of twice per layer."""
        on_cpu = self._base.device.type == "cpu"
        return dense_weights_kept(self._model) if on_cpu else contextlib.nullcontext()


@contextlib.contextmanager
def _new_gradients(trained: list[nn.Parameter]) -> Iterator[Any]:
    """Collect the block's gradients apart; add them to the former ones at its end, or drop them if it raises.

    Yields:
        A function that drops what the block has computed so far.
    """
    before = [parameter.grad for parameter in trained]

    def put(gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient

    undo = partial(put, [None] * len(trained))
    undo()
    try:
        yield undo
    except BaseException:
        put(before)
        raise
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    put([new if old is None else old.add_(new) for old, new in zip(before, found, strict=True)])


def _join(one: _Pass, chunk: list[int], device: torch.device) -> tuple[PackedRow, list[torch.Tensor]]:
    """Join some data into one row; also return for each datum the positions [T] of its tokens in the row."""
    builder = RowBuilder()
    groups: dict[int, list[int]] = {}
    for at in chunk:
        groups.setdefault(one.lengths.group_B[at], []).append(at)
    places: dict[int, torch.Tensor] = {}
    for members in groups.values():
        n = one.lengths.shared_B[members[0]]
        shared = builder.begin_group(one.data[members[0]].tokens[:n])
        for at in members:
            tokens = one.data[at].tokens[n:]
            own = builder.add_branch(at, tokens, torch.full_like(tokens, IGNORE))
            places[at] = torch.cat([torch.arange(part.start, part.stop) for part in (shared, own)])
    return builder.finish(device), [places[at] for at in chunk]


def _like(place_T: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Expand positions to the shape of their targets, [T] or [T, K]."""
    return place_T if targets.ndim == 1 else place_T[:, None].expand(targets.shape)


def _check_model(datum: Datum, config: Any) -> None:
    """Raise if a datum has more tokens than the model takes, or ids outside of its vocabulary.

    Raises:
        QeRLError: The message begins with what is wrong; the caller puts the datum's index in front.
    """
    longest = positions_of(config)
    if longest and len(datum.tokens) > longest:
        raise QeRLError(f"it has {len(datum.tokens)} tokens and the model takes {longest}; shorten it.")
    for role, ids in (("tokens", datum.tokens), (TARGETS, datum.inputs[TARGETS])):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            raise QeRLError(
                f"{role} have the id {low if low < 0 else high}, and the model knows 0 to "
                f"{config.vocab_size - 1}; use its tokenizer."
            )
