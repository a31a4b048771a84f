"""Evaluate the clean policies of S runs on held-out problems.

Each problem gets a greedy answer and, if asked for, several sampled answers at temperature 1. The entropy of
the policy is measured on prefixes that stay the same during the whole run: completions of the base, one
sample for each of the first problems.

Before the first step all runs have the base's policy, so each run answers a share of the problems, and all
get the scores of the whole set.

Legend: S runs, P problems, M problems of a run, k samples of a problem, R samples of a run, C tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import comb

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from lab.study.batched.model import BatchedModel
from lab.study.batched.rewards import Problems, held_out_problems
from lab.study.batched.sampler import Sampler, Samples, clean_norms
from lab.study.batched.score import Texts, score
from qerl.rollout.engine import SamplingParams, uniform_streams
from qerl.seeding import derive_seed
from qerl.tasks.base import Task
from qerl.tasks.guard import stratum

_PREFIXES = 64
"""Problems on whose prefixes the policy's entropy is measured."""

_WITHOUT_GRADIENT = 4
"""Tokens of a pass that keeps no activations per token of one that does; it still needs less memory."""


class Evaluation:
    """Scores the policies of a batch.

    Args:
        model, sampler: Model and sampler of the batch.
        task: The task; an answer is right if its first reward is above 0.
        tokenizer: Tokenizer of the model.
        seeds: Seeds of the runs.
        greedy: Parameters of greedy decoding.
        rows_at_once: Samples that are decoded at once, over all runs.
        tokens_at_once: Tokens of a forward pass whose activations are kept.
    """

    def __init__(
        self,
        model: BatchedModel,
        sampler: Sampler,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        seeds: Sequence[int],
        greedy: SamplingParams,
        rows_at_once: int,
        tokens_at_once: int,
    ) -> None:
        self._model, self._sampler, self._task, self._seeds = model, sampler, task, seeds
        self._tokenizer, self._greedy = tokenizer, greedy
        self._rows_at_once, self._tokens_at_once = rows_at_once, _WITHOUT_GRADIENT * tokens_at_once
        self._prefixes: Samples | None = None

    def run(self, rows: Dataset, samples: int, step: int) -> list[dict[str, float]]:
        """Scores of each run: `accuracy` of greedy answers, overall and by the task's strata
        (`accuracy/steps_1`), and `entropy`; with samples also `sampled_accuracy`, `pass@1`, `pass@2`,
        `pass@4`, ..., and with several samples `distinct`, the number of different answers to a problem.

        Args:
            rows: Problems of the task; the same in every call of a run.
            samples: Sampled answers per problem; 0 for none.
            step: Steps done, on which the sampled answers' random numbers depend.
        """
        problems = held_out_problems(self._task, rows, self._tokenizer)
        alike = self._model.trained.do_nothing
        shares = self._shares(len(problems.ids)) if alike else self._all(len(problems.ids))
        right_SP = self._answers(problems, shares, self._greedy, 1, step)[0][..., 0]
        if alike:
            right_SP = _of_all(right_SP, len(problems.ids)).expand(self._model.runs, -1)
        scores = [{"accuracy": own.mean().item()} for own in right_SP]
        for name, members in self._strata(problems).items():
            for own, score_ in zip(right_SP, scores, strict=True):
                score_[f"accuracy/{name}"] = own[members].mean().item()
        for entropy, score_ in zip(self._entropies(problems, alike), scores, strict=True):
            score_["entropy"] = entropy
        if samples:
            sampled = replace(self._greedy, temperature=1.0)
            right_SPk, distinct_SP = self._answers(
                problems, self._all(len(problems.ids)), sampled, samples, step
            )
            for own_Pk, score_ in zip(right_SPk, scores, strict=True):
                score_["sampled_accuracy"] = own_Pk.mean().item()
                score_ |= {f"pass@{k}": pass_at(own_Pk, k) for k in _powers(samples)}
            if distinct_SP is not None:
                for own_P, score_ in zip(distinct_SP, scores, strict=True):
                    score_["distinct"] = own_P.mean().item()
        return scores

    def _strata(self, problems: Problems) -> dict[str, list[int]]:
        """Indices of the problems of each stratum, by its name."""
        column, found = self._task.strata, defaultdict(list)
        if column is not None:
            for index, row in enumerate(problems.rows):
                found[stratum(column, row[column])].append(index)
        return dict(sorted(found.items()))

    def _all(self, problems: int) -> list[list[int]]:
        """All problems for every run."""
        return [list(range(problems))] * self._model.runs

    def _shares(self, problems: int) -> list[list[int]]:
        """Split the problems over the runs: of S runs the first has problems 0, S, 2 S, ...

        All shares have the same size; if the problems do not suffice for that, the first ones are repeated.
        """
        runs = self._model.runs
        return [[index % problems for index in range(run, problems + run, runs)] for run in range(runs)]

    def _answers(
        self,
        problems: Problems,
        shares: list[list[int]],
        params: SamplingParams,
        samples: int,
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Which answers are right [S, M, k], and with several samples the number of different answers [S, M].

        Args:
            problems: The problems.
            shares: Indices of the problems that each run answers, equally many.
            params: Parameters of decoding.
            samples: Samples per problem.
            step: As in `run`.
        """
        runs, count = self._model.runs, len(shares[0])
        at_once = min(count, max(1, self._rows_at_once // (runs * samples)))
        right, distinct = [], []
        for start in range(0, count, at_once):
            # The last call is as large as the others, so that it can use their graph.
            wanted = [[own[at % count] for at in range(start, start + at_once)] for own in shares]
            uniforms_SRC = self._uniforms(wanted[0], samples, step) if params.temperature else None
            prompts = [[problems.ids[index] for index in own] for own in wanted]
            drawn = self._sampler.generate(prompts, samples, params, uniforms_SRC)
            kept = min(at_once, count - start)
            asked = [index for own in wanted for index in own[:kept] for _ in range(samples)]
            completions = [ids for run in drawn.completions() for ids in run[: kept * samples]]
            verdicts = problems.judge(asked, completions)[:, 0] > 0
            right.append(verdicts.float().view(runs, kept, samples))
            if samples > 1:
                answers = map(self._task.extract, problems.texts(asked, completions))
                each = [len({*islice(answers, samples)}) for _ in range(runs * kept)]
                distinct.append(torch.tensor(each, dtype=torch.float).view(runs, kept))
        return torch.cat(right, dim=1), torch.cat(distinct, dim=1) if distinct else None

    def _uniforms(self, problems: Sequence[int], samples: int, step: int) -> torch.Tensor:
        """Uniform numbers [S, R, C] for samples of some problems.

        They are keyed by the run's seed, the step, the problem and the sample, so neither the number of runs
        in a batch nor the number of rows that a GPU decodes at once changes what is drawn.
        """
        rows = [(problem, sample) for problem in problems for sample in range(samples)]
        streams = {}
        for seed in set(self._seeds):
            keyed = [(derive_seed("study evaluation", seed, step), *row) for row in rows]
            streams[seed] = uniform_streams(keyed, self._greedy.max_tokens)
        return torch.stack([streams[seed] for seed in self._seeds])

    def _entropies(self, problems: Problems, alike: bool) -> list[float]:
        """Mean entropy of each run's policy on the prefixes, in nats per token.

        Args:
            problems: The problems.
            alike: Whether all policies are the base's; each run then scores a share of the prefixes.
        """
        model, count = self._model, min(_PREFIXES, len(problems.ids))
        if self._prefixes is None:
            self._prefixes = self._written(problems, count)
        prefixes = self._prefixes if alike else _on_all(self._prefixes, count)
        texts = Texts.of(prefixes, model.device)
        norms = clean_norms(model, texts.mask_SRC.shape[1])
        _, entropies_SRC = score(model, texts, norms, [1.0] * model.runs, self._tokens_at_once)
        sums_SR, tokens_SR = entropies_SRC.double().sum(dim=2), texts.mask_SRC.sum(dim=2)
        if alike:
            sums_SR, tokens_SR = (
                _of_all(each_SR, count).expand(model.runs, -1) for each_SR in (sums_SR, tokens_SR)
            )
        return (sums_SR.sum(dim=1) / tokens_SR.sum(dim=1)).tolist()

    def _written(self, problems: Problems, count: int) -> Samples:
        """Completions of the base for the first problems, split over the runs."""
        shares = self._shares(count)
        sampled = replace(self._greedy, temperature=1.0)
        uniforms_SRC = torch.stack(
            [uniform_streams([(0, index, 0) for index in own], sampled.max_tokens) for own in shares]
        )
        prompts = [[problems.ids[index] for index in own] for own in shares]
        with self._model.base_only():
            return self._sampler.generate(prompts, 1, sampled, uniforms_SRC)


def _of_all(values_SM: torch.Tensor, problems: int) -> torch.Tensor:
    """Reorder values [S, M, ...] of the runs' shares into the order of the problems, [P, ...]."""
    return values_SM.transpose(0, 1).flatten(0, 1)[:problems]


def _on_all(samples: Samples, problems: int) -> Samples:
    """Give every run all of the samples that are split over the runs."""
    runs = len(samples.prompts)
    ordered = [samples.prompts[index % runs][index // runs] for index in range(problems)]

    def every(values_SMC: torch.Tensor) -> torch.Tensor:
        return _of_all(values_SMC, problems).expand(runs, -1, -1)

    return replace(
        samples,
        prompts=[ordered] * runs,
        tokens_SRC=every(samples.tokens_SRC),
        mask_SRC=every(samples.mask_SRC),
        logprobs_SRC=every(samples.logprobs_SRC),
        entropies_SRC=every(samples.entropies_SRC),
    )


def pass_at(right_Pk: torch.Tensor, k: int) -> float:
    """Mean over problems of the unbiased estimate of pass@k, 1 - C(wrong, k) / C(samples, k)."""
    samples = right_Pk.shape[1]
    wrong = (samples - right_Pk.sum(dim=1)).tolist()
    return sum(1 - comb(int(number), k) / comb(samples, k) for number in wrong) / len(wrong)


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... up to a number."""
    return [2**exponent for exponent in range(largest.bit_length())]
