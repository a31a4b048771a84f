"""One call of the paged engine: who runs in which row, from the first plan to the last token.

A call runs in rounds: plan (who enters, who is preempted), prefill what entered, replay the decode graph a
few times, look who has finished. Within a round the GPU never waits for the host.

Rows of the batch are places. A finished sequence's row is refilled at the next plan. Steps are captured for a
few numbers of rows; a call takes the smallest that holds what runs, and moves to a smaller one when the last
long samples are alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from qerl.kernels.limits import PAGE
from qerl.rollout.engine import FinishReason, SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.prefill import Job
from qerl.rollout.paged.scheduler import Plan, Sample, Scheduler
from qerl.rollout.sampling import uniform_streams

ROUND_STEPS = 16
"""Decode steps between two plans."""

_SMALL = 8  # rows that hardly take longer than one
_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "error"}


@dataclass
class Output:
    """What a sequence has so far, as the host knows it."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "length"


class Call:
    """One call of ``generate``.

    Args:
        scheduler: Over the cache's blocks, with nothing queued.
        params: Sampling parameters.
        samples: Completions of each prompt.
        pad_token_id: The only token of a completion whose first logits were not finite.
        prefill: Computes jobs, in order.
        step_for: The step for at least so many rows.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        params: SamplingParams,
        samples: int,
        pad_token_id: int,
        prefill: Callable[[list[Job]], None],
        step_for: Callable[[int], DecodeStep],
    ) -> None:
        self._scheduler, self._params, self._samples = scheduler, params, samples
        self._pad_token_id, self._prefill, self._step_for = pad_token_id, prefill, step_for
        self._running_step: DecodeStep | None = None
        self._outputs: dict[int, Output] = {}
        self._streams = torch.empty(0)

    @property
    def _step(self) -> DecodeStep:
        assert self._running_step is not None
        return self._running_step

    def run(self, prompts: Sequence[Sequence[int]]) -> list[Output]:
        """All completions in order."""
        scheduler, params = self._scheduler, self._params
        scheduler.add(prompts, self._samples, params.max_tokens)
        ids = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(self._samples)]
        self._streams = uniform_streams(params.seed, ids, params.max_tokens).float()
        self._outputs = {index: Output() for index in range(len(ids))}
        while scheduler.busy:
            plan = scheduler.plan()
            self._enter(plan)
            for _ in range(min(ROUND_STEPS, params.max_tokens)):
                self._step.replay()
            self._collect()
        return [self._outputs[index] for index in range(len(ids))]

    def _enter(self, plan: Plan) -> None:
        for sample, row in plan.preempted:
            self._fetch({row: sample})
            self._step.state.done_T[row] = 1
            self._step.state.slot_T[row] = -1
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
            self._prefill(jobs)
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
        step = self._step_for(len(running))
        entering = {sample.index for sample in admitted}
        staying = [row for row, sample in running.items() if sample.index not in entering]
        moved = self._scheduler.compact(step.rows)
        step.clear()
        if before is not None and staying:
            step.take_over(before, {row: moved[row] for row in staying})
        self._running_step = step

    def _write_rows(self, admitted: list[Sample]) -> None:
        """State of the sequences that enter."""
        state, device = self._step.state, self._step.state.done_T.device
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
        of_rows = (
            state.token_T, state.position_T, state.slot_T, state.generated_T, state.max_new_T, state.done_T,
        )  # fmt: skip
        for column, name_T in enumerate(of_rows):
            name_T.index_copy_(0, at, values[:, column])
        state.limit_2T.index_copy_(1, at, values[:, 6:].T.contiguous())
        streams = self._streams[[sample.index for sample in admitted]].to(device)
        state.uniform_TM[:, : streams.shape[1]].index_copy_(0, at, streams)
        for sample in admitted:
            known_output = self._outputs[sample.index]
            if known_output.token_ids:
                n = len(known_output.token_ids)
                state.out_token_TM[sample.row, :n] = torch.tensor(known_output.token_ids, device=device)
                stats = torch.tensor([known_output.logprobs, known_output.entropies], device=device)
                state.out_stats_2TM[:, sample.row, :n] = stats

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
        done, generated = torch.stack([state.done_T, state.generated_T]).tolist()
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
        at = torch.tensor(list(rows), device=state.done_T.device)
        tokens = state.out_token_TM[at].tolist()
        logprobs, entropies = state.out_stats_2TM[:, at].tolist()
        counts = state.generated_T[at].tolist()
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
                    [self._pad_token_id],
                    [0.0],
                    [0.0],
                )
