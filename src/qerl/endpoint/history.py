"""The conversations of one trajectory as a tree, from messages to the tokens that were drawn.

A client knows messages, the engine knows tokens, and text does not determine tokens: a conversation that is
rendered and tokenized again often has other tokens, with other log-probabilities, and the gradient would be
of tokens that were never drawn. So the drawn tokens are kept as a `Turn`, under the messages before the turn
and the message that the client received. The longest prefix of a request that ends with such a turn continues
token by token; only the messages after it are rendered. If a client rewrites its history (drops a turn,
shortens a tool's answer, leaves thoughts out), the conversation forks after the last unchanged turn, or
starts anew if there is none.

    system user | turn 1 | user | turn 2 | user | turn 3
                         | user' | turn 4                     a fork: turn 1 is common to both

Each leaf is a `Branch`, one row of an update. A turn that several branches share is drawn once and counts
once: in the first branch its tokens are the policy's, in the others they are context.

Prompts of `/v1/completions` are kept in the same tree. Token ids continue a branch whose tokens they begin
with. A text continues a branch whose text it begins with, if the last turn was cut off by a length or a stop
text. A turn that ended with the stop token is over: text cannot show whether the token is still there.

Given up: a client that alters a message it received, for example by stripping a space, forks its history at
each turn.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from qerl.endpoint.bodies import Message
from qerl.rollout.engine import Completion


class Template(Protocol):
    """A chat template that renders messages (`qerl.agents.template.TurnTemplate`)."""

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[int]:
        """Tokenize a conversation, up to the start of the policy's turn."""

    def suffix_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """Return the tokens between two turns of the policy, given the last token of the first turn."""


@dataclass(eq=False)
class Turn:
    """A turn of the policy.

    Attributes:
        parent: The turn that this turn continues; None for the first turn of a conversation.
        given: Tokens between the parent's and its own; the prompt for a first turn.
        before: Key of everything before the turn: a hash of messages, or a text; empty for token ids.
        messages: Messages between the parent's and its own; empty for a first turn.
        number: Position in the order in which turns were begun, from 0.
        drawn: The completion that the policy drew; None until the turn has ended.
        message: The message that the client received for it.
        handle: An object of the owner, such as a sequence of the engine.
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
        """The turns of its conversation up to this turn."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    @property
    def token_ids(self) -> list[int]:
        """All tokens up to the end of this turn, or up to its start while it is being drawn."""
        return [token for turn in self.path for token in turn.own_ids]

    @property
    def own_ids(self) -> list[int]:
        """The given tokens, followed by the drawn ones."""
        return self.given + (self.drawn.token_ids if self.drawn is not None else [])


@dataclass(frozen=True)
class Place:
    """A place in the history at which a request continues.

    Attributes:
        parent, given, before, messages: Attributes of the `Turn` that begins there.
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
        token_ids: All other tokens.
        written: For each of `token_ids` 1 if the policy drew it and no earlier branch has it, else 0.
        logprobs, entropies: Values of the tokens with 1; 0.0 elsewhere.
        messages: All messages after the prompt.
        turns: Turns that no earlier branch has.
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
    """The ended turns of a trajectory, found by the conversation before them.

    Args:
        most_tokens: Maximum number of tokens of all turns, above which the oldest turns are forgotten; None
            keeps all.
    """

    def __init__(self, most_tokens: int | None = None) -> None:
        self._most, self._tokens, self._begun = most_tokens, 0, 0
        self._turns: dict[Turn, None] = {}  # ended turns, in the order of their ends
        self._by_key: dict[str, list[Turn]] = {}

    def place(self, messages: Sequence[Message], tools: Sequence[Any], template: Template) -> Place:
        """Return where a conversation continues: after its longest prefix that ends with a known turn.

        Args:
            messages: In the form of `qerl.endpoint.bodies.messages_of`; the last is not the policy's.
            tools: Tools as chat templates take them.
            template: The template of conversations with these tools.

        Raises:
            QeRLError: The template cannot continue a turn.
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
        """Return where a text or token ids continue.

        Args:
            prompt: Text, or ids.
            encode: Tokenizes a text; the second argument is True if nothing precedes it.
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
        """Create a turn, which `place` finds after `end`."""
        self._begun += 1
        return Turn(place.parent, place.given, place.before, place.messages, self._begun - 1)

    def end(self, turn: Turn, drawn: Completion, message: Message) -> None:
        """Store the completion of a turn.

        Args:
            turn: A turn from `begin`.
            drawn: The completion, with at least one token.
            message: The client's message, in the form of `messages_of`, or ``{"text": ...}`` for a text.
        """
        turn.drawn, turn.message = drawn, message
        self._turns[turn] = None
        if "text" not in message:
            self._by_key.setdefault(_key(turn.before, message), []).append(turn)
        self._tokens += len(turn.own_ids)
        while self._most is not None and self._tokens > self._most and len(self._turns) > 1:
            self._forget(next(iter(self._turns)))

    def branches(self) -> list[Branch]:
        """Return the branch of each leaf, in the order in which the leaves were begun."""
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
        """Number of turns that have ended."""
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
    """Return True if a prompt begins with a turn's text, and the turn was cut off."""
    if "text" not in turn.message or turn.message.get("over"):
        return False
    text = _text(turn)
    return len(text) < len(prompt) and prompt.startswith(text)


def _key(before: str, value: Any) -> str:
    """Hash a value as JSON with sorted keys, together with the key of what precedes it."""
    if isinstance(value, dict):  # without thoughts, which clients seldom send back
        value = {name: each for name, each in value.items() if name != "reasoning_content"}
    text = before + "\x1f" + json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
