"""Samples of a trainer's rollouts: rows of the data in, the policy's completions out.

A call draws all samples of some rows (`Sampler.draw`), or stays open, and groups of rows enter while others
are decoded (`Sampler.open_call`). In both the engine draws completions under this step's noise, or, with
tools, environments or a thinking budget, conversations (`qerl.agents`). With `rollout_func` that function
samples in the engine's place; it returns whole lists, so groups enter an open call list by list. Groups of
agents that lead their conversations themselves enter in the same way: each list of them has a session of its
own, since an agent does not tell which of its requests is its last. The trajectory of such an agent may have
forked into several; its sample has forks then.

Seeds of a call are keyed by the step and the number of the call within it, so a resumed run draws the same
samples. In an open call the seed of a sample is keyed by the number of its group as well, so that it draws
the same whenever the group enters. A call may be entered again in later steps (`Sampler.refilled`): samples
that have not ended then go on under the present policy.
"""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerState
from trl.chat_template_utils import parse_response

from qerl.agents.conversations import Conversations
from qerl.agents.loop import Trajectories
from qerl.agents.trajectory import Trajectory
from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.families.sizes import positions_of
from qerl.noise.draw import AdaptiveNoise
from qerl.rollout.engine import (
    Begun,
    Completion,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    Session,
    check_goes_on,
    check_request,
    takes,
)
from qerl.seeding import derive_seed
from qerl.settings.config import QeRLConfig
from qerl.tasks.together import Asked
from qerl.trainer.step_log import StepLog
from qerl.trainer.teacher import check_teacher_room, teacher_prompt
from qerl.update.packed_row import Sample

Row = dict[str, Any]


