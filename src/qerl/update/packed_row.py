"""Samples of a batch packed into one row, which holds the prompt of a group once.

A padded GRPO batch runs every prompt once per sample. Here the samples that share a prompt share its forward
and backward: the row holds the prompt without its last token, then for each sample a branch that starts with
that last token and continues with the completion,

    prompt[:-1] | prompt[-1] c1 .. c(n-1) | prompt[-1] c1' .. c(m-1)' | next prompt[:-1] | ...

so that every position of a branch predicts exactly one completion token and nothing is padded. A branch
attends to its prompt and to itself; positions count from the start of the sample, so rotary embeddings are
those of the sample alone. Gradients through the shared prompt add up over its branches, which is what a
padded batch computes sample by sample.

The attention mask of the row has two forms. `Branches` lists the segments of the row for a kernel that
computes only visible pairs (`qerl.update.attention`); `mask_function` decides for any two tokens, and the
model's own code makes its dense masks from it (`masked_by_branch`), at a cost of L^2 whatever they mask.
Masks made here would need code for every family, and would silently be wrong for a forgotten one. Given up:
models that make masks in some other way; `qerl.update.row_check` finds them.

Layers that carry a state from token to token read a third form: `Sequences` says where a state starts from
zero, and from which prompt's state a branch continues (`qerl.update.delta_net`).

Legend: B samples (or branches), C completion columns, L tokens of the row, S positions of L that predict a
token, N number of segments + 1, M keys of all segments, W taps of a convolution.
"""

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from qerl.errors import QeRLError
from qerl.kernels.tensors import upload

