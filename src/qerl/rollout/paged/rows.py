"""The rows of the decode batch on the GPU: their state, outputs, block tables and attention work items.

A row is a slot for one sequence. Its state (token, position, place of its key, tokens that it attends to) is
on the GPU and is advanced there by the sampling kernel, so the host writes a row when a sequence enters it,
reads it when the sequence leaves, and in between looks which rows have ended.

Shapes: T rows, S of them, M maximum tokens of a row, B blocks of a table, K stop tokens.
"""

import math
from collections import abc
from dataclasses import fields

import numpy as np
import torch

from qerl.kernels.decode.draw import RowState, uniforms_of_rows
from qerl.kernels.decode.filters import FILTERED, FREE, GREEDY, RowSettings
from qerl.kernels.limits import STOP_TOKENS
from qerl.rollout.engine import SamplingParams, uniform_streams
from qerl.rollout.paged.forward import Inputs
from qerl.rollout.session import Prompt, Sequence
from qerl.rollout.stops import Cut, FinishReason

_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length", 3: "error"}
_BY_KIND = ("limit_2T", "out_stats_2TM")  # tensors whose rows are the second dimension
_MOST = 2**31 - 1  # of int32


class Rows:
    """Rows of one captured step; all of them are free at first.

    Args:
        count: T.
        max_new: M.
        table_width: Maximum blocks of a sequence, and of a prompt.
        pools: Number of pools of the cache.
        kinds: Number of kinds of attention.
        device: Device of the tensors.

    Attributes:
        state: State that the sampling kernel advances.
        settings: Sampling parameters and stop tokens of each row.
        inputs: Inputs of the forward pass. The first half of each table [2 T, B] lists the blocks of prompts,
            the second each row's own blocks; items [2 T, 4] and their order [2 T] are divided likewise.
    """

    def __init__(
        self,
        count: int,
        max_new: int,
        table_width: int,
        pools: int,
        kinds: int,
        device: torch.device,
    ) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.count, self._device = count, device
        self.state = RowState(
            token_T=integers(count),
            position_T=integers(count),
            limit_2T=integers(2, count),
            generated_T=integers(count),
            max_new_T=integers(count),
            done_T=integers(count),
            uniform_TM=torch.zeros(count, max_new, device=device),
            out_token_TM=integers(count, max_new),
            out_stats_2TM=torch.zeros(2, count, max_new, device=device),
        )
        self.settings = RowSettings.free(count, device)
        self.inputs = Inputs(
            self.state.token_T, self.state.position_T, self.state.limit_2T,
            torch.arange(count, 2 * count, dtype=torch.int32, device=device),
            [integers(2 * count, table_width) for _ in range(pools)],
            [(integers(2 * count, 4), integers(2 * count)) for _ in range(kinds)],
        )  # fmt: skip
        self.clear()

    def clear(self) -> None:
        """End every row."""
        self.state.done_T.fill_(1)
        self.state.limit_2T[1].fill_(0)

    def place(self, sequences: list[Sequence]) -> None:
        """Write the state of sequences that enter rows.

        Args:
            sequences: Admitted sequences, with rows and blocks. All their tokens but the last must be in the
                cache when they are decoded.
        """
        if not sequences:
            return
        at = torch.tensor([sequence.row for sequence in sequences], device=self._device)
        columns = [self._column(sequence) for sequence in sequences]
        values = torch.tensor(columns, dtype=torch.int32, device=self._device)
        state = self.state
        by_column = (
            state.token_T, state.position_T, state.generated_T, state.max_new_T, state.done_T,
        )  # fmt: skip
        for column, of_rows in enumerate(by_column):
            of_rows.index_copy_(0, at, values[:, column])
        state.limit_2T.index_copy_(1, at, values[:, len(by_column) :].T.contiguous())
        write_settings(self.settings, at, [sequence.params for sequence in sequences])
        longest = max(sequence.max_tokens for sequence in sequences)
        streams = uniform_streams([each.key for each in sequences], longest)
        uniforms = uniforms_of_rows(streams).to(self._device)
        state.uniform_TM[:, : uniforms.shape[1]].index_copy_(0, at, uniforms)
        self._write_outputs([sequence for sequence in sequences if sequence.token_ids])

    @staticmethod
    def _column(sequence: Sequence) -> list[int]:
        """Return the values of a row in the order of `place`; the last two are the limits."""
        shared, own = sequence.prompt.shared_tokens, sequence.own_tokens
        counts = sequence.generated, sequence.max_tokens
        return [sequence.last_token, shared + own, *counts, 0, shared, own + 1]

    def _write_outputs(self, sequences: list[Sequence]) -> None:
        """Upload the tokens that sequences already have, drawn or appended, in three copies for all."""
        if not sequences:
            return
        most = max(len(sequence.token_ids) for sequence in sequences)
        tokens_SM = np.zeros((len(sequences), most), np.int32)
        stats_2SM = np.zeros((2, len(sequences), most), np.float32)
        for i, sequence in enumerate(sequences):
            count = len(sequence.token_ids)
            tokens_SM[i, :count] = sequence.token_ids
            stats_2SM[:, i, :count] = sequence.logprobs, sequence.entropies
        at = torch.tensor([sequence.row for sequence in sequences], device=self._device)
        state = self.state
        state.out_token_TM[:, :most].index_copy_(0, at, torch.from_numpy(tokens_SM).to(self._device))
        state.out_stats_2TM[:, :, :most].index_copy_(1, at, torch.from_numpy(stats_2SM).to(self._device))

    def end(self, preempted: dict[int, Sequence]) -> None:
        """Read what preempted sequences have generated, and free their rows."""
        if preempted:
            self._fetch(preempted, {row: sequence.generated for row, sequence in preempted.items()})
            self._end(list(preempted))

    def _end(self, rows: list[int]) -> None:
        """Mark rows as ended, so that they draw no tokens and write no keys."""
        if rows:
            at = torch.tensor(rows, device=self._device)
            self.state.done_T.index_fill_(0, at, 1)
            self.state.limit_2T[1].index_fill_(0, at, 0)

    def move(self, source: "Rows", rows: dict[int, int]) -> None:
        """Move sequences here from the rows of another step.

        Args:
            source: The rows of the other step; all rows here must have ended.
            rows: Row there -> row here.
        """
        if not rows:
            return
        there, here = (torch.tensor(list(side), device=self._device) for side in (rows.keys(), rows.values()))
        for mine, theirs in ((self.state, source.state), (self.settings, source.settings)):
            for tensor in fields(mine):
                dim = int(tensor.name in _BY_KIND)
                moved = getattr(theirs, tensor.name).index_select(dim, there)
                getattr(mine, tensor.name).index_copy_(dim, here, moved)

    def attend(self, running: abc.Mapping[int, Sequence], together: abc.Sequence[int]) -> None:
        """Upload block tables and attention work items of all running sequences.

        A group's samples read their prompt together, in items of as many tokens as a tile takes; each sample
        reads its own tokens alone.

        Args:
            running: Sequences by row.
            together: Maximum tokens of a work item, per kind of attention.
        """
        numbers = {prompt: i for i, prompt in enumerate({each.prompt: None for each in running.values()})}
        for pool, to in enumerate(self.inputs.tables):
            tables_GB = np.zeros(to.shape, np.int32)
            for prompt, group in numbers.items():
                tables_GB[group, : len(prompt.blocks[pool])] = prompt.blocks[pool]
            for row, sequence in running.items():
                tables_GB[self.count + row, : len(sequence.blocks[pool])] = sequence.blocks[pool]
            to.copy_(torch.from_numpy(tables_GB))
        for most, (to_item_4, to_order) in zip(together, self.inputs.items, strict=True):
            item_4, order = self._items(running, numbers, most)
            to_item_4.copy_(torch.from_numpy(item_4))
            to_order.copy_(torch.from_numpy(order))

    def _items(
        self, running: abc.Mapping[int, Sequence], numbers: abc.Mapping[Prompt, int], together: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return work items of one kind of attention, of at most ``together`` tokens each, and their rows."""
        item_4 = np.zeros((2 * self.count, 4), np.int32)
        order = np.zeros(2 * self.count, np.int32)
        own_4 = item_4[self.count :]
        own_4[:, 0] = own_4[:, 2] = np.arange(self.count, 2 * self.count)
        own_4[list(running), 1] = 1
        own_4[:, 3] = 1
        order[self.count :] = np.arange(self.count)
        members: dict[Prompt, list[int]] = {}
        for row, sequence in running.items():
            members.setdefault(sequence.prompt, []).append(row)
        item = place = 0
        for prompt, of_prompt in members.items():
            if not prompt.shared_tokens:
                continue
            for first in range(0, len(of_prompt), together):
                chosen = of_prompt[first : first + together]
                item_4[item] = place, len(chosen), numbers[prompt], 0
                order[place : place + len(chosen)] = chosen
                item, place = item + 1, place + len(chosen)
        return item_4, order

    def read(self, running: abc.Mapping[int, Sequence]) -> tuple[dict[int, int], list[int], list[int]]:
        """Find the rows that have ended, and read their tokens.

        Tokens drawn after the point where a sequence's stops end its turn are discarded. Their keys and
        values lie behind those of the sequence, where its next tokens overwrite them.

        Returns:
            Number of tokens by row, the rows that have ended, and the ended rows for which more tokens were
            computed: the arguments of `Scheduler.advance`.
        """
        done, counts = torch.stack([self.state.done_T, self.state.generated_T]).tolist()
        generated = {row: counts[row] for row in running}
        reasons = {row: _REASONS[done[row]] for row in running if done[row]}
        cuts = self._cuts(running, generated)
        overrun = [row for row, cut in cuts.items() if cut.tokens < generated[row]]
        for row, cut in cuts.items():
            if reasons.get(row) != "stop" or cut.tokens < generated[row]:
                generated[row], reasons[row] = cut
        self._end([row for row in cuts if not done[row]])
        ended = {row: running[row] for row in reasons}
        for row, sequence in ended.items():
            sequence.finish_reason = reasons[row]
        if ended:
            self._fetch(ended, generated)
        return generated, list(ended), overrun

    def _cuts(self, running: abc.Mapping[int, Sequence], generated: abc.Mapping[int, int]) -> dict[int, Cut]:
        """Return where stops end turns, by row."""
        asked = {row: each for row, each in running.items() if each.stops and generated[row] > each.generated}
        readers = {row: each for row, each in asked.items() if any(stop.reads_tokens for stop in each.stops)}
        if readers:
            self._fetch_new(readers, generated)
        cuts = {row: sequence.cut(sequence.generated) for row, sequence in asked.items()}
        return {row: cut for row, cut in cuts.items() if cut}

    def _fetch_new(self, rows: dict[int, Sequence], generated: abc.Mapping[int, int]) -> None:
        """Read the tokens of this round, and append them to those of earlier rounds."""
        known = torch.tensor([sequence.generated for sequence in rows.values()], device=self._device)
        new = max(generated[row] - sequence.generated for row, sequence in rows.items())
        places = known[:, None] + torch.arange(new, device=self._device)
        at = torch.tensor(list(rows), device=self._device)[:, None]
        out_TM = self.state.out_token_TM
        tokens = out_TM[at, places.clamp_(max=out_TM.shape[1] - 1)].tolist()
        for (row, sequence), drawn in zip(rows.items(), tokens, strict=True):
            sequence.token_ids += drawn[: generated[row] - sequence.generated]

    def _fetch(self, rows: dict[int, Sequence], generated: dict[int, int]) -> None:
        """Read tokens, log-probabilities and entropies of rows, as many as each has generated."""
        at = torch.tensor(list(rows), device=self._device)
        most = max(generated[row] for row in rows)
        tokens = self.state.out_token_TM[at, :most].tolist()
        logprobs, entropies = self.state.out_stats_2TM[:, at, :most].tolist()
        for i, (row, sequence) in enumerate(rows.items()):
            count = generated[row]
            sequence.token_ids, sequence.logprobs = tokens[i][:count], logprobs[i][:count]
            sequence.entropies = entropies[i][:count]


def write_settings(settings: RowSettings, at: torch.Tensor, params: abc.Sequence[SamplingParams]) -> None:
    """Write the sampling parameters of some rows.

    A row takes only the first `STOP_TOKENS` of its stop tokens.

    Args:
        settings: Settings of all rows.
        at: int64 [S], the rows.
        params: Sampling parameters of each of them.
    """
    numbers, counts = [], []
    for own in params:
        mode = FILTERED if own.filtered else FREE if own.temperature > 0 else GREEDY
        farthest = -math.log(own.min_p) if own.min_p else math.inf
        stops = own.stop_token_ids[:STOP_TOKENS]
        numbers.append([1 / (own.temperature or 1.0), own.top_p, farthest])
        counts.append([mode.value, min(own.top_k, _MOST), *stops, *[-1] * (STOP_TOKENS - len(stops))])
    numbers_S3 = torch.tensor(numbers, dtype=torch.float32, device=at.device)
    counts_SK = torch.tensor(counts, dtype=torch.int32, device=at.device)
    for column, of_rows in enumerate((settings.inverse_temperature_T, settings.top_p_T, settings.farthest_T)):
        of_rows.index_copy_(0, at, numbers_S3[:, column])
    settings.mode_T.index_copy_(0, at, counts_SK[:, 0])
    settings.top_k_T.index_copy_(0, at, counts_SK[:, 1])
    settings.stop_TK.index_copy_(0, at, counts_SK[:, 2:])
