"""Division of an update into forward passes that fit in memory, and retry with smaller ones when it runs out.

Activations grow with the tokens of the packed row (`qerl.update.packed_row`), not with its samples: eight
short answers may take less memory than one long one. So the limit is a number of tokens. The samples of an
optimizer step are spread over as few chunks as hold them, balanced: the longest first, each into the chunk
that is lightest with it (longest processing time first, Graham 1969). A chunk computes a prompt once for all
of its samples of that group; groups are divided only if more chunks would be needed otherwise. Each chunk
runs forward and backward before the next, so that memory holds one at a time and nothing is computed twice.

A step's memory depends on the lengths of its samples, so a run may go well for hours before a batch does not
fit. Samples are kept; the update is repeated from its start (`MemoryRetry`): the gradients of the step so far
are dropped, since an interrupted backward pass has left partial sums in them, and every chunk runs again. The
first remedy drops the keys and values of samples that resume after the update, if there are any, at the cost
of another prefill; the second recomputes every layer for backward, if some kept their activations; the third
halves the tokens per forward pass. None changes a gradient. The latter two stay for the rest of the run, and
for later training by the same trainer, and are saved in checkpoints, so that a resumed run computes the same.

Given up: retries with several processes. A process that repeats its step would leave the others waiting in
their all-reduce, so the run ends with an error that says what to change. A repeated step draws new masks if
LoRA has dropout.

Legend: B samples.
"""

import gc
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from qerl.errors import QeRLError, first_line
from qerl.update.packed_row import Lengths

T = TypeVar("T")

LIMITS_FILE = "update_limits.json"

logger = logging.getLogger(__name__)

_ADVICE = (
    "lower max_completion_length, set gradient_checkpointing: true and with it "
    "gradient_checkpointing_kwargs: {offload: true}, or take a smaller lora_r"
)


def split_rows(rows: list[int], lengths: Lengths, max_tokens: int | None) -> list[list[int]]:
    """Spread samples over the fewest chunks found, the longest chunk first, so that memory runs out early.

    Args:
        rows: Samples to compute, in order.
        lengths: Lengths of all samples of the batch.
        max_tokens: Largest number of tokens in a chunk; a sample that has more is a chunk of its own. None
            is no limit.

    Returns:
        At least one chunk, each in the order of `rows`.
    """
    if max_tokens is None or lengths.tokens(rows) <= max_tokens:
        return [rows]
    alone = [[row] for row in rows if lengths.tokens([row]) > max_tokens]
    rest = [row for row in rows if lengths.tokens([row]) <= max_tokens]
    chunks = alone + (_balanced(rest, lengths, max_tokens) if rest else [])
    return sorted(chunks, key=lengths.tokens, reverse=True)


