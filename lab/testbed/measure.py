"""Measure how often the testbed's model is right: by one forward pass of the right answer, and by sampling.

A prompt has one right completion, so the probability of success is exact without any sample. Both are
measured, because exploration samples.

Legend: B problems, T tokens, C tokens of an answer, V vocabulary.
"""

from dataclasses import asdict, dataclass

import torch
from transformers import PreTrainedModel

from lab.testbed.language import ASKED, CELLS, Cell
from lab.testbed.problems import ANSWER, Rows, rows_of, stream
from qerl.eval.interval import score_interval


@dataclass(frozen=True)
class Prior:
    """Measured probabilities of a model in one cell.

    Attributes:
        kind, length, prior: The cell.
        exact: Mean probability of the right answer over `problems` prompts.
        spread: Its standard deviation over prompts.
        sampled: Share of right answers of one sample of each of `samples` other prompts.
        low, high: 95 % interval of `sampled`.
        habit: Mean probability of the habit's answer.
    """

    kind: str
    length: int
    prior: float
    problems: int
    exact: float
    spread: float
    samples: int
    sampled: float
    low: float
    high: float
    habit: float

    def plain(self) -> dict[str, str | int | float]:
        """As a row of a result file, to five digits."""
        return {name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in asdict(self).items()}


def answer_probability(model: PreTrainedModel, rows: Rows) -> torch.Tensor:
    """Probability [B], fp64 on the CPU, of each row's answer given its prompt."""
    with torch.no_grad():
        logits_BTV = model(input_ids=rows.ids_BT[:, :-1], use_cache=False).logits
    labels_BT = rows.labels_BT[:, 1:]
    seen_BT = labels_BT >= 0
    logps_BTV = logits_BTV.double().log_softmax(-1)
    logps_BT = logps_BTV.gather(2, labels_BT.clamp(min=0)[..., None])[..., 0]
    return logps_BT.where(seen_BT, 0.0).sum(dim=1).exp().cpu()


def sample(model: PreTrainedModel, rows: Rows, draw: torch.Generator) -> torch.Tensor:
    """Draw a sample for each row's prompt; returns if it is the row's answer, [B]. Rows are of one cell."""
    ids_BT, begin = rows.ids_BT.clone(), int(rows.begin_B[0])
    with torch.no_grad():
        for at in range(begin, begin + ANSWER):
            logits_BV = model(input_ids=ids_BT[:, :at], use_cache=False, logits_to_keep=1).logits[:, -1]
            drawn_B1 = torch.multinomial(logits_BV.float().softmax(-1), 1, generator=draw)
            ids_BT[:, at] = drawn_B1[:, 0]
    learned_BT = rows.labels_BT >= 0
    return (ids_BT == rows.ids_BT).where(learned_BT, True).all(dim=1)


def measure(
    model: PreTrainedModel, problems: int, samples: int, seed: int = 0, cells: tuple[Cell, ...] = ASKED
) -> list[Prior]:
    """Measure the priors of a model in each cell.

    Args:
        model: In eval mode.
        problems: Prompts of each cell whose right answer is scored.
        samples: Further prompts, each of which gets one sample.
        seed: Seed of prompts and samples.
        cells: Cells to measure.
    """
    found = []
    for cell in cells:
        index, draw = CELLS.index(cell), stream(model.device, "measure", seed, *map(str, cell))
        number = torch.full((problems,), index, device=model.device)
        exact = answer_probability(model, rows_of(number, draw, "right"))
        by_habit = answer_probability(model, rows_of(number, draw, "habit"))
        right = 0
        for start in range(0, samples, _AT_ONCE):
            some = number[:1].expand(min(_AT_ONCE, samples - start))
            right += int(sample(model, rows_of(some, draw, "right"), draw).sum())
        low, high = score_interval(right / samples, samples)
        spread = float(exact.std())
        found.append(
            Prior(*cell, problems, float(exact.mean()), spread, samples, right / samples, low, high,
                  float(by_habit.mean()))
        )  # fmt: skip
    return found


_AT_ONCE = 2048
