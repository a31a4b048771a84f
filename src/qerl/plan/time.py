"""Time of a step, estimated from the nearest step that was measured on the same card.

Memory follows from sizes; time does not, so there is no estimate for a card or model that was not measured.
The measured steps are in steps.json, which `python -m lab tables` writes from bench/results: whole GRPO steps
of random models, all completions at full length, on one GPU.

The nearest measured step is scaled to the planned one. Rollout time grows with the completion length, and
with the cube root of the number of sequences that decode at the same time (from 8 to 128 of them a 7B model's
rollout grew 2.5-fold); sequences that wait in the queue come after these. The optimizer steps that train on a
rollout share its time. Update time grows with the tokens computed. Each measured step was estimated in this
way from the nearest other one of its model and card: none was off by more than a third
(`tests/plan/test_time.py`).

The measured steps are GRPO with LoRA, no KL penalty and one turn. So there is no estimate for a run that does
other work in a step (`why_not_said`), and the exchange of gradients between GPUs is left out.

Given up: separate terms for prefill of long prompts and attention at long contexts. They count as in the
measured step, so lengths must be near the measured ones.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from typing import Any

from qerl.families.sizes import Sizes
from qerl.plan.parts import Weights
from qerl.plan.phases import MemoryPlan
from qerl.plan.settings import rollout_samples
from qerl.settings.config import QeRLConfig
from qerl.weight_formats import FORMATS

SAME_SIZE = 0.05
"""Largest relative difference in weights between models that count as the same size."""

NEAR_PROMPT, NEAR_COMPLETION, NEAR_SEQUENCES = 4, 8, 16
"""Largest factors between the measured and the planned step: of prompt length, completion length, and
sequences that decode at the same time."""

ROWS_EXPONENT = 1 / 3
"""Exponent with which a rollout's time grows with the sequences that decode at the same time."""


@dataclass(frozen=True)
class Step:
    """A measured step.

    Attributes:
        card: Name of the GPU, as `qerl.kernels.cards` has it.
        shape: Name of the model's sizes.
        weights: Format of its linears.
        samples: Completions of the step.
        group: Completions per prompt.
        prompt_tokens, completion_tokens: Tokens of each prompt and of each completion.
        rollout_s, update_s: Seconds of rollout and update.
        date: Date of the measurement.
    """

    card: str
    shape: str
    weights: str
    samples: int
    group: int
    prompt_tokens: int
    completion_tokens: int
    rollout_s: float
    update_s: float
    date: str

    @property
    def computed(self) -> int:
        """Tokens of the update: each group's prompt once, and every completion."""
        return self.samples // self.group * self.prompt_tokens + self.samples * self.completion_tokens


@dataclass(frozen=True)
class Estimate:
    """Estimated seconds of a step, and the measured step that they come from."""

    rollout_s: float
    update_s: float
    of: Step

    @property
    def total_s(self) -> float:
        """Seconds of rollout and update together."""
        return self.rollout_s + self.update_s


def measured() -> list[Step]:
    """Load the measured steps from steps.json."""
    text = files("qerl.plan").joinpath("steps.json").read_text(encoding="utf-8")
    return [Step(**row) for row in json.loads(text)]


def carried_over(step: Step, samples: int, sequences: int, group: int, prompt: int, tokens: int) -> Estimate:
    """Scale a measured step to a step of other sizes.

    Args:
        step: The measured step.
        samples: Completions of the other step, of which ``sequences`` decode at the same time.
        group: Completions per prompt of the other step.
        prompt, tokens: Tokens of a prompt and of a completion of the other step.
    """
    rows = min(samples, sequences)
    waves = math.ceil(samples / rows)
    wider = (rows / step.samples) ** ROWS_EXPONENT
    computed = math.ceil(samples / group) * prompt + samples * tokens
    rollout = step.rollout_s * tokens / step.completion_tokens * wider * waves
    return Estimate(rollout, step.update_s * computed / step.computed, step)


