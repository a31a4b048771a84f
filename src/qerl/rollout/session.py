"""Books of a session: what each sequence has, what it may still have, and whose turn it is.

Both engines keep them in the same way; how tokens are drawn is theirs.

Legend: a sequence is waiting for the engine from `start` or `go_on` on, and between turns after `next` has
returned it, until it goes on or is finished.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from qerl.errors import QeRLError
from qerl.rollout.engine import (
    Completion,
    Ended,
    FinishReason,
    SamplingParams,
    Session,
    check_prompts,
)


@dataclass(eq=False)
class Track:
    """One sequence, from its start to its end.

    Attributes:
        index: Its number in the session.
        prompt_number: Number of its prompt in the session, which keys its uniform numbers.
        prompt: Token ids of its prompt.
        sample: Number among the prompt's sequences, from 0.
        limit: Tokens that it may have beside the prompt, drawn or written; at most 0 for one without room.
        token_ids: What it has, drawn or written.
        logprobs, entropies: Of its tokens; 0.0 where others wrote them.
        turn_start: Tokens that it had when its turn began.
        finish_reason: Why its last turn ended.
        stage: Where it stands.
    """

    index: int
    prompt_number: int
    prompt: list[int]
    sample: int
    limit: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    turn_start: int = 0
    finish_reason: FinishReason = "length"
    stage: Literal["waiting", "between turns", "finished"] = "waiting"

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return 0 if self.finish_reason == "error" else max(0, self.limit - len(self.token_ids))


class TrackedSession(Session):
    """A session that knows what its sequences have, and asks a subclass to draw.

    Args:
        params: Sampling parameters.
        positions: Positions that the model has; None where it sets no limit.
        pad_token_id: Stands in for a turn whose first logits were not finite.
    """

    def __init__(self, params: SamplingParams, positions: int | None, pad_token_id: int) -> None:
        self._params, self._positions, self._pad_token_id = params, positions, pad_token_id
        self._tracks: list[Track] = []
        self._prompts = 0

    @abstractmethod
    def _draw(self, tracks: list[Track]) -> list[Completion]:
        """What the policy draws in the turn of each."""

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        samples_per_prompt: int,
        max_tokens: Sequence[int] | None = None,
    ) -> list[int]:
        """See `Session.start`."""
        check_prompts(prompts, samples_per_prompt)
        first = len(self._tracks)
        for prompt, own in zip(prompts, max_tokens or [self._params.max_tokens] * len(prompts), strict=True):
            limit = min(own, self._params.max_tokens)
            if self._positions is not None:
                limit = min(limit, self._positions - len(prompt))
            for sample in range(samples_per_prompt):
                index = len(self._tracks)
                self._tracks.append(Track(index, self._prompts, list(prompt), sample, limit))
            self._prompts += 1
        return list(range(first, len(self._tracks)))

    def go_on(self, index: int, token_ids: Sequence[int]) -> None:
        """See `Session.go_on`."""
        track = self._between_turns(index)
        if len(token_ids) >= track.room:
            raise QeRLError(
                f"Sequence {index} has room for {track.room} tokens, and {len(token_ids)} written ones leave "
                "none to draw: shorten them or finish the sequence."
            )
        track.token_ids += token_ids
        track.logprobs += [0.0] * len(token_ids)
        track.entropies += [0.0] * len(token_ids)
        track.turn_start, track.stage = len(track.token_ids), "waiting"

    def room(self, index: int) -> int:
        """See `Session.room`."""
        return self._tracks[index].room

    def finish(self, index: int) -> None:
        """See `Session.finish`."""
        self._between_turns(index).stage = "finished"

    def next(self) -> list[Ended]:
        """See `Session.next`."""
        waiting = [track for track in self._tracks if track.stage == "waiting"]
        running = [track for track in waiting if track.room > 0]
        drawn = dict(zip(running, self._draw(running), strict=True)) if running else {}
        return [self._end(track, drawn.get(track, Completion([], [], [], "length"))) for track in waiting]

    @property
    def busy(self) -> bool:
        """See `Session.busy`."""
        return any(track.stage == "waiting" for track in self._tracks)

    def _end(self, track: Track, completion: Completion) -> Ended:
        track.token_ids += completion.token_ids
        track.logprobs += completion.logprobs
        track.entropies += completion.entropies
        track.finish_reason, track.stage = completion.finish_reason, "between turns"
        return Ended(track.index, completion)

    def _between_turns(self, index: int) -> Track:
        track = self._tracks[index]
        if track.stage != "between turns":
            state = "was finished" if track.stage == "finished" else "has not ended its turn"
            raise QeRLError(f"Sequence {index} {state}; only one whose turn has ended can go on or finish.")
        return track
