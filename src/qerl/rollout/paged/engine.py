"""The rollout engine for CUDA, on the very modules that train.

What outlives a call: weights, which are bound once (see binding), keys and values (kv_cache), and captured
steps for a few numbers of rows (graphs). A new training step costs a copy of LoRA and norm weights, never a
recapture.

A call runs in rounds: decide who enters and who is preempted (scheduler), prefill what entered, replay the
decode step a few times, look who has ended. While steps are replayed the GPU never waits for the host. A call
that is cut off, by Ctrl-C or an error, leaves nothing taken, and the sums that its last pass may have left
are zeroed by the next.
"""

import time
from collections import Counter, abc
from collections.abc import Iterator
from contextlib import contextmanager

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
from qerl.rollout.paged.binding import Binding
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.graphs import DecodeGraphs
from qerl.rollout.paged.kv_cache import KVCache
from qerl.rollout.paged.limits import MAX_ROWS, BlockDemand
from qerl.rollout.paged.machine import Cuda, Machine
from qerl.rollout.paged.pace import Pace
from qerl.rollout.paged.prefill import Prefill
from qerl.rollout.paged.scheduler import Prompt, Scheduler, Sequence
from qerl.rollout.paged.weights import Decoder
from qerl.rollout.session import Track, TrackedSession

_CUDA = Cuda()
_PACE = Pace()


