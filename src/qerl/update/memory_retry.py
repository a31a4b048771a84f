"""A training step that runs out of GPU memory is done again from its start, with less memory.

How much memory a step takes depends on how long its samples turned out, so a run may do well for hours and
then meet one batch that does not fit. What is sampled is kept; the update is done again: the gradients of the
step so far are dropped, since a backward pass that was interrupted has left a part of its own in them, and
every microbatch of the step runs again: first with every layer recomputed for backward, where some kept their
activations, then with half as many tokens per forward pass (`qerl.update.chunks`). Neither changes a
gradient. What was changed stays for the rest of the run, and for whatever the same trainer trains after it,
and goes into its checkpoints, so that a resumed run computes what this one would have.

Given up: several processes. One that repeats its step would leave the others waiting in their all-reduce, so
there the error says what to change and ends the run. A repeated step draws new masks where LoRA has dropout.
"""

import gc
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from qerl.errors import QeRLError, first_line
from qerl.update.chunks import split_rows
from qerl.update.padded import Lengths

T = TypeVar("T")
B = TypeVar("B")

LIMITS_FILE = "update_limits.json"

logger = logging.getLogger(__name__)

_ADVICE = (
    "lower max_completion_length, set gradient_checkpointing: true and with it "
    "gradient_checkpointing_kwargs: {offload: true}, or take a smaller lora_r"
)


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
    """Runs microbatches, and all of an optimizer step's again where memory ran out.

    Args:
        max_tokens: Largest number of tokens per forward pass, None for no limit.
        processes: Processes of the run; with more than one nothing is done again.
        recompute_every_layer: Turns that on and says whether it was off.
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
    ) -> None:
        self.max_tokens = max_tokens
        self._processes, self._recompute = processes, recompute_every_layer
        self._advice = advice
        options = {**(checkpointing or {}), "every_n_layers": 1}
        self._every_layer = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
        self._lowered = self._recomputes = False
        self._newest = (0, 0)  # tokens and samples of the newest forward pass
        self._step, self._batches = -1, list[Any]()

    def start_step(self, step: int) -> bool:
        """Start optimizer step ``step`` unless it is under way; called before each microbatch.

        Returns:
            Whether the next microbatch is the first of that step.
        """
        if step == self._step:
            return False
        self._step, self._batches = step, []
        return True

    def forget_step(self) -> None:
        """Forget the step under way, as training begins; limits stay, because memory has not grown."""
        self._step, self._batches = -1, []

    def split(self, rows: list[int], lengths: Lengths) -> list[list[int]]:
        """The samples of a microbatch as chunks of which each fits one forward pass."""
        return split_rows(rows, lengths, self.max_tokens)

    def note_forward(self, rows: list[int], lengths: Lengths) -> None:
        """Note the samples of the forward pass that begins next."""
        self._newest = lengths.tokens(rows), len(rows)

    def run(self, batch: B, microbatch: Callable[[B], T], undo_step: Callable[[], None]) -> T:
        """Run forward and backward of one more microbatch.

        Args:
            batch: Its tensors.
            microbatch: Runs a batch, whose samples it splits by :meth:`split`.
            undo_step: Undoes what the microbatches of this step have done to gradients and counters.

        Returns:
            What ``microbatch`` returned for ``batch``.

        Raises:
            QeRLError: One sample alone does not fit, there are several processes, or memory ran out that
                torch's allocator of the GPU does not hold.
        """
        self._batches.append(batch)
        pending = [batch]
        while True:
            try:
                return [microbatch(one) for one in pending][-1]
            except torch.OutOfMemoryError as error:
                self._lower_limits(error)
            except torch.AcceleratorError as error:
                refuse_memory_error(error)
                raise
            # Only here, with the exception gone, do the frames of the failed attempt let go of their tensors.
            undo_step()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            pending = self._batches

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
            self.max_tokens, self._lowered = min(found, self.max_tokens or found), True

    def _lower_limits(self, error: torch.OutOfMemoryError) -> None:
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
        if self._recompute():
            self._recomputes = True
            logger.warning(
                "Out of GPU memory in step %d: it is redone from its start, from now on with every layer "
                "recomputed; gradient_checkpointing_kwargs: {%s} sets that from the start.",
                self._step + 1,
                self._every_layer,
            )
        else:
            self._halve(error)

    def _halve(self, error: torch.OutOfMemoryError) -> None:
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
            self._step + 1,
            half,
            tokens,
            half,
        )
