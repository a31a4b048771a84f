"""Rewards of a run's samples: calls of reward functions and models, and the end of a run on which one always
fails.

Every function is guarded (`qerl.tasks.guard`), whether it is asynchronous or not. Its arguments are those
that TRL gives it.

A reward that fails on some samples is noise, which is counted. One that fails on every sample of a step is a
defect (a misspelled column, a judge that cannot be reached), and a run that goes on learns from zeros. The
run ends with the function's first error, unless ``reward_errors: tolerate`` asks for the zeros.

The samples are those of all processes, and failures are gathered before anything is raised: every process
raises the same sentence, and none waits for another in a collective. Groups that dynamic sampling adds and
rollouts of evaluation are not checked: they may be a single problem on which a sound function fails.
"""

import contextlib
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl.rewards import get_soft_overlong_punishment

from qerl.agents.outside import Endpoint
from qerl.errors import QeRLError, first_line
from qerl.settings.config import QeRLConfig
from qerl.tasks.guard import GuardedReward, Judged, describe, judges_outside, name_of
from qerl.tasks.together import Asked, Together, begins_early, guarded

logger = logging.getLogger(__name__)

WRITTEN_COLUMN = "written_tokens"
"""Column with the number of tokens that the policy wrote in a completion, where others wrote in it too."""

_NOT_HANDED_ON = ("prompt", "completion", "completion_ids")
"""Columns of the data that reward functions do not get; under these names they get the samples."""


def guard_rewards(rewards: Any, timeout_s: float, together: Together) -> list[Any]:
    """Return the reward functions guarded; reward models, and names of such, as they are.

    Args:
        rewards: One, or several in a list or tuple.
        timeout_s: Seconds per sample, above 0.
        together: As in `guarded`.
    """
    return [
        reward if isinstance(reward, str | nn.Module) else guarded(reward, timeout_s, together)
        for reward in as_list(rewards)
    ]


def as_list(rewards: Any) -> list[Any]:
    """Return reward functions (None, one, or several in a list or tuple) as a new list; TRL would call a
    tuple."""
    if rewards is None:
        return []
    return [*rewards] if isinstance(rewards, list | tuple) else [rewards]


def with_length_penalty(rewards: Any, args: QeRLConfig) -> list[Any]:
    """Return the reward functions (none, one or a list), with DAPO's soft overlong punishment where it is
    on."""
    every = as_list(rewards)
    buffer = round((args.overlong_buffer or 0.0) * (args.max_completion_length or 0))
    if buffer:
        every.append(_length_penalty(args.max_completion_length or 0, buffer))
    return every


