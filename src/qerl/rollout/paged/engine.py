"""The rollout engine for CUDA, which samples from the very modules that are trained.

Four things outlive a call: the weights, which are bound once (see binding), the KV cache (kv_cache), decode
steps captured for a few numbers of rows (decode), and short prefill passes (prefill). A training step costs a
copy of LoRA and norm weights, never a recapture.

A call is a session, which runs in rounds: admit and preempt sequences (scheduler), prefill the admitted ones,
replay the decode step a few times, collect the ended sequences. While steps are replayed the GPU never waits
for the host. A call that is interrupted, by Ctrl-C or an error, leaves no blocks taken; an unfinished pass
leaves nothing behind, because every pass overwrites its partial sums.
"""

from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.sizes import Sizes, positions_of
from qerl.kernels.nvrtc import current
from qerl.rollout.engine import (
    KV_DTYPES,
    KvCacheDtype,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    Session,
    WhenEnded,
    check_keys,
    check_model,
    check_request,
)
from qerl.rollout.paged.binding import Binding
from qerl.rollout.paged.blocks import has_prefixes
from qerl.rollout.paged.decode import DecodeGraphs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.rollout.paged.machine import Cuda, Machine
from qerl.rollout.paged.prefill import Prefill
from qerl.rollout.paged.scheduler import Pace
from qerl.rollout.paged.session import EngineParts, PagedSession
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.session import LastSession, whole_completions

_CUDA = Cuda()
_PACE = Pace()


class PagedEngine(RolloutEngine):
    """Continuous-batching engine for the model families of `qerl.families.table`, with or without LoRA.

    Linears may be NVFP4, MXFP4, NF4 or bf16.

    Args:
        model: The model that is trained. Its packed weights are reordered in place, permanently.
        pad_token_id: The only token of a completion whose first logits were not finite.
        max_sequences: Maximum number of running sequences, up to 512; fewer run when memory is short.
        kv_cache_dtype: ``auto``: keys and values are bf16; ``fp8``: E4M3 without a scale, half the memory.
            The trainer does not round its own, a difference that the importance ratio has to correct.
        machine: The current GPU, or a stand-in for one.
        pace: Lengths of rounds and passes.

    Attributes:
        cache: The KV cache.
        graphs: Captured decode steps.
        prefill: Prefill passes.

    Raises:
        QeRLError: The engine cannot run this model, or not with FP8 keys; the message says why.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int,
        max_sequences: int = MAX_ROWS,
        kv_cache_dtype: KvCacheDtype = "auto",
        machine: Machine = _CUDA,
        pace: Pace = _PACE,
    ) -> None:
        check_model(model)
        reason = machine.why_not(model)
        if reason is not None:
            raise QeRLError(f"The paged engine cannot run this model: {reason}. Use the portable engine.")
        config = base_model(model).config.get_text_config(decoder=True)
        check_keys(kv_cache_dtype, Sizes.of(config))
        if not 1 <= max_sequences <= MAX_ROWS:
            raise QeRLError(f"max_sequences is {max_sequences}; it must be between 1 and {MAX_ROWS}.")
        self.model = model
        self._pad_token_id, self._max_sequences = pad_token_id, max_sequences
        self._machine, self._pace = machine, pace
        self.rows_per_call = 8 * max_sequences  # rows are refilled until an eighth of the call is left
        self._last = LastSession[PagedSession]()  # has the blocks of the cache
        self._device = base_model(model).device
        self._positions = positions_of(config) or 0
        kv_dtype = None if kv_cache_dtype == "auto" else KV_DTYPES[kv_cache_dtype]
        with current(self._device):
            self._binding = Binding(model, self._positions)
            self.cache = KVCache(self.decoder, kv_dtype, machine.memory)
            self.graphs = DecodeGraphs(self.decoder, self.cache, machine, pace.small_rows)
            self.prefill = Prefill(self.decoder, self.cache, self.graphs, pace.prefill_tokens)
        self.keeps_prefixes = has_prefixes(self.cache.geometry.pools)

    @property
    def decoder(self) -> Decoder:
        """The model's weights as the kernels read them."""
        return self._binding.decoder

    def release(self) -> None:
        """Free the memory of the KV cache; the next call takes it back at the same addresses.

        Captured graphs stay, with the memory they work in: the logits of the largest step, some tens of
        megabytes per size of step, and the buffers of short prefill passes.
        """
        with current(self._device):
            self.prefill.free()
            self.cache.give_up()

    def pause(self) -> None:
        """See ``RolloutEngine.pause``: free the buffers of long prefill passes."""
        with current(self._device):
            self.prefill.free()

    def reset(self) -> None:
        """See ``RolloutEngine.reset``.

        The cache is closed too, as its number of blocks decides when sequences wait, and so which share a
        batch.
        """
        with current(self._device):
            self._last.set_aside()
            self.graphs.close()
            self.prefill.forget()
            self.cache.close()

    def generate(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        seeds: abc.Sequence[int] | None = None,
        ended: WhenEnded | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        check_request(prompts, samples_per_prompt, params, self._positions)
        opened = self.session(params, norm_offsets)
        return whole_completions(opened, prompts, samples_per_prompt, seeds=seeds, ended=ended)

    @contextmanager
    def session(
        self,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        growing: bool = False,
        longest_prompt: int | None = None,
        going_on: Session | None = None,
        policy: abc.Hashable | None = None,
    ) -> Iterator[PagedSession]:
        """See ``RolloutEngine.session``."""
        policy = policy if self.keeps_prefixes else None
        with torch.no_grad(), current(self._device):
            if going_on is None:
                self._last.set_aside()
            renewed = self._read_weights(norm_offsets or {})
            if going_on is None:
                session = self._new_session(params, growing, longest_prompt, policy)
            else:
                session = self._last.again(going_on)
                session.enter(renewed, longest_prompt, policy)
            try:
                with self._last.opened(session):
                    yield session
            except BaseException:
                self.cache.known.forget()  # its last pages may not have been computed
                raise

    def _new_session(
        self,
        params: SamplingParams,
        growing: bool,
        longest_prompt: int | None,
        policy: abc.Hashable | None,
    ) -> PagedSession:
        parts = EngineParts(
            self.cache,
            self.graphs,
            self.prefill,
            lambda freed: self._machine.cache_bytes(self.model, freed),
            self._max_sequences,
            self._pace,
        )
        return PagedSession(
            params, self._positions, self._pad_token_id, parts, growing, longest_prompt, policy
        )

    def _read_weights(self, norm_offsets: NormOffsets) -> bool:
        """Copy the weights that training may have changed.

        Returns:
            Whether buffers were replaced, and captured steps and prefill passes dropped with them.
        """
        if renewed := self._binding.refresh(norm_offsets):
            self.graphs.forget()
            self.prefill.forget()
        return renewed
