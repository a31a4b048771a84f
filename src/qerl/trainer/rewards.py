"""Reward functions of a run: guarded, and the end of the run when one of them fails on everything.

A reward that fails on some samples is noise, which is counted. One that fails on every sample of a step is a
defect (a misspelled column, a judge that cannot be reached), and a run that goes on learns from zeros. It
ends with the function's first error, unless ``reward_errors: tolerate`` asks for the zeros.

The samples are those of all processes, and what failed is gathered before anything is raised: every process
raises the same sentence, and none waits for another in a collective. Rollouts that dynamic sampling adds and
those of evaluation are not looked at: they may be a single problem on which a sound function fails.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from trl.rewards import get_soft_overlong_punishment

from qerl.errors import QeRLError, first_line
from qerl.ranks import is_first_process
from qerl.settings.config import QeRLConfig
from qerl.tasks.guard import GuardedReward, describe, guarded
from qerl.tasks.judging import name_of
from qerl.tasks.together import Together, can_begin_early

logger = logging.getLogger(__name__)

WRITTEN_COLUMN = "written_tokens"
"""Column of the number of tokens that the policy wrote in a completion, where others wrote in it too."""


def guard_rewards(rewards: Any, timeout_s: float, together: Together) -> list[Any]:
    """The reward functions guarded; reward models, and names of such, as they are.

    Args:
        rewards: One, or several in a list or tuple.
        timeout_s: Seconds for a sample, above 0.
        together: As in `guarded`.
    """
    return [
        reward if isinstance(reward, str | torch.nn.Module) else guarded(reward, timeout_s, together)
        for reward in as_list(rewards)
    ]


@contextlib.contextmanager
def reward_models_found(rewards: Sequence[Any]) -> Iterator[None]:
    """A block in which TRL loads the reward models that are named among the rewards.

    Raises:
        QeRLError: One of them is not found.
    """
    names = [reward for reward in rewards if isinstance(reward, str)]
    try:
        yield
    except OSError as error:
        if not names:
            raise
        raise QeRLError(
            f"reward_funcs names {', '.join(names)}, and a reward model is not found ({first_line(error)}); "
            "give its folder or Hub id, or a function."
        ) from error


def calls_of(rewards: Any, args: QeRLConfig) -> Together:
    """Where functions of a run wait, and begin while samples are decoded where the settings ask for that.

    Raises:
        QeRLError: None of the functions can be called so.
    """
    if not args.early_rewards:
        return Together()
    later = [reward for reward in as_list(rewards) if not can_begin_early(reward)]
    names = ", ".join(map(name_of, later))
    if len(later) == len(as_list(rewards)):
        raise QeRLError(
            f"early_rewards has nothing to begin early: none of {names} asks outside of this process alone. "
            "What computes in this process is called after the rollout, because it would hold up the "
            "decoding and its time limit needs the main thread; mark a function with judges_outside "
            "(qerl.tasks.guard) if it waits and limits its own time, or remove early_rewards."
        )
    if later and is_first_process():
        logger.warning("early_rewards: what computes in this process is called after the rollout: %s.", names)
    return Together(early=True)


def as_list(rewards: Any) -> list[Any]:
    """Reward functions (None, one, or several in a list or tuple) as a new list; TRL would call a tuple."""
    if rewards is None:
        return []
    return [*rewards] if isinstance(rewards, list | tuple) else [rewards]


def with_length_penalty(rewards: Any, args: QeRLConfig) -> list[Any]:
    """The reward functions (none, one or a list), and DAPO's soft overlong punishment where it is on."""
    every = as_list(rewards)
    buffer = round((args.overlong_buffer or 0.0) * (args.max_completion_length or 0))
    if buffer:
        every.append(_length_penalty(args.max_completion_length or 0, buffer))
    return every


def _length_penalty(longest: int, buffer: int) -> Callable[..., list[float | None]]:
    """TRL's soft overlong punishment, of what the policy wrote alone where others wrote too."""
    punish = get_soft_overlong_punishment(longest, buffer)

    @functools.wraps(punish)
    def of_written(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        lengths = columns.get(WRITTEN_COLUMN)
        written = completion_ids if lengths is None else [[0] * length for length in lengths]
        return punish(completion_ids=written)

    return of_written


def one_for_each(classes: Any, given: Any, rewards: list[Any]) -> Any:
    """Tokenizers of reward models, one entry for each reward, with None for those that were added.

    Args:
        classes: What TRL takes as ``reward_processing_classes``: None, one tokenizer, or a list.
        given: The user's reward functions, none, one or a list.
        rewards: The same with those that the settings add behind them.
    """
    if classes is None:
        return None
    every = [*classes] if isinstance(classes, list | tuple) else [classes]
    added = len(rewards) - len(as_list(given))
    return every + [None] * added


def stop_if_all_failed(rewards: Sequence[Callable[..., Any]], accelerator: Accelerator) -> None:
    """Raises on every process if a guarded function failed on all samples that it was last called with.

    Raises:
        QeRLError: With the function's name and its first error.
    """
    functions = [reward for reward in rewards if isinstance(reward, GuardedReward)]
    if not functions:
        return
    counts = [[reward.last.failed, len(reward.last.rewards)] for reward in functions]
    counts_RF2 = accelerator.gather(torch.tensor([counts], device=accelerator.device))  # R ranks, F functions
    for reward, (failed, samples) in zip(functions, counts_RF2.sum(0).tolist(), strict=True):
        if 0 < samples == failed:
            (first, *_) = gather_object([describe(reward.last.first)])
            raise QeRLError(
                f"The reward function {reward.__name__!r} failed on all {samples} samples of a step; its "
                f"first error is {first}. Mend it, or set reward_errors: tolerate to go on without it."
            )