def _length_penalty(longest: int, buffer: int) -> Callable[..., list[float | None]]:
    """Return TRL's soft overlong punishment; where others wrote too, it counts only the policy's tokens."""
    punish = get_soft_overlong_punishment(longest, buffer)

    @functools.wraps(punish)
    def of_written(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        lengths = columns.get(WRITTEN_COLUMN)
        written = completion_ids if lengths is None else [[0] * length for length in lengths]
        return punish(completion_ids=written)

    return of_written


def one_for_each(classes: Any, given: Any, rewards: list[Any]) -> Any:
    """Return tokenizers of reward models, one entry per reward, None for rewards that settings added.

    Args:
        classes: TRL's ``reward_processing_classes``: None, one tokenizer, or a list.
        given: The user's reward functions, none, one or a list.
        rewards: The same, followed by those that the settings add.
    """
    if classes is None:
        return None
    every = [*classes] if isinstance(classes, list | tuple) else [classes]
    added = len(rewards) - len(as_list(given))
    return every + [None] * added


@dataclass
class Tally:
    """Number of samples on which the guarded function of this name failed; `first` is its first error."""

    name: str
    failed: int = 0
    samples: int = 0
    first: BaseException | None = None

    @property
    def all_failed(self) -> bool:
        """True if the function was called and failed on all samples."""
        return 0 < self.samples == self.failed


def tallied(scored: "Sequence[ScoredBatch]") -> list[Tally]:
    """Return a tally of each guarded function over some batches, at least one."""
    found = [Tally(name) for name, _ in scored[0].judged]
    for batch in scored:
        for tally, (_, judged) in zip(found, batch.judged, strict=True):
            tally.failed += judged.failed
            tally.samples += len(judged.rewards)
            tally.first = tally.first or judged.first
    return found


def stop_if_all_failed(tallies: Sequence[Tally], accelerator: Accelerator) -> None:
    """Raise on every process if a guarded function failed on all samples of all processes.

    Raises:
        QeRLError: With the function's name and its first error.
    """
    if not tallies:
        return
    counts = [[tally.failed, tally.samples] for tally in tallies]
    counts_RF2 = accelerator.gather(torch.tensor([counts], device=accelerator.device))  # R ranks, F functions
    for tally, (failed, samples) in zip(tallies, counts_RF2.sum(0).tolist(), strict=True):
        if 0 < samples == failed:
            (first, *_) = gather_object([describe(tally.first)])
            raise QeRLError(
                f"The reward function {tally.name!r} failed on all {samples} samples of a step; its "
                f"first error is {first}. Mend it, or set reward_errors: tolerate to go on without it."
            )


def episode_rewards_of(judges: Sequence[type]) -> list[Callable[..., Any]]:
    """Return a reward function for each class of environments that score their episodes; it gives None for
    rows of other classes."""
    return [_episode_reward(judge) for judge in judges]


def _episode_reward(judge: Any) -> Callable[..., Any]:
    async def awaited(environments: list[Any], **_: Any) -> list[float | None]:
        return [await each.get_reward() if type(each) is judge else None for each in environments]

    def at_once(environments: list[Any], **_: Any) -> list[float | None]:
        return [each.get_reward() if type(each) is judge else None for each in environments]

    score: Callable[..., Any] = awaited if iscoroutinefunction(judge.get_reward) else at_once
    score.__name__ = judge.__name__
    if issubclass(judge, Endpoint):  # its agent has ended; if it failed there is no reward
        score = judges_outside(score)
        score.__dict__["computes_too"] = True  # nothing is asked, so not called early
    return score


@dataclass(eq=False)
class ScoredBatch:
    """Samples that are scored together, with the results.

    Attributes:
        prompts, completions: The samples, as functions get them.
        columns: Further arguments of the functions.
        extra: Columns for the table of completions that functions have logged.
        metrics: Values that functions have logged.
        judged: Result of each guarded function, with its name, in their order.
    """

    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, Any]
    extra: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    judged: list[tuple[str, Judged]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.columns["log_extra"] = lambda column, values: self.extra[column].extend(values)
        self.columns["log_metric"] = lambda name, value: self.metrics[name].append(value)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the functions."""
        return {"prompts": self.prompts, "completions": self.completions} | self.columns


class Scorer:
    """Calls the reward functions and reward models of a run.

    Args:
        functions: Guarded functions, reward models, or names of reward models.
        processing_classes: Tokenizers of reward models, one entry for each function; None loads the models'
            own.
        calls: Runs the calls of functions that wait.
        accelerator: Accelerator of the run.
        state: Returns transformers' state of the trainer.
        args: Settings of the run.

    Attributes:
        functions, processing_classes: As they are called.
        names: Names of the functions in logs.
        early: Whether functions are called for each sample as it ends. Not with `max_staleness`, where a
            sample may end steps before the one that it trains in.
        waits: Whether functions are called beside this thread.

    Raises:
        QeRLError: A named reward model is not found, or `processing_classes` has not one entry per function.
    """

    def __init__(
        self,
        functions: Sequence[Any],
        processing_classes: Sequence[Any] | None,
        calls: Together,
        accelerator: Accelerator,
        state: Callable[[], Any],
        args: QeRLConfig,
    ) -> None:
        self._calls, self._accelerator, self._state, self._args = calls, accelerator, state, args
        self.waits = calls.waits
        self.functions = [self._loaded(function) for function in functions]
        self.processing_classes = [*(processing_classes or [None] * len(self.functions))]
        if len(self.processing_classes) != len(self.functions):
            raise QeRLError(
                f"reward_processing_classes has {len(self.processing_classes)} entries for "
                f"{len(self.functions)} reward functions; give one for each."
            )
        self.names = [_name_of(function) for function in self.functions]
        self.early = not args.max_staleness and any(map(begins_early, self.functions))
        for at, model in enumerate(self.functions):
            if isinstance(model, PreTrainedModel):
                self.processing_classes[at] = _tokenizer_of(model, self.processing_classes[at], args)
                self.functions[at] = accelerator.prepare_model(
                    model, evaluation_mode=True, device_placement=True
                )

    def _loaded(self, function: Any) -> Any:
        if not isinstance(function, str):
            return function
        kwargs = {"trust_remote_code": self._args.trust_remote_code} | (self._args.model_init_kwargs or {})
        try:
            return AutoModelForSequenceClassification.from_pretrained(function, num_labels=1, **kwargs)
        except OSError as error:
            raise QeRLError(
                f"reward_funcs names {function}, and no reward model is found there ({first_line(error)}); "
                "give its folder or Hub id, or a function."
            ) from error

    @contextlib.contextmanager
    def rollout(self) -> Iterator[None]:
        """Open a block in which samples are drawn and scored; calls still pending at its end are given up."""
        if not self.waits:
            yield
            return
        self._calls.abandon()
        self._calls.take_seconds()  # of the calls before
        try:
            yield
        finally:
            self._calls.abandon()

    def begin(self, row: dict[str, Any], prompt: Any, completion: Any, token_ids: list[int]) -> Asked:
        """Begin the calls for a sample that has ended, of the functions that are called early."""
        return self._calls.begin(self.batch([row], [prompt], [completion], [token_ids]).arguments)

    def take_seconds(self) -> float:
        """Return the seconds, since the last call of this, in which calls ran beside this thread."""
        return self._calls.take_seconds() if self.waits else 0.0

    def batch(
        self,
        rows: Sequence[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        environments: list[Any] | None = None,
    ) -> ScoredBatch:
        """Return samples of this process as a batch for `score`.

        Args:
            rows: Rows of the data set, one for each sample.
            prompts, completions, completion_ids: The samples, as functions get them.
            environments: The samples' environments, if there are any.
        """
        names = [name for name in rows[0] if name not in _NOT_HANDED_ON]
        columns: dict[str, Any] = {name: [row[name] for row in rows] for name in names}
        columns |= {"completion_ids": completion_ids, "trainer_state": self._state()}
        if environments is not None:
            columns["environments"] = environments
        return ScoredBatch(prompts, completions, columns)

    def start(self, batch: ScoredBatch, asked: Sequence[Asked | None]) -> None:
        """Begin the calls of functions that wait, while other samples may still be decoded.

        Args:
            batch: The batch that `score` will get.
            asked: Result of `begin` for each of its samples, or None; empty if `begin` was called for none.
        """
        if self.waits:
            self._calls.start(batch.arguments, asked)

    def ended(self, batches: Sequence[ScoredBatch], wait: bool) -> list[int]:
        """Return the indices of batches that `score` can finish without waiting.

        Args:
            batches: Batches that were started; at least one, if ``wait``.
            wait: Return only when there is one.
        """
        return self._calls.ended([batch.completions for batch in batches], wait)

    def score(self, batch: ScoredBatch) -> torch.Tensor:
        """The rewards [B, F] of a batch, fp32; NaN where a function gives none."""
        prompts, completions, columns = batch.prompts, batch.completions, batch.columns
        device = self._accelerator.device
        rewards_BF = torch.full((len(completions), len(self.functions)), torch.nan, device=device)
        for at, function in enumerate(self.functions):
            if isinstance(function, nn.Module):
                rewards_BF[:, at] = self._judged_by(
                    function, self.processing_classes[at], prompts, completions
                )
                continue
            given = function(prompts=prompts, completions=completions, **columns)
            if isinstance(function, GuardedReward):
                batch.judged.append((function.__name__, function.last))
            rewards_BF[:, at] = torch.tensor([torch.nan if reward is None else reward for reward in given])
        unscored = rewards_BF.isnan().all(dim=1).nonzero().flatten().tolist()
        if unscored and self.functions:
            logger.warning(
                "No reward function scored %d of %d samples, the first of them for the prompt %r with the "
                "completion %r.",
                *(len(unscored), len(completions), prompts[unscored[0]], completions[unscored[0]]),
            )
        return rewards_BF

    def _judged_by(self, model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any]) -> Any:
        """Return the scores [B] of a reward model."""
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            kwargs = self._args.chat_template_kwargs or {}
            texts = [
                tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **kwargs)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return model(**inputs.to(self._accelerator.device)).logits[:, 0].float()

    def metrics(self, scored: Sequence[ScoredBatch]) -> dict[str, float]:
        """Return means over all processes of the values that functions have logged for some batches.

        Every process must call this. Names are gathered and sorted, because processes may differ in them.
        """
        means = {}
        for name in sorted(set(gather_object([name for batch in scored for name in batch.metrics]))):
            values = [value for batch in scored for value in batch.metrics.get(name, ())]
            own = torch.tensor(
                [[sum(values), len(values)]], dtype=torch.float, device=self._accelerator.device
            )
            total, number = self._accelerator.gather(own).sum(dim=0).tolist()
            means[name] = total / number
        return means


def _name_of(function: Any) -> str:
    if isinstance(function, nn.Module):
        config: Any = function.config
        return str(config._name_or_path).split("/")[-1]
    return name_of(function)


def _tokenizer_of(model: PreTrainedModel, given: Any, args: QeRLConfig) -> Any:
    """Return the tokenizer of a reward model, and set the model's pad token, by which it finds the last
    token."""
    tokenizer = given or AutoTokenizer.from_pretrained(
        model.config._name_or_path, trust_remote_code=args.trust_remote_code
    )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return tokenizer
