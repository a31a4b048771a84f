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
from qerl.rollout.session import Track, TrackedSession

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
    def session(
        self, params: SamplingParams, norm_offsets: NormOffsets | None = None
    ) -> Iterator["PortableSession"]:
        """See ``RolloutEngine.session``."""
        with self._ready(norm_offsets or {}):
            yield PortableSession(self, params)

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
        return self.decode(
            [prompts[index] for index in used],
            [row_of_prompt[s.prompt] for s in sequences],
            [params.max_tokens] * len(sequences),
            uniform_streams(params.seed, sequences, params.max_tokens),
            params,
        )

    def decode(
        self,
        prefixes: Sequence[Sequence[int]],
        rows: list[int],
        limits: list[int],
        uniforms: torch.Tensor,
        params: SamplingParams,
    ) -> list[Completion]:
        """Sample one wave to its end.

        Args:
            prefixes: Token ids that are computed once each.
            rows: The prefix of each sequence.
            limits: Tokens that each sequence may draw.
            uniforms: fp64, a row for each sequence, a column for each step.
            params: Sampling parameters; ``max_tokens`` plays no part.
        """
        wave = Wave(len(rows), params, self._pad_token_id, limits)
        runner = Runner(self.model, self._pad_token_id)
        logits_BV = runner.prefill(prefixes, rows, max(limits))
        uniforms = uniforms.to(logits_BV.device)
        for step in range(max(limits)):
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


class PortableSession(TrackedSession):
    """Turns of sequences in waves; each turn computes all tokens before it anew.

    Args:
        engine: The engine, with its model ready for a rollout.
        params: Sampling parameters.
    """

    def __init__(self, engine: PortableEngine, params: SamplingParams) -> None:
        config = base_model(engine.model).config.get_text_config(decoder=True)
        super().__init__(params, positions_of(config), engine._pad_token_id)
        self._engine = engine

    def _draw(self, tracks: list[Track]) -> list[Completion]:
        """See ``TrackedSession._draw``."""
        width = self._engine.rows_per_call
        waves = [tracks[first : first + width] for first in range(0, len(tracks), width)]
        return [completion for wave in waves for completion in self._run_wave(wave)]

    def _run_wave(self, tracks: list[Track]) -> list[Completion]:
        fresh = {track.prompt_number: track for track in tracks if not track.token_ids}
        later = [track for track in tracks if track.token_ids]
        prefixes = [track.prompt for track in fresh.values()] + [t.prompt + t.token_ids for t in later]
        keys: list[int | Track] = [*fresh, *later]
        row_of = {key: row for row, key in enumerate(keys)}
        params, length = self._params, self._params.max_tokens
        streams = uniform_streams(params.seed, [(t.prompt_number, t.sample) for t in tracks], length)
        place_B1 = torch.tensor([len(track.token_ids) for track in tracks])[:, None]
        return self._engine.decode(
            prefixes,
            [row_of[track if track.token_ids else track.prompt_number] for track in tracks],
            [track.room for track in tracks],
            streams.gather(1, (place_B1 + torch.arange(length)).clamp_(max=length - 1)),
            params,
        )