MaskFunction = Callable[[Any, Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' form of a mask: True if, at these indices of batch, head, query and key, the query sees the
key."""

IGNORE = -100
"""Label of positions that predict nothing, as in transformers."""


@dataclass
class Sample:
    """One completion of a prompt, from its rollout to its update: plain lists on the host, nothing padded.

    Attributes:
        prompt: Token ids, at least one.
        tokens: Token ids of the completion, at least one.
        logprobs: Natural log-probability of each token under the policy that drew it; NaN where unknown.
        entropies: Entropy in nats of the distribution that each token was drawn from; NaN where unknown.
        group: Number of its prompt among those of an optimizer step; samples with one number share it.
        written: For each token 1 if the policy wrote it, else 0; None if the policy wrote all of them.
        truncated: Whether the completion was cut off.
        masked: Whether the loss sees none of its tokens.
        rewards: One for each reward function; NaN where it gave none.
        advantage: Advantage computed from the rewards.
        group_tokens: Mean number of tokens that the loss sees per sample of its prompt.
        old_logprobs: Log-probabilities under the old policy, the ratio's denominator; None for the policy at
            the time of the update.
        reference_logprobs: Log-probabilities under the reference policy; None without one.
        teacher_prompt: Token ids of the prompt that a teacher reads before the tokens; None for `prompt`.
        choices: Experts that the sampler chose for its first tokens, prompt included, as in
            `qerl.rollout.engine.Completion.choices`; None if no choice is known.
        ages: For each token the number of optimizer steps between sampling and update; None if all are 0.
        forks: Other samples of the same trajectory, from an agent that rewrote its history; they get this
            sample's rewards and advantage, and join the update beside it.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    group: int = 0
    written: list[int] | None = None
    truncated: bool = False
    masked: bool = False
    rewards: list[float] = field(default_factory=list)
    advantage: float = 0.0
    group_tokens: float = 0.0
    old_logprobs: list[float] | None = None
    reference_logprobs: list[float] | None = None
    teacher_prompt: list[int] | None = None
    choices: np.ndarray | None = field(default=None, compare=False)
    ages: list[int] | None = None
    forks: list["Sample"] = field(default_factory=list)

    @property
    def drawn_tokens(self) -> int:
        """Number of tokens of its trajectory that the policy wrote."""
        own = len(self.tokens) if self.written is None else sum(self.written)
        return own + sum(fork.drawn_tokens for fork in self.forks)

    @property
    def loss_mask(self) -> list[int]:
        """1 for each token that the loss sees, else 0."""
        if self.masked:
            return [0] * len(self.tokens)
        return self.written or [1] * len(self.tokens)

    @property
    def computed(self) -> list[int]:
        """The tokens that an update computes: all, or only the first if the loss sees none of them."""
        return self.tokens[:1] if self.masked else self.tokens


def plain_choices(choices: np.ndarray | None) -> tuple[tuple[int, ...], str] | None:
    """Convert `Sample.choices` for JSON: shape and base64."""
    return None if choices is None else (choices.shape, base64.b64encode(choices.tobytes()).decode())


def choices_of_plain(plain: Any) -> np.ndarray | None:
    """Invert `plain_choices`."""
    return None if plain is None else np.frombuffer(base64.b64decode(plain[1]), np.uint8).reshape(plain[0])


@dataclass(frozen=True)
class Lengths:
    """Number of tokens that each sample adds to a row.

    Attributes:
        own_B: Tokens of each sample's completion.
        shared_B: Tokens of its prompt but the last one, which the row holds once per group.
        group_B: Number of its group.
    """

    own_B: list[int]
    shared_B: list[int]
    group_B: list[int]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> "Lengths":
        """Return the lengths of samples."""
        own = [len(sample.computed) for sample in samples]
        return cls(own, [len(sample.prompt) - 1 for sample in samples], [sample.group for sample in samples])

    def tokens(self, rows: Sequence[int]) -> int:
        """Number of tokens in the row that holds these samples."""
        shared = {self.group_B[row]: self.shared_B[row] for row in rows}
        return sum(self.own_B[row] for row in rows) + sum(shared.values())


@dataclass(frozen=True)
class Branches:
    """The row as segments of queries, each with the segment of keys it sees: causal, aligned at their ends.

    A shared prompt sees itself, a branch sees its prompt and then itself. `keys_M` concatenates the keys of
    all segments: a prompt's keys occur once for itself and once more for each of its branches.

    Attributes:
        query_offsets_N: int32, start of each segment's queries in the row, then L.
        key_offsets_N: int32, start of each segment's keys in `keys_M`, then M.
        longest_query, longest_key: Tokens of the longest segment.
        keys_M: Position in the row of each key.
        own_L: Index into `keys_M` of each position's key in its own segment.
        copies: For each shared prompt, its position in the row and the index [branches, tokens] into `keys_M`
            of the copies that its branches read.
    """

    query_offsets_N: torch.Tensor
    key_offsets_N: torch.Tensor
    longest_query: int
    longest_key: int
    keys_M: torch.Tensor
    own_L: torch.Tensor
    copies: list[tuple[slice, torch.Tensor]]


@dataclass(frozen=True)
class Sequences:
    """The row for layers that carry a state: shared prompts, each from a zero state, then all branches, each
    from the state after its prompt.

    Attributes:
        prompt_offsets: Start of each prompt in this order, and end of the last one; [0] without prompts.
        branch_offsets: The same for branches, counted from the first branch.
        prompt_B: int64, index of each branch's prompt, -1 for none.
        taps_LW: int64, in this order, row positions of the W - 1 tokens before each token in its own sample,
            then of the token itself; -1 before the sample's start.
        place_L: int64, place of each row position in this order.
    """

    prompt_offsets: list[int]
    branch_offsets: list[int]
    prompt_B: torch.Tensor
    taps_LW: torch.Tensor
    place_L: torch.Tensor


@dataclass(frozen=True)
class PackedRow:
    """One row that holds many samples. Tensors are int64 on one device.

    Attributes:
        input_ids_1L: Tokens.
        position_ids_1L: Position of each token in its own sample.
        labels_1L: Completion token predicted at each position, `IGNORE` on prompts.
        sample_L: Sample that each position belongs to, -1 on prompts.
        column_L: Completion column that each position predicts.
        group_L: Index of the prompt that a position belongs to, counted within the row.
        branch_L: Index of its branch of that prompt, 0 for the prompt itself.
        scored_S: Positions that predict a token.
        segments: (group, branch, tokens) of the row's parts in order.
        choices_LMC: int16, experts that the sampler chose at each position, for each of M mixtures, -1 where
            unknown; None without any.
    """

    input_ids_1L: torch.Tensor
    position_ids_1L: torch.Tensor
    labels_1L: torch.Tensor
    sample_L: torch.Tensor
    column_L: torch.Tensor
    group_L: torch.Tensor
    branch_L: torch.Tensor
    scored_S: torch.Tensor
    segments: list[tuple[int, int, int]]
    choices_LMC: torch.Tensor | None = None

    def mask_function(self, of_sample: MaskFunction) -> MaskFunction:
        """Return the mask function of the row.

        Args:
            of_sample: The mask of a sample by itself, by position: causal, within a window, in blocks.

        Returns:
            The same by index into the row: a token sees what `of_sample` lets it see of its own branch and of
            the prompt that the branch continues.
        """
        position_L = self.position_ids_1L[0]

        def of_row(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            same_prompt = self.group_L[query] == self.group_L[key]
            key_branch = self.branch_L[key]
            own_or_prompt = (self.branch_L[query] == key_branch) | (key_branch == 0)
            return same_prompt & own_or_prompt & of_sample(batch, head, position_L[query], position_L[key])

        return of_row

    @cached_property
    def branches(self) -> Branches:
        """The mask of the row for causal attention, as segments."""
        queries, keys = [0], [0]
        gathered: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        prompts: dict[int, slice] = {}
        copies: dict[int, list[int]] = {}
        for group, branch, tokens in self.segments:
            start = queries[-1]
            at = keys[-1]
            if branch == 0:
                prompts[group] = slice(start, start + tokens)
            elif group in prompts:
                shared = prompts[group]
                gathered.append(torch.arange(shared.start, shared.stop))
                copies.setdefault(group, []).append(at)
                at += shared.stop - shared.start
            gathered.append(torch.arange(start, start + tokens))
            own.append(torch.arange(at, at + tokens))
            queries.append(start + tokens)
            keys.append(at + tokens)
        device = self.group_L.device
        width = {group: torch.arange(part.stop - part.start) for group, part in prompts.items()}
        return Branches(
            query_offsets_N=upload(torch.tensor(queries, dtype=torch.int32), device),
            key_offsets_N=upload(torch.tensor(keys, dtype=torch.int32), device),
            longest_query=max(b - a for a, b in pairwise(queries)),
            longest_key=max(b - a for a, b in pairwise(keys)),
            keys_M=upload(torch.cat(gathered), device),
            own_L=upload(torch.cat(own), device),
            copies=[
                (prompts[group], upload(torch.tensor(starts)[:, None] + width[group], device))
                for group, starts in copies.items()
            ],
        )

    def sequences(self, width: int) -> Sequences:
        """Return the row for layers that carry a state, after a convolution of `width` taps, at least one."""
        prompts: dict[int, torch.Tensor] = {}
        taps: dict[bool, list[torch.Tensor]] = {True: [], False: []}  # of prompts, of branches
        prompt_B: list[int] = []
        start, nothing = 0, torch.full((width - 1,), -1)
        for group, branch, tokens in self.segments:
            own = torch.arange(start, start + tokens)
            start += tokens
            before = nothing
            if branch == 0:
                prompts[group] = own
            else:
                prompt_B.append(list(prompts).index(group) if group in prompts else -1)
                before = torch.cat([nothing, prompts.get(group, nothing)])
            seen = torch.cat([before[len(before) - width + 1 :], own])
            taps[branch == 0].append(seen.unfold(0, width, 1))
        taps_LW = torch.cat(taps[True] + taps[False])
        prompt_offsets, branch_offsets = ([0, *accumulate(map(len, parts))] for parts in taps.values())
        device = self.group_L.device
        return Sequences(
            prompt_offsets,
            branch_offsets,
            prompt_B=upload(torch.tensor(prompt_B), device),
            taps_LW=upload(taps_LW, device),
            place_L=upload(taps_LW[:, -1].argsort(), device),
        )

    def scatter(self, values_S: torch.Tensor, batch: int, columns: int) -> torch.Tensor:
        """Scatter values of the S positions that predict a token into the layout [B, C], zero elsewhere."""
        index_S = (self.sample_L * columns + self.column_L)[self.scored_S]
        flat = values_S.new_zeros(batch * columns)
        return flat.index_put((index_S,), values_S).view(batch, columns)


def pack_row(samples: Sequence[Sample], rows: Sequence[int], device: torch.device) -> PackedRow:
    """Pack the samples with these indices into one row, with groups in the order of their first sample.

    Args:
        samples: The samples to choose from.
        rows: Indices of the samples to pack, at least one.
        device: Device of the row; the call does not wait for it.
    """
    builder = RowBuilder()
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(samples[row].group, []).append(row)
    for members in groups.values():
        prompt = samples[members[0]].prompt
        shared = builder.begin_group(torch.tensor(prompt[:-1], dtype=torch.long))
        builder.choose(shared, samples[members[0]].choices)
        for row in members:
            tokens, choices = samples[row].computed, samples[row].choices
            own = builder.add_branch(row, torch.tensor([prompt[-1], *tokens[:-1]]), torch.tensor(tokens))
            builder.choose(own, None if choices is None else choices[len(prompt) - 1 :])
    return builder.finish(device)


class RowBuilder:
    """Builder of a packed row, sample by sample, on the CPU: on a GPU each sample would cost a wait."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []  # [7, tokens], in the order of PackedRow's fields
        self._segments: list[tuple[int, int, int]] = []
        self._shared, self._group, self._branch = 0, -1, 0
        self._length = 0
        self._choices: list[tuple[slice, np.ndarray]] = []

    def choose(self, part: slice, choices: np.ndarray | None) -> None:
        """Record the experts of a part's first tokens; choices beyond the end of the part are ignored."""
        if choices is not None:
            self._choices.append((part, choices[: part.stop - part.start]))

    def begin_group(self, shared: torch.Tensor) -> slice:
        """Begin a group with the tokens that its branches share, which may be none.

        Returns:
            Their positions in the row.
        """
        self._shared, self._group, self._branch = len(shared), self._group + 1, 0
        return self._extend(shared, 0, torch.full_like(shared, IGNORE), -1)

    def add_branch(self, sample: int, tokens: torch.Tensor, labels: torch.Tensor) -> slice:
        """Add a sample to the group that was begun last.

        Args:
            sample: Its index.
            tokens: Tokens after the shared ones, at least one.
            labels: Label of each of these tokens.

        Returns:
            Positions of these tokens in the row.
        """
        self._branch += 1
        return self._extend(tokens, self._shared, labels, sample)

    def _extend(self, tokens: torch.Tensor, position: int, labels: torch.Tensor, sample: int) -> slice:
        start, n = self._length, len(tokens)
        self._length += n
        if n:
            self._segments.append((self._group, self._branch, n))
            column = torch.arange(n)
            where = (torch.full((n,), x) for x in (sample, self._group, self._branch))
            sample_n, group_n, branch_n = where
            parts = [tokens, position + column, labels, sample_n, column, group_n, branch_n]
            self._parts.append(torch.stack(parts))
        return slice(start, self._length)

    def finish(self, device: torch.device) -> PackedRow:
        """The row, on a device."""
        on_host = torch.cat(self._parts, dim=1)
        scored_S = upload((on_host[3] >= 0).nonzero()[:, 0], device)
        tokens, positions, labels, *where = upload(on_host, device)
        sample, column, group, branch = where
        rows = tokens[None], positions[None], labels[None]
        choices_LMC = self._chosen(device) if self._choices else None
        return PackedRow(*rows, sample, column, group, branch, scored_S, self._segments, choices_LMC)

    def _chosen(self, device: torch.device) -> torch.Tensor:
        all_LMC = np.full((self._length, *self._choices[0][1].shape[1:]), -1, np.int16)
        for part, choices in self._choices:
            all_LMC[part.start : part.start + len(choices)] = choices
        return upload(torch.from_numpy(all_LMC), device)


@contextmanager
def masked_by_branch(config: PreTrainedConfig, row: PackedRow) -> Iterator[dict[str, Any]]:
    """Make the model's masks those of the packed row inside the block; yields arguments of a forward pass.

    The model defines the mask within a sample: a layer attends to all earlier tokens, to a window, to a
    block. transformers expresses it as a function of two positions, and looks up by name the function of the
    attention implementation that makes a tensor from it; this entry is replaced for one forward pass. Masks
    are made before the decoder's layers run, so layers recomputed in the backward pass read the same masks.

    Args:
        config: Config of the model, or of the decoder in it.
        row: The row.

    Raises:
        QeRLError: The model's attention implementation makes no such masks.
    """
    name = config.get_text_config(decoder=True)._attn_implementation
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(name)

    def make_for_row(*, mask_function: MaskFunction = causal_mask_function, **settings: Any) -> Any:
        settings |= {"attention_mask": None, "allow_is_causal_skip": False}
        mask = make(mask_function=row.mask_function(mask_function), **settings)
        if mask is None or mask.ndim != 4:
            raise _no_masks(name)
        return mask

    if make is None:
        raise _no_masks(name)
    ALL_MASK_ATTENTION_FUNCTIONS[name] = make_for_row
    try:
        # Without a mask, transformers would guess from the positions where a sample ends.
        yield {"attention_mask": torch.ones_like(row.input_ids_1L)}
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]


def _no_masks(name: str) -> QeRLError:
    return QeRLError(
        f"The model asks {name} attention for a mask that cannot be restricted to the samples of a packed "
        "row; load it with attn_implementation='sdpa' or 'eager', or use a model family of docs/families.md."
    )
