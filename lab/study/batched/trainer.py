"""GRPO of S runs at once: the steps of a study.

A step is one of `QeRLTrainer`'s with the arm's loss and the other defaults of `QeRLConfig`: a rollout of each
run with its noise, rewards, advantages within groups, one loss, one step of AdamW. Unless the arm takes the
ratio to the sampler, its ratio to the old policy is 1, so nothing is clipped, and the gradient is that of the
advantage times the correction's weight times the log-probability. Data, fresh adapters, noise and sampling
are keyed as in `QeRLTrainer`, so a run in a batch computes what a run by itself would.

A stale sampler has the adapter of some steps ago: its samples are those that a loop which samples this many
steps ahead would train on. The adapters in between are kept on the device.

If a run's gradient, loss or a logit is not finite, the run has diverged: its weights stay as they are, and
each later record says so. The other runs are not affected.

The learning rate is constant by default and AdamW's beta2 0.99, as in the recipe of the demo, which trains
such models on such tasks.

Legend: S runs, P prompts of a run, R = P times the size of a group samples of a run, C tokens, F rewards.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.study.arms import Run
from lab.study.batched.evaluation import Evaluation
from lab.study.batched.model import BatchedModel
from lab.study.batched.noise import Exploration, Explorers, same_batch
from lab.study.batched.objective import Outcome, loss_of
from lab.study.batched.rewards import training_problems
from lab.study.batched.sampler import Sampler, Samples, clean_norms, keyed_uniforms
from lab.study.batched.score import Texts, score, score_piece
from lab.study.batched.trained import AdamW
from lab.study.followed import Followed
from qerl.errors import QeRLError
from qerl.rollout.engine import SamplingParams
from qerl.seeding import derive_seed
from qerl.tasks.base import Task
from qerl.trainer.advantages import Signal
from qerl.trainer.order import RepeatedRows


@dataclass(frozen=True)
class Settings:
    """Settings that all runs of a study share.

    Attributes:
        steps: Optimizer steps of a run.
        prompts_per_step: Prompts of a run in each step.
        samples_per_prompt: Size of a group.
        max_completion_length: Maximum number of tokens of a completion, at least 2.
        tokens_per_forward: Maximum number of tokens in one forward pass of the update, over all runs; larger
            updates are split into pieces, with the same gradients.
        rows_at_once: Maximum number of samples, over all runs, that an evaluation decodes at once.
    """

    steps: int
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_completion_length: int = 24
    tokens_per_forward: int = 32768
    rows_at_once: int = 2048

    def __post_init__(self) -> None:
        for name in ("steps", "prompts_per_step", "tokens_per_forward", "rows_at_once"):
            if getattr(self, name) < 1:
                raise QeRLError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("samples_per_prompt", "max_completion_length"):
            if getattr(self, name) < 2:
                raise QeRLError(f"{name} is {getattr(self, name)}; it must be at least 2.")


class BatchedTrainer:
    """Trains the runs of a batch.

    Args:
        base: The model in the format of the runs' arms, as `qerl.models.load.load_model` gives it; it is read
            and not changed.
        tokenizer: Tokenizer of the model.
        task: The task to train on.
        runs: The runs, whose arms fit into one batch (`same_batch`).
        settings: What they share.
        followed: For each run of an arm with `match_entropy` the run that it follows.

    Attributes:
        done: Steps done.

    Raises:
        QeRLError: Arms that contradict themselves or each other, a model of another kind, or a task whose
            rewards or prompts do not fit.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        runs: Sequence[Run],
        settings: Settings,
        followed: Sequence[Followed | None] | None = None,
    ) -> None:
        if not runs:
            raise QeRLError("There is no run to train; give at least one.")
        self.runs, self.settings, self.done = list(runs), settings, 0
        arm = runs[0].arm
        for run in runs:
            if not same_batch(arm, run.arm):
                raise QeRLError(
                    f"Arms {arm.name} and {run.arm.name} differ in their base or in how noise is applied, so "
                    "they cannot share a batch; train them in separate batches."
                )
        seeds = [run.seed for run in runs]
        self.model = BatchedModel(base, len(runs), arm.lora_r, seeds, arm.frozen_noise, arm.tuning)
        self._problems = training_problems(task, tokenizer)
        self._eos = int(tokenizer.eos_token_id)
        width = max(map(len, self._problems.ids))
        self._sampler = Sampler(self.model, int(tokenizer.pad_token_id), width)
        self._orders = {
            seed: _Order(len(self._problems.ids), settings.prompts_per_step, seed) for seed in seeds
        }
        groups = settings.prompts_per_step, settings.samples_per_prompt
        self._explorers = Explorers(self.model, self.runs, settings.steps, *groups, followed)
        self._trained = self.model.trained
        self._optimizer = AdamW(self._trained)
        self._former = deque[torch.Tensor](maxlen=arm.staleness)
        device = self.model.device
        self._alive_S = torch.ones(len(runs), dtype=torch.bool, device=device)
        self._rates_S = torch.tensor([run.learning_rate for run in runs], device=device)
        self._policy_temperatures = [run.arm.temperature for run in runs]
        self._entropy_has_gradient = any(run.arm.entropy_bonus for run in runs)
        weights = torch.ones(len(self._problems.reward_names))
        self._signals = {
            # Divided by the standard deviation of their group, advantages of pass@k would be those of GRPO.
            k: Signal(groups[1], weights, "none" if k else "group", "sum_then_normalize", pass_at_k=k)
            for k in {run.arm.pass_at_k for run in runs}
        }
        self._evaluation = Evaluation(
            self.model,
            self._sampler,
            task,
            tokenizer,
            seeds,
            self._params(0.0),
            settings.rows_at_once,
            settings.tokens_per_forward,
        )

    def step(self) -> list[dict[str, float]]:
        """Do one optimizer step of every run.

        Returns:
            The logged values of each run: `reward`, `rewards/NAME/mean`, `loss`, `grad_norm`,
            `learning_rate`, `entropy` (of the policy), `rollout/entropy` (of the sampler), `sampling/kl` (of
            the samples drawn with noise), `sampling/ratio/...`, `clip_ratio` (share of the tokens beyond a
            bound of the loss's ratio), `completions/mean_length`, `signal` (share of groups with an advantage
            other than 0), `noise/sigma`, `temperature`, `diverged` (0 or 1); if the temperature follows
            another run, `temperature/error`; and if a share of each group is clean, `noisy`, `clean` (their
            accuracy), `only_noisy`, `only_clean` (share of the problems that only one of them solves).
        """
        if self.done >= self.settings.steps:
            raise QeRLError(f"All {self.settings.steps} steps are done.")
        exploration = self._explorers.at(self.done)
        picked = [self._orders[run.seed].batch(self.done) for run in self.runs]
        samples = self._sample(picked, exploration)
        rewards_SRF = self._rewards(picked, samples.completions())
        advantages_SR = self._advantages(rewards_SRF)
        outcome = self._backward(samples, advantages_SR, exploration)
        finite_S = self._alive_S & samples.finite_S & outcome.loss_S.isfinite()
        if self._former.maxlen:
            self._former.append(self._trained.values_SE.clone())
        norms_S, self._alive_S = self._optimizer.step(self._rates_S, finite_S)
        measured = outcome.columns() | {
            "grad_norm": norms_S,
            "diverged": ~self._alive_S,
            "learning_rate": self._rates_S,
        }
        table_MS = torch.stack([column.double() for column in measured.values()]).tolist()
        seen = dict(zip(measured, table_MS, strict=True))
        seen |= self._rewarded(rewards_SRF, advantages_SR, exploration)
        seen |= {"noise/sigma": exploration.sigma_S, "temperature": exploration.temperature_S}
        seen |= self._explorers.observe(self.done, seen["sampling/kl"], seen["rollout/entropy"])
        self.done += 1
        return [{name: float(seen[name][index]) for name in seen} for index in range(len(self.runs))]

    def evaluate(self, problems: Dataset, samples: int = 0) -> list[dict[str, float]]:
        """Score the clean policy of every run; see `Evaluation`."""
        return self._evaluation.run(problems, samples, self.done)

    def state(self) -> dict[str, Any]:
        """The state from which a batch continues as if it had not been interrupted; tensors on the CPU."""
        optimizer = self._optimizer
        return {
            "done": self.done,
            "values": self._trained.values_SE.cpu(),
            "mean": optimizer.mean_SE.cpu(),
            "square": optimizer.square_SE.cpu(),
            "alive": self._alive_S.cpu(),
            "former": [values_SE.cpu() for values_SE in self._former],
            "explorers": self._explorers.state(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from a state that `state` returned, with the same runs and settings.

        Raises:
            QeRLError: The state is of another batch.
        """
        if state["values"].shape != self._trained.values_SE.shape or state["done"] > self.settings.steps:
            raise QeRLError("The saved state belongs to another batch of runs; remove it to start anew.")
        self.done = self._optimizer.steps = state["done"]
        self._trained.values_SE.copy_(state["values"])
        self._optimizer.mean_SE.copy_(state["mean"])
        self._optimizer.square_SE.copy_(state["square"])
        self._alive_S.copy_(state["alive"])
        self._former.extend(values_SE.to(self.model.device) for values_SE in state["former"])
        self._explorers.restore(state["explorers"])

    def _params(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.settings.max_completion_length,
            temperature=temperature,
            stop_token_ids=(self._eos,),
        )

    def _sample(self, picked: list[list[int]], exploration: Exploration) -> Samples:
        settings = self.settings
        seeds = [derive_seed("rollout", run.seed, "train", self.done, 0, 0) for run in self.runs]
        sizes = settings.prompts_per_step, settings.samples_per_prompt, settings.max_completion_length
        sampler_SE = self._former[0] if self._former else self._trained.values_SE
        with self._trained.holding(sampler_SE):
            return self._sampler.generate(
                [[self._problems.ids[problem] for problem in own] for own in picked],
                settings.samples_per_prompt,
                self._params(1.0),
                keyed_uniforms(seeds, *sizes),
                exploration.norms,
                torch.tensor(exploration.temperature_S),
                exploration.logits_noise_SV,
            )

    def _rewards(self, picked: list[list[int]], completions: list[list[list[int]]]) -> torch.Tensor:
        """Rewards [S, R, F] on the CPU."""
        size = self.settings.samples_per_prompt
        problems = [problem for own in picked for problem in own for _ in range(size)]
        texts = [ids for run in completions for ids in run]
        return self._problems.judge(problems, texts).unflatten(0, (len(self.runs), -1))

    def _advantages(self, rewards_SRF: torch.Tensor) -> torch.Tensor:
        each = [
            self._signals[run.arm.pass_at_k].advantages(own)
            for run, own in zip(self.runs, rewards_SRF, strict=True)
        ]
        return torch.stack(each)

    def _backward(self, samples: Samples, advantages_SR: torch.Tensor, exploration: Exploration) -> Outcome:
        """Compute the gradients of every run's loss; returns the inputs and results of the update."""
        model, arm, at_once = self.model, self.runs[0].arm, self.settings.tokens_per_forward
        texts = Texts.of(samples, model.device)
        clean = clean_norms(model, advantages_SR.shape[1])
        norms = exploration.norms if arm.noise_in_loss and exploration.norms is not None else clean
        temperatures = self._policy_temperatures
        noisy_SRC = clean_SRC = None
        if arm.correction == "token_balance" and exploration.all_noisy is not None:
            noisy_SRC = score(model, texts, exploration.all_noisy, temperatures, at_once)[0]
        if norms is not clean:
            clean_SRC = score(model, texts, clean, temperatures, at_once)
        outcome = Outcome.of(
            self.runs, samples, texts, advantages_SR, exploration.noisy_R, self._explorers.share
        )
        outcome.noisy_SRC = noisy_SRC
        self._trained.refresh()
        with torch.enable_grad(), warnings.catch_warnings():
            # Gradients have the strides of the matrices, in rows of runs; torch expects contiguous ones.
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            for piece in texts.pieces(at_once):
                leaves = self._trained.leaves(piece.runs)
                logps, entropies = score_piece(
                    model, texts, piece, leaves, norms, temperatures, self._entropy_has_gradient
                )
                loss_S = loss_of(outcome, piece, logps, entropies)
                loss_S.sum().backward()
                self._trained.collect(piece.runs)
        if clean_SRC is not None:
            outcome.logps_SRC, outcome.entropies_SRC = clean_SRC
        return outcome

    def _rewarded(
        self, rewards_SRF: torch.Tensor, advantages_SR: torch.Tensor, exploration: Exploration
    ) -> dict[str, list[float]]:
        """Logged metrics of rewards, by name and run."""
        names, size = self._problems.reward_names, self.settings.samples_per_prompt
        seen = {"reward": rewards_SRF.nansum(dim=2).mean(dim=1)}
        for name, values_SR in zip(names, rewards_SRF.unbind(2), strict=True):
            seen[f"rewards/{name}/mean"] = values_SR.nanmean(dim=1)
        seen["signal"] = (advantages_SR.unflatten(1, (-1, size)) != 0).any(dim=2).float().mean(dim=1)
        noisy_G = torch.tensor(exploration.noisy_R[:size])
        if not noisy_G.all():
            right_SPG = (rewards_SRF[..., 0] > 0).unflatten(1, (-1, size))
            noisy, clean = right_SPG[..., noisy_G], right_SPG[..., ~noisy_G]
            seen["noisy"], seen["clean"] = noisy.float().mean(dim=(1, 2)), clean.float().mean(dim=(1, 2))
            found_noisy, found_clean = noisy.any(dim=2), clean.any(dim=2)
            seen["only_noisy"] = (found_noisy & ~found_clean).float().mean(dim=1)
            seen["only_clean"] = (found_clean & ~found_noisy).float().mean(dim=1)
        return {name: values.tolist() for name, values in seen.items()}


class _Order:
    """The problems of each step of a run: those of `QeRLTrainer`'s sampler with the run's seed."""

    def __init__(self, problems: int, per_step: int, seed: int) -> None:
        if per_step > problems:
            raise QeRLError(
                f"prompts_per_step is {per_step}, but the task has only {problems} training problems; lower "
                "prompts_per_step or use more problems."
            )
        self._per_step, self._steps = per_step, problems // per_step
        self._sampler = RepeatedRows(range(problems), samples=1, prompts=per_step, seed=seed)
        self._epoch, self._known = 0, list(self._sampler)

    def batch(self, step: int) -> list[int]:
        """Indices of the problems of a 0-based step."""
        epoch, place = divmod(step, self._steps)
        if epoch != self._epoch:
            self._sampler.set_epoch(epoch)
            self._epoch, self._known = epoch, list(self._sampler)
        return self._known[place * self._per_step : (place + 1) * self._per_step]