def _balanced(rows: list[int], lengths: Lengths, max_tokens: int) -> list[list[int]]:
    """Use the smallest number of chunks that fits, and with it keep the largest parts of groups together."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(lengths.group_B[row], []).append(row)
    together = [max(map(len, groups.values()))]
    while together[-1] > 1:
        together.append(-(-together[-1] // 2))
    halves = sum(lengths.own_B[row] > max_tokens / 2 for row in rows)  # no two of these fit together
    count = max(-(-lengths.tokens(rows) // max_tokens), halves)
    while True:
        for size in together:
            units = [group[at : at + size] for group in groups.values() for at in range(0, len(group), size)]
            chunks = _spread(units, lengths, count)
            if all(lengths.tokens(chunk) <= max_tokens for chunk in chunks):
                return [sorted(chunk) for chunk in chunks if chunk]
        count += 1


def _spread(units: list[list[int]], lengths: Lengths, count: int) -> list[list[int]]:
    """Put units of samples with one prompt, the longest first, into the chunk that is lightest with each."""
    chunks: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for unit in sorted(units, key=lengths.tokens, reverse=True):
        group, whole, shared = lengths.group_B[unit[0]], lengths.tokens(unit), lengths.shared_B[unit[0]]
        after = [
            tokens[at] + whole - shared * any(lengths.group_B[row] == group for row in chunk)
            for at, chunk in enumerate(chunks)
        ]
        lightest = after.index(min(after))
        tokens[lightest] = after[lightest]
        chunks[lightest] += unit
    return chunks


def refuse_memory_error(error: torch.AcceleratorError) -> None:
    """Raise if memory ran out outside of torch's allocator, for example while pinning CPU memory.

    Args:
        error: Any CUDA error; errors other than those of memory are ignored.

    Raises:
        QeRLError: Memory ran out.
    """
    if "out of memory" in str(error):
        raise QeRLError(
            "Memory ran out outside of torch's GPU allocator, most likely in CPU memory if layer inputs are "
            "offloaded (gradient_checkpointing_kwargs: {offload: true}); take shorter samples, or free CPU "
            f"memory ({first_line(error)})."
        ) from error


class MemoryRetry:
    """Runner of an update that repeats it when memory runs out.

    Args:
        max_tokens: Largest number of tokens per forward pass, None for no limit.
        processes: Number of processes of the run; with more than one nothing is repeated.
        recompute_every_layer: Turns on recomputation of every layer and returns True if it was off.
        make_room: Frees memory held outside of the update and returns True if there was any.
        checkpointing: `gradient_checkpointing_kwargs` of the run, repeated in the advice of messages.
        advice: What to do about a single sample that does not fit.

    Attributes:
        max_tokens: The current limit; lowered when memory runs out.
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        processes: int = 1,
        recompute_every_layer: Callable[[], bool] = lambda: False,
        advice: str = _ADVICE,
        checkpointing: Mapping[str, Any] | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.max_tokens = max_tokens
        self._processes, self._recompute = processes, recompute_every_layer
        self._advice, self._make_room = advice, make_room
        options = {**(checkpointing or {}), "every_n_layers": 1}
        self._every_layer = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
        self._lowered = self._recomputes = False
        self._newest = (0, 0)  # tokens and samples of the newest forward pass

    def lower_to(self, max_tokens: int | None) -> None:
        """Lower the limit to at most `max_tokens`; None changes nothing."""
        if max_tokens is not None:
            self.max_tokens = min(max_tokens, self.max_tokens or max_tokens)

    def split(self, rows: list[int], lengths: Lengths) -> list[list[int]]:
        """Divide samples into chunks that each fit one forward pass."""
        return split_rows(rows, lengths, self.max_tokens)

    def note_forward(self, rows: list[int], lengths: Lengths) -> None:
        """Record the samples of the forward pass that begins next."""
        self._newest = lengths.tokens(rows), len(rows)

    def run(self, step: int, update: Callable[[], T], undo: Callable[[], None]) -> T:
        """Run an update, repeat it until it fits in memory, and return its result.

        Args:
            step: Number of the optimizer step, from 1, for messages.
            update: Forward and backward passes of all of the step's samples, which it divides by `split`.
            undo: Drops the gradients that a failed attempt has left.

        Raises:
            QeRLError: One sample alone does not fit, there are several processes, or memory ran out outside
                of torch's allocator of the GPU.
        """
        while True:
            try:
                return update()
            except torch.OutOfMemoryError as error:
                self._lower_limits(step, error)
            except torch.AcceleratorError as error:
                refuse_memory_error(error)
                raise
            # Only here, with the exception gone, do the frames of the failed attempt release their tensors.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def save(self, folder: Path) -> None:
        """Write limits that differ from the settings into a checkpoint."""
        if self._lowered or self._recomputes:
            folder.mkdir(parents=True, exist_ok=True)
            limits = {
                "tokens_per_forward": self.max_tokens if self._lowered else None,
                "recompute_every_layer": self._recomputes,
            }
            (folder / LIMITS_FILE).write_text(json.dumps(limits), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Load the limits of a checkpoint; a lower setting stays."""
        file = folder / LIMITS_FILE
        if not file.is_file():
            return
        limits = json.loads(file.read_text(encoding="utf-8"))
        if limits["recompute_every_layer"]:
            self._recomputes = True
            self._recompute()
        found = limits["tokens_per_forward"]
        if found is not None and (self.max_tokens is None or found < self.max_tokens):
            self.max_tokens, self._lowered = found, True

    def _lower_limits(self, step: int, error: torch.OutOfMemoryError) -> None:
        """Make the next attempt take less memory.

        Raises:
            QeRLError: No remedy is left, or there are several processes.
        """
        if self._processes > 1:
            raise QeRLError(
                "A training step ran out of GPU memory; with several processes it is not redone: set "
                f"tokens_per_forward: {-(-self._newest[0] // 2)}, and gradient_checkpointing_kwargs: "
                f"{{{self._every_layer}}} if every_n_layers is larger."
            ) from error
        if self._make_room():
            logger.warning(
                "Out of GPU memory in step %d: it is redone from its start; keys and values of unfinished "
                "samples are dropped and computed again for the next rollout. If this happens often, set "
                "max_staleness: 0 or a lower tokens_per_forward.",
                step,
            )
        elif self._recompute():
            self._recomputes = True
            logger.warning(
                "Out of GPU memory in step %d: it is redone from its start, from now on with every layer "
                "recomputed; gradient_checkpointing_kwargs: {%s} sets that from the start.",
                step,
                self._every_layer,
            )
        else:
            self._halve(step, error)

    def _halve(self, step: int, error: torch.OutOfMemoryError) -> None:
        tokens, samples = self._newest
        half = -(-tokens // 2)
        if samples <= 1:
            raise QeRLError(
                f"A training step ran out of GPU memory with a single sample in it; {self._advice}."
            ) from error
        self.max_tokens, self._lowered = half, True
        logger.warning(
            "Out of GPU memory in step %d: it is redone from its start, from now on with at most %d instead "
            "of %d tokens in one forward pass; tokens_per_forward: %d sets that from the start.",
            step,
            half,
            tokens,
            half,
        )
