"""Problems with answers as rows of token ids, drawn in batches on the device that trains.

A row is a chat as the template writes it: the prompt, the assistant's turn and its end, then padding. Nothing
is tokenised: a few dozen operations draw all rows of a step, so that a GPU does not wait for data. Rows are
keyed by (seed, step), so a resumed run draws the same rows.

Legend: B rows, T tokens, N = 8 nodes, L = 6 letters of the longest lock, C = 11 tokens of the longest answer.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from lab.scratch import END, PAD, ROLES
from lab.testbed.language import ARROWS, CELLS, ENDS, NODES, ON, PRIORS, STOP, VOCABULARY, chance
from qerl.seeding import derive_seed

ID = {token: i for i, token in enumerate(VOCABULARY)}
LETTERS, ANSWER = 6, 11
BEFORE = 4 + NODES
"""Tokens of a row before the letters that name where to begin."""

LONGEST = BEFORE + LETTERS + 2 + ANSWER
"""Tokens of a row."""

UNSEEN = -100
"""Label of a token without loss."""

Strategy = Literal["drawn", "right", "habit"]


@dataclass(frozen=True)
class Rows:
    """Problems and answers.

    Attributes:
        ids_BT: Token ids.
        begin_B: Index of the answer's first token.
        success_B: Whether the answer is right.
    """

    ids_BT: torch.Tensor
    begin_B: torch.Tensor
    success_B: torch.Tensor

    @property
    def labels_BT(self) -> torch.Tensor:
        """The ids of answers and their ends, `UNSEEN` elsewhere."""
        at_T = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)
        learned_BT = (at_T >= self.begin_B[:, None]) & (self.ids_BT != ID[PAD])
        return self.ids_BT.where(learned_BT, UNSEEN)


def stream(device: torch.device, *coordinates: int | str) -> torch.Generator:
    """A generator on a device at the start of the stream of these coordinates."""
    return torch.Generator(device).manual_seed(derive_seed("testbed", *coordinates))


def orders(rows: int, draw: torch.Generator) -> torch.Tensor:
    """Random orders [B, N] of the nodes."""
    return torch.rand(rows, NODES, generator=draw, device=draw.device).argsort(dim=1)


def rows_of(cells: torch.Tensor, draw: torch.Generator, strategy: Strategy = "drawn") -> Rows:
    """Draw problems with answers.

    Args:
        cells: Cell of each row, [B], indices into `language.CELLS`.
        draw: Generator on the device of the rows.
        strategy: Answers drawn by the prior, all right, or all of the habit.
    """
    device, rows = draw.device, len(cells)
    kind_B, prior_B, length_B, q_B = (column[cells] for column in _table(device))
    letters = torch.arange(LETTERS, device=device)
    is_chain_B1 = (kind_B == ID["chain"])[:, None]

    circle_BN, order_BN = orders(rows, draw), orders(rows, draw)
    next_BN = torch.empty_like(circle_BN).scatter_(1, circle_BN, circle_BN.roll(-1, dims=1))
    begin_BL = torch.randint(NODES, (rows, LETTERS), generator=draw, device=device)
    lucky_BL = torch.rand(rows, LETTERS, generator=draw, device=device) < q_B[:, None]
    if strategy != "drawn":
        lucky_BL = torch.full_like(lucky_BL, strategy == "right")

    ends = ID[ENDS[0]]  # ids of letters and of arrows follow each other
    arrows_BN = ID[ARROWS[0]] + NODES * order_BN + next_BN.gather(1, order_BN)
    unlocked_BL = torch.where(lucky_BL, next_BN.gather(1, begin_BL), begin_BL)
    nodes, at_B1 = [], begin_BL[:, :1]
    for _ in range(LETTERS):
        at_B1 = next_BN.gather(1, at_B1)
        nodes.append(at_B1)
    goes_on_BL = lucky_BL & (letters < length_B[:, None] - 1)
    hops_B1 = 1 + goes_on_BL.long().cumprod(dim=1).sum(dim=1, keepdim=True)
    chain_BC = _chain(torch.cat(nodes, dim=1) + ends, hops_B1)
    lock_BC = torch.nn.functional.pad(unlocked_BL + ends, (0, ANSWER - LETTERS), value=ID[PAD])
    lock_BC = _ended(lock_BC, length_B[:, None])
    answer_BC = torch.where(is_chain_B1, chain_BC, lock_BC)

    said_B1 = torch.where(is_chain_B1, 1, length_B[:, None])
    prompt_B4 = torch.stack([torch.full_like(kind_B, ID[ROLES["user"]]), kind_B, prior_B, length_B + _X], 1)
    tail = torch.arange(LETTERS + 2 + ANSWER, device=device).expand(rows, -1)
    tail_BE = (begin_BL + ends).gather(1, tail.clamp(max=LETTERS - 1))
    tail_BE = tail_BE.where(tail < said_B1, answer_BC.gather(1, (tail - said_B1 - 2).clamp(0, ANSWER - 1)))
    tail_BE = tail_BE.where(tail != said_B1, ID[END]).where(tail != said_B1 + 1, ID[ROLES["assistant"]])
    tail_BE = tail_BE.where(tail - said_B1 - 2 < ANSWER, ID[PAD])
    opened_B = (lucky_BL | (letters >= length_B[:, None])).all(dim=1)
    return Rows(
        torch.cat([prompt_B4, arrows_BN, tail_BE], dim=1),
        BEFORE + 2 + said_B1[:, 0],
        torch.where(is_chain_B1[:, 0], hops_B1[:, 0] == length_B, opened_B),
    )


_X = ID["x2"] - 2
"""Offset from a length to the id of its word."""


@cache
def _table(device: torch.device) -> list[torch.Tensor]:
    """Columns of `_numbers`, a row for each cell."""
    columns = zip(*(_numbers(*cell) for cell in CELLS), strict=True)
    return [torch.tensor(column, device=device) for column in columns]


def _numbers(kind: str, length: int, prior: float) -> tuple[int, int, int, float]:
    """Ids of a cell's kind and prior, its length, and the chance of a decision."""
    word = next(word for word, value in PRIORS.items() if value == prior)
    return ID[kind], ID[word], length, chance(kind, length, prior)


def _chain(nodes_BL: torch.Tensor, hops_B1: torch.Tensor) -> torch.Tensor:
    """Answers [B, C] that write the first `hops_B1` of the nodes with these ids."""
    at_C = torch.arange(ANSWER, device=nodes_BL.device)
    node_BC = nodes_BL[:, at_C // 2]
    mark_BC = torch.where(at_C // 2 < hops_B1 - 1, ID[ON], ID[STOP])
    return _ended(torch.where(at_C % 2 == 0, node_BC, mark_BC), 2 * hops_B1)


def _ended(answer_BC: torch.Tensor, length_B1: torch.Tensor) -> torch.Tensor:
    """Cut answers to a length, followed by their end and padding."""
    at_C = torch.arange(ANSWER, device=answer_BC.device)
    return answer_BC.where(at_C < length_B1, torch.where(at_C == length_B1, ID[END], ID[PAD]))
