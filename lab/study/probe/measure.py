"""From walks to numbers by problem, which are all that is kept of a cell.

Shapes: P problems, G samples of each, R = P * G rows, T tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from lab.study.probe.walk import Ints, Rows, Walk
from qerl.tasks.base import Task

Numbers = dict[str, list[Any]]
"""A list by name, each with a value for each problem (or, for solutions, for each token)."""

DECISIVE = 0.9
"""A token of a worked solution is decisive where the clean policy gives it at most this probability."""


class Judge:
    """Says which completions are right and which answer they state.

    A cell has thousands of completions, of which most were seen before or state an answer that was: each text
    of a problem is read once, and each answer of a problem compared once.

    Args:
        task: Its first reward says what is right.
        tokenizer: Decodes, as training does, without special tokens.
        problems: Rows of the task.
    """

    def __init__(
        self, task: Task, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Mapping[str, Any]]
    ) -> None:
        self._task, self._tokenizer, self._problems = task, tokenizer, problems
        self._by_answer = type(task).rewards is Task.rewards  # the accuracy of others may read the whole text
        self._known: dict[tuple[int, bytes], tuple[bool, str | None]] = {}
        self._compared: dict[tuple[int, str], bool] = {}

    def judge(self, problems: Ints, completions: Sequence[Ints]) -> list[tuple[bool, str | None]]:
        """Whether each completion is right, and its answer, None where it states none.

        Args:
            problems: The problem of each completion.
            completions: Token ids of each.
        """
        keys = [(p, ids.tobytes()) for p, ids in zip(problems.tolist(), completions, strict=True)]
        new = {
            key: ids.tolist() for key, ids in zip(keys, completions, strict=True) if key not in self._known
        }
        texts = self._tokenizer.batch_decode(list(new.values()), skip_special_tokens=True) if new else []
        for key, text in zip(new, texts, strict=True):
            answer = self._task.of(self._problems[key[0]]).extract(text)
            self._known[key] = self._right(key[0], text, answer), answer
        return [self._known[key] for key in keys]

    def _right(self, problem: int, text: str, answer: str | None) -> bool:
        if not self._by_answer:
            return self._reward(problem, text)
        if answer is None:
            return False
        key = (problem, answer)
        if key not in self._compared:
            self._compared[key] = self._reward(problem, text)
        return self._compared[key]

    def _reward(self, problem: int, text: str) -> bool:
        row = self._problems[problem]
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        return self._task.rewards[0]([row["prompt"]], [text], **columns) == [1.0]


def by_problem(rows: Rows, walk: Walk, judge: Judge) -> Numbers:
    """What a cell is, problem by problem, in the order of the problems.

    Returns:
        `problem`; `right` samples and `answers` (distinct ones); sums over the `tokens` of `kl`, `entropy`,
        `entropy_pi`, and of the `ratio` pi / mu and its square; and `ess`, the effective share of the samples
        when each is weighted by pi / mu of its whole completion.
    """
    problems = np.unique(rows.problem)
    numbers: Numbers = {}
    ratio = np.exp((walk.pi - walk.mu).astype(np.float64)) * walk.valid
    log_weight = np.where(walk.valid, walk.pi - walk.mu, 0).sum(1, dtype=np.float64)
    written = [tokens[valid] for tokens, valid in zip(walk.tokens, walk.valid, strict=True)]
    verdicts = judge.judge(rows.problem, written)
    for problem in problems.tolist():
        here = np.flatnonzero(rows.problem == problem)
        judged = [verdicts[row] for row in here]
        valid = walk.valid[here]
        weight = np.exp(log_weight[here] - log_weight[here].max())
        values = {
            "problem": problem,
            "right": sum(right for right, _ in judged),
            "answers": len({answer for _, answer in judged if answer is not None}),
            "tokens": int(valid.sum()),
            "kl": _sum(walk.kl[here], valid),
            "entropy": _sum(walk.entropy[here], valid),
            "entropy_pi": _sum(walk.entropy_pi[here], valid),
            "ratio": _short(ratio[here].sum()),
            "ratio_squared": _short((ratio[here] ** 2).sum()),
            "ess": _short(weight.sum() ** 2 / (len(here) * (weight**2).sum())),
        }
        for name, value in values.items():
            numbers.setdefault(name, []).append(value)
    return numbers


def on_solutions(rows: Rows, walk: Walk) -> Numbers:
    """Shifts of the log-odds of a worked solution's decisive tokens.

    Args:
        rows: G draws of the noise for each problem, as its samples.
        walk: Along the worked solutions, the same tokens for all rows of a problem.

    Returns:
        For each decisive token: its `problem`, the clean probability `p`, `shift` and `spread` (mean and
        standard deviation over the draws of the log-odds under mu minus those under pi), and `lift`, the
        logarithm of the mean probability under mu divided by p: what an average draw makes of the chance to
        take the token.
    """
    numbers: Numbers = {name: [] for name in ("problem", "p", "shift", "spread", "lift")}
    for problem in np.unique(rows.problem).tolist():
        here = rows.problem == problem
        mu, pi, valid = (field[here].astype(np.float64) for field in (walk.mu, walk.pi, walk.valid))
        clean = np.exp(pi[0])
        for token in np.flatnonzero((valid.min(0) > 0) & (clean <= DECISIVE)):
            shift = _log_odds(mu[:, token]) - _log_odds(pi[:1, token])
            numbers["problem"].append(problem)
            numbers["p"].append(_short(clean[token]))
            numbers["shift"].append(_short(shift.mean()))
            numbers["spread"].append(_short(shift.std(ddof=1) if len(shift) > 1 else 0.0))
            numbers["lift"].append(_short(np.log(np.exp(mu[:, token]).mean()) - pi[0, token]))
    return numbers


def on_prefixes(rows: Rows, walk: Walk, written_by: Walk) -> Numbers:
    """Entropy of a policy along what another wrote, by problem: sums over tokens.

    Returns:
        `problem`, `tokens`, `entropy`, and `kl`, an estimate from the tokens of KL(writer || this policy).
    """
    numbers: Numbers = {name: [] for name in ("problem", "tokens", "entropy", "kl")}
    difference = (walk.mu - written_by.mu).astype(np.float64)
    for problem in np.unique(rows.problem).tolist():
        here = rows.problem == problem
        valid = written_by.valid[here]
        numbers["problem"].append(problem)
        numbers["tokens"].append(int(valid.sum()))
        numbers["entropy"].append(_sum(walk.entropy[here], valid))
        numbers["kl"].append(_sum(np.expm1(difference[here]) - difference[here], valid))
    return numbers


def _log_odds(logp: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return logp - np.log(-np.expm1(np.minimum(logp, -1e-12)))


def _sum(values: npt.NDArray[Any], valid: npt.NDArray[Any]) -> float:
    return _short(values[valid.astype(bool)].sum(dtype=np.float64))


def _short(value: float) -> float:
    """Six digits, so that a file of many cells stays small."""
    return float(f"{value:.6g}")
