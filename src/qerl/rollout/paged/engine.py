"""The rollout engine for CUDA, on the very modules that train.

A call runs in rounds: plan (who enters, who is preempted), prefill what entered, replay the decode graph a
few times, look who has finished. Between rounds nothing waits for the host. Weights are bound once (see
binding); a new training step costs a copy of LoRA and norm weights, never a recapture.

Scheduler and blocks belong to the call: one that is cut off, by Ctrl-C or an error, leaves nothing taken.

Rows of the batch are places. A finished sequence's row is refilled at the next plan. Steps are captured for a
few numbers of rows; a call takes the smallest that holds what runs, and moves to a smaller one when the last
long samples are alone.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.kernels.common import PAGE
from qerl.modules import base_model
from qerl.rollout.engine import (
    KV_DTYPES,
    Completion,
    FinishReason,
    KvCacheDtype,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    check_request,
)
from qerl.rollout.paged.binding import Binding, refusal
from qerl.rollout.paged.blocks import BlockManager
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.memory import SwitchedMemory
from qerl.rollout.paged.prefill import Job, Prefill
from qerl.rollout.paged.scheduler import Plan, Sample, Scheduler
from qerl.rollout.paged.step import Cache
from qerl.rollout.sampling import uniform_streams

_ROUND_STEPS = 16
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SMALL = 8  # rows that hardly take longer than one
_CONTEXT = 1.2e9  # bytes: CUDA context, kernels, graphs
_MOST_OF_FREE = 0.95
_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "error"}
_STATE = ("token", "position", "slot", "generated", "max_new", "done")


@dataclass
class _Output:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


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
        max_sequences: int = 512,
        cache_share: float = 0.6,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        reason = refusal(model)
        if reason is not None:
            raise QeRLError(f"The paged engine cannot run this model: {reason}. Use the portable engine.")
        if not 1 <= max_sequences <= _BATCHES[-1]:
            raise QeRLError(f"max_sequences is {max_sequences}; it must be between 1 and {_BATCHES[-1]}.")
        self.model = model
        self._pad_token_id = pad_token_id
        self._max_sequences, self._cache_share = max_sequences, cache_share
        self.rows_per_call = 2 * max_sequences  # rows are refilled until half of the call is left
        self._kv_dtype = KV_DTYPES[kv_cache_dtype]
        config = base_model(model).config.get_text_config(decoder=True)
        self._positions = config.max_position_embeddings
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
        self._prefill = Prefill(self._binding.decoder, self._binding.has_lora)
        if self._memory is not None:
            self._memory.give_up()

    def _drop(self) -> None:
        """Gives keys, values and graphs up for good."""
        self._cache = None
        self._steps.clear()
        self._pool = None
        self._prefill = Prefill(self._binding.decoder, self._binding.has_lora)
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
        start = time.perf_counter()
        self._binding.refresh(norm_offsets or {})
        total = len(prompts) * samples_per_prompt
        rows = min(self._max_sequences, total)
        cache = self._reserve(prompts, samples_per_prompt, rows, params)
        scheduler = Scheduler(BlockManager(cache.k.shape[1], PAGE), rows, _ROUND_STEPS)
        call = _Call(self, cache, scheduler, params, samples_per_prompt)
        outputs = call.run(prompts)
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
        prompt_blocks = max(-(-(len(prompt) - 1) // PAGE) for prompt in prompts)
        own_blocks = -(-params.max_tokens // PAGE)
        one = prompt_blocks + own_blocks
        wanted = rows * own_blocks + (-(-rows // samples) + 1) * prompt_blocks
        width = max(prompt_blocks, own_blocks, 1)
        fits = width <= self._table_width and params.max_tokens <= self._most
        if fits and self._cache is not None and self._cache.k.shape[1] >= (one if self._scarce else wanted):
            assert self._memory is not None
            if self._memory.given_up:
                self._memory.take_back()
                self._clear_cache()
            return self._cache
        self._drop()
        per_block = 2 * len(decoder.layers) * decoder.kv_heads * PAGE * decoder.head_size
        per_block *= self._kv_dtype.itemsize
        affordable = int(self._budget() / per_block)
        if affordable < one:
            free = torch.cuda.mem_get_info()[0]
            raise QeRLError(
                f"{free / 1e9:.1f} GB of GPU memory are free, keys and values may have "
                f"{max(0, affordable) * per_block / 1e9:.1f}, and one sequence needs "
                f"{one * per_block / 1e9:.1f}: lower max_tokens, set kv_cache_dtype: fp8, or free memory."
            )
        self._most = max(self._most, params.max_tokens)
        self._table_width = max(self._table_width, width)
        self._scarce = affordable < wanted
        shape = len(decoder.layers), min(wanted, affordable), decoder.kv_heads, PAGE, decoder.head_size
        half = shape[1] * per_block // 2
        self._memory = SwitchedMemory(2 * half)
        k, v = (self._memory.tensor(shape, self._kv_dtype, offset) for offset in (0, half))
        self._cache = Cache(k, v)
        self._clear_cache()
        return self._cache

    def _budget(self) -> float:
        """Bytes for keys and values: a share of what a run leaves, or of what is free now if that is less.

        A run holds the model, and of what it trains gradients, AdamW's moments and the engine's copy. That is
        counted whether it is there yet or not: a resumed run must get the cache, and so the order in which
        sequences run, of one that was not stopped.
        """
        free, total = torch.cuda.mem_get_info()
        model = self.model
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        held += sum(14 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return min(self._cache_share * (total - held - _CONTEXT), _MOST_OF_FREE * free)

    def _clear_cache(self) -> None:
        """Fresh memory may hold NaN, which a masked key would carry into a product with zero."""
        assert self._cache is not None
        self._cache.k.zero_()
        self._cache.v.zero_()

    def _step(self, rows: int, params: SamplingParams) -> DecodeStep:
        """The captured step for at least so many rows."""
        size = next(size for size in _BATCHES if size >= rows)
        key = (size, replace(params, seed=0, max_tokens=1))
        if key not in self._steps:
            assert self._cache is not None
            decoder = self._binding.decoder
            if self._pool is None and decoder.head_VD.is_cuda:
                self._pool = torch.cuda.graph_pool_handle()
            self._steps[key] = DecodeStep(
                decoder, self._cache, size, self._most, self._table_width, params, self._binding.has_lora,
                self._pool,
            )  # fmt: skip
        return self._steps[key]


class _Call:
    """One call of ``generate``."""

    def __init__(
        self, engine: PagedEngine, cache: Cache, scheduler: Scheduler, params: SamplingParams, samples: int
    ) -> None:
        self._engine, self._cache, self._scheduler, self._params = engine, cache, scheduler, params
        self._samples = samples
        self._running_step: DecodeStep | None = None
        self._outputs: dict[int, _Output] = {}
        self._streams = torch.empty(0)

    @property
    def _step(self) -> DecodeStep:
        assert self._running_step is not None
        return self._running_step

    def run(self, prompts: Sequence[Sequence[int]]) -> list[_Output]:
        """All completions in order."""
        scheduler, params = self._scheduler, self._params
        scheduler.add(prompts, self._samples, params.max_tokens)
        ids = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(self._samples)]
        self._streams = uniform_streams(params.seed, ids, params.max_tokens).float()
        self._outputs = {index: _Output() for index in range(len(ids))}
        while scheduler.busy:
            plan = scheduler.plan()
            self._enter(plan)
            for _ in range(min(_ROUND_STEPS, params.max_tokens)):
                self._step.replay()
            self._collect()
        return [self._outputs[index] for index in range(len(ids))]

    def _enter(self, plan: Plan) -> None:
        for sample, row in plan.preempted:
            self._fetch({row: sample})
            self._step.state["done"][row] = 1
            self._step.state["slot"][row] = -1
        self._fit_step(plan.admitted)
        jobs = [
            Job(prompt.token_ids[:-1], 0, prompt.blocks or [], [], 0)
            for prompt in plan.prefill_prompts
            if prompt.cached_tokens
        ]
        for sample in plan.admitted:
            if sample.generated:
                known = self._outputs[sample.index].token_ids
                jobs.append(
                    Job(
                        [sample.prompt.token_ids[-1], *known[:-1]],
                        sample.prompt.cached_tokens,
                        sample.blocks,
                        sample.prompt.blocks or [],
                        sample.prompt.cached_tokens,
                    )
                )
        if jobs:
            self._engine._prefill.run(jobs, self._cache)
        if plan.admitted:
            self._write_rows(plan.admitted)
        self._write_tables()

    def _fit_step(self, admitted: list[Sample]) -> None:
        """Goes on with a larger step when rows are wanting, and with a smaller one when a quarter is enough.

        Near the end of a rollout few long samples are left, and a step takes as long as its rows say.
        """
        running, before = self._scheduler.running, self._running_step
        if before is not None:
            enough = before.rows // 4 if before.rows > _SMALL else 0
            if enough < len(running) <= before.rows:
                return
        step = self._engine._step(len(running), self._params)
        entering = {sample.index for sample in admitted}
        staying = [row for row, sample in running.items() if sample.index not in entering]
        moved = self._scheduler.compact(step.rows)
        step.clear()
        if before is not None and staying:
            step.take_over(before, {row: moved[row] for row in staying})
        self._running_step = step

    def _write_rows(self, admitted: list[Sample]) -> None:
        """State of the sequences that enter."""
        step, device = self._step, self._step.uniform.device
        rows, columns = [], []
        for sample in admitted:
            known = self._outputs[sample.index].token_ids
            prompt, own = sample.prompt, sample.generated
            slot = sample.blocks[own // PAGE] * PAGE + own % PAGE
            token = known[-1] if known else prompt.token_ids[-1]
            rows.append(sample.row)
            columns.append(
                [
                    token,
                    prompt.cached_tokens + own,
                    slot,
                    own,
                    sample.max_tokens,
                    0,
                    prompt.cached_tokens,
                    own + 1,
                ]
            )
        at = torch.tensor(rows, device=device)
        values = torch.tensor(columns, dtype=torch.int32, device=device)
        for column, name in enumerate(_STATE):
            step.state[name].index_copy_(0, at, values[:, column])
        step.state["limit"].index_copy_(1, at, values[:, 6:].T.contiguous())
        streams = self._streams[[sample.index for sample in admitted]].to(device)
        step.uniform[:, : streams.shape[1]].index_copy_(0, at, streams)
        for sample in admitted:
            known_output = self._outputs[sample.index]
            if known_output.token_ids:
                n = len(known_output.token_ids)
                step.state["out_token"][sample.row, :n] = torch.tensor(known_output.token_ids, device=device)
                stats = torch.tensor([known_output.logprobs, known_output.entropies], device=device)
                step.state["out_stats"][:, sample.row, :n] = stats

    def _write_tables(self) -> None:
        """Block tables and attention items of everything that runs."""
        step = self._step
        tile = step.tile_tokens
        width, rows = step.tables.shape[1], step.rows
        tables = [[0] * width for _ in range(2 * rows)]
        groups: dict[int, list[Sample]] = {}
        for sample in self._scheduler.running.values():
            assert sample.row is not None
            tables[rows + sample.row][: len(sample.blocks)] = sample.blocks
            groups.setdefault(id(sample.prompt), []).append(sample)
        shared: list[list[int]] = []
        order: list[int] = []
        for number, members in enumerate(groups.values()):
            prompt = members[0].prompt
            blocks = prompt.blocks or []
            tables[number][: len(blocks)] = blocks
            if not prompt.cached_tokens:
                continue
            for first in range(0, len(members), tile):
                piece = members[first : first + tile]
                shared.append([len(order), len(piece), number, 0])
                order += [sample.row or 0 for sample in piece]
        shared += [[0, 0, 0, 0]] * (rows - len(shared))
        order += [0] * (rows - len(order)) + list(range(rows))
        own = [[rows + row, 1 if row in self._scheduler.running else 0, rows + row, 1] for row in range(rows)]
        step.tables.copy_(torch.tensor(tables, dtype=torch.int32))
        step.items.copy_(torch.tensor(shared + own, dtype=torch.int32))
        step.order.copy_(torch.tensor(order, dtype=torch.int32))
        step.step.lse_ZTH.fill_(-torch.inf)

    def _collect(self) -> None:
        """Looks who has finished and takes their tokens."""
        state = self._step.state
        done, generated = torch.stack([state["done"], state["generated"]]).tolist()
        running = self._scheduler.running
        finished = {row: sample for row, sample in running.items() if done[row]}
        counts = {row: generated[row] for row in running}
        if finished:
            for row, sample in finished.items():
                self._outputs[sample.index].finish_reason = _REASONS[done[row]]
            self._fetch(finished)
        self._scheduler.advance(counts, finished)

    def _fetch(self, rows: dict[int, Sample]) -> None:
        state = self._step.state
        at = torch.tensor(list(rows), device=state["done"].device)
        tokens = state["out_token"][at].tolist()
        logprobs, entropies = state["out_stats"][:, at].tolist()
        counts = state["generated"][at].tolist()
        for i, sample in enumerate(rows.values()):
            n = counts[i]
            output = self._outputs[sample.index]
            output.token_ids, output.logprobs, output.entropies = (
                tokens[i][:n],
                logprobs[i][:n],
                entropies[i][:n],
            )
            if not n and output.finish_reason == "error":
                output.token_ids, output.logprobs, output.entropies = (
                    [self._engine._pad_token_id],
                    [0.0],
                    [0.0],
                )
