"""The rollout engine for any transformers causal LM, on any device, without compilation.

A prompt is computed once and its samples share the result; finished sequences leave the batch. See
``session`` for who runs and the loop, ``runner`` for the model call, ``cache`` for keys and values, and
`qerl.rollout.sampling` for what is drawn; this file gets the model ready for them.

The calls run under ``no_grad``, not ``inference_mode``: whatever a module of the training model keeps from a
forward pass (a rotary table, a cached weight) must serve backward later; inference tensors cannot.
"""

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
    NormOffsets,
    RolloutEngine,
    RolloutResult,
    SamplingParams,
    WhenEnded,
    check_model,
    check_request,
)
from qerl.rollout.portable.runner import grouped_decode
from qerl.rollout.portable.session import KEPT_BYTES, PortableSession
from qerl.rollout.session import whole_completions

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
        kept_bytes: Bytes of keys and values that a session keeps between turns at most.
        speculative_tokens: Tokens that are drafted for each sequence and verified in one pass, where few
            run; 0 for none (`qerl.rollout.drafts`).
    """

    model: nn.Module

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int,
        max_sequences: int = ROWS,
        kept_bytes: int = KEPT_BYTES,
        speculative_tokens: int = 0,
    ) -> None:
        if max_sequences < 1:
            raise QeRLError(f"max_sequences is {max_sequences}; at least one sequence must run at a time.")
        check_model(model)
        self.model = model
        self._pad_token_id = pad_token_id
        self._max_sequences = self.rows_per_call = max_sequences
        self._kept_bytes, self._speculative_tokens = kept_bytes, speculative_tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        seeds: Sequence[int] | None = None,
        ended: WhenEnded | None = None,
    ) -> RolloutResult:
        """See ``RolloutEngine.generate``."""
        check_request(prompts, samples_per_prompt, params, self._positions())
        opened = self.session(params, norm_offsets)
        return whole_completions(opened, prompts, samples_per_prompt, seeds=seeds, ended=ended)

    @contextmanager
    def session(
        self,
        params: SamplingParams,
        norm_offsets: NormOffsets | None = None,
        growing: bool = False,
    ) -> Iterator[PortableSession]:
        """See ``RolloutEngine.session``."""
        with self._ready(norm_offsets or {}):
            yield PortableSession(
                params,
                self._positions(),
                self._pad_token_id,
                self.model,
                self._max_sequences,
                self._kept_bytes,
                growing,
                self._speculative_tokens,
            )

    def _positions(self) -> int | None:
        return positions_of(base_model(self.model).config.get_text_config(decoder=True))

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
