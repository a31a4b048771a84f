"""OpenAI's chat API over the server's samplers: the base and saved weights, each by name.

A request becomes a `SampleRequest` like those of the Tinker API: it waits in the same queue, joins the same
batches, and counts among what the server holds. What was drawn is kept as tokens for a while
(`qerl.endpoint.history`), so a client that goes on with a conversation goes on with the tokens that were
drawn, and not with those that its text would have; keys and values are computed again.

A model is named as the base is, by the tinker:// path of saved weights, or by the last part of that path
where only one of the asker's own and of those the server began with has it: what others save changes no name.
Saved weights are opened for a request and those that were asked for last stay open.
Teachers have tokenizers of their own, which nothing here reads or writes with, so they and what was trained
on them are refused.
"""

import asyncio
import secrets
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future as CallFuture
from dataclasses import dataclass
from functools import partial
from operator import methodcaller

from qerl.agents.chat import Templates, decoded
from qerl.endpoint.bodies import ApiError, Asked
from qerl.endpoint.history import History, Turn
from qerl.endpoint.http import check_model
from qerl.endpoint.reply import Choice, Outcome, Reply
from qerl.rollout.engine import Completion
from qerl_serve import owners
from qerl_serve.clients import Clients
from qerl_serve.futures import Answer, Busy, Failure, Future, TooLarge, failure_of
from qerl_serve.names import IMPORTED, split_path
from qerl_serve.requests import TOKEN_BYTES
from qerl_serve.types import Backend, Reader, SampleRequest, SampleResult

KEPT_TOKENS = 1_000_000
"""Tokens of an owner's conversations with one model that are kept; a token takes some 40 bytes."""

KEPT_HISTORIES = 64
"""Owners' conversations with a model that are kept, those used last."""

KEPT_POLICIES = 8
"""Policies of saved weights that stay open."""


@dataclass(eq=False)
class _Drawing:
    """A request that is drawn.

    Attributes:
        asked, reply: It, and its answer in the making.
        history, turns: Where its turns are kept.
        prompt: Tokens before them.
        key: The backend's of the policy, while it is open for this request.
    """

    asked: Asked
    reply: Reply
    history: History
    turns: list[Turn]
    prompt: list[int]
    key: str = ""


