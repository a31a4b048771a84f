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
    def session(self, params, norm_offsets=None, growing=False, longest_prompt=None):
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


# The two halves of a step, and TRL's side of a comparison


def rollout_of(trainer, rows=None):
    """The microbatches of a rollout of these rows, else of every row of `DATA` as often as it is sampled."""
    trainer.model.train()
    rows = [row for row in DATA for _ in range(GROUP)] if rows is None else rows
    return trainer._rollout(trainer.model, rows)


def samples_of(microbatches):
    """The samples of microbatches, in order."""
    return [sample for part in microbatches for sample in part.samples]


def update_of(trainer, microbatches):
    """The loss of an optimizer step; gradients are added."""
    return trainer.updates.run(trainer.model, microbatches, trainer.state.global_step + 1)


def reported(trainer):
    """What the last update has reported, one number each."""
    return {name: values[-1] for name, values in trainer.updates.metrics().items()}


def logged_of(trainer, mode="train"):
    """The last value of each metric that waits for a log line."""
    return {name: values[-1] for name, values in trainer._log.metrics[mode].items() if values}


def as_batch(microbatches, pad=0):
    """Samples as TRL's trainer has them: tensors padded on the left (prompts) and the right."""
    samples = samples_of(microbatches)

    def padded(rows, left=False, fill=0.0):
        width = max(map(len, rows))
        side = [[fill] * (width - len(row)) for row in rows]
        return torch.tensor([[*s, *r] if left else [*r, *s] for s, r in zip(side, rows, strict=True)])

    masks = [[0 if s.masked else 1] * len(s.tokens) for s in samples]
    batch = {
        "prompt_ids": padded([s.prompt for s in samples], left=True, fill=pad).long(),
        "prompt_mask": padded([[1] * len(s.prompt) for s in samples], left=True).long(),
        "completion_ids": padded([s.tokens for s in samples], fill=pad).long(),
        "completion_mask": padded(masks).long(),
        "sampling_per_token_logps": padded([s.logprobs for s in samples]),
        "sampling_entropies": padded([s.entropies for s in samples]),
        "advantages": torch.tensor([s.advantage for s in samples]),
        "num_items_in_batch": torch.tensor(float(microbatches[0].rollout_tokens)),
    }
    if any(s.written is not None for s in samples):
        batch["tool_mask"] = padded([s.written or [1] * len(s.tokens) for s in samples], fill=1).long()
    for name, key in (("old_logprobs", "old_per_token_logps"), ("reference_logprobs", "ref_per_token_logps")):
        if getattr(samples[0], name) is not None:
            batch[key] = padded([getattr(s, name) for s in samples])
    return batch


class TrlClient:
    """What TRL's trainer expects of a vLLM client, answered by an engine as ours asks it."""

    def __init__(self, trainer):
        self.trainer = trainer

    def sync_weights(self):
        pass

    def generate(self, prompts, images, num_generations, profiler):
        result = self.trainer.rollouts.sampler.sample(prompts[::num_generations], num_generations)
        ids = [completion.token_ids for completion in result.completions]
        return prompts, ids, [[[value] for value in c.logprobs] for c in result.completions], None


def fed_by(theirs, client):
    """TRL's trainer, which takes its samples from a client."""
    theirs.use_vllm, theirs.vllm_mode, theirs._last_loaded_step = True, "server", -1
    theirs.vllm_generation = client
    return theirs


def trl_step(theirs, rows=None):
    """TRL's batch of a rollout, and its loss, whose gradients are added."""
    theirs.model.train()
    theirs.current_gradient_accumulation_steps = 1
    rows = [row for row in DATA for _ in range(GROUP)] if rows is None else rows
    batch = theirs._generate_and_score_completions(rows)
    loss = theirs.compute_loss(theirs.model, dict(batch))
    loss.backward()
    return batch, loss.item()
