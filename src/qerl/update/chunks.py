"""An update in forward passes that fit: its samples in chunks, and in smaller ones where memory runs out.

Activations grow with the tokens of the packed row (`qerl.update.packed_row`), not with its samples: eight
short answers may take less memory than one long one. So the limit is a number of tokens. The samples of an
optimizer step are spread over as few chunks as hold them, balanced: the longest first, each to the chunk that
it leaves the lightest (longest processing time first, Graham 1969). A chunk computes a prompt once for all of
its samples of that group; groups are divided as far as more chunks would be needed otherwise, no further.
Each chunk is run forward and backward before the next begins, so that one at a time is in memory, and nothing
is computed twice.

How much memory a step takes depends on how long its samples turned out, so a run may do well for hours and
then meet one batch that does not fit. What is sampled is kept; the update is done again from its start
(`MemoryRetry`): the gradients of the step so far are dropped, since a backward pass that was interrupted has
left a part of its own in them, and every chunk runs again: first without the keys and values of samples that
go on behind the update, if there are any, which cost a pass over them; then with every layer recomputed for
backward, where some kept their activations; then with half as many tokens per forward pass. None changes a
gradient. What the latter two changed stays for the rest of the run, and for whatever the same trainer trains
after it, and goes into its checkpoints, so that a resumed run computes what this one would have.

Given up: several processes. One that repeats its step would leave the others waiting in their all-reduce, so
there the error says what to change and ends the run. A repeated step draws new masks where LoRA has dropout.

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
    """Samples spread over the fewest chunks found, the longest chunk first, so that memory runs out early.

    Args:
        rows: Samples to compute, in order.
        lengths: Of all samples of the batch.
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
    """The smallest number of chunks that works, and for it the largest parts of groups that stay together."""
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
    """Units of samples with one prompt, the longest first, each in the chunk that is lightest with it."""
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
    """Say in a sentence that memory ran out outside of torch's allocator, as where the CPU's is pinned.

    Args:
        error: Any of CUDA's; others than those of memory are left alone.

    Raises:
        QeRLError: Memory ran out.
    """
    if "out of memory" in str(error):
        raise QeRLError(
            "Memory ran out outside of torch's allocator of the GPU: where inputs of layers wait in the "
            "CPU's memory (gradient_checkpointing_kwargs: {offload: true}), most likely there; take shorter "
            f"samples, or free some of that memory ({first_line(error)})."
        ) from error


class MemoryRetry:
    """Runs an update, again where memory ran out.

    Args:
        max_tokens: Largest number of tokens per forward pass, None for no limit.
        processes: Processes of the run; with more than one nothing is done again.
        recompute_every_layer: Turns that on and says whether it was off.
        make_room: Frees what others hold of the memory and says whether that was anything.
        checkpointing: `gradient_checkpointing_kwargs` of the run, in which it can be set.
        advice: What to do about one sample that does not fit by itself.

    Attributes:
        max_tokens: The limit that holds at present; lower once memory has run out.
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
        """The limit becomes at most this; None changes nothing."""
        if max_tokens is not None:
            self.max_tokens = min(max_tokens, self.max_tokens or max_tokens)

    def split(self, rows: list[int], lengths: Lengths) -> list[list[int]]:
        """Samples as chunks of which each fits one forward pass."""
        return split_rows(rows, lengths, self.max_tokens)

    def note_forward(self, rows: list[int], lengths: Lengths) -> None:
        """Note the samples of the forward pass that begins next."""
        self._newest = lengths.tokens(rows), len(rows)

    def run(self, step: int, update: Callable[[], T], undo: Callable[[], None]) -> T:
        """What an update returns, once it got through.

        Args:
            step: Number of the optimizer step, from 1, for messages.
            update: Forward and backward passes of all of the step's samples, which it divides by `split`.
            undo: Drops what an attempt that failed has left in gradients.

        Raises:
            QeRLError: One sample alone does not fit, there are several processes, or memory ran out that
                torch's allocator of the GPU does not hold.
        """
        while True:
            try:
                return update()
            except torch.OutOfMemoryError as error:
                self._lower_limits(step, error)
            except torch.AcceleratorError as error:
                refuse_memory_error(error)
                raise
            # Only here, with the exception gone, do the frames of the failed attempt let go of their tensors.
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
        """Take over the limits of a checkpoint, unless the setting is lower still."""
        file = folder / LIMITS_FILE
        if not file.is_file():
            return
        limits = json.loads(file.read_text(encoding="utf-8"))
        if limits["recompute_every_layer"]:
            self._recomputes = True
            self._recompute()
        found = limits["tokens_per_forward"]
        if found is not None:
            self.lower_to(found)
            self._lowered = True

    def _lower_limits(self, step: int, error: torch.OutOfMemoryError) -> None:
        """Choose how the next attempt takes less memory.

        Raises:
            QeRLError: Nothing is left to do, or there are several processes.
        """
        if self._processes > 1:
            raise QeRLError(
                "A training step ran out of GPU memory; with several processes it is not redone: set "
                f"tokens_per_forward: {-(-self._newest[0] // 2)}, and gradient_checkpointing_kwargs: "
                f"{{{self._every_layer}}} if every_n_layers is larger."
            ) from error
        if self._make_room():
            logger.warning(
                "Out of GPU memory in step %d: it is redone from its start, keys and values of samples under "
                "way being given up and computed again for the next rollout; where this comes often, set "
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
