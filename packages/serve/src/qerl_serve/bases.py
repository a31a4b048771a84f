"""A loaded model of a server: frozen weights, rollout engine and loss driver in one place.

A server has one trainable base and may have teachers beside it: models that clients sample from and score
with, as recipes of distillation do, and that never train. A teacher is also a `Base`, not a second kind of
server: its policies are the model itself and saved adapters that were trained on it, and its requests wait in
the same queue. Beyond its packed weights a teacher takes the buffers that its engine keeps for an adapter;
only the model being sampled from has a KV cache.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from qerl.families.parts import base_model
from qerl.rollout.engine import NormOffsets, RolloutEngine
from qerl.rollout.stops import StopStrings
from qerl.update.driver import LossDriver
from qerl_serve.adapters import Snapshot
from qerl_serve.sampling import Host, Limits, Policy, Scores
from qerl_serve.scoring import score_prompts
from qerl_serve.seats import Seats
from qerl_serve.types import ModelInfo, SampleRequest


@dataclass(frozen=True, eq=False)
class Base:
    """One model of a server.

    Attributes:
        names: The model under each of its names; answers use the first.
        seats: Adapter slots in the model.
        engine: Samples from `seats.model`.
        driver: Computes losses on `seats.model`.
        tokenizer: For stop strings.
        end_token_ids: Default end tokens of a completion.
        fingerprint: Identifies the adapters that were trained on this model (`qerl.models.fingerprint`).
    """

    names: Sequence[ModelInfo]
    seats: Seats
    engine: RolloutEngine
    driver: LossDriver
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: tuple[int, ...]
    fingerprint: str | None

    @property
    def name(self) -> str:
        """The name used in answers."""
        return self.names[0].name

    def host(
        self, noise: Callable[[Snapshot], NormOffsets] | None = None, keeps_prefixes: bool = True
    ) -> Host:
        """Return the model for sampling; `noise` as in `Host`. Prefixes are kept only if the engine can keep
        them."""
        vocabulary = base_model(self.seats.model).get_input_embeddings().num_embeddings
        limits = Limits(self.names[0].max_context_length, vocabulary, self.end_token_ids)
        return Host(
            self.engine,
            limits,
            self._lend,
            noise,
            self._score,
            self._stop_strings,
            keeps_prefixes and self.engine.keeps_prefixes,
        )

    def _lend(self, policy: Policy) -> AbstractContextManager[object]:
        if policy is None:
            return self.seats.unused()
        return self.seats.used(policy.shape, policy.on(self.seats.device))

    def _score(self, requests: Sequence[SampleRequest]) -> list[Scores]:
        return score_prompts(self.driver, self.seats.model, requests)

    def _stop_strings(self, strings: tuple[str, ...]) -> StopStrings:
        return StopStrings(self.tokenizer, strings)
