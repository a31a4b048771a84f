"""The rollout engine for any transformers causal LM, on any device, without compilation.

A prompt is computed once and its samples share the result; finished sequences leave the batch. See ``waves``,
``sampling``, ``cache`` and ``runner`` for who runs, what is drawn, keys and values, and the model call; this
file only lets them take turns.

The calls run under ``no_grad``, not ``inference_mode``: whatever a module of the training model keeps from a
forward pass (a rotary table, a cached weight) must serve backward later; inference tensors cannot.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.families.parts import base_model, eval_mode
from qerl.families.sizes import positions_of
from qerl.fp4.linear import dense_weights_kept
from qerl.noise.norms import noisy_norms
from qerl.rollout.engine import (
    Completion,
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    check_model,
    check_request,
)
from qerl.rollout.portable.attention import grouped_decode
from qerl.rollout.portable.runner import Runner
from qerl.rollout.portable.waves import SequenceId, Wave, plan_waves
from qerl.rollout.sampling import draw_tokens, uniform_streams

ROWS = 64
"""Sequences that run at once if nobody says otherwise."""


class PortableEngine(RolloutEngine):
    """Samples from a transformers causal LM in place.

    Args:
        model: The model that trains, PEFT-wrapped or not. It is used as it is at each call and left as it
            was: same modes, same parameters.
        pad_token_id: Any id of the vocabulary; it fills masked positions and is the only token of a
            completion whose first logits were not finite.
        max_sequences: Sequences that run at once at most. Each needs memory for the keys and values of its
            prompt and of ``max_tokens`` tokens.
    """

    model: nn.Module

    def __init__(self, model: nn.Module, pad_token_id: int, max_sequences: int = ROWS) -> None:
        if max_sequences < 1:
            raise QeRLError(f"max_sequences is {max_sequences}; at least one sequence must run at a time.")
        check_model(model)
        self.model = model
        self._pad_token_id = pad_token_id
        self._max_sequences = self.rows_per_call = max_sequences

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        config = base_model(self.model).config.get_text_config(decoder=True)
        check_request(prompts, samples_per_prompt, params, positions_of(config))
        start = time.perf_counter()
        completions: list[Completion] = []
        prompt_tokens = 0
        with self._ready(norm_offsets or {}):
            for sequences in plan_waves(len(prompts), samples_per_prompt, self._max_sequences):
                completions += self._run_wave(prompts, sequences, params)
                prompt_tokens += sum(len(prompts[index]) for index in {s.prompt for s in sequences})
        return RolloutResult(
            completions=completions,
            prompt_tokens=prompt_tokens,
            generated_tokens=sum(len(completion.token_ids) for completion in completions),
            seconds=time.perf_counter() - start,
        )

    @contextmanager
    def _ready(self, norm_offsets: NormOffsets) -> Iterator[None]:
        """Everything about the model that differs between a rollout and training, for one call."""
        base = base_model(self.model)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(eval_mode(self.model))
            if base._supports_attention_backend:  # others compare the name of their attention with "sdpa"
                stack.enter_context(grouped_decode(base.config))
            stack.enter_context(noisy_norms(self.model, norm_offsets))
            if base.device.type == "cpu":
                stack.enter_context(dense_weights_kept(self.model))
            yield

    def _run_wave(
        self, prompts: Sequence[Sequence[int]], sequences: list[SequenceId], params: SamplingParams
    ) -> list[Completion]:
        """Samples the sequences of one wave to their ends."""
        used = sorted({sequence.prompt for sequence in sequences})
        row_of_prompt = {prompt: row for row, prompt in enumerate(used)}
        wave = Wave(len(sequences), params, self._pad_token_id)
        runner = Runner(self.model, self._pad_token_id)
        logits_BV = runner.prefill(
            [prompts[index] for index in used],
            [row_of_prompt[s.prompt] for s in sequences],
            params.max_tokens,
        )
        # One column for each step, one row for each sequence, on the model's device for the whole wave.
        uniforms = uniform_streams(params.seed, sequences, params.max_tokens).to(logits_BV.device)
        for step in range(params.max_tokens):
            drawn = draw_tokens(logits_BV, uniforms[wave.rows, step], params)
            wave.record(*(column.tolist() for column in drawn))
            tokens_B = drawn.tokens_B
            sources = wave.compact()
            if not wave.rows:
                break
            if sources is not None:
                runner.keep(sources)
                tokens_B = tokens_B[sources]
            logits_BV = runner.step(tokens_B)
        return wave.completions()
