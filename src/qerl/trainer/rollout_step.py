"""A rollout of a trainer: rows of the data in, scored samples with advantages out.

1. **Prompts.** The order of the data proposes rows, each as often as it is sampled; a curriculum may replace
   some.
2. **Samples.** The engine draws completions under this step's noise; with tools, environments or a budget of
   thinking, it draws conversations (`qerl.agents`). `rollout_func` samples in its place. Seeds are keyed by
   step, so a resumed run draws what it would have; an evaluation's by its problems, so that it draws the same
   whenever it comes. Agents that lead conversations themselves may divide theirs into several: each
   trajectory is one sample with forks up to here, compared by its one reward, and several samples of one
   advantage in the update.
3. **Rewards** (`qerl.trainer.rewards`), and with dynamic sampling further rollouts in the place of groups
   that teach nothing.
4. **Advantages** (`qerl.trainer.advantages`), and log-probabilities under the old and the reference policy
   where the loss reads them. When every rollout is used for one optimizer step, the policy has not moved
   since it sampled, and the update's own values are the old ones: no forward pass is made for them.

A rollout holds whole groups, the samples of a group side by side. What is logged of a step is that of its
first rollout, an unbiased sample of the data.

Legend: B samples of this process, F reward functions.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase, TrainerState
from trl.chat_template_utils import parse_response

from qerl.agents.conversations import Conversations
from qerl.agents.trajectory import Trajectory
from qerl.errors import QeRLError
from qerl.noise.draw import AdaptiveNoise
from qerl.ranks import is_first_process
from qerl.rollout.engine import Completion, NormOffsets, RolloutEngine, RolloutResult, SamplingParams
from qerl.seeding import ProblemSeeds, derive_seed, problem_key
from qerl.settings.config import QeRLConfig
from qerl.trainer.advantages import JUDGE, Signal, find_judge, in_parts
from qerl.trainer.curriculum import settled_groups
from qerl.trainer.prompt_choice import PromptChoice
from qerl.trainer.rewards import WRITTEN_COLUMN, Scorer, stop_if_all_failed
from qerl.trainer.step_log import HIDDEN, Record, StepLog
from qerl.trainer.teacher import check_teacher_room, teacher_prompt
from qerl.update.packed_row import Sample

logger = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass
class Drawn:
    """What the engine, or `rollout_func`, made of some rows.

    Attributes:
        rows: Of the data set, one for each sample.
        prompts: As reward functions get them, with what environments have shown.
        samples: Without rewards.
        completions: As reward functions get them: texts, or messages.
        trajectories: Where samples are conversations.
        environments: Of the samples, if there are any.
        result: What the engine counted; None where it was not asked.
    """

    rows: list[Row]
    prompts: list[Any]
    samples: list[Sample]
    completions: list[Any]
    trajectories: list[Trajectory] = field(default_factory=list)
    environments: list[Any] | None = None
    result: RolloutResult | None = None


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
        engine: Samples from the policy.
        tokenizer: Of the policy.
        renderer: Renders chat messages: the tokenizer, or a processor that has it.
        eos_token_ids: Tokens that end a completion.
        embeddings: Rows of the policy's embedding.
        scorer: Calls the reward functions.
        signal: Makes advantages of rewards.
        prompts: Chooses rows; None takes them as they come.
        conversations: Of samples that are no single completion; None where all are.
        noise: Gives Z for each norm; None without noise.
        stops: What ends or interrupts turns beside stop tokens.
        rollout_func: Samples in the engine's place: its output, for prompts; None for the engine.
        log: Takes what is logged.
        accelerator: Of the run.
        state: Gives transformers' state of the trainer.
        teacher_positions: Of a teacher; None where there is none, or nothing limits it.

    Attributes:
        had_signal: Whether any sample of any rollout had an advantage.
        without_signal: Rollouts in which none had.
    """

    def __init__(
        self,
        args: QeRLConfig,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Any,
        eos_token_ids: Sequence[int],
        embeddings: int,
        scorer: Scorer,
        signal: Signal,
        prompts: PromptChoice | None,
        conversations: Conversations | None,
        noise: Callable[[], AdaptiveNoise] | None,
        stops: tuple[Any, ...],
        rollout_func: Callable[[list[Any]], Mapping[str, Any]] | None,
        log: StepLog,
        accelerator: Accelerator,
        state: Callable[[], TrainerState],
        teacher_positions: int | None = None,
    ) -> None:
        self._teacher_positions = teacher_positions
        self._args, self._engine, self._tokenizer, self._renderer = args, engine, tokenizer, renderer
        self._eos, self._embeddings = eos_token_ids, embeddings
        self._scorer, self._signal, self._prompts = scorer, signal, prompts
        self._conversations, self._noise, self._stops = conversations, noise, stops
        self._rollout_func, self._log, self._accelerator, self._state = rollout_func, log, accelerator, state
        self._talks = conversations is not None and (
            args.thinking_budget is not None or conversations.take_turns
        )
        self._group = args.num_generations or 1
        self._ends = {*eos_token_ids, tokenizer.pad_token_id}  # TRL counts the pad token as a stop token, too
        self._problem_seeds = ProblemSeeds(args.seed)
        self._warned = False
        self.had_signal, self.without_signal = False, 0
        self._calls: dict[str, tuple[int, int]] = {}  # by mode: step and number of its next call
        self._apart = 0  # the last group of a sample that shares its prompt with no other

    # A rollout

    def train(self, rows: list[Row], first_group: int) -> Rollout:
        """The samples of a rollout of this process.

        Args:
            rows: Proposed by the order of the data, each as often as it is sampled, side by side.
            first_group: Number of its first group; no two rollouts of an optimizer step have groups in
                common.

        Raises:
            QeRLError: The rows are not whole groups, a reward function fails on all samples, or an
                environment or the engine cannot go on.
        """
        if self._prompts is not None:
            rows, chosen = self._prompts.chosen(rows, self._state().global_step)
            self._log.add("train", chosen)
        samples, records, entropy = self._sampled(rows)
        if self._args.reward_errors == "stop":
            stop_if_all_failed(self._scorer.functions, self._accelerator)
        self._replace_groups(samples, records)
        self._advantages(samples, records)
        self._log.keep(records)
        size = self._group
        for at, sample in enumerate(samples):
            read = sample.prompt, sample.teacher_prompt  # an environment, or rollout_func, may show others
            new = at % size == 0 or read != (samples[at - 1].prompt, samples[at - 1].teacher_prompt)
            sample.group = first_group + at if new else samples[at - 1].group
        self._log.metrics["train"]["num_tokens"] = [self._state().num_input_tokens_seen]
        tokens, counted = self._counted(samples)
        if any(sample.forks for sample in samples):
            samples, share = self._with_forks(samples)
            counted *= share
        return Rollout(samples, tokens, counted, entropy)

    def evaluate(self, rows: list[Row]) -> None:
        """Sample and score rows of an evaluation, of which nothing but what is logged is kept."""
        samples, rank = self._args.num_generations_eval or self._group, self._rank
        own = [problem_key(row) for row in rows[::samples]]
        every: list[list[str]] = gather_object([own])
        start = sum(map(len, every[:rank])) * samples
        seeds = self._problem_seeds.of([problem for part in every for problem in part], samples)
        _, records, _ = self._sampled(rows, "eval", seeds[start : start + len(rows)])
        self._log.keep(records)

    def begin_evaluation(self) -> None:
        """Meet the problems of an evaluation anew."""
        self._problem_seeds = ProblemSeeds(self._args.seed)

    def begin_training(self, noise: Callable[[], AdaptiveNoise] | None, prompts: PromptChoice | None) -> None:
        """Begin a training: a step that was cut off before samples as it did, and nothing has been
        learned."""
        self._noise, self._prompts, self._calls = noise, prompts, {}
        self._scorer.forget_logged()  # of a step that was cut off
        self.had_signal, self.without_signal = False, 0

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what the choice of prompts has learned."""
        if self._prompts is not None:
            self._prompts.save(folder)

    def load(self, folder: Path) -> None:
        """Go on with what `save` has written."""
        if self._prompts is not None:
            self._prompts.load(folder)

    def _sampled(
        self, rows: list[Row], mode: str = "train", seeds: Sequence[int] | None = None
    ) -> tuple[list[Sample], list[Record], float]:
        """Samples with their rewards, their records of all processes, and the sampler's mean entropy."""
        size = self._group
        if mode == "eval":
            size = self._args.num_generations_eval or size
        if self._scorer.early:
            self._scorer.expect(rows)
        try:
            drawn = self._draw(rows, size, mode, seeds)
            self._log_lengths(drawn, mode)
            if mode == "train" and self._args.teacher_prompt is not None:
                self._give_teacher_prompts(drawn, self._args.teacher_prompt)
            if mode == "train" and self._teacher_positions is not None:
                self._check_teacher_room(drawn, self._teacher_positions)
            if self._args.mask_truncated_completions:
                for sample in (each for one in drawn.samples for each in (one, *one.forks)):
                    sample.masked |= sample.truncated
            records, rewards_BF = self._score(drawn, size, mode)
        finally:
            if self._scorer.early:
                self._scorer.expect([])
        logged = self._count(drawn)
        self._log.add(mode, logged)
        if mode == "train" and self._prompts is not None and self._prompts.learns:
            self._prompts.observe(rows, self._settled(rewards_BF))
        return drawn.samples, records, logged["rollout/entropy"]

    # Samples

    def _draw(self, rows: list[Row], size: int, mode: str, seeds: Sequence[int] | None) -> Drawn:
        if self._conversations is not None and self._conversations.has_others:
            prompts: list[Any] = self._conversations.open(rows)
            environments = self._conversations.environments
        else:
            prompts, environments = [row["prompt"] for row in rows], None
        if self._rollout_func is not None:
            return self._drawn_by_others(rows, prompts)
        if self._conversations is not None and self._conversations.endpoints:
            return self._drawn_by_agents(rows, prompts, mode, seeds)
        if environments is not None or self._talks:
            ids = self._rendered(prompts)
        else:
            _check_groups(prompts, size)
            ids = [each for each in self._rendered(prompts[::size]) for _ in range(size)]
        once = ids[::size]
        differ = ids != [each for each in once for _ in range(size)]
        if differ and environments is None:
            _check_groups(ids, size)
        drawn = Drawn(rows, prompts, [], [], environments=environments)
        drawn.result = self.sample(ids if differ else once, 1 if differ else size, mode, seeds, drawn)
        found = drawn.result.completions
        written: list[Any] = [t.written for t in drawn.trajectories] or [None] * len(found)
        drawn.samples = [
            Sample(
                *(prompt, c.token_ids, c.logprobs, c.entropies),
                written=mask,
                truncated=self._is_cut_off(c),
                choices=c.choices,
            )
            for prompt, c, mask in zip(ids, found, written, strict=True)
        ]
        if self._talks and self._conversations is not None and self._conversations.has_others:
            drawn.completions = [trajectory.messages for trajectory in drawn.trajectories]
        else:
            drawn.completions = self._said(prompts, drawn.samples)
        return drawn

    def sample(
        self,
        prompt_ids: list[list[int]],
        samples: int,
        mode: str = "train",
        seeds: Sequence[int] | None = None,
        drawn: Drawn | None = None,
    ) -> RolloutResult:
        """Sample completions of the present policy, with this step's noise while training.

        Args:
            prompt_ids: Token ids of each prompt.
            samples: Completions per prompt.
            mode: ``train`` or ``eval``.
            seeds: By which each is drawn; None draws them by the step.
            drawn: Gets the trajectories, and is scored meanwhile; None for samples that nobody scores.
        """
        check_vocabulary(prompt_ids, self._embeddings)
        params, offsets = self._sampling(mode)
        if self._talks and self._conversations is not None:
            result, trajectories = self._conversed(params, offsets, prompt_ids, samples, seeds)
            if drawn is not None:
                drawn.trajectories = trajectories
        elif not self._scorer.early or drawn is None:
            result = self._engine.generate(prompt_ids, samples, params, offsets, seeds)
        else:
            result = self._engine.generate(
                prompt_ids, samples, params, offsets, seeds, self._begin_rewards(drawn, prompt_ids, samples)
            )
        self._sampling_ended(result)
        return result

    def _sampling(self, mode: str) -> tuple[SamplingParams, NormOffsets]:
        """Parameters and noise of the next call of the engine."""
        step = self._state().global_step
        before, call = self._calls.get(mode, (step, 0))
        call = call if before == step else 0
        self._calls[mode] = (step, call + 1)
        offsets: NormOffsets = {}
        if mode == "train" and self._noise is not None:
            noise = self._noise()
            offsets = noise.offsets(step)
            self._log.add(mode, {"noise/sigma": noise.schedule.sigma(step)})
            self._log.add(mode, {"noise/norms": float(len(offsets))})
        args = self._args
        params = SamplingParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            stop_token_ids=tuple(self._eos),
            seed=derive_seed("rollout", args.seed, mode, step, call, self._rank),
            stops=self._stops,
        )
        return params, offsets

    def _sampling_ended(self, result: RolloutResult) -> None:
        self._log.read_memory()
        self._engine.release()
        self._log.add_seconds("rollout", result.seconds)

    def _begin_rewards(
        self, drawn: Drawn, prompt_ids: list[list[int]], samples: int
    ) -> Callable[[int, Completion], None]:
        """Begins the rewards of samples as the engine finishes them."""

        def ended(place: int, completion: Completion) -> None:
            ids = completion.token_ids
            sample = Sample(prompt_ids[place // samples], ids, [], [])
            (said,) = self._said([drawn.prompts[place]], [sample])
            self._scorer.begin(place, said, ids)

        return ended

    def _conversed(
        self,
        params: SamplingParams,
        offsets: NormOffsets,
        prompt_ids: list[list[int]],
        samples: int,
        seeds: Sequence[int] | None,
    ) -> tuple[RolloutResult, list[Trajectory]]:
        assert self._conversations is not None
        start = time.perf_counter()
        found = self._conversations.sample(self._engine, params, offsets, prompt_ids, samples, seeds)
        for trajectory in found:
            if not trajectory.token_ids:  # its prompt has left no room; a token that nobody counts stands in
                trajectory.hear([self._tokenizer.pad_token_id], [{"role": "assistant", "content": ""}])
        return _result_of(found, sum(map(len, prompt_ids)), time.perf_counter() - start), found

    def _drawn_by_agents(
        self, rows: list[Row], prompts: list[Any], mode: str, seeds: Sequence[int] | None
    ) -> Drawn:
        """What agents of their own make of some rows; nothing is learned from one that failed."""
        assert self._conversations is not None
        params, offsets = self._sampling(mode)
        if seeds is None:
            seeds = [derive_seed("trajectory", params.seed, place) for place in range(len(rows))]
        start = time.perf_counter()
        found = self._conversations.play(self._engine, params, offsets, seeds, fixed=mode == "train")
        prompts_read = sum(len(t.prompt_ids) for t in found)
        result = _result_of(found, prompts_read, time.perf_counter() - start)
        self._sampling_ended(result)
        samples = []
        environments = self._conversations.environments or []
        for trajectory, environment in zip(found, environments, strict=True):
            sample, *forks = (
                Sample(
                    *(list(t.prompt_ids), t.token_ids, t.logprobs, t.entropies),
                    written=t.written,
                    truncated=t.end == "length",
                    masked=environment.error is not None,
                    choices=t.choices,
                )
                for t in (trajectory, *trajectory.forks)
            )
            sample.forks = forks
            samples.append(sample)
        said = [trajectory.messages for trajectory in found]
        return Drawn(rows, prompts, samples, said, found, environments, result)

    def _drawn_by_others(self, rows: list[Row], prompts: list[Any]) -> Drawn:
        """What `rollout_func` gives, with its further columns among those of the rows.

        Raises:
            QeRLError: A field is missing, or not of one value per prompt or per token.
        """
        assert self._rollout_func is not None
        output = dict(self._rollout_func(copy.deepcopy(prompts)))
        samples = _samples_of(output, len(rows))
        for sample in samples:
            sample.truncated = self._is_cut_off(Completion(sample.tokens, [], [], "stop"))
        rows = [
            row | {name: values[i] if isinstance(values, list) else values for name, values in output.items()}
            for i, row in enumerate(rows)
        ]
        return Drawn(rows, prompts, samples, self._said(prompts, samples))

    def _rendered(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Token ids of prompts, texts or messages."""
        if self._conversations is not None and self._conversations.has_others:
            return self._conversations.prompt_ids(prompts)
        if isinstance(prompts[0], str):
            return self._tokenizer(text=list(prompts))["input_ids"]
        kwargs = self._args.chat_template_kwargs or {}
        rendered = self._renderer.apply_chat_template(
            list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
        )
        return rendered["input_ids"]

    def _give_teacher_prompts(self, drawn: Drawn, template: str) -> None:
        """Give samples the prompts that a teacher reads."""
        pairs = zip(drawn.prompts, drawn.rows, strict=True)
        found = self._rendered([teacher_prompt(template, prompt, row) for prompt, row in pairs])
        for sample, ids in zip(drawn.samples, found, strict=True):
            sample.teacher_prompt = ids

    def _check_teacher_room(self, drawn: Drawn, positions: int) -> None:
        """Refuse prompts that leave a teacher no room, whether or not these completions need it: a later one
        would. What is sampled in turns, or by others, has a length of its own.
        """
        by_turns = self._talks or drawn.result is None
        most = self._args.max_completion_length
        for sample in drawn.samples:
            read = len(sample.teacher_prompt or sample.prompt)
            check_teacher_room(read + (len(sample.tokens) if by_turns else most), positions)

    def _said(self, prompts: Sequence[Any], samples: Sequence[Sample]) -> list[Any]:
        """Completions as reward functions get them: texts, or messages where prompts are messages."""
        if not isinstance(prompts[0], str) and _parses(self._tokenizer):
            return [[parse_response(self._tokenizer, s.tokens, prefix=s.prompt, tools=[])] for s in samples]
        ids = [sample.tokens for sample in samples]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        if isinstance(prompts[0], str):
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]

    def _is_cut_off(self, completion: Completion) -> bool:
        """Whether a completion ended without a stop token, and without a text that ends it."""
        if self._args.stop_strings and completion.finish_reason == "stop":
            return False
        return completion.token_ids[-1] not in self._ends

    # Rewards and advantages

    def _score(self, drawn: Drawn, size: int, mode: str) -> tuple[list[Record], torch.Tensor]:
        """Give samples their rewards; records and rewards [B, F] of all processes.

        Where others wrote in the completions, rewards are told how many tokens the policy wrote.
        """
        rows = drawn.rows
        if any(sample.written is not None for sample in drawn.samples):
            counts = [sample.drawn_tokens for sample in drawn.samples]
            rows = [row | {WRITTEN_COLUMN: count} for row, count in zip(rows, counts, strict=True)]
        if self._scorer.early:
            self._log.add_seconds(HIDDEN, self._scorer.hidden_seconds())
        with self._log.part("reward"):
            ids = [sample.tokens for sample in drawn.samples]
            own_BF = self._scorer.score(rows, drawn.prompts, drawn.completions, ids, drawn.environments)
        for sample, rewards in zip(drawn.samples, own_BF.tolist(), strict=True):
            sample.rewards = rewards
        rewards_BF = self._accelerator.gather(own_BF).cpu()
        self._log.add(mode, self._signal.statistics(rewards_BF, size, self._scorer.names))
        extra, means = self._scorer.take_logged(len(rows))
        self._log.add(mode, means)
        prompts, completions = gather_object(drawn.prompts), gather_object(drawn.completions)
        records = [
            Record(prompt, said, dict(zip(self._scorer.names, rewards, strict=True)))
            for prompt, said, rewards in zip(prompts, completions, rewards_BF.tolist(), strict=True)
        ]
        for name, values in extra.items():
            for record, value in zip(records, values, strict=False):
                record.extra[name] = value
        return records, rewards_BF

    def _learned_from(self, samples: Sequence[Sample]) -> torch.Tensor:
        """The rewards [B, F] by which samples are compared: none of those of which the loss sees nothing."""
        unseen = [not any(map(_seen, (sample, *sample.forks))) for sample in samples]
        rewards_BF = torch.tensor([sample.rewards for sample in samples])
        return rewards_BF.masked_fill(torch.tensor(unseen)[:, None], torch.nan)

    def _replace_groups(self, samples: list[Sample], records: list[Record]) -> None:
        """Dynamic sampling: groups without signal give their places to groups of further rollouts that have
        one.

        Every process draws as many groups, because rewards are gathered over processes.
        """
        size, rank = self._group, self._rank
        for extra in range(self._args.dynamic_sampling_rounds or 0):
            replaced = self._groups_without_signal(samples)
            counts = self._of_ranks(len(replaced))
            if extra == 0:
                share = sum(counts) / len(counts) * size / len(samples)
                self._log.add("train", {"dynamic_sampling/groups_without_signal": share})
            if not any(counts):
                return
            assert self._prompts is not None, "it draws the fresh prompts"
            draws = max(counts)
            with self._log.apart():
                fresh, fresh_records, _ = self._sampled(self._prompts.others(draws))
            without = set(self._groups_without_signal(fresh))
            usable = (group for group in range(draws) if group not in without)
            pairs = list(zip(replaced, usable, strict=False))
            count = float(sum(self._of_ranks(len(pairs))))
            self._log.add("train", {"dynamic_sampling/replaced_groups": count})
            moved = []
            for target, source in pairs:
                for i in range(size):
                    to, of = target * size + i, source * size + i
                    samples[to] = fresh[of]
                    moved.append((to + rank * len(samples), of + rank * draws * size))
            for to, of in gather_object(moved):
                records[to] = fresh_records[of]

    def _groups_without_signal(self, samples: list[Sample]) -> list[int]:
        return self._signal.zero_advantage(self._learned_from(samples)).nonzero().flatten().tolist()

    def _advantages(self, samples: list[Sample], records: list[Record]) -> None:
        """Give samples their advantages, once no group of them will be replaced."""
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
        """Tokens and share of samples, of all processes, that count in the losses' means; gives samples the
        mean length of their group."""
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
        """Samples with their forks beside them, filled up to as many as microbatches can share evenly, and
        the share of them that are samples and no filling."""
        found = []
        for sample in samples:
            forks, sample.forks = sample.forks, []
            for fork in forks:
                fork.rewards, fork.advantage, fork.group = sample.rewards, sample.advantage, sample.group
                if fork.prompt != sample.prompt:
                    fork.group = self._group_apart()
            found += [sample, *forks]
        count, parts = len(found), self._args.steps_per_generation or 1
        pad = self._tokenizer.pad_token_id
        for _ in range(-count % parts):
            found.append(Sample([pad], [pad], [0.0], [0.0], self._group_apart(), masked=True))
        return found, count / len(found)

    def _group_apart(self) -> int:
        """The number of a group of one sample; no row has a negative one."""
        self._apart -= 1
        return self._apart

    def _settled(self, rewards_BF: torch.Tensor) -> list[bool | None]:
        """Of the groups of all processes, whether samples were all right or all wrong; without a judge,
        whether they were all rewarded alike."""
        judge = find_judge(self._scorer.names)
        if judge is None:
            return self._signal.zero_advantage(rewards_BF).tolist()
        return settled_groups(rewards_BF[:, judge], self._group)

    def _warn_of_judge(self, rewards_BF: torch.Tensor) -> None:
        """Say once that the reward that is taken for a verdict may be none."""
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
                "The reward %s has several values above 0, each of which counts as right; if it gives credit "
                "for parts of an answer, let a reward called accuracy be 0 or 1 beside it, or set signal: "
                "reward."
            )
        self._warned = bool(text)
        if text and is_first_process():
            logger.warning(text, name)

    # What is logged

    def _log_lengths(self, drawn: Drawn, mode: str) -> None:
        """Log lengths of completions, those of all processes, and count tokens."""
        own = [[s.drawn_tokens, s.truncated, len(s.prompt)] for s in drawn.samples]
        device = self._accelerator.device
        lengths_B, cut_B, prompts_B = (
            self._accelerator.gather(torch.tensor(own, dtype=torch.double, device=device)).cpu().unbind(1)
        )
        state = self._state()
        if mode == "train":
            state.num_input_tokens_seen += int(prompts_B.sum() + lengths_B.sum())
        else:
            self._log.metrics[mode]["num_tokens"] = [state.num_input_tokens_seen]
        whole_B = lengths_B[cut_B == 0]
        found = {"clipped_ratio": cut_B.mean()}
        for kind, values in (("", lengths_B), ("terminated_", whole_B if len(whole_B) else torch.zeros(1))):
            found |= {f"mean_{kind}length": values.mean(), f"min_{kind}length": values.min()}
            found[f"max_{kind}length"] = values.max()
        self._log.add(mode, {f"completions/{name}": value.item() for name, value in found.items()})
        if self._talks and self._conversations is not None and self._conversations.take_turns:
            calls = sum(self._of_ranks(sum(t.calls for t in drawn.trajectories)))
            failures = sum(self._of_ranks(sum(t.failures for t in drawn.trajectories)))
            self._log.add(mode, {"tools/call_frequency": calls / len(lengths_B)})
            self._log.add(mode, {"tools/failure_frequency": failures / calls if calls else 0.0})

    def _count(self, drawn: Drawn) -> dict[str, float]:
        """What the engine reports of a rollout, of all processes, each of which must call this.

        Raises:
            QeRLError: No sample of any process got through to its end, because logits were not finite.
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
        if self._conversations is not None and self._conversations.take_turns:
            more["rollout/turns"] = turns / samples
        if self._conversations is not None and self._conversations.endpoints:
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

    def _of_ranks(self, number: int) -> list[int]:
        own = torch.tensor([number], device=self._accelerator.device)
        return self._accelerator.gather(own).tolist()


def check_vocabulary(prompts: Sequence[Sequence[int]], embeddings: int) -> None:
    """Refuse token ids for which the model has no embedding; on a GPU to read one ends the process.

    Args:
        prompts: Token ids of each prompt.
        embeddings: Rows of the model's embedding.

    Raises:
        QeRLError: A prompt has such an id.
    """
    largest = max((max(prompt, default=0) for prompt in prompts), default=0)
    if largest >= embeddings:
        raise QeRLError(
            f"A prompt has the token id {largest} and the model embeds {embeddings} tokens; give the "
            "tokenizer that belongs to the model, or resize the model's embeddings to the tokenizer's length."
        )


def _result_of(found: Sequence[Trajectory], prompt_tokens: int, seconds: float) -> RolloutResult:
    """What an engine would count of trajectories."""
    completions = [
        Completion(t.token_ids, t.logprobs, t.entropies, t.finish_reason, t.choices) for t in found
    ]
    tokens = sum(sum(each.written) for t in found for each in (t, *t.forks))
    return RolloutResult(completions, prompt_tokens, tokens, seconds)


def _seen(sample: Sample) -> int:
    """Tokens that the loss sees."""
    return sum(sample.loss_mask)


def _samples_of(output: dict[str, Any], count: int) -> list[Sample]:
    """Take the samples out of what a `rollout_func` returned, which leaves its further columns."""
    missing = sorted({"prompt_ids", "completion_ids", "logprobs"} - output.keys())
    if missing:
        raise QeRLError(f"rollout_func returned no {', '.join(missing)}; return a mapping that has them.")
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
    prompts, ids, logprobs, masks = (_rows_of(output.pop(name, None)) for name in names)
    logprobs = logprobs or [[None] * len(each) for each in ids]
    masks = masks or [None] * len(ids)
    filled = sum(map(bool, ids))
    if filled != count or len(ids) != count:
        raise QeRLError(
            f"rollout_func returned {filled} completions with tokens for {count} prompts; return one for "
            "each."
        )
    for name, rows in zip(names, (prompts, ids, logprobs, masks), strict=True):
        if len(rows) != count:
            raise QeRLError(
                f"{name} of rollout_func has {len(rows)} rows for {count} prompts; return one for each."
            )
        for at, (row, tokens) in enumerate(zip(rows, ids, strict=True)):
            if name in ("logprobs", "env_mask") and row is not None and len(row) != len(tokens):
                raise QeRLError(
                    f"{name} of rollout_func has {len(row)} values in row {at}, whose completion has "
                    f"{len(tokens)} tokens; return one for each token."
                )
            if any(isinstance(value, list | tuple) for value in row or ()):
                raise QeRLError(f"{name} of rollout_func is nested in row {at}; return a number per token.")
    for name, column in output.items():
        if isinstance(column, list) and len(column) != count:
            raise QeRLError(
                f"{name} of rollout_func has {len(column)} values for {count} prompts; return one for each."
            )
    return [
        Sample(p, c, [math.nan if x is None else x for x in lp], [math.nan] * len(c), written=mask)
        for p, c, lp, mask in zip(prompts, ids, logprobs, masks, strict=True)
    ]


def _rows_of(rows: Any) -> list[Any]:
    """Rows of numbers, lists or tensors, as lists; none where there are no rows."""
    if rows is None:
        return []
    return [row.tolist() if hasattr(row, "tolist") else row if row is None else [*row] for row in rows]


def _check_groups(prompts: Sequence[Any], size: int) -> None:
    """Refuse rows that are not each prompt as often as it is sampled, side by side."""
    if any(prompts[at] != prompts[at - at % size] for at in range(len(prompts))):
        raise QeRLError(
            f"The samples of a rollout are not {size} of each prompt, side by side; sample the data with the "
            "trainer's own sampler."
        )


def _parses(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer says how to find thoughts and calls in what its model writes."""
    names = ("response_template", "response_schema")
    return any(getattr(tokenizer, name, None) is not None for name in names)
