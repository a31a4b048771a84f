"""What tests of the trainer share: data, settings, rewards, and an engine without a model."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from qerl.rollout.engine import Completion, RolloutEngine, RolloutResult
from qerl.seeding import generator
from tests.support.sessions import WholeTurns

GROUP = 4
DATA = Dataset.from_dict({"prompt": ["one two", "three", "four five six", "seven eight"]})


class ScriptedEngine(RolloutEngine):
    """Random completions that depend on the seed alone; log-probabilities are off by a known amount.

    Args:
        vocabulary: Tokens are drawn below it.
        stop: Last token of each completion that is shorter than the longest; None for any token.
        shortest: Smallest number of tokens.

    Attributes:
        calls: (prompts, params, norm_offsets) of each call.
    """

    def __init__(self, vocabulary: int, stop: int | None = None, shortest: int = 1) -> None:
        self.vocabulary, self.stop, self.shortest = vocabulary, stop, shortest
        self.calls: list[tuple[Any, Any, Any]] = []

    def generate(self, prompts, samples_per_prompt, params, norm_offsets=None, seeds=None):
        self.calls.append((prompts, params, norm_offsets))
        draw = torch.Generator().manual_seed(params.seed)
        count = len(prompts) * samples_per_prompt
        completions = [self.draw(params.max_tokens, draw) for _ in range(count)]
        return RolloutResult(completions, 1, sum(len(c.token_ids) for c in completions), 0.5)

    @contextmanager
    def session(self, params, norm_offsets=None):
        self.calls.append(([], params, norm_offsets))
        yield ScriptedSession(self, params)

    def draw(self, most, draw):
        """A completion of at most so many tokens, by the next numbers of a generator."""
        length = int(torch.randint(min(self.shortest, most), most + 1, (), generator=draw))
        ids = torch.randint(5, self.vocabulary, (length,), generator=draw).tolist()
        if self.stop is not None and length < most:
            ids[-1] = self.stop
        logprobs = (-4.8 - torch.rand(length, generator=draw)).tolist()
        return Completion(ids, logprobs, [4.0] * length, "stop")


class ScriptedSession(WholeTurns):
    """Turns of a scripted engine: each depends on the seed, the sequence and what it has so far."""

    def __init__(self, engine: ScriptedEngine, params) -> None:
        super().__init__(params, positions=None)
        self._engine, self._seed = engine, params.seed

    def turn(self, sequence):
        place = sequence.prompt.number, sequence.sample, len(sequence.token_ids)
        return self._engine.draw(sequence.room, generator("scripted", self._seed, *place))


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """Fields of a short run on the CPU without noise, files or reports."""
    values = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "per_device_train_batch_size": 4 * GROUP,
        "max_completion_length": 6,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "max_steps": 4,
        "noise": False,
        "report_to": "none",
        "save_strategy": "no",
    }
    return values | changes


def sum_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs within most groups."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def logged(trainer):
    """What was logged of training, without times and memory."""
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [{k: v for k, v in row.items() if "time" not in k and "memory" not in k} for row in rows]


def gradients(model):
    """Gradients by the names of the parameters, whatever the adapter is called."""
    return {n.replace("default.", ""): p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(reference, model):
    """Every gradient of both models agrees to 1e-5 of its norm, and none is zero."""
    expected, actual = gradients(reference), gradients(model)
    assert expected and expected.keys() == actual.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"
