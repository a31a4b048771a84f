"""The rollout engine for CUDA, on the very modules that train.

This is what outlives a call: weights, which are bound once (see binding), keys and values, and captured steps
for a few numbers of rows. A new training step costs a copy of LoRA and norm weights, never a recapture. What
runs when is a call's own (see call); one that is cut off, by Ctrl-C or an error, leaves nothing taken, and
the sums that its last pass may have left are zeroed by the next.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.sizes import positions_of
from qerl.kernels.limits import PAGE
from qerl.kernels.nvrtc import current
from qerl.rollout.engine import (
    KV_DTYPES,
    Completion,
    KvCacheDtype,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    check_model,
    check_request,
)
from qerl.rollout.paged import call
from qerl.rollout.paged.binding import Binding, refusal
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.forward import Cache
from qerl.rollout.paged.limits import CACHE_SHARE, MAX_ROWS, ROW_COUNTS, BlockDemand, KVGeometry, cache_budget
from qerl.rollout.paged.memory import SwitchedMemory
from qerl.rollout.paged.prefill import Prefill
from qerl.rollout.paged.scheduler import Scheduler

_SETTINGS = 3
"""Temperatures, filters and stops whose captured steps are kept: training's, evaluation's and one more."""


class PagedEngine(RolloutEngine):
    """Samples from a Llama, Mistral, Qwen2 or Qwen3 model with NVFP4, MXFP4, NF4 or bf16 linears, with
    or without LoRA.

    Args:
        model: The model that trains. Its packed weights are reordered in place, for good.
        pad_token_id: The only token of a completion whose first logits were not finite.
        max_sequences: Most sequences that run side by side, up to 512; fewer run where memory is short.
        cache_share: Most of the GPU memory beside the model and its training state that keys and values may
            take.
        kv_cache_dtype: ``auto``: keys and values are bf16; ``fp8``: E4M3 without a scale, half the memory.
            The trainer's are not rounded so, which the importance ratio has to correct.

    Raises:
        QeRLError: The engine cannot run this model; the message says why.
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int,
        max_sequences: int = MAX_ROWS,
        cache_share: float = CACHE_SHARE,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        check_model(model)
        reason = refusal(model)
        if reason is not None:
            raise QeRLError(f"The paged engine cannot run this model: {reason}. Use the portable engine.")
        if not 1 <= max_sequences <= MAX_ROWS:
            raise QeRLError(f"max_sequences is {max_sequences}; it must be between 1 and {MAX_ROWS}.")
        self.model = model
        self._pad_token_id = pad_token_id
        self._max_sequences, self._cache_share = max_sequences, cache_share
        self.rows_per_call = 2 * max_sequences  # rows are refilled until half of the call is left
        self._kv_dtype = KV_DTYPES[kv_cache_dtype]
        self._device = base_model(model).device
        self._positions = positions_of(base_model(model).config.get_text_config(decoder=True)) or 0
        with current(self._device):
            self._binding = Binding(model, self._positions)
            self._prefill = Prefill(self._binding.decoder, self._binding.has_lora)
        self._cache: Cache | None = None
        self._memory: SwitchedMemory | None = None
        self._steps: dict[tuple[int, SamplingParams], DecodeStep] = {}
        self._pool: Any = None
        self._most = self._table_width = 0
        self._scarce = False

    def release(self) -> None:
        """Gives the memory of keys and values up; the next call takes it back at the same addresses.

        Captured graphs stay, with the memory they work in: the logits of the largest step, some tens of
        megabytes for each size of a step.
        """
        with current(self._device):
            self._prefill = Prefill(self._binding.decoder, self._binding.has_lora)
            if self._memory is not None:
                self._memory.give_up()

    def _forget_steps(self) -> None:
        """Gives captured graphs and buffers of steps up."""
        self._steps.clear()
        self._pool = None
        self._prefill = Prefill(self._binding.decoder, self._binding.has_lora)

    def _drop(self) -> None:
        """Gives keys, values and graphs up for good."""
        self._cache = None
        self._forget_steps()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        torch.cuda.empty_cache()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        check_request(prompts, samples_per_prompt, params, self._positions)
        with current(self._device):
            return self._generate(prompts, samples_per_prompt, params, norm_offsets or {})

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets,
    ) -> RolloutResult:
        start = time.perf_counter()
        if self._binding.refresh(norm_offsets):
            self._forget_steps()
        for step in self._steps.values():
            step.step.clear()
        self._prefill.clear()
        total = len(prompts) * samples_per_prompt
        rows = min(self._max_sequences, total)
        cache = self._reserve(prompts, samples_per_prompt, rows, params)
        scheduler = Scheduler(BlockManager(cache.k.shape[1], PAGE), rows, call.ROUND_STEPS)
        outputs = call.Call(
            scheduler, params, samples_per_prompt, self._pad_token_id,
            prefill=lambda jobs: self._prefill.run(jobs, cache),
            step_for=lambda running: self._step(running, params),
        ).run(prompts)  # fmt: skip
        completions = [Completion(o.token_ids, o.logprobs, o.entropies, o.finish_reason) for o in outputs]
        return RolloutResult(
            completions=completions,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            generated_tokens=sum(len(c.token_ids) for c in completions),
            seconds=time.perf_counter() - start,
        )

    def _reserve(
        self, prompts: Sequence[Sequence[int]], samples: int, rows: int, params: SamplingParams
    ) -> Cache:
        """The cache, made or enlarged for this call; graphs that knew a smaller one are dropped.

        One that took all it may take is not made anew for a call that wants more: sequences wait instead.
        """
        decoder = self._binding.decoder
        demand = BlockDemand(max(map(len, prompts)), params.max_tokens, samples)
        one, wanted, width = demand.least, demand.blocks(rows), demand.table_width
        fits = width <= self._table_width and params.max_tokens <= self._most
        if fits and self._cache is not None and self._cache.k.shape[1] >= (one if self._scarce else wanted):
            assert self._memory is not None
            if self._memory.given_up:
                self._memory.take_back()
                self._clear_cache()
            return self._cache
        self._drop()
        geometry = KVGeometry(
            len(decoder.layers), decoder.kv_heads, decoder.head_size, self._kv_dtype.itemsize
        )
        affordable = self._budget(params.filtered) // geometry.block_bytes
        if affordable < one:
            free, block = torch.cuda.mem_get_info()[0] / 1e9, geometry.block_bytes / 1e9
            raise QeRLError(
                f"{free:.1f} GB of GPU memory are free, keys and values may have {affordable * block:.1f}, "
                f"and one sequence needs {one * block:.1f}: lower max_tokens, set kv_cache_dtype: fp8, or "
                "free memory."
            )
        self._most = max(self._most, params.max_tokens)
        self._table_width = max(self._table_width, width)
        self._scarce = affordable < wanted
        shape = geometry.shape(min(wanted, affordable))
        half = shape[1] * geometry.block_bytes // 2
        self._memory = SwitchedMemory(2 * half)
        k, v = (self._memory.tensor(shape, self._kv_dtype, offset) for offset in (0, half))
        self._cache = Cache(k, v)
        self._clear_cache()
        return self._cache

    def _budget(self, filtered: bool) -> int:
        """Bytes for keys and values: a share of what a run leaves, or of what is free now if that is less."""
        free, total = torch.cuda.mem_get_info()
        model = self.model
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return cache_budget(total, held, trained, filtered, free, self._cache_share)

    def _clear_cache(self) -> None:
        """Fresh memory may hold NaN, which a masked key would carry into a product with zero."""
        assert self._cache is not None
        self._cache.k.zero_()
        self._cache.v.zero_()

    def _step(self, rows: int, params: SamplingParams) -> DecodeStep:
        """The captured step for at least so many rows."""
        size = next(size for size in ROW_COUNTS if size >= rows)
        key = (size, replace(params, seed=0, max_tokens=1))
        if key in self._steps:
            self._steps[key] = self._steps.pop(key)  # the last in order is the last that was used
        else:
            self._evict(key[1])
            assert self._cache is not None
            decoder = self._binding.decoder
            if self._pool is None and decoder.head_VD.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            self._steps[key] = DecodeStep(
                decoder, self._cache, size, self._most, self._table_width, params, self._binding.has_lora,
                self._pool,
            )  # fmt: skip
        return self._steps[key]

    def _evict(self, params: SamplingParams) -> None:
        """Makes room for a step with these settings: those of the settings used longest ago go."""
        kept = list(dict.fromkeys(known for _, known in reversed(self._steps)))
        for old in kept[_SETTINGS - (params not in kept) :]:
            for key in [key for key in self._steps if key[1] == old]:
                del self._steps[key]
