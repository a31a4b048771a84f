"""The part of a rollout that samples: prompts in, completions or whole trajectories of the policy out.

TRL asks for completions through the seam of its vLLM client, and with tools for what came of the calls in
them. Both are answered by the engine, with this step's noise and with seeds keyed by step. Evaluations are
drawn by seeds of their problems.
"""

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from qerl.agents.thinking import ThinkingBudget
from qerl.errors import QeRLError
from qerl.families.parts import base_model
from qerl.rollout.engine import Completion, NormOffsets, RolloutEngine, RolloutResult, SamplingParams
from qerl.rollout.stops import FinishReason, Stop, StopStrings
from qerl.seeding import derive_seed
from qerl.settings.config import QeRLConfig
from qerl.tasks.together import Together
from qerl.trainer.early import EarlyRewards
from qerl.trainer.memory import PeakMemory
from qerl.trainer.resume.trainer import ResumableTrainer
from qerl.trainer.rollout_log import RolloutLog
from qerl.trainer.timing import Runtimes, StepClock
from qerl.trainer.trl.client import EngineClient
from qerl.trainer.trl.truncation import cut_off, log_lengths
from qerl.trainer.turns import Turns


def stops_of(args: QeRLConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[Stop, ...]:
    """What ends or interrupts turns beside stop tokens, by the settings.

    Raises:
        QeRLError: There is a budget of thinking and the model does not think.
    """
    stops: list[Stop] = []
    if args.stop_strings:
        stops.append(StopStrings(tokenizer, args.stop_strings))
    if args.thinking_budget is not None:
        stops.append(ThinkingBudget(tokenizer, args.thinking_budget, args.thinking_end))
    return tuple(stops)


def check_vocabulary(prompts: list[list[int]], embeddings: int) -> None:
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


class SamplerTrainer(ResumableTrainer):
    """`GRPOTrainer` whose completions come from an engine."""

    def _start_sampling(self, engine: RolloutEngine, calls: Together) -> None:
        """Make what sampling needs, once TRL's constructor is through."""
        self.engine = engine
        self._early = EarlyRewards(self, calls) if calls.early else None
        self._memory = PeakMemory(self.accelerator.device)
        self._clock = StepClock(hides=calls.early)
        self._runtimes = Runtimes()
        self._calls = 0
        self._eval_seeds: list[int] | None = None
        self._call_key: tuple[int, str] | None = None
        self._rollout = RolloutLog(bool(self.tools), self.args.thinking_budget is not None)
        # TRL asks these four: the first three route generation to `rollout` and turn the correction on, the
        # last says with which step weights were synchronised, which the shared modules never need.
        self.use_vllm = True
        self.vllm_mode = "server"
        self.vllm_generation = EngineClient(self.rollout, may_differ=self.environment_factories is not None)
        self._last_loaded_step = -1
        speaks = self.tools or self.args.thinking_budget is not None
        self._turns = Turns(self, calls.beside) if speaks else None
        self._written: list[list[int]] | None = None
        self._stops = stops_of(self.args, self._tokenizer)
        policy = self.accelerator.unwrap_model(self.model)
        self._embeddings = base_model(policy).get_input_embeddings().weight.shape[0]
        self._reasons: list[FinishReason] | None = None
        self._cut_off: list[bool] = []

    def _init_training_state(self, *args: Any) -> tuple[int, int]:
        self._call_key = None  # a step that was cut off samples as it did
        return super()._init_training_state(*args)

    def rollout(self, prompts: list[list[int]], samples: int, differ: bool = False) -> RolloutResult:
        """Sample completions of the present policy, with this step's noise while training.

        Args:
            prompts: Token ids of each prompt.
            samples: Completions per prompt.
            differ: The samples of a group have prompts of their own; then there is one for each sample.
        """
        check_vocabulary(prompts, self._embeddings)
        mode = "train" if self.model.training else "eval"
        step = self.state.global_step
        if self._call_key != (step, mode):
            self._call_key, self._calls = (step, mode), 0
        offsets, logged = self._noise.for_rollout(step) if mode == "train" else ({}, {})
        for name, value in logged.items():
            self._metrics[mode][name].append(value)
        result = self._sample(mode, prompts, 1 if differ else samples, offsets)
        self._memory.read()
        self.engine.release()
        self._clock.add("rollout", result.seconds)
        if self.args.stop_strings:
            self._reasons = [completion.finish_reason for completion in result.completions]
        self._rollout.add(result, [] if self._turns is None else self._turns.trajectories)
        return result

    def _sample(
        self, mode: str, prompts: list[list[int]], samples: int, offsets: NormOffsets
    ) -> RolloutResult:
        """One call of the engine, or one session, with so many samples of each prompt.

        In training it has a seed of its own; an evaluation's samples have theirs.
        """
        step, rank = self.state.global_step, self.accelerator.process_index
        params = SamplingParams(
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.eos_token_ids),
            seed=derive_seed("rollout", self.args.seed, mode, step, self._calls, rank),
            stops=self._stops,
        )
        self._calls += 1
        seeds = self._eval_seeds
        if self._turns is not None:
            return self._turns.sample(self.engine, params, offsets, prompts, samples, seeds)
        if self._early is None:
            return self.engine.generate(prompts, samples, params, offsets, seeds)
        begin = self._early.begin

        def ended(place: int, completion: Completion) -> None:
            begin(place, prompts[place // samples], completion.token_ids)

        return self.engine.generate(prompts, samples, params, offsets, seeds, ended)

    def _generate(self, prompts: list[Any]) -> Any:
        """Wraps TRL's: refuses rows without any prompt, and keeps which tokens the policy wrote and which
        completions were cut off."""
        if self.environments and any(not prompt[-1]["content"] for prompt in prompts):
            raise QeRLError(
                f"reset of the environment {type(self.environments[0]).__name__} returned no observation, "
                "and the data have no prompt; return a text that says what to do."
            )
        self._reasons = None
        generated = super()._generate(prompts)
        silent = self._turns is not None and not self.tools
        if self._turns is not None and silent:  # TRL asks for masks where there are tools
            generated = (*generated[:2], self._turns.for_trl()[0], *generated[3:])
        ids, self._written = generated[1:3]
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        self._cut_off = cut_off(ids, self._reasons, ends)
        if self._stops:
            written = self._written or [[1] * len(each) for each in ids]
            self._log_lengths(written, of_others=silent)
        return generated

    def _log_lengths(self, written: list[list[int]], of_others: bool) -> None:
        """Correct what TRL has logged of completions, of which it knows neither why they ended nor, without
        tools, which tokens others wrote."""
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        log_lengths(metrics, [sum(mask) for mask in written], self._cut_off, self.accelerator)
        if of_others and mode == "train":
            own = torch.tensor([sum(mask.count(0) for mask in written)], device=self.accelerator.device)
            self.state.num_input_tokens_seen -= int(self.accelerator.gather(own).sum())
            metrics["num_tokens"] = [self.state.num_input_tokens_seen]

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Wraps TRL's: of whole trajectories it is told the first turns."""
        completions = super()._generate_single_turn(*args, **kwargs)
        return completions if self._turns is None else self._turns.first_turns()

    def _tool_call_loop(self, *_: Any) -> Any:
        """Replaces TRL's: what came of the calls in the first turns is known."""
        assert self._turns is not None
        return self._turns.for_trl()
