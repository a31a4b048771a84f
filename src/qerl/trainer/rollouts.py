"""The half of the trainer that makes batches: prompts in, scored completions with advantages out.

TRL's `_generate_and_score_completions` tokenizes, samples (`sampler`), and scores. Around it: a choice of the
prompts, advantages of our own (`advantages`), and dynamic sampling, which calls it again for groups without
signal and puts what comes back into the batch, its rewards and the table of completions alike. What is logged
of a step stays that of its first rollout, an unbiased sample of the data.

Legend: B samples of this process, C completion columns, F reward functions.
"""

import logging
from collections import defaultdict
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object

from qerl.ranks import is_first_process
from qerl.rollout.engine import RolloutEngine
from qerl.seeding import ProblemSeeds, problem_key
from qerl.tasks.together import Together
from qerl.trainer.advantages import JUDGE, Signal, find_judge, in_parts, judge_of
from qerl.trainer.batch import GROUP_KEY, Batch, group_index
from qerl.trainer.correction import loss_mask
from qerl.trainer.curriculum import settled_groups
from qerl.trainer.dynamic_sampling import empty_log, replace_groups, replace_log_rows, samples_of
from qerl.trainer.noise import RolloutNoise
from qerl.trainer.prompt_choice import PromptChoice
from qerl.trainer.rewards import WRITTEN_COLUMN, stop_if_all_failed
from qerl.trainer.sampler import SamplerTrainer

N = TypeVar("N", int, float)

logger = logging.getLogger(__name__)


