"""A rollout of a trainer: rows of the data in, scored samples with advantages out.

1. **Prompts.** The order of the data proposes rows, each repeated per sample; a curriculum may replace some.
2. **Samples** (`qerl.trainer.sampler`). Samples of an evaluation are seeded by their problems, so that every
   evaluation draws the same. Agents that lead conversations themselves may fork a conversation into several:
   up to the rewards a trajectory is one sample with forks, compared by its one reward, and in the update it
   is several samples of one advantage.
3. **Rewards** (`qerl.trainer.rewards`). Functions that ask outside of this process are called for each sample
   as it ends (`qerl.tasks.together`). Without dynamic sampling all others are called once all samples have
   ended; with it both happen in one open call, see below.
4. **Advantages** (`qerl.trainer.advantages`), and log-probabilities under the old and the reference policy
   where the loss reads them. When every rollout is used for one optimizer step, the policy has not changed
   since it sampled, and the update's own log-probabilities are the old ones: no forward pass is made for
   them.

A rollout holds whole groups, the samples of a group side by side. With `max_staleness` some of them started
in earlier steps, in rows that those steps' tails left free (`qerl.trainer.refill`); all else is the same.

**The open call** of dynamic sampling. The engine's session stays open, further groups start as earlier ones
turn out to have no signal (`qerl.trainer.dynamic_sampling` decides), and each group is scored by itself as
soon as its last sample has ended: functions that compute in this process are called between two rounds of
decoding, functions that wait do so while decoding goes on. A step logs the groups that its data proposed, an
unbiased sample of the data. Groups after the last one that is taken are dropped; nothing of them is learned
or counted, because their number depends on how long samples are. Each process fills its own places in the
batch, and processes synchronise when all have.

Legend: B samples of this process, F reward functions.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerState

from qerl.errors import QeRLError
from qerl.noise.draw import AdaptiveNoise
from qerl.ranks import is_first_process
from qerl.seeding import ProblemSeeds, problem_key
from qerl.settings.config import QeRLConfig
from qerl.trainer.advantages import JUDGE, Signal, find_judge, in_parts
from qerl.trainer.curriculum import settled_groups
from qerl.trainer.dynamic_sampling import Intake
from qerl.trainer.prompt_choice import PromptChoice
from qerl.trainer.refill import Refill
from qerl.trainer.rewards import WRITTEN_COLUMN, ScoredBatch, Scorer, stop_if_all_failed, tallied
from qerl.trainer.sampler import Drawn, Row, Sampler, joined
from qerl.trainer.step_log import HIDDEN, Record, StepLog
from qerl.update.packed_row import Sample

logger = logging.getLogger(__name__)

Part = tuple[Drawn, ScoredBatch]
"""Samples, and the batch in which they are scored."""


@dataclass
class Rollout:
    """Scored samples, whole groups of this process.

    Attributes:
        samples: With rewards and advantages.
        tokens: Tokens that count in the losses' means, of all processes.
        counted: The share of samples that count, of all processes: 1, or with `filter_zero_advantages` that
            of the groups with a signal.
        entropy: Mean entropy of the sampler in nats over the tokens of the first rollout, of all processes.
    """

    samples: list[Sample]
    tokens: int
    counted: float
    entropy: float


class RolloutStep:
    """Makes the rollouts of a trainer.

    Args:
        args: Settings of the run.
        sampler: Draws samples.
        scorer: Calls the reward functions.
        signal: Turns rewards into advantages.
        prompts: Chooses rows; None takes them as they come.
        refill: Draws the samples of training where rows are refilled across steps, else None.
        log: Receives metrics, seconds and records of samples.
        accelerator: Accelerator of the run.
        state: Returns transformers' state of the trainer.

    Attributes:
        sampler: As given.
        had_signal: Whether any sample of any rollout had an advantage.
        without_signal: Number of rollouts in which no sample had an advantage.
    """

    def __init__(
        self,
        args: QeRLConfig,
        sampler: Sampler,
        scorer: Scorer,
        signal: Signal,
        prompts: PromptChoice | None,
        refill: Refill | None,
        log: StepLog,
        accelerator: Accelerator,
        state: Callable[[], TrainerState],
    ) -> None:
        self.sampler, self._scorer, self._signal, self._prompts = sampler, scorer, signal, prompts
        self._refill = refill
        self._args, self._log, self._accelerator, self._state = args, log, accelerator, state
        self._group = args.num_generations or 1
        self._problem_seeds = ProblemSeeds(args.seed)
        self._warned = False
        self._apart = 0  # number of the last group of one sample, see _group_apart
        self.had_signal, self.without_signal = False, 0

    # A rollout

    def train(self, rows: list[Row], first_group: int) -> Rollout:
        """Return a rollout of this process for training.

        Args:
            rows: Rows that the order of the data proposes, each repeated per sample, copies side by side.
            first_group: Number of its first group; no two rollouts of an optimizer step have groups in
                common.

        Raises:
            QeRLError: The rows are not whole groups, a reward function fails on all samples, or an
                environment or the engine cannot go on.
        """
        if self._prompts is not None:
            rows, chosen = self._prompts.chosen(rows, self._state().global_step)
            self._log.add("train", chosen)
        if self._args.dynamic_sampling_batches:
            samples, records, entropy = self._filled(rows)
        else:
            samples, records, entropy = self._sampled(rows)
        self._advantages(samples, records)
        self._log.keep(records)
        size = self._group
        for at, sample in enumerate(samples):
            read = sample.prompt, sample.teacher_prompt  # environments or rollout_func may differ
            new = at % size == 0 or read != (samples[at - 1].prompt, samples[at - 1].teacher_prompt)
            sample.group = first_group + at if new else samples[at - 1].group
        self._log.metrics["train"]["num_tokens"] = [self._state().num_input_tokens_seen]
        tokens, counted = self._counted(samples)
        if any(sample.forks for sample in samples):
            samples, share = self._with_forks(samples)
            counted *= share
        return Rollout(samples, tokens, counted, entropy)

    def evaluate(self, rows: list[Row]) -> None:
        """Sample, score and log the rows of an evaluation; nothing else of them is kept."""
        samples, rank = self._args.num_generations_eval or self._group, self._rank
        own = [problem_key(row) for row in rows[::samples]]
        every: list[list[str]] = gather_object([own])
        start = sum(map(len, every[:rank])) * samples
        seeds = self._problem_seeds.of([problem for part in every for problem in part], samples)
        _, records, _ = self._sampled(rows, "eval", seeds[start : start + len(rows)])
        self._log.keep(records)

    def begin_evaluation(self) -> None:
        """Reset the seeds of problems, so that each evaluation draws the same samples."""
        self._problem_seeds = ProblemSeeds(self._args.seed)

    def begin_training(self, noise: Callable[[], AdaptiveNoise] | None, prompts: PromptChoice | None) -> None:
        """Reset for a new training: a step that was cut off draws the same samples again, and `had_signal` is
        False."""
        self.sampler.begin_training(noise)
        if self._refill is not None:
            self._refill.begin_training()
        self._prompts = prompts
        self.had_signal, self.without_signal = False, 0

    def end_training(self) -> None:
        """Discard unfinished samples, whether or not the training came to its last step."""
        if self._refill is not None:
            self._refill.end_training()

    def save(self, folder: Path) -> None:
        """Write the state of the prompt choice and unfinished samples into a checkpoint."""
        if self._prompts is not None:
            self._prompts.save(folder)
        if self._refill is not None and not self._args.save_only_model:  # nothing resumes from that
            self._refill.save(folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote."""
        if self._prompts is not None:
            self._prompts.load(folder)
        if self._refill is not None:
            self._refill.load(folder)

    def make_room(self) -> bool:
        """Free the KV cache of unfinished samples, which go on all the same; return True if there were
        any."""
        return self._refill is not None and self._refill.make_room()

    def _sampled(
        self, rows: list[Row], mode: str = "train", seeds: Sequence[int] | None = None
    ) -> tuple[list[Sample], list[Record], float]:
        """Sample and score rows; return the samples, the records of all processes, and the sampler's mean
        entropy."""
        size = self._group
        if mode == "eval":
            size = self._args.num_generations_eval or size
        with self._scorer.rollout():
            drawn = self._drawn(rows, size, mode, seeds)
            part = self._begun(drawn, mode)
            self._score(*part)
        records, entropy = self._logged(drawn, [part], size, mode)
        if mode == "train":
            self._observe([part])
        return drawn.samples, records, entropy

    def _drawn(self, rows: list[Row], size: int, mode: str, seeds: Sequence[int] | None) -> Drawn:
        """Draw the samples of rows; those of a training may have started in earlier steps."""
        if self._refill is None or mode == "eval":
            return self.sampler.draw(rows, size, mode, seeds)
        state = self._state()
        drawn = self._refill.draw(rows, state.global_step, state.max_steps)
        ages = [age for sample in drawn.samples for age in sample.ages or ()]
        found = {
            "staleness/mean": sum(ages) / len(ages),
            "staleness/max": float(max(ages)),
            "staleness/samples_under_way": float(self._refill.under_way),
        }
        self._log.add(mode, found)
        return drawn

    # The open call of dynamic sampling

    def _filled(self, rows: list[Row]) -> tuple[list[Sample], list[Record], float]:
        """As `_sampled`, with groups of further rows in the places of those without signal."""
        assert self._prompts is not None, "it draws the fresh prompts"
        size, wanted = self._group, len(rows) // self._group
        rows = [*rows, *self._prompts.others(wanted * (self._args.dynamic_sampling_batches or 0))]
        intake = Intake(wanted, len(rows) // size, self._prompts.share)
        with self._scorer.rollout():
            parts, seconds = self._open_call(rows, intake)
        generated = sum(drawn.result.generated_tokens for drawn, _ in parts if drawn.result is not None)
        proposed = joined([drawn for drawn, _ in parts[:wanted]], generated, seconds)
        records, entropy = self._logged(proposed, parts[:wanted], size, "train")
        self._count_tokens([sample for drawn, _ in parts[wanted:] for sample in drawn.samples])
        places = intake.places()
        moved = [(place, group) for place, group in enumerate(places) if place != group]
        self._log_intake(intake, len(moved))
        self._prompts.share = float(self._accelerator.gather(self._on_device(intake.share)).mean())
        first = self._rank * wanted * size
        own = [
            (first + place * size + i, record)
            for place, group in moved
            for i, record in enumerate(self._records(*parts[group]))
        ]
        for at, record in gather_object(own):
            records[at] = record
        self._observe(parts)
        return [sample for group in places for sample in parts[group][0].samples], records, entropy

    def _open_call(self, rows: list[Row], intake: Intake) -> tuple[list[Part], float]:
        """The groups up to the last one that is taken, in order of start, and seconds of sampling them."""
        size, begin, judged_s = self._group, time.perf_counter(), 0.0
        parts: dict[int, Part] = {}
        scoring: list[int] = []  # groups whose rewards are pending, in the order in which they ended
        with self.sampler.open_call(rows, size) as call:
            while (last := intake.last) is None:
                if numbers := intake.start(intake.wanted - -(-call.samples // size)):
                    call.start(numbers)
                for group, drawn in call.next(one_round=bool(scoring)):
                    parts[group] = self._begun(drawn, "train")
                    scoring.append(group)
                start, wait = time.perf_counter(), bool(scoring) and not call.busy
                with self._rewarding():
                    ended = self._scorer.ended([parts[group][1] for group in scoring], wait)
                for group in [scoring[place] for place in ended]:
                    drawn = parts[group][0]
                    with torch.enable_grad():  # which the session turns off
                        self._score(*parts[group])
                    self.sampler.close(drawn)
                    intake.judge(group, not self._groups_without_signal(drawn.samples))
                    scoring.remove(group)
                judged_s += time.perf_counter() - start
                if self._all_failed(parts, intake):
                    intake.stop()
        seconds = time.perf_counter() - begin - judged_s
        self._log.add_seconds("rollout", seconds)
        return [parts[group] for group in range(last)], seconds

    def _all_failed(self, parts: dict[int, Part], intake: Intake) -> bool:
        """Return True if a function failed on all samples of this process's proposed groups, so that other
        groups would not help. If it failed on those of all processes, the run ends."""
        if self._args.reward_errors != "stop" or not intake.has_judged_proposed:
            return False
        scored = [parts[group][1] for group in range(intake.wanted)]
        return any(tally.all_failed for tally in tallied(scored))

    def _log_intake(self, intake: Intake, moved: int) -> None:
        """Log what the open call did, of all processes."""
        dead = sum(not intake.alive(group) for group in range(intake.wanted))
        share = sum(self._of_ranks(dead)) / intake.wanted / self._accelerator.num_processes
        found = {
            "groups_without_signal": share,
            "replaced_groups": float(sum(self._of_ranks(moved))),
            "started_groups": float(sum(self._of_ranks(intake.started))),
        }
        self._log.add("train", {f"dynamic_sampling/{name}": value for name, value in found.items()})

    # Rewards and advantages

    def _begun(self, drawn: Drawn, mode: str) -> Part:
        """Start the reward calls for samples that have ended."""
        self.sampler.prepare(drawn, mode)
        batch = self._to_score(drawn)
        self._scorer.start(batch, drawn.asked)
        return drawn, batch

    @contextlib.contextmanager
    def _rewarding(self) -> Iterator[None]:
        """Time the block as rewards. Seconds of calls before the block were hidden by the rollout; waits
        inside it are not."""
        if self._scorer.waits:
            self._log.add_seconds(HIDDEN, self._scorer.take_seconds())
        with self._log.part("reward"):
            yield
        self._scorer.take_seconds()

    def _to_score(self, drawn: Drawn) -> ScoredBatch:
        """Return the batch for reward functions. Where others wrote in the completions, a column counts the
        tokens that the policy wrote."""
        rows = drawn.rows
        if any(sample.written is not None for sample in drawn.samples):
            counts = [sample.drawn_tokens for sample in drawn.samples]
            rows = [row | {WRITTEN_COLUMN: count} for row, count in zip(rows, counts, strict=True)]
        ids = [sample.tokens for sample in drawn.samples]
        return self._scorer.batch(rows, drawn.prompts, drawn.completions, ids, drawn.environments)

    def _score(self, drawn: Drawn, batch: ScoredBatch) -> None:
        """Give samples their rewards."""
        with self._rewarding():
            rewards_BF = self._scorer.score(batch)
        for sample, rewards in zip(drawn.samples, rewards_BF.tolist(), strict=True):
            sample.rewards = rewards

    def _records(self, drawn: Drawn, batch: ScoredBatch) -> list[Record]:
        """The samples of this process for the table of completions."""
        names = self._scorer.names
        records = [
            Record(prompt, said, dict(zip(names, sample.rewards, strict=True)))
            for prompt, said, sample in zip(drawn.prompts, drawn.completions, drawn.samples, strict=True)
        ]
        for name in sorted(batch.extra):
            for record, value in zip(records, batch.extra[name], strict=False):
                record.extra[name] = value
        return records

    def _observe(self, parts: Sequence[Part]) -> None:
        """Report the rewards of groups to a curriculum; every process must call this."""
        if self._prompts is not None and self._prompts.learns:
            rows = [row for drawn, _ in parts for row in drawn.rows]
            rewards_BF = torch.tensor([sample.rewards for drawn, _ in parts for sample in drawn.samples])
            self._prompts.observe(rows, self._settled(rewards_BF))

    def _learned_from(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Return the rewards [B, F] by which samples are compared; NaN for samples without a token in the
        loss."""
        unseen = [not any(map(_seen, (sample, *sample.forks))) for sample in samples]
        rewards_BF = torch.tensor([sample.rewards for sample in samples])
        return rewards_BF.masked_fill(torch.tensor(unseen)[:, None], torch.nan)

    def _groups_without_signal(self, samples: list[Sample]) -> list[int]:
        return self._signal.zero_advantage(self._learned_from(samples)).nonzero().flatten().tolist()

    def _advantages(self, samples: list[Sample], records: list[Record]) -> None:
        """Give samples and records their advantages; no group may be replaced afterwards."""
        own_BF = self._learned_from(samples).to(self._accelerator.device)
        rewards_BF = self._accelerator.gather(own_BF).cpu()
        self._warn_of_judge(rewards_BF)
        advantages = self._signal.advantages(rewards_BF).tolist()
        self.had_signal |= any(advantages)
        self.without_signal += not any(advantages)
        for record, advantage in zip(records, advantages, strict=True):
            record.advantage = advantage
        own = advantages[self._rank * len(samples) :]
        for sample, advantage in zip(samples, own, strict=False):
            sample.advantage = advantage

    def _counted(self, samples: list[Sample]) -> tuple[int, float]:
        """Return the tokens and the share of samples, of all processes, that count in the losses' means; set
        `group_tokens` of each sample, the mean over its group."""
        size, tokens = self._group, 0
        dead = set(self._groups_without_signal(samples)) if self._args.filter_zero_advantages else set[int]()
        for group, start in enumerate(range(0, len(samples), size)):
            every = [each for s in samples[start : start + size] for each in (s, *s.forks)]
            seen = sum(map(_seen, every))
            tokens += 0 if group in dead else seen
            for sample in every:
                sample.group_tokens = seen / len(every)
        total = sum(self._of_ranks(tokens))
        if not self._args.filter_zero_advantages:
            return total, 1.0
        alive = self._of_ranks(len(samples) - len(dead) * size)
        return total, sum(alive) / len(samples) / len(alive) or 1.0  # where none is alive, every loss is 0

    def _with_forks(self, samples: list[Sample]) -> tuple[list[Sample], float]:
        """Return samples with their forks beside them, padded to a multiple of `steps_per_generation`, and
        the share that is not padding."""
        found = []
        for sample in samples:
            forks, sample.forks = sample.forks, []
            for fork in forks:
                fork.rewards, fork.advantage, fork.group = sample.rewards, sample.advantage, sample.group
                if fork.prompt != sample.prompt:
                    fork.group = self._group_apart()
            found += [sample, *forks]
        count, parts = len(found), self._args.steps_per_generation or 1
        pad = self.sampler.pad_token_id
        for _ in range(-count % parts):
            found.append(Sample([pad], [pad], [0.0], [0.0], self._group_apart(), masked=True))
        return found, count / len(found)

    def _group_apart(self) -> int:
        """Return a new number for a group of one sample, negative as no row's is."""
        self._apart -= 1
        return self._apart

    def _settled(self, rewards_BF: torch.Tensor) -> list[bool | None]:
        """Return for each group whether its samples were all right or all wrong; without a judge, whether it
        has no signal."""
        judge = find_judge(self._scorer.names)
        if judge is None:
            return self._signal.zero_advantage(rewards_BF).tolist()
        return settled_groups(rewards_BF[:, judge], self._group)

    def _warn_of_judge(self, rewards_BF: torch.Tensor) -> None:
        """Warn once if the reward that is taken for a verdict may not be one."""
        judge, text = self._signal.judge, ""
        if self._warned or judge is None:
            return
        name = self._scorer.names[judge]
        if name != JUDGE and self._signal.overruled(rewards_BF):
            text = (
                "Rewards differ in this step but no group has both right samples (%s above 0) and wrong "
                "ones, so nothing is learned from it; if that reward is not a verdict, set signal: reward."
            )
        elif in_parts(rewards_BF[:, judge]):
            text = (
                "The reward %s has several values above 0, each of which counts as right; if it gives "
                "partial credit, add a reward function named accuracy that is 0 or 1, or set signal: reward."
            )
        self._warned = bool(text)
        if text and is_first_process():
            logger.warning(text, name)

    # Logging

    def _logged(
        self, drawn: Drawn, parts: Sequence[Part], size: int, mode: str
    ) -> tuple[list[Record], float]:
        """Log metrics of samples; return the records of all processes and the sampler's mean entropy.

        Every process must call this.

        Args:
            drawn: The samples.
            parts: The same samples with the batches in which they were scored.
            size: Samples of a group.
            mode: ``train`` or ``eval``.
        """
        scored = [batch for _, batch in parts]
        self._log_lengths(drawn, mode)
        own_BF = torch.tensor([sample.rewards for sample in drawn.samples], device=self._accelerator.device)
        rewards_BF = self._accelerator.gather(own_BF).cpu()
        self._log.add(mode, self._signal.statistics(rewards_BF, size, self._scorer.names))
        self._log.add(mode, self._scorer.metrics(scored))
        logged = self._count(drawn)
        self._log.add(mode, logged)
        if mode == "train" and self._args.reward_errors == "stop":
            stop_if_all_failed(tallied(scored), self._accelerator)
        records = gather_object([record for part in parts for record in self._records(*part)])
        return records, logged["rollout/entropy"]

    def _log_lengths(self, drawn: Drawn, mode: str) -> None:
        """Log lengths and tool calls of the completions of all processes; in training also count tokens."""
        own = [[sample.drawn_tokens, sample.truncated] for sample in drawn.samples]
        device = self._accelerator.device
        lengths_B, cut_B = (
            self._accelerator.gather(torch.tensor(own, dtype=torch.double, device=device)).cpu().unbind(1)
        )
        if mode == "train":
            self._count_tokens(drawn.samples)
        else:
            self._log.metrics[mode]["num_tokens"] = [self._state().num_input_tokens_seen]
        whole_B = lengths_B[cut_B == 0]
        found = {"clipped_ratio": cut_B.mean()}
        for kind, values in (("", lengths_B), ("terminated_", whole_B if len(whole_B) else torch.zeros(1))):
            found |= {f"mean_{kind}length": values.mean(), f"min_{kind}length": values.min()}
            found[f"max_{kind}length"] = values.max()
        self._log.add(mode, {f"completions/{name}": value.item() for name, value in found.items()})
        if self.sampler.takes_turns:
            calls = sum(self._of_ranks(sum(t.calls for t in drawn.trajectories)))
            failures = sum(self._of_ranks(sum(t.failures for t in drawn.trajectories)))
            self._log.add(mode, {"tools/call_frequency": calls / len(lengths_B)})
            self._log.add(mode, {"tools/failure_frequency": failures / calls if calls else 0.0})

    def _count_tokens(self, samples: Sequence[Sample]) -> None:
        """Add the prompt and drawn tokens of all processes to the trainer's count; every process must call
        this."""
        own = sum(len(sample.prompt) + sample.drawn_tokens for sample in samples)
        self._state().num_input_tokens_seen += sum(self._of_ranks(own))

    def _count(self, drawn: Drawn) -> dict[str, float]:
        """Return the engine's metrics of a rollout, of all processes; every process must call this.

        Raises:
            QeRLError: All samples of all processes ended because logits were not finite.
        """
        result, found = drawn.result, drawn.trajectories
        forks = [fork for trajectory in found for fork in trajectory.forks]
        completions = result.completions if result is not None else []
        entropies = [c.entropies for c in completions] + [fork.entropies for fork in forks]
        own = (
            sum(map(sum, entropies)),
            sum(map(len, entropies)) - sum(t.written.count(0) for t in (*found, *forks)),
            sum(c.finish_reason == "error" for c in completions),
            result.generated_tokens if result is not None else 0,
            len(completions),
            sum(t.turns for t in (*found, *forks)),
            len(forks),
            *(sum(t.thoughts == by for t in found) for by in ("model", "budget")),
            result.seconds if result is not None else 0.0,
        )
        ranks = self._accelerator.gather(
            torch.tensor([own], dtype=torch.double, device=self._accelerator.device)
        )
        entropy, tokens, errors, generated, samples, turns, forked, *closed, _ = ranks.sum(dim=0).tolist()
        if 0 < samples == errors:
            raise QeRLError(
                f"The logits of all {samples:.0f} samples of a rollout were not finite: the weights hold NaN "
                "or, with noise or in this dtype, overflow; lower noise_sigma_start or set dtype: bfloat16."
            )
        slowest = float(ranks[:, -1].max())
        more: dict[str, float] = {}
        if self.sampler.takes_turns:
            more["rollout/turns"] = turns / samples
        if self.sampler.led_by_agents:
            more["rollout/forks"] = forked / samples
        if self._args.thinking_budget is not None:
            by_model, by_budget = (count / samples for count in closed)
            more |= {"thinking/closed_by_model": by_model, "thinking/closed_by_budget": by_budget}
        return more | {
            "rollout/entropy": entropy / tokens if tokens else float("nan"),
            "rollout/errors": errors,
            "rollout/tokens_per_second": generated / slowest if slowest else float("nan"),
        }

    # Processes

    @property
    def _rank(self) -> int:
        return self._accelerator.process_index

    def _on_device(self, number: float) -> torch.Tensor:
        return torch.tensor([number], device=self._accelerator.device)

    def _of_ranks(self, number: int) -> list[int]:
        return self._accelerator.gather(self._on_device(number)).tolist()


def _seen(sample: Sample) -> int:
    """Return the number of tokens that the loss sees."""
    return sum(sample.loss_mask)
