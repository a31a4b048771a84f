"""The conversations of one trajectory: which messages stand for which tokens, as a tree.

A client knows messages, the engine knows tokens, and text does not say which tokens were drawn: rendered and
tokenized again a conversation often has others, with other log-probabilities, and a gradient of tokens that
nobody drew. So what was drawn is kept as a `Turn` under the messages before it and the message that the
client was sent. A request is searched for the longest beginning of this kind, which goes on token by token;
only the messages behind it are rendered. Where a client writes its history anew (drops a turn, shortens a
tool's answer, leaves thoughts out), the conversation divides at the last turn that it left as it was, or
begins anew if there is none.

    system user | turn 1 | user | turn 2 | user | turn 3
                         | user' | turn 4                     a fork: turn 1 is common to both

Each leaf is a `Branch`, one row of an update. A turn that several branches begin with is drawn once and
counts once: in the first of them its tokens are the policy's, in the others they are context.

Texts of `/v1/completions` are kept in the same tree: token ids continue a branch whose tokens they begin
with, and a text one whose text it begins with if its last turn was cut off, by a length or a stop text. A
turn that ended with the stop token is over, and no text says whether the token is still there.

Given up: a client that changes what it was sent, by stripping a space, say, forks its history at each turn.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qerl.endpoint.bodies import Message
from qerl.rollout.engine import Completion


class Template(Protocol):
    """Renders messages (`qerl.agents.template.TurnTemplate`)."""

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Tokens of a conversation, with the policy's turn opened."""

    def suffix_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Tokens between the end of the policy's turn, whose last token is given, and its next one."""


@dataclass(eq=False)
class Turn:
    """A turn of the policy.

    Attributes:
        parent: The turn that it goes on from; None for the first of a conversation.
        given: Tokens between the parent's and its own: for a first one the prompt.
        before: What stands before it, as a key: messages, or a text.
        messages: Those between the parent's and its own.
        number: By which it was begun, from 0.
        drawn: What the policy drew; None while it draws.
        message: What the client was sent of it.
        handle: The owner's, such as a sequence of the engine.
    """

    parent: "Turn | None"
    given: list[int]
    before: str
    messages: Sequence[Message] = ()
    number: int = 0
    drawn: Completion | None = None
    message: Message = field(default_factory=dict)
    handle: Any = None

    @property
    def path(self) -> "list[Turn]":
        """The turns of its conversation, itself the last."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to its end, or to its beginning while it draws."""
        return [token for turn in self.path for token in turn.own_ids]

    @property
    def own_ids(self) -> list[int]:
        """What was given to it and what it drew."""
        return self.given + (self.drawn.token_ids if self.drawn is not None else [])


@dataclass(frozen=True)
class Place:
    """Where a request goes on.

    Attributes:
        parent, given, before, messages: As of the `Turn` that begins there.
    """

    parent: Turn | None
    given: list[int]
    before: str
    messages: Sequence[Message] = ()