class PagedEngine(RolloutEngine):
    """Samples from a Llama, Mistral, Qwen2 or Qwen3 model with NVFP4, MXFP4, NF4 or bf16 linears, with
    or without LoRA.

    Args:
        model: The model that trains. Its packed weights are reordered in place, for good.
        pad_token_id: The only token of a completion whose first logits were not finite.
        max_sequences: Sequences that run side by side at most, up to 512; fewer run where memory is short.
        kv_cache_dtype: ``auto``: keys and values are bf16; ``fp8``: E4M3 without a scale, half the memory.
            The trainer's are not rounded so, which the importance ratio has to correct.
        machine: What the engine runs on: the current GPU, or a stand-in for one.
        pace: Lengths of rounds and passes.

    Attributes:
        cache: Keys and values.
        graphs: Captured decode steps.
        prefill: Passes over prompts.

    Raises:
        QeRLError: The engine cannot run this model; the message says why.
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
        if not 1 <= max_sequences <= MAX_ROWS:
            raise QeRLError(f"max_sequences is {max_sequences}; it must be between 1 and {MAX_ROWS}.")
        self.model = model
        self._pad_token_id, self._max_sequences = pad_token_id, max_sequences
        self._machine, self._pace = machine, pace
        self.rows_per_call = 2 * max_sequences  # rows are refilled until half of the call is left
        self._device = base_model(model).device
        self._positions = positions_of(base_model(model).config.get_text_config(decoder=True)) or 0
        kv_dtype = None if kv_cache_dtype == "auto" else KV_DTYPES[kv_cache_dtype]
        with current(self._device):
            self._binding = Binding(model, self._positions)
            self.cache = KVCache(self.decoder, kv_dtype, machine.memory)
            self.graphs = DecodeGraphs(self.decoder, self.cache, machine, pace.small_rows)
            self.prefill = Prefill(self.decoder, pace.prefill_tokens)

    @property
    def decoder(self) -> Decoder:
        """The model's weights as the kernels read them."""
        return self._binding.decoder

    def release(self) -> None:
        """Free the memory of keys and values; the next call takes it back at the same addresses.

        Captured graphs stay, with the memory they work in: the logits of the largest step, some tens of
        megabytes for each size of a step.
        """
        with current(self._device):
            self.prefill.forget()
            self.cache.give_up()

    @torch.no_grad()
    def generate(
        self,
        prompts: abc.Sequence[abc.Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        check_request(prompts, samples_per_prompt, params, self._positions)
        start = time.perf_counter()
        with current(self._device):
            self._read_weights(norm_offsets or {})
            rows = min(self._max_sequences, len(prompts) * samples_per_prompt)
            demand = BlockDemand(max(map(len, prompts)), params.max_tokens, samples_per_prompt)
            self._reserve(demand, rows, params)
            scheduler = Scheduler(BlockManager(self.cache.blocks, PAGE), rows, self._pace)
            sequences = scheduler.add(prompts, samples_per_prompt, params.max_tokens)
            self._decode_all(scheduler, params)
        completions = [self._completion(sequence) for sequence in sequences]
        return RolloutResult(
            completions=completions,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            generated_tokens=sum(len(completion.token_ids) for completion in completions),
            seconds=time.perf_counter() - start,
        )

    @contextmanager
    def session(
        self, params: SamplingParams, norm_offsets: NormOffsets | None = None
    ) -> Iterator["PagedSession"]:
        """See ``RolloutEngine.session``."""
        with torch.no_grad(), current(self._device):
            self._read_weights(norm_offsets or {})
            yield PagedSession(self, params, self._positions, self._pad_token_id)

    def decode_turns(self, tracks: list[Track], params: SamplingParams) -> list[Completion]:
        """Sample a turn of each, from its whole prefix."""
        per_prompt = max(Counter(track.prompt_number for track in tracks).values())
        rows = min(self._max_sequences, len(tracks))
        longest = max(len(track.prompt) for track in tracks)
        self._reserve(BlockDemand(longest, params.max_tokens, per_prompt), rows, params)
        scheduler = Scheduler(BlockManager(self.cache.blocks, PAGE), rows, self._pace)
        prompts = {track.prompt_number: Prompt(track.prompt_number, track.prompt) for track in tracks}
        sequences = [
            Sequence(
                track.index, prompts[track.prompt_number], track.sample, track.limit,
                generated=len(track.token_ids), token_ids=list(track.token_ids),
                logprobs=list(track.logprobs), entropies=list(track.entropies),
            )
            for track in tracks
        ]  # fmt: skip
        scheduler.waiting.extend(sequences)
        self._decode_all(scheduler, params)
        return [
            self._completion(sequence, len(track.token_ids))
            for sequence, track in zip(sequences, tracks, strict=True)
        ]

    def _decode_all(self, scheduler: Scheduler, params: SamplingParams) -> None:
        """Run rounds until every sequence has ended."""
        step: DecodeStep | None = None
        while scheduler.busy:
            planned = scheduler.next_round()
            if step is not None:
                step.rows.end(planned.preempted)
            step = self.graphs.fit(step, scheduler, planned.admitted, params)
            step.rows.place(planned.admitted, params.seed)
            step.attend(scheduler.running)
            self.prefill.run(planned.spans(), self.cache)  # last, because uploads would wait for it
            step.decode(min(self._pace.round_steps, params.max_tokens))
            scheduler.advance(*step.rows.read(scheduler.running))

    def _completion(self, sequence: Sequence, start: int = 0) -> Completion:
        if len(sequence.token_ids) == start:  # its first logits were not finite
            return Completion([self._pad_token_id], [0.0], [0.0], sequence.finish_reason)
        return Completion(
            sequence.token_ids[start:],
            sequence.logprobs[start:],
            sequence.entropies[start:],
            sequence.finish_reason,
        )

    def _read_weights(self, norm_offsets: NormOffsets) -> None:
        """Copy what training may have changed, and drop what was captured with buffers that were replaced."""
        if self._binding.refresh(norm_offsets):
            self.graphs.forget()
            self.prefill.forget()
        self.graphs.clear()
        self.prefill.clear()

    def _reserve(self, demand: BlockDemand, rows: int, params: SamplingParams) -> None:
        """Have a cache for this call, made or enlarged; steps that knew a smaller one are dropped."""
        needed = params.max_tokens, demand.table_width
        if self.graphs.serves(*needed) and self.cache.serves(demand, rows):
            self.cache.take_back()
            return
        self.graphs.forget()
        self.prefill.forget()
        self.cache.close()
        self.cache.reserve(demand, rows, self._machine.cache_bytes(self.model, params.filtered))
        self.graphs.make_room(*needed)


class PagedSession(TrackedSession):
    """Turns of sequences, each computed from its whole prefix.

    Args:
        engine: The engine, with the weights of this rollout.
        params: Sampling parameters.
        positions: Positions that the model has.
        pad_token_id: Stands in for a turn whose first logits were not finite.
    """

    def __init__(
        self, engine: PagedEngine, params: SamplingParams, positions: int, pad_token_id: int
    ) -> None:
        super().__init__(params, positions, pad_token_id)
        self._engine = engine

    def _draw(self, tracks: list[Track]) -> list[Completion]:
        """See `TrackedSession._draw`."""
        return self._engine.decode_turns(tracks, self._params)