@dataclass
class Drawn:
    """Samples of some rows, drawn by the engine or `rollout_func`.

    Attributes:
        rows: Rows of the data set, one for each sample.
        prompts: As reward functions get them, with what environments have shown.
        ids: Token ids of the prompts; empty where the engine was not asked.
        samples: One for each row, with rewards once they are scored.
        completions: As reward functions get them: texts, or messages.
        trajectories: The samples' trajectories where samples are conversations, else empty.
        environments: The samples' environments, if there are any.
        result: The engine's result with its counts; None where the engine was not asked.
        asked: For each sample the reward calls that began as it ended, or None; empty if there are none.
    """

    rows: list[Row]
    prompts: list[Any]
    ids: list[list[int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)
    environments: list[Any] | None = None
    result: RolloutResult | None = None
    asked: list[Asked | None] = field(default_factory=list)

    def groups(self, size: int) -> tuple[list[list[int]], int]:
        """Return the prompts for a request to the engine, and the number of samples of each.

        Environments may have shown each sample a prompt of its own; then each prompt has one sample.
        """
        once = self.ids[::size]
        alike = self.ids == [each for each in once for _ in range(size)]
        return (once, size) if alike else (self.ids, 1)

    def part(self, begin: int, count: int) -> "Drawn":
        """Return `count` of the rows, from `begin` on, with their samples and results."""
        end = begin + count
        of_rows = {
            name: getattr(self, name)[begin:end]
            for name in ("rows", "prompts", "ids", "samples", "completions", "trajectories")
        }
        found = Drawn(**of_rows, environments=self.environments and self.environments[begin:end])
        if self.result is not None:
            found.result = _result_of(self.result.completions[begin:end], found.samples, self.result.seconds)
        return found


def joined(parts: Sequence[Drawn], generated: int, seconds: float) -> Drawn:
    """Return groups of an open call as if they had been drawn in one call."""
    found = Drawn([], [])
    for part in parts:
        for name in ("rows", "prompts", "ids", "samples", "completions", "trajectories"):
            getattr(found, name).extend(getattr(part, name))
    of_engine = [part.result for part in parts if part.result is not None]
    if of_engine:
        completions = [each for result in of_engine for each in result.completions]
        read = sum(result.prompt_tokens for result in of_engine)
        found.result = RolloutResult(completions, read, generated, seconds)
    return found


class Sampler:
    """Draws the samples of a trainer.

    Args:
        args: Settings of the run.
        engine: Samples from the policy.
        tokenizer: The policy's tokenizer.
        renderer: Renders chat messages: the tokenizer, or a processor that has it.
        eos_token_ids: Tokens that end a completion.
        embeddings: Number of rows of the policy's embedding.
        conversations: Leads samples that are more than a single completion; None where all are single.
        noise: Returns Z for each norm; None without noise.
        stops: Conditions beside stop tokens that end or interrupt turns.
        rollout_func: Samples in the engine's place and returns its output for prompts; None for the engine.
        ended: Begins the reward calls of a completion of one turn as it ends, given its row and prompt, the
            completion as reward functions get it, and its tokens; None if no function is called that early.
        log: Receives metrics, seconds and readings of memory.
        rank: Number of this process.
        state: Returns transformers' state of the trainer.
        teacher_positions: Positions of the teacher; None without a teacher, or where nothing limits it.

    Raises:
        QeRLError: `ended` is needed, and the engine's `generate` has no such argument.

    Attributes:
        talks: Whether samples are conversations.
        takes_turns: Whether conversations have turns of tools or environments between the policy's.
        led_by_agents: Whether agents behind an endpoint lead the conversations.
        pad_token_id: The tokenizer's pad token, for places where no token counts.
    """

    def __init__(
        self,
        args: QeRLConfig,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        renderer: Any,
        eos_token_ids: Sequence[int],
        embeddings: int,
        conversations: Conversations | None,
        noise: Callable[[], AdaptiveNoise] | None,
        stops: tuple[Any, ...],
        rollout_func: Callable[[list[Any]], Mapping[str, Any]] | None,
        ended: Callable[[Row, Any, Any, list[int]], Asked] | None,
        log: StepLog,
        rank: int,
        state: Callable[[], TrainerState],
        teacher_positions: int | None = None,
    ) -> None:
        self._teacher_positions = teacher_positions
        self._args, self._engine, self._tokenizer, self._renderer = args, engine, tokenizer, renderer
        self._eos, self._embeddings = eos_token_ids, embeddings
        self._conversations, self._noise, self._stops = conversations, noise, stops
        self._rollout_func, self._ended, self._log = rollout_func, ended, log
        self._rank, self._state = rank, state
        self.talks = conversations is not None and (
            args.thinking_budget is not None or conversations.take_turns
        )
        self.takes_turns = conversations is not None and conversations.take_turns
        self.led_by_agents = conversations is not None and conversations.endpoints
        self.pad_token_id: int = tokenizer.pad_token_id
        self._ends = {*eos_token_ids, tokenizer.pad_token_id}  # TRL counts the pad token as a stop token, too
        self._calls: dict[str, tuple[int, int]] = {}  # by mode: step, and number of the next call in it
        if conversations is not None or rollout_func is not None:
            self._ended = None
        elif ended is not None and not takes(engine.generate, "ended"):
            raise QeRLError(
                "Rewards that wait for something outside of this process start as completions end, and "
                f"`generate` of {type(engine).__name__} lacks the argument `ended` that reports ends; add it "
                "as in RolloutEngine.generate."
            )

    def begin_training(self, noise: Callable[[], AdaptiveNoise] | None) -> None:
        """Reset for a new training, so that a step that was cut off draws the same samples again."""
        self._noise, self._calls = noise, {}

    def draw(self, rows: list[Row], size: int, mode: str, seeds: Sequence[int] | None) -> Drawn:
        """Draw the samples of some rows in one call.

        Args:
            rows: Rows of the data, each repeated per sample, copies side by side.
            size: Samples of a group.
            mode: ``train`` or ``eval``.
            seeds: Seed of each sample; None derives them from the step.
        """
        drawn = self.open(rows, size)
        if self._rollout_func is not None:
            return self._drawn_by_others(drawn)
        if self.led_by_agents:
            params, offsets = self._call(mode)
            if seeds is None:
                seeds = [derive_seed("trajectory", params.seed, place) for place in range(len(rows))]
            result = self._play(drawn, params, offsets, seeds, fixed=mode == "train")
            self._log.add_seconds("rollout", result.seconds)
        else:
            self.take(drawn, self.sample(*drawn.groups(size), mode, seeds, drawn))
        return drawn

    @contextlib.contextmanager
    def open_call(self, rows: list[Row], size: int) -> Iterator["Lists | Sequences"]:
        """Open a block in which groups of some rows are sampled, in this order, once they are started.

        Args:
            rows: Rows of all groups that may be started, each repeated per sample.
            size: Samples of a group.
        """
        if self._rollout_func is not None:
            yield Lists(self, lambda drawn, _: self._drawn_by_others(drawn), rows, size)
            return
        params, offsets = self._call("train")
        if self.led_by_agents:
            yield Lists(self, functools.partial(self._drawn_by_agents, params, offsets), rows, size)
            return
        others = self._conversations is not None and self._conversations.has_others
        known = None if others else self.open(rows, size)  # environments' prompts are not known yet
        longest = max(map(len, known.ids)) if known is not None else None

        def opened(numbers: range) -> Drawn:
            begin, count = numbers.start * size, len(numbers) * size
            if known is not None:
                return known.part(begin, count)
            return self.open(rows[begin : begin + count], size, beside=begin > 0)

        with self._engine.session(params, offsets, growing=True, longest_prompt=longest) as session:
            if self.talks and self._conversations is not None:
                with self._conversations.going_on(session, params) as trajectories:
                    yield Sequences(self, opened, size, params, trajectories)
            else:
                yield Sequences(self, opened, size, params, session)
            self._log.read_memory()
        self._engine.release()

    @contextlib.contextmanager
    def refilled(
        self, call: "Sequences | None", opened: Callable[[range], Drawn], size: int, longest_prompt: int
    ) -> Iterator["Sequences"]:
        """Open a block in which groups are sampled, some of which may not have ended when it is left.

        Args:
            call: The call of an earlier block, whose samples go on under the present policy; None for a new
                one.
            opened: Opens the rows of groups.
            size: Samples of a group.
            longest_prompt: Tokens of the longest prompt that may be started.
        """
        seed = derive_seed("refilled", self._args.seed, self._rank)
        session = None if call is None else call.session
        opening = self._engine.session(
            self._params(seed), growing=True, longest_prompt=longest_prompt, going_on=session
        )
        with opening as entered:
            if call is None:
                check_goes_on(entered)
            call = call or Sequences(self, opened, size, self._params(seed), entered)
            yield call
            self._log.read_memory()
        if call.busy:
            self._engine.pause()
        else:
            self._engine.release()

    def release(self) -> None:
        """Free the engine's memory, including the KV cache of unfinished samples."""
        self._engine.release()

    def reset(self) -> None:
        """Reset the engine to its state in a new process, in which a resumed run begins."""
        self._engine.reset()

    def close(self, drawn: Drawn) -> None:
        """Return the environments of a scored group of an open call, to be used again."""
        if drawn.environments is not None and self._conversations is not None:
            self._conversations.close(drawn.environments)

    def open(self, rows: list[Row], size: int, beside: bool = False) -> Drawn:
        """Return rows with their prompts and, unless `rollout_func` or an agent makes these, the prompts'
        token ids.

        Args:
            rows: Whole groups.
            size: Samples of a group.
            beside: Whether environments of other rows are in use.
        """
        if self._conversations is not None and self._conversations.has_others:
            prompts: list[Any] = self._conversations.open(rows, beside)
            drawn = Drawn(rows, prompts, environments=self._conversations.environments)
        else:
            drawn = Drawn(rows, prompts := [row["prompt"] for row in rows])
        if self._rollout_func is not None or self.led_by_agents:
            return drawn
        if drawn.environments is not None or self.talks:
            drawn.ids = self._rendered(prompts)
        else:
            _check_groups(prompts, size)
            drawn.ids = [each for each in self._rendered(prompts[::size]) for _ in range(size)]
        if drawn.environments is None:
            _check_groups(drawn.ids, size)
        return drawn

    def take(self, drawn: Drawn, result: RolloutResult) -> None:
        """Make samples and completions from the engine's result for the prompts."""
        drawn.result, found = result, result.completions
        written: list[Any] = [t.written for t in drawn.trajectories] or [None] * len(found)
        drawn.samples = [
            Sample(
                *(prompt, c.token_ids, c.logprobs, c.entropies),
                written=mask,
                truncated=self._is_cut_off(c),
                choices=c.choices,
            )
            for prompt, c, mask in zip(drawn.ids, found, written, strict=True)
        ]
        if self.talks and self._conversations is not None and self._conversations.has_others:
            drawn.completions = [trajectory.messages for trajectory in drawn.trajectories]
        else:
            drawn.completions = self._said(drawn.prompts, drawn.samples)

    def prepare(self, drawn: Drawn, mode: str) -> None:
        """Prepare samples for scoring: teacher prompts with a check of their length, and masks of truncated
        completions."""
        if mode == "train" and self._args.teacher_prompt is not None:
            self._give_teacher_prompts(drawn, self._args.teacher_prompt)
        if mode == "train" and self._teacher_positions is not None:
            self._check_teacher_room(drawn, self._teacher_positions)
        if self._args.mask_truncated_completions:
            for sample in (each for one in drawn.samples for each in (one, *one.forks)):
                sample.masked |= sample.truncated

    def sample(
        self,
        prompt_ids: list[list[int]],
        samples: int,
        mode: str = "train",
        seeds: Sequence[int] | None = None,
        drawn: Drawn | None = None,
    ) -> RolloutResult:
        """Sample completions from the present policy, with this step's noise while training.

        Args:
            prompt_ids: Token ids of each prompt.
            samples: Completions per prompt.
            mode: ``train`` or ``eval``.
            seeds: Seed of each completion; None derives them from the step.
            drawn: Gets the trajectories, and reward calls as samples end; None for samples that are not
                scored.
        """
        check_vocabulary(prompt_ids, self._embeddings)
        params, offsets = self._call(mode)
        if self.talks and self._conversations is not None:
            result, trajectories = self._conversed(params, offsets, prompt_ids, samples, seeds)
            if drawn is not None:
                drawn.trajectories = trajectories
        elif self._ended is None or drawn is None:
            result = self._engine.generate(prompt_ids, samples, params, offsets, seeds)
        else:
            begin = functools.partial(self.tell_ended, drawn)
            result = self._engine.generate(prompt_ids, samples, params, offsets, seeds, ended=begin)
        self._log.read_memory()
        self._engine.release()
        self._log.add_seconds("rollout", result.seconds)
        return result

    def begin(
        self,
        session: Session | Trajectories,
        params: SamplingParams,
        drawn: Drawn,
        size: int,
        seeds: Sequence[int],
        begun: Sequence[Begun] | None = None,
    ) -> list[int]:
        """Start the samples of opened rows in a session; return the numbers of their sequences.

        Args:
            session: The session, or the conversations in it.
            params: Sampling parameters of the session.
            drawn: The rows that were opened last, or any where no environment takes part.
            size: Samples of a group.
            seeds: Seed of each sample.
            begun: Tokens that each sample has already; None for none, as always for conversations.

        Raises:
            QeRLError: A prompt has an unknown token, or no room for its completion.
        """
        prompts, samples = drawn.groups(size)
        check_vocabulary(prompts, self._embeddings)
        if isinstance(session, Trajectories):
            assert self._conversations is not None, "they are its own"
            worlds = self._conversations.worlds(len(seeds))
            return session.start(prompts, samples, worlds, seeds)
        model = self._engine.model
        config = None if model is None else base_model(model).config.get_text_config(decoder=True)
        check_request(prompts, samples, params, None if config is None else positions_of(config))
        more: dict[str, Any] = {}  # sessions without refill need not take `begun`
        if begun is not None:
            more = {"begun": begun}
        return session.start(prompts, samples, seeds=seeds, **more)

    def _call(self, mode: str) -> tuple[SamplingParams, NormOffsets]:
        """Return sampling parameters and noise of the engine's next call in this step."""
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
        return self._params(derive_seed("rollout", self._args.seed, mode, step, call, self._rank)), offsets

    def _params(self, seed: int) -> SamplingParams:
        args = self._args
        return SamplingParams(
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p or 0.0,
            stop_token_ids=tuple(self._eos),
            seed=seed,
            stops=self._stops,
        )

    def tell_ended(self, drawn: Drawn, place: int, completion: Completion) -> None:
        """Begin the early reward calls of a sample that has ended, if there are any.

        Args:
            drawn: Rows and prompts of the sample's call.
            place: Index of the sample in `drawn`.
            completion: The sample's completion.
        """
        if self._ended is None:
            return
        sample = Sample(drawn.ids[place], completion.token_ids, [], [])
        (said,) = self._said([drawn.prompts[place]], [sample])
        drawn.asked = drawn.asked or [None] * len(drawn.rows)
        drawn.asked[place] = self._ended(drawn.rows[place], drawn.prompts[place], said, completion.token_ids)

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
        completions = [self.completion_of(trajectory) for trajectory in found]
        tokens = sum(sum(t.written) for t in found)
        return RolloutResult(
            completions, sum(map(len, prompt_ids)), tokens, time.perf_counter() - start
        ), found

    def completion_of(self, trajectory: Trajectory) -> Completion:
        """Return a conversation as a completion of the engine's result; one without a token gets a pad
        token."""
        if not trajectory.token_ids:  # its prompt left no room; a token that is not counted stands in
            trajectory.hear([self._tokenizer.pad_token_id], [{"role": "assistant", "content": ""}])
        t = trajectory
        return Completion(t.token_ids, t.logprobs, t.entropies, t.finish_reason, t.choices)

    def _drawn_by_agents(
        self, params: SamplingParams, offsets: NormOffsets, drawn: Drawn, places: Sequence[tuple[int, int]]
    ) -> Drawn:
        """Return groups of an open call whose conversations agents lead, seeded by group and place of each
        sample."""
        self._play(drawn, params, offsets, _seeds_of(params, places), fixed=True)
        return drawn

    def _play(
        self,
        drawn: Drawn,
        params: SamplingParams,
        offsets: NormOffsets,
        seeds: Sequence[int],
        fixed: bool,
    ) -> RolloutResult:
        """Run the conversations of opened rows, which agents lead, and make samples of them; those whose
        agent failed are masked.

        Args:
            drawn: The rows, which were opened last.
            params, offsets: Sampling parameters and noise.
            seeds: Seed of each row.
            fixed: Whether requests have to be sampled as `params` say.
        """
        assert self._conversations is not None and drawn.environments is not None
        start = time.perf_counter()
        found = self._conversations.play(self._engine, params, offsets, seeds, fixed)
        seconds = time.perf_counter() - start
        self._log.read_memory()
        self._engine.release()
        for trajectory, environment in zip(found, drawn.environments, strict=True):
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
            drawn.samples.append(sample)
        drawn.trajectories, drawn.completions = found, [trajectory.messages for trajectory in found]
        drawn.result = _result_of([*map(self.completion_of, found)], drawn.samples, seconds)
        return drawn.result

    def _drawn_by_others(self, drawn: Drawn) -> Drawn:
        """Return the samples of `rollout_func`, its extra columns added to the rows.

        Raises:
            QeRLError: A field is missing, or has not one value per prompt or per token.
        """
        assert self._rollout_func is not None
        rows, prompts = drawn.rows, drawn.prompts
        output = dict(self._rollout_func(copy.deepcopy(prompts)))
        samples = _samples_of(output, len(rows))
        for sample in samples:
            sample.truncated = self._is_cut_off(Completion(sample.tokens, [], [], "stop"))
        rows = [
            row | {name: values[i] if isinstance(values, list) else values for name, values in output.items()}
            for i, row in enumerate(rows)
        ]
        return replace(drawn, rows=rows, samples=samples, completions=self._said(prompts, samples))

    def _rendered(self, prompts: Sequence[Any]) -> list[list[int]]:
        """Return the token ids of prompts, texts or messages."""
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
        """Set the teacher prompt of each sample."""
        pairs = zip(drawn.prompts, drawn.rows, strict=True)
        found = self._rendered([teacher_prompt(template, prompt, row) for prompt, row in pairs])
        for sample, ids in zip(drawn.samples, found, strict=True):
            sample.teacher_prompt = ids

    def _check_teacher_room(self, drawn: Drawn, positions: int) -> None:
        """Raise if prompts leave the teacher too few positions, even if these completions are short: a later
        one may not be.

        Samples of several turns or of `rollout_func` count with the length that they have.

        Raises:
            QeRLError: A prompt does.
        """
        by_turns = self.talks or drawn.result is None
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
        """Return True if a completion ended without a stop token and without a stop string."""
        if self._args.stop_strings and completion.finish_reason == "stop":
            return False
        return completion.token_ids[-1] not in self._ends


class Lists:
    """Groups of an open call that are drawn list by list, each list at once.

    Args:
        sampler: Opens rows.
        draw: Makes samples of opened rows, given for each the group and the place in it.
        rows: Rows of all groups that may be drawn.
        size: Samples of a group.

    Attributes:
        samples: Number of unfinished samples; always 0.
        busy: Whether any samples are unfinished; always False.
    """

    samples, busy = 0, False

    def __init__(
        self,
        sampler: Sampler,
        draw: Callable[[Drawn, Sequence[tuple[int, int]]], Drawn],
        rows: list[Row],
        size: int,
    ) -> None:
        self._sampler, self._draw, self._rows, self._size = sampler, draw, rows, size
        self._drawn: list[tuple[int, Drawn]] = []

    def start(self, numbers: range) -> None:
        """Draw the groups of these numbers."""
        size = self._size
        rows = self._rows[numbers.start * size : numbers.stop * size]
        opened = self._sampler.open(rows, size, beside=numbers.start > 0)
        drawn = self._draw(opened, [(number, place) for number in numbers for place in range(size)])
        self._drawn = [(number, drawn.part(i * size, size)) for i, number in enumerate(numbers)]

    def next(self, one_round: bool) -> list[tuple[int, Drawn]]:
        """Return the groups that were drawn since the last call."""
        found, self._drawn = self._drawn, []
        return found


class Sequences:
    """Groups of an open call that an engine samples in a session.

    Args:
        sampler: The sampler with the engine.
        opened: Opens the rows of groups, given their numbers.
        size: Samples of a group.
        params: Sampling parameters of the session.
        session: The session, or the conversations in it.

    Attributes:
        samples: Number of unfinished samples.
    """

    def __init__(
        self,
        sampler: Sampler,
        opened: Callable[[range], Drawn],
        size: int,
        params: SamplingParams,
        session: Session | Trajectories,
    ) -> None:
        self._sampler, self._opened, self._size = sampler, opened, size
        self._params, self._session, self.samples = params, session, 0
        self._of: dict[int, tuple[int, int]] = {}  # group and place by sequence
        self._groups: dict[int, Drawn] = {}
        self._found: dict[int, dict[int, tuple[Completion, Trajectory | None]]] = {}

    @property
    def busy(self) -> bool:
        """Whether samples are unfinished."""
        return self._session.busy

    @property
    def session(self) -> Session:
        """The session, where samples are not conversations."""
        assert not isinstance(self._session, Trajectories)
        return self._session

    def start(self, numbers: range, begun: Sequence[Begun] | None = None) -> None:
        """Start the groups of these numbers.

        Args:
            numbers: Numbers of the groups.
            begun: Tokens that each of their samples has already; None for none.
        """
        size = self._size
        drawn = self._opened(numbers)
        places = [(number, place) for number in numbers for place in range(size)]
        seeds = _seeds_of(self._params, places)
        indices = self._sampler.begin(self._session, self._params, drawn, size, seeds, begun)
        self._of |= zip(indices, places, strict=True)
        for i, number in enumerate(numbers):
            self._groups[number], self._found[number] = drawn.part(i * size, size), {}
        self.samples += len(places)

    def lengths(self) -> dict[int, list[int]]:
        """Return, for each unfinished group, the present number of tokens of its samples."""
        found = {group: [0] * self._size for group in self._groups}
        for group, ended in self._found.items():
            for place, (completion, _) in ended.items():
                found[group][place] = len(completion.token_ids)
        for index, (group, place) in self._of.items():
            found[group][place] = self.session.length(index)
        return found

    def left(self) -> dict[int, list[Begun]]:
        """End this call; return the tokens of each unfinished group's samples, with which another call can
        `start` them."""
        begun = self.session.leave()
        under_way = {place: begun[index] for index, place in self._of.items()}
        return {
            group: [
                under_way[group, place]
                if (group, place) in under_way
                else begun_of(self._found[group][place][0])
                for place in range(self._size)
            ]
            for group in self._groups
        }

    def next(self, one_round: bool) -> list[tuple[int, Drawn]]:
        """Return the groups that have ended since the last call.

        Decodes until at least one has, or for one round only if ``one_round``; empty if no sample is
        unfinished.
        """
        ended: list[tuple[int, Drawn]] = []
        while self.busy and not ended:
            for index, completion, trajectory in self._next(one_round):
                group, place = self._of.pop(index)
                self._found[group][place] = completion, trajectory
                self.samples -= 1
                self._sampler.tell_ended(self._groups[group], place, completion)
                if len(self._found[group]) == self._size:
                    ended.append((group, self._taken(group)))
            if one_round:
                break
        return ended

    def _next(self, one_round: bool) -> Iterator[tuple[int, Completion, Trajectory | None]]:
        if isinstance(self._session, Trajectories):
            for index, trajectory in self._session.next(one_round).items():
                yield index, self._sampler.completion_of(trajectory), trajectory
        else:
            for turn in self._session.next_finished(one_round):
                yield turn.index, turn.completion, None

    def _taken(self, group: int) -> Drawn:
        drawn, found = self._groups.pop(group), self._found.pop(group)
        ordered = [found[place] for place in range(self._size)]
        drawn.trajectories = [trajectory for _, trajectory in ordered if trajectory is not None]
        completions = [completion for completion, _ in ordered]
        written = [t.written for t in drawn.trajectories] or [[1] * len(c.token_ids) for c in completions]
        read, tokens = sum(map(len, drawn.ids)), sum(map(sum, written))
        self._sampler.take(drawn, RolloutResult(completions, read, tokens, 0.0))
        return drawn


def begun_of(completion: Completion) -> Begun:
    """Return a completion as a sequence that has ended."""
    c = completion
    return Begun(c.token_ids, c.logprobs, c.entropies, c.finish_reason, c.choices)


def _seeds_of(params: SamplingParams, places: Sequence[tuple[int, int]]) -> list[int]:
    """Return the seeds of samples of an open call, by the group and the place of each."""
    return [derive_seed("open call", params.seed, *place) for place in places]


def _result_of(completions: list[Completion], samples: Sequence[Sample], seconds: float) -> RolloutResult:
    """Return the result of an engine for samples, with their token counts."""
    read, drawn = sum(len(s.prompt) for s in samples), sum(s.drawn_tokens for s in samples)
    return RolloutResult(completions, read, drawn, seconds)


def check_vocabulary(prompts: Sequence[Sequence[int]], embeddings: int) -> None:
    """Raise if a token id has no embedding in the model; on a GPU, reading one ends the process.

    Args:
        prompts: Token ids of each prompt.
        embeddings: Number of rows of the model's embedding.

    Raises:
        QeRLError: A prompt has such an id.
    """
    largest = max((max(prompt, default=0) for prompt in prompts), default=0)
    if largest >= embeddings:
        raise QeRLError(
            f"A prompt has the token id {largest} and the model embeds {embeddings} tokens; give the "
            "tokenizer that belongs to the model, or resize the model's embeddings to the tokenizer's length."
        )


def _samples_of(output: dict[str, Any], count: int) -> list[Sample]:
    """Remove the fields of samples from the output of `rollout_func`, leaving its extra columns; return the
    samples."""
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
    """Return rows of numbers, given as lists or tensors, as lists; empty for None."""
    if rows is None:
        return []
    return [row.tolist() if hasattr(row, "tolist") else row if row is None else [*row] for row in rows]


def _check_groups(prompts: Sequence[Any], size: int) -> None:
    """Raise unless each group's rows have the same prompt, `size` rows side by side."""
    if any(prompts[at] != prompts[at - at % size] for at in range(len(prompts))):
        raise QeRLError(
            f"The samples of a rollout are not {size} of each prompt, side by side; sample the data with the "
            "trainer's own sampler."
        )


def _parses(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if a tokenizer defines how to parse thoughts and tool calls in its model's output."""
    names = ("response_template", "response_schema")
    return any(getattr(tokenizer, name, None) is not None for name in names)