@dataclass(frozen=True)
class Branch:
    """A conversation from its prompt to a last turn, as an update takes it.

    Attributes:
        prompt_ids: Tokens before the first turn.
        token_ids: All others.
        written: For each of them 1 if the policy drew it and no earlier branch has it, else 0.
        logprobs, entropies: Of the tokens with 1; 0.0 elsewhere.
        messages: What was said since the prompt.
        turns: Turns that count here.
        last: The last turn.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    written: list[int]
    logprobs: list[float]
    entropies: list[float]
    messages: list[Message]
    turns: list[Turn]
    last: Turn


class History:
    """Turns by what stood before them.

    Args:
        most_tokens: The oldest turns are forgotten where all together have more; None keeps all.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self._most, self._tokens, self._begun = most_tokens, 0, 0
        self._turns: dict[Turn, None] = {}  # those that have ended, in that order
        self._by_key: dict[str, list[Turn]] = {}

    def place(self, messages: Sequence[Message], tools: Sequence[Any], template: Template) -> Place:
        """Where a conversation goes on: behind the longest beginning that was drawn here.

        Args:
            messages: In the form of `qerl.endpoint.bodies.messages_of`; the last is not the policy's.
            tools: As chat templates take them.
            template: Of conversations with these tools.

        Raises:
            QeRLError: The template cannot go on with a turn.
        """
        keys = [_key("", list(tools))]
        for message in messages:
            keys.append(_key(keys[-1], message))
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] == "assistant" and keys[count] in self._by_key:
                turn = self._by_key[keys[count]][0]
                assert turn.drawn is not None, "a turn is found once it has ended"
                rest = list(messages[count:])
                given = template.suffix_ids(rest, turn.drawn.token_ids[-1])
                return Place(turn, given, keys[-1], rest)
        return Place(None, template.prompt_ids(list(messages), tools), keys[-1])

    def place_of_text(self, prompt: str | Sequence[int], encode: Callable[[str, bool], list[int]]) -> Place:
        """Where a text or token ids go on.

        Args:
            prompt: Text, or ids.
            encode: Token ids of a text, given whether nothing stands before it.
        """
        if isinstance(prompt, str):
            begun = [turn for turn in self._turns if turn.before and _goes_on(turn, prompt)]
            if begun:
                turn = max(begun, key=lambda each: len(_text(each)))
                return Place(turn, encode(prompt[len(_text(turn)) :], False), prompt)
            return Place(None, encode(prompt, True), prompt)
        ids, best = list(prompt), None
        for turn in self._turns:
            own = turn.token_ids
            if len(own) < len(ids) and ids[: len(own)] == own and (best is None or len(own) > best[0]):
                best = len(own), turn
        return Place(None, ids, "") if best is None else Place(best[1], ids[best[0] :], "")

    def begin(self, place: Place) -> Turn:
        """A new turn, which is found once it has ended."""
        self._begun += 1
        return Turn(place.parent, place.given, place.before, place.messages, self._begun - 1)

    def end(self, turn: Turn, drawn: Completion, message: Message) -> None:
        """Keep what the policy drew in a turn.

        Args:
            turn: Of `begin`.
            drawn: At least one token.
            message: What the client is sent: a message in the form of `messages_of`, or for a text
                ``{"text": ...}``.
        """
        turn.drawn, turn.message = drawn, message
        self._turns[turn] = None
        if "text" not in message:
            self._by_key.setdefault(_key(turn.before, message), []).append(turn)
        self._tokens += len(turn.own_ids)
        while self._most is not None and self._tokens > self._most and len(self._turns) > 1:
            self._forget(next(iter(self._turns)))

    def branches(self) -> list[Branch]:
        """The leaves' conversations, in the order in which their last turns were begun."""
        inner = {turn.parent for turn in self._turns}
        seen: set[Turn] = set()
        found = []
        for leaf in sorted(self._turns, key=lambda turn: turn.number):
            if leaf in inner:
                continue
            path = leaf.path
            found.append(_branch(path, seen))
            seen.update(path)
        return found

    def __len__(self) -> int:
        """Turns that have ended."""
        return len(self._turns)

    def _forget(self, turn: Turn) -> None:
        del self._turns[turn]
        self._tokens -= len(turn.own_ids)
        if "text" not in turn.message:
            key = _key(turn.before, turn.message)
            self._by_key[key].remove(turn)
            if not self._by_key[key]:
                del self._by_key[key]


def _branch(path: list[Turn], seen: set[Turn]) -> Branch:
    branch = Branch(path[0].given, [], [], [], [], [], [turn for turn in path if turn not in seen], path[-1])
    for turn in path:
        drawn = turn.drawn
        assert drawn is not None, "a turn goes on from one that has ended"
        given = 0 if turn.parent is None else len(turn.given)
        branch.token_ids.extend(turn.given[:given] + drawn.token_ids)
        own, count = int(turn not in seen), len(drawn.token_ids)
        branch.written.extend([0] * given + [own] * count)
        branch.logprobs.extend([0.0] * given + (drawn.logprobs if own else [0.0] * count))
        branch.entropies.extend([0.0] * given + (drawn.entropies if own else [0.0] * count))
        branch.messages.extend([*turn.messages, turn.message])
    return branch


def _text(turn: Turn) -> str:
    return turn.before + str(turn.message.get("text", ""))


def _goes_on(turn: Turn, prompt: str) -> bool:
    """Whether a prompt begins with a turn's text, and the turn was cut off."""
    if "text" not in turn.message or turn.message.get("over"):
        return False
    text = _text(turn)
    return len(text) < len(prompt) and prompt.startswith(text)


def _key(before: str, value: Any) -> str:
    """A hash of what stands before and of what follows, in which equal JSON is equal."""
    if isinstance(value, dict):  # thoughts, which clients seldom send back, say nothing of who they answer
        value = {name: each for name, each in value.items() if name != "reasoning_content"}
    text = before + "\x1f" + json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