def estimate(plan: MemoryPlan, card: str, config: QeRLConfig) -> Estimate | None:
    """Estimate the time of a planned step; None if no step of such a model was measured on that card.

    Args:
        plan: Plan of a run, one that fits.
        card: Name of the GPU.
        config: Settings of the planned run.
    """
    work = plan.work
    of_model = [
        step
        for step in measured()
        if step.card == card
        and step.weights == work.weights
        and work.teacher is None
        and _alike(Sizes.by_name(step.shape), plan.sizes)
    ]
    rollout, samples = rollout_samples(config), work.microbatch * work.microbatches
    rows = min(rollout, plan.sequences)
    step = nearest(of_model, rows, work.prompt_tokens, work.completion_tokens) if rows else None
    if step is None:
        return None
    lengths = work.group, work.prompt_tokens, work.completion_tokens
    rolled, updated = (carried_over(step, count, rows, *lengths) for count in (rollout, samples))
    served = config.num_iterations * rollout / samples
    return Estimate(rolled.rollout_s / served, updated.update_s, step)


def why_not_said(config: QeRLConfig) -> str | None:
    """Return what a run does that no measured step did; None if its steps are like the measured ones."""
    reasons = (
        (config.algorithm == "sft", "supervised fine-tuning"),
        (config.lora_dropout > 0, "a run with lora_dropout"),
        (config.beta > 0, "a run with a KL penalty (beta)"),
        (bool(config.environment or config.tools), "a run with an environment or tools"),
        (config.max_staleness > 0, "a run with max_staleness"),
        (bool(config.dynamic_sampling_batches), "a run with dynamic sampling"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def nearest(steps: Iterable[Step], rows: int, prompt: int, tokens: int) -> Step | None:
    """Return the step nearest in sequences and lengths, on ties the one with more tokens, or None."""

    def apart(one: int, other: int) -> float:
        return abs(math.log(one / other))

    near = [
        step
        for step in steps
        if apart(rows, step.samples) <= math.log(NEAR_SEQUENCES)
        and apart(prompt, step.prompt_tokens) <= math.log(NEAR_PROMPT)
        and apart(tokens, step.completion_tokens) <= math.log(NEAR_COMPLETION)
    ]
    return min(
        near,
        key=lambda step: (
            round(
                apart(rows, step.samples)
                + apart(tokens, step.completion_tokens)
                + apart(prompt, step.prompt_tokens),
                6,
            ),
            -step.computed,
        ),
        default=None,
    )


def _alike(one: Sizes, other: Sizes) -> bool:
    """Return True if two models have the same kinds and number of layers and about as many weights."""
    kinds = [{(type(run.spec.mixer), type(run.spec.mlp)) for run in sizes.runs} for sizes in (one, other)]
    first, second = (Weights(sizes, FORMATS["bf16"]).linears for sizes in (one, other))
    return kinds[0] == kinds[1] and one.layers == other.layers and abs(first / second - 1) < SAME_SIZE


def in_words(plan: MemoryPlan, card: str | None, config: QeRLConfig, price: Any = None) -> str:
    """Say in a sentence or two how long a step and the run take, and what the run costs.

    Args:
        plan: See `estimate`.
        card: Name of the GPU; None if only its memory is known.
        config: Settings of the run; without max_steps, its length depends on the data and is not estimated.
        price: Price of a GPU per hour, in any currency; None if it is not given.
    """
    reason = why_not_said(config)
    found = None if card is None or reason else estimate(plan, card, config)
    if found is None:
        cards = sorted({step.card for step in measured()})
        elsewhere = (
            f"such steps of this model on {card}" if card else "a GPU that is known by its memory alone"
        )
        where = reason or elsewhere
        return (
            f"How long a step takes is not known for {where}; steps were measured on {' and '.join(cards)}."
        )
    step = found.of
    said = (
        f"A step takes about {_short(found.total_s)} ({_short(found.rollout_s)} of rollout, "
        f"{_short(found.update_s)} of update) if all completions have full length: extrapolated from "
        f"{step.samples} samples of {step.prompt_tokens} + {step.completion_tokens} tokens, which took "
        f"{_short(step.rollout_s + step.update_s)} on {step.card} ({step.date})."
    )
    if plan.work.processes > 1:
        said += " That is for one GPU; communication between several is extra and was not measured."
    steps = config.max_steps
    if steps < 1:
        return f"{said} Set max_steps for the time of the run."
    hours = found.total_s * steps / 3600
    said += f" {steps} steps take about {timedelta(seconds=round(3600 * hours))}"
    if price is not None:
        said += f", which cost about {hours * plan.work.processes * price:.2f}"
    return said + ", without loading, evaluations and checkpoints."


def _short(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