class RolloutTrainer(SamplerTrainer):
    """`GRPOTrainer` whose advantages are `advantages.Signal`'s, and whose groups have a signal if any."""

    vllm_importance_sampling_correction: bool
    mask_truncated_completions: bool
    _logs: dict[str, Any]

    def _start_rollouts(self, engine: RolloutEngine, calls: Together) -> None:
        """Make what rollouts need, once TRL's constructor is through."""
        self._start_learning()
        self._start_sampling(engine, calls)
        self._signal = Signal(
            group_size=self.num_generations,
            weights_F=self.reward_weights.to(self.accelerator.device),
            scale=self.scale_rewards,
            aggregation=self.multi_objective_aggregation,
            judge=judge_of(self.reward_func_names) if self.args.signal == "accuracy" else None,
            pass_at_k=self.args.pass_at_k,
        )
        self._reads_logps = True
        self._warned = False
        self._problem_seeds = ProblemSeeds(self.args.seed)

    def _start_learning(self) -> None:
        """Noise and choice of prompts of a run that begins: noise asks how long that is, and the choice has
        learned nothing."""
        policy = self.accelerator.unwrap_model(self.model)
        self._noise = RolloutNoise(self.args, policy, lambda: self.state.max_steps)
        self._prompts = PromptChoice(self.args, self.train_dataset, self.accelerator)
        self._rollouts_without_signal, self._had_signal = 0, False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Wraps transformers': a training whose rewards taught nothing says so at its end."""
        self._runtimes.begin("train")
        output = super().train(*args, **kwargs)
        if self._rollouts_without_signal and not self._had_signal and is_first_process():
            logger.warning(
                "Nothing was learned from rewards: in none of the rollouts (%d) did any prompt have both "
                "better and worse samples. Read some completions (log_completions: true): the problems may "
                "be too hard or too easy for the model, its answers cut off (completions/clipped_ratio), or "
                "the rewards may not find them.",
                self._rollouts_without_signal,
            )
        return output

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        self._start_learning()
        return super()._init_training_state(*args)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        """Wraps TRL's rollout: groups without signal are replaced, and advantages are computed here."""
        if not self.model.training:
            return self._evaluated(inputs)
        inputs, chosen = self._prompts.chosen(inputs, self.state.global_step)
        for name, value in chosen.items():
            self._metrics["train"][name].append(value)
        batch = self._sample_batch(inputs)
        if self.args.reward_errors == "stop":
            stop_if_all_failed(self.reward_funcs, self.accelerator)
        for extra in range(self.args.dynamic_sampling_rounds):
            dead = self._dead_groups(batch)
            counts = self._of_ranks(len(dead))
            if extra == 0:
                share = sum(counts) / len(counts) * self.num_generations / len(inputs)
                self._metrics["train"]["dynamic_sampling/groups_without_signal"].append(share)
            if not any(counts):
                break
            batch = self._replace_dead_groups(batch, dead, max(counts))
        return self._with_advantages(batch)

    def _evaluated(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's batch of an evaluation, its samples drawn by seeds of their problems."""
        samples, rank = self.num_generations_eval, self.accelerator.process_index
        own = [problem_key(row) for row in inputs[::samples]]
        every: list[list[str]] = gather_object([own])
        start = sum(map(len, every[:rank])) * samples
        seeds = self._problem_seeds.of([problem for part in every for problem in part], samples)
        self._eval_seeds = seeds[start : start + len(inputs)]
        try:
            return self._scored_by_trl(inputs)[0]
        finally:
            self._eval_seeds = None

    def _sample_batch(self, inputs: list[dict[str, Any]]) -> Batch:
        """TRL's batch with its groups [B], rewards [B, F] and the sampler's entropies [B, C]."""
        batch, logged = self._scored_by_trl(inputs)
        batch[GROUP_KEY] = group_index(batch, self.num_generations)
        batch["rollout_entropy"] = torch.tensor(logged["rollout/entropy"], device=self.accelerator.device)
        if self._prompts.learns:
            self._prompts.observe(inputs, self._settled())
        rewards_BF = self._own_rows(self._rewards_BF, len(inputs))
        unseen_B1 = loss_mask(batch).sum(dim=1, keepdim=True) == 0  # cut off, and masked for that
        batch["rewards_per_func"] = rewards_BF.masked_fill(unseen_B1, torch.nan)
        return batch

    def _settled(self) -> list[bool | None]:
        """Of the groups of all processes, whether samples were all right or all wrong; without a judge,
        whether they were all rewarded alike."""
        judge = find_judge(self.reward_func_names)
        if judge is None:
            return self._signal.dead(self._rewards_BF).tolist()
        return settled_groups(self._rewards_BF[:, judge], self.num_generations)

    def _own_rows(self, gathered: Any, count: int) -> Any:
        """This process's part of the gathered samples of all processes."""
        start = self.accelerator.process_index * count
        return gathered[start : start + count]

    def _dead_groups(self, batch: Batch) -> list[int]:
        return self._signal.dead(batch["rewards_per_func"]).nonzero().flatten().tolist()

    def _with_advantages(self, batch: Batch) -> Batch:
        """The batch with advantages in place of rewards, once no group of it will be replaced."""
        own_BF = batch.pop("rewards_per_func")
        rewards_BF = self.accelerator.gather(own_BF)
        self._warn_of_judge(rewards_BF)
        advantages_B = self._signal.advantages(rewards_BF)
        advantages = advantages_B.tolist()
        self._had_signal |= any(advantages)
        self._rollouts_without_signal += not any(advantages)
        self._logs["advantages"].extend(advantages)
        return batch | {"advantages": self._own_rows(advantages_B, len(own_BF))}

    def _warn_of_judge(self, rewards_BF: torch.Tensor) -> None:
        """Say once that the reward that is taken for a verdict may be none."""
        judge, text = self._signal.judge, ""
        if self._warned or judge is None:
            return
        name = self.reward_func_names[judge]
        if name != JUDGE and self._signal.overruled(rewards_BF):
            text = (
                "Rewards differ in this step but no group has both right samples (%s above 0) and wrong "
                "ones, so nothing is learned from it; if that reward is not a verdict, set signal: reward."
            )
        elif in_parts(rewards_BF[:, judge]):
            text = (
                "The reward %s has several values above 0, each of which counts as right; if it gives credit "
                "for parts of an answer, let a reward called accuracy be 0 or 1 beside it, or set signal: "
                "reward."
            )
        self._warned = bool(text)
        if text and is_first_process():
            logger.warning(text, name)

    def _scored_by_trl(self, inputs: list[dict[str, Any]]) -> tuple[Batch, dict[str, float]]:
        """TRL's batch, and the metrics of the rollout.

        Without the correction, which is applied in the loss (`trainer.correction`), TRL computes old
        log-probabilities only where the policy will have moved since the rollout. Evaluation has no loss that
        would read any. What was cut off is masked here, by what the engine says.
        """
        wanted, self.vllm_importance_sampling_correction = self.vllm_importance_sampling_correction, False
        masks, self.mask_truncated_completions = self.mask_truncated_completions, False
        self._reads_logps = self.model.training
        try:
            with nullcontext() if self._early is None else self._early.of(inputs):
                batch = super()._generate_and_score_completions(inputs)
        finally:
            self.vllm_importance_sampling_correction, self._reads_logps = wanted, True
            self.mask_truncated_completions = masks
        if masks:
            self._mask_cut_off(batch)
        if self._turns is not None:
            self._turns.replace_hanging()
        mode = "train" if self.model.training else "eval"
        batch["sampling_entropies"] = self._rollout.entropies(batch["completion_ids"])
        logged = self._rollout.report(self.accelerator)
        for name, value in logged.items():
            self._metrics[mode][name].append(value)
        return batch, logged

    def _mask_cut_off(self, batch: Batch) -> None:
        """Leave samples that were cut off out of the loss."""
        whole_B1 = ~torch.tensor(self._cut_off, device=self.accelerator.device)[:, None]
        for name in {"completion_mask", "tool_mask"} & batch.keys():
            batch[name] = batch[name] * whole_B1
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask(batch).sum()).sum()

    def _replace_dead_groups(self, batch: Batch, dead: list[int], draws: int) -> Batch:
        """One extra rollout; every rank samples `draws` groups, because TRL gathers rewards over ranks."""
        size, rank = self.num_generations, self.accelerator.process_index
        fresh, fresh_log = self._sample_apart(self._prompts.others(draws))
        without = set(self._dead_groups(fresh))
        pairs = list(zip(dead, (group for group in range(draws) if group not in without), strict=False))
        replaced = sum(self._of_ranks(len(pairs)))
        self._metrics["train"]["dynamic_sampling/replaced_groups"].append(float(replaced))
        targets, sources = ([pair[side] for pair in pairs] for side in (0, 1))
        in_log = zip(
            (samples_of(targets, size) + rank * len(batch["completion_mask"])).tolist(),
            (samples_of(sources, size) + rank * draws * size).tolist(),
            strict=True,
        )
        replace_log_rows(self._logs, fresh_log, gather_object(list(in_log)))
        if pairs:
            batch = replace_groups(batch, targets, fresh, sources, size, self._tokenizer.pad_token_id)
        tokens = loss_mask(batch).sum()
        batch["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        return batch

    def _sample_apart(self, rows: list[dict[str, Any]]) -> tuple[Batch, dict[str, Any]]:
        """A further rollout of a step, and its table of completions; its metrics are dropped."""
        log, self._logs = self._logs, empty_log(self._logs)
        metrics, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            return self._sample_batch(rows), self._logs
        finally:
            self._logs, self._metrics["train"] = log, metrics

    def _of_ranks(self, number: N) -> list[N]:
        return self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).tolist()

    def _calculate_rewards(self, inputs: list[dict[str, Any]], *args: Any) -> torch.Tensor:
        """Wraps TRL's rewards: times them and keeps the tensor [B, F] gathered from all processes.

        Where others wrote in the completions, rewards are told how many tokens the policy wrote.
        """
        if self._written is not None:
            lengths = [sum(mask) for mask in self._written]
            inputs = [row | {WRITTEN_COLUMN: n} for row, n in zip(inputs, lengths, strict=True)]
        waiting = nullcontext() if self._early is None else self._early.waiting(self._clock)
        with self._clock.part("reward"), waiting:
            self._rewards_BF = super()._calculate_rewards(inputs, *args)
        return self._rewards_BF
