"""OpenAI's chat API over the server's samplers: the base and saved weights, each by name.

A request becomes a `SampleRequest` like those of the Tinker API: it waits in the same queue, joins the same
batches, and counts against the same limits. Sampled tokens are kept for a while (`qerl.endpoint.history`), so
a client that continues a conversation continues with the tokens that were sampled, not with a new
tokenization of their text. Keys and values are computed again, except for prefixes that the engine has kept.

A model is named by the base's name, by the tinker:// path of saved weights, or by the last part of that path,
if that is unique among the caller's own saved weights and the adapters given at the start: weights that
others save change no name. Saved weights are opened for a request, and the most recently used stay open.
Teachers have tokenizers of their own, which are not available here, so teachers and adapters trained on them
are refused.
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
"""Maximum tokens kept of an owner's conversations with one model; a token takes some 40 bytes."""

KEPT_HISTORIES = 64
"""Maximum number of histories, one per owner and model; the least recently used goes first."""

KEPT_POLICIES = 8
"""Maximum number of saved weights that stay open."""


@dataclass(eq=False)
class _Drawing:
    """A request being sampled.

    Attributes:
        asked, reply: The request, and its reply in progress.
        history, turns: Its turns, and the history that keeps them.
        prompt: Token ids before the turns.
        key: The backend's key of the policy, while that is open for this request.
    """

    asked: Asked
    reply: Reply
    history: History
    turns: list[Turn]
    prompt: list[int]
    key: str = ""


class ChatDesk:
    """A `qerl.endpoint.http.Desk` over the server's queue; the gate has checked the key.

    Args:
        clients: Queue and futures.
        reader: Tokenizer and end tokens of the base.
    """

    def __init__(self, clients: Clients, reader: Reader) -> None:
        self._clients, self._reader = clients, reader
        self._templates = Templates(reader.tokenizer, None)
        self._bases = [base.name for base in clients.bases.values() if base.trainable]
        self._lock = threading.Lock()  # of the histories, which the worker writes to
        # By owner and model, least recently used first.
        self._histories: OrderedDict[tuple[str, str], History] = OrderedDict()
        self._open: OrderedDict[str, str] = OrderedDict()  # the backend's keys by source, least recent first

    async def models(self, key: str) -> Sequence[str]:
        """See `Desk.models`."""
        saved = await self._saved()
        return [*self._bases, *(name for name, paths in saved.items() if len(paths) == 1)]

    async def ask(self, key: str, asked: Asked) -> Reply:
        """See `Desk.ask`; each request is sampled anew."""
        source = await self._source(asked.model)
        reply = Reply(uuid.uuid4().hex, asked.n)
        if asked.n > self._clients.limits.num_samples:
            raise ApiError(
                f"n is {asked.n}; this server draws {self._clients.limits.num_samples}.", param="n"
            )
        with self._lock:
            history = self._history(source)
            # Texts and token ids are complete prompts; only messages refer to tokens sampled before.
            place = self._templates.place(asked, history if asked.is_chat else History())
            turns = [history.begin(place) for _ in range(asked.n)]
            before = place.parent.token_ids if place.parent is not None else []
        self._submit(_Drawing(asked, reply, history, turns, before + place.given), source)
        return reply

    def _history(self, source: str) -> History:
        """Return the caller's history with a model; if there are too many, forget the least recently used."""
        key = owners.now().name, source
        history = self._histories.setdefault(key, History(KEPT_TOKENS))
        self._histories.move_to_end(key)
        if len(self._histories) > KEPT_HISTORIES:
            self._histories.popitem(last=False)
        return history

    def reward(self, key: str, reward: float) -> None:
        """See `Desk.reward`; a server has no trajectories."""
        raise ApiError("This server does not accept rewards.", 404)

    def decode(self, token_ids: Sequence[int]) -> str:
        """See `Desk.decode`."""
        return decoded(self._reader.tokenizer, token_ids)

    def left(self, reply: Reply) -> None:
        """See `Desk.left`; sampling for a client that is gone is not completed."""
        reply.wanted = False

    async def _source(self, name: str) -> str:
        """Return the backend's name of a model: the base's name or a tinker:// path.

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
        """Return the paths of saved weights by the names under which the caller may ask for them."""
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
            ApiError: The request is too large, or the server overloaded.
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
        """Open a policy for one request and return its key; saved weights stay open afterwards."""
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
        """Turn a sampling result into the client's reply; called by the worker."""
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
        """Pass the failure of a future, which no client fetches, to the reply, and close the policy."""
        outcome = future.fetch()
        if isinstance(outcome, Failure):
            drawing.reply.settle(ApiError(outcome.error, 400 if outcome.category == "user" else 500))
        self._close(drawing)

    def _close(self, drawing: _Drawing) -> None:
        """Release the policy of a request, once."""
        with self._lock:
            key, drawing.key = drawing.key, ""
        if key:
            self._clients.later(methodcaller("drop_sampler", key))