class ChatDesk:
    """See `qerl.endpoint.http.Desk`; the gate has looked at the key.

    Args:
        clients: Queue and futures.
        reader: Reads and writes texts of the base.
    """

    def __init__(self, clients: Clients, reader: Reader) -> None:
        self._clients, self._reader = clients, reader
        self._templates = Templates(reader.tokenizer, None)
        self._bases = [base.name for base in clients.bases.values() if base.trainable]
        self._lock = threading.Lock()  # of the histories, which the worker writes to
        # Of an owner with a model, the last used last.
        self._histories: OrderedDict[tuple[str, str], History] = OrderedDict()
        self._open: OrderedDict[str, str] = OrderedDict()  # the backend's keys by source, the last used last

    async def models(self, key: str) -> Sequence[str]:
        """See `Desk.models`."""
        saved = await self._saved()
        return [*self._bases, *(name for name, paths in saved.items() if len(paths) == 1)]

    async def ask(self, key: str, asked: Asked) -> Reply:
        """See `Desk.ask`; each request is drawn anew."""
        source = await self._source(asked.model)
        reply = Reply(uuid.uuid4().hex, asked.n)
        if asked.n > self._clients.limits.num_samples:
            raise ApiError(
                f"n is {asked.n}; this server draws {self._clients.limits.num_samples}.", param="n"
            )
        with self._lock:
            history = self._history(source)
            # Texts and ids are what a client has whole; only messages stand for other tokens than they say.
            place = self._templates.place(asked, history if asked.is_chat else History())
            turns = [history.begin(place) for _ in range(asked.n)]
            before = place.parent.token_ids if place.parent is not None else []
        self._submit(_Drawing(asked, reply, history, turns, before + place.given), source)
        return reply

    def _history(self, source: str) -> History:
        """What the asker drew from a model; a surplus one of others is forgotten."""
        key = owners.now().name, source
        history = self._histories.setdefault(key, History(KEPT_TOKENS))
        self._histories.move_to_end(key)
        if len(self._histories) > KEPT_HISTORIES:
            self._histories.popitem(last=False)
        return history

    def reward(self, key: str, reward: float) -> None:
        """See `Desk.reward`; a server has no trajectories."""
        raise ApiError("This server takes no rewards.", 404)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Desk.decode`."""
        return decoded(self._reader.tokenizer, token_ids)

    def left(self, reply: Reply) -> None:
        """See `Desk.left`; what nobody waits for is not finished."""
        reply.wanted = False

    async def _source(self, name: str) -> str:
        """What the backend knows the model of a name by.

        Raises:
            ApiError: There is no such model, or it is a teacher.
        """
        if name in self._bases:
            return name
        if name in self._clients.bases:
            raise ApiError(
                f"The model {name!r} is a teacher, whose tokenizer these routes do not have; ask for "
                f"{self._bases[0]}, or sample from the teacher with the Tinker API.",
                param="model",
            )
        saved = await self._saved()
        check_model(name, [*self._bases, *saved])
        if len(paths := saved[name]) > 1:
            raise ApiError(
                f"{len(paths)} saved weights have the name {name!r}; ask for one by its path: "
                f"{', '.join(paths)}.",
                404,
                param="model",
                code="model_not_found",
            )
        return paths[0]

    async def _saved(self) -> dict[str, list[str]]:
        """Paths of saved weights by the names that they go by for whoever asks."""
        listed = await asyncio.wrap_future(self._clients.queue.call(methodcaller("checkpoints")))
        found = {checkpoint.path: [checkpoint.path] for checkpoint in listed}
        for checkpoint in listed:
            run, _, name = split_path(checkpoint.path)
            if run == IMPORTED or checkpoint.notes.owner == owners.now().name:
                found.setdefault(name, []).append(checkpoint.path)
        return found

    def _submit(self, drawing: _Drawing, source: str) -> None:
        """Enqueue a request to a policy.

        Raises:
            ApiError: The server has too much to do.
        """
        clients, reply = self._clients, drawing.reply
        future = Future(f"chat:{reply.name}", "sample", "", bytes=TOKEN_BYTES * len(drawing.prompt))
        try:
            clients.futures.add(future)
        except (Busy, TooLarge) as error:
            raise ApiError(str(error), 429 if isinstance(error, Busy) else 413) from error
        future.when_settled(partial(self._settled, drawing, future))

        def opened(call: "CallFuture[str]") -> None:
            if (error := call.exception()) is not None:
                future.settle(failure_of(error))
                return
            drawing.key = call.result()
            if future.outcome is not None:  # the server ends
                self._close(drawing)
            else:
                clients.queue.sample(future, self._request(drawing), answer=partial(self._answer, drawing))

        clients.queue.call(partial(self._opened, source)).add_done_callback(opened)

    def _opened(self, source: str, backend: Backend) -> str:
        """The backend's key of a policy, for one request; saved weights that were asked for stay open."""
        key = backend.sampler(source, self._bases[0])
        if source not in self._bases:
            former = self._open.pop(source, None)
            self._open[source] = backend.sampler(source, self._bases[0])
            surplus = [] if former is None else [former]
            if len(self._open) > KEPT_POLICIES:
                surplus.append(self._open.popitem(last=False)[1])
            for each in surplus:
                backend.drop_sampler(each)
        return key

    def _request(self, drawing: _Drawing) -> SampleRequest:
        asked, reply = drawing.asked, drawing.reply
        return SampleRequest(
            sampler=drawing.key,
            prompt=tuple(drawing.prompt),
            seed=secrets.randbits(63) if asked.seed is None else asked.seed & ((1 << 63) - 1),
            num_samples=asked.n,
            max_tokens=asked.max_tokens,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            top_k=asked.top_k or 0,
            min_p=asked.min_p or 0.0,
            stop_strings=asked.stop,
            wanted=lambda: reply.wanted and reply.outcome is None,
            told=reply.tell if asked.stream else None,
        )

    def _answer(self, drawing: _Drawing, result: SampleResult) -> Answer:
        """Give a client its answer; called by the worker."""
        choices: list[Choice] = []
        for turn, sequence in zip(drawing.turns, result.sequences, strict=True):
            drawn = Completion(list(sequence.tokens), list(sequence.logprobs), [], sequence.stop_reason)
            ends = drawn.token_ids[-1] in self._reader.end_token_ids
            choices.append(self._templates.choice(drawing.asked, drawing.prompt, drawn, ends))
            if drawing.asked.is_chat:
                with self._lock:
                    drawing.history.end(turn, drawn, choices[-1].message)
        drawing.reply.settle(Outcome(drawing.prompt, choices))
        return Answer(b"")

    def _settled(self, drawing: _Drawing, future: Future) -> None:
        """Take the outcome of a future, which nobody fetches, for the reply's, and close the policy."""
        outcome = future.fetch()
        if isinstance(outcome, Failure):
            drawing.reply.settle(ApiError(outcome.error, 400 if outcome.category == "user" else 500))
        self._close(drawing)

    def _close(self, drawing: _Drawing) -> None:
        """Give up the policy of a request, once."""
        with self._lock:
            key, drawing.key = drawing.key, ""
        if key:
            self._clients.later(methodcaller("drop_sampler", key))
