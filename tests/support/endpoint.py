"""Agents that play against a tiny policy through its endpoint, and a client that needs no package."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from qerl.agents.outside import Endpoint
from qerl.agents.play import Endpoints
from qerl.agents.process import EndpointOf
from qerl.calls.beside import Beside
from qerl.rollout.engine import SamplingParams
from qerl.rollout.portable.engine import PortableEngine
from tests.support.models import make_tiny_model, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
EOS_ID = TOKENIZER.eos_token_id


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Refused(Exception):
    """An answer that is none: its status and its error."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error


def post(endpoint: EndpointOf, route: str, **body: Any) -> dict[str, Any]:
    """What the endpoint answers to a body with the model's name in it."""
    return send(endpoint, route, {"model": endpoint.model} | body)


def send(endpoint: EndpointOf, route: str, body: Any, key: str | None = None) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key or endpoint.api_key}", "Content-Type": "application/json"}
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{endpoint.base_url}/{route}", content, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise Refused(error.code, json.loads(error.read())["error"]) from None


def chat(endpoint: EndpointOf, messages: Sequence[dict[str, Any]], **options: Any) -> dict[str, Any]:
    """A chat completion, with its tokens."""
    return post(endpoint, "chat/completions", messages=list(messages), return_token_ids=True, **options)


def message_of(answer: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    return answer["choices"][choice]["message"]


class Watched(PortableEngine):
    """Keeps its last session, of which everything must have been finished at its end.

    Attributes:
        last: The session.
    """

    last: Any = None

    @contextmanager
    def session(self, *args, **kwargs):
        with super().session(*args, **kwargs) as session:
            self.last = session
            yield session


def tiny_engine(**overrides) -> Watched:
    return Watched(make_tiny_model(**overrides), pad_token_id=0)


@contextmanager
def rollouts(environments: Sequence[Endpoint], engine: Any = None, tokenizer: Any = TOKENIZER, **params: Any):
    """A function that lets the agents of these environments play some rows, as often as it is called."""
    own = SamplingParams(**({"max_tokens": 200, "stop_token_ids": (EOS_ID,)} | params))
    engine, calls = engine or tiny_engine(), Beside()
    endpoints = Endpoints(tokenizer, None, calls)

    def play_rows(*rows: dict[str, Any]):
        for environment, row in zip(environments, rows, strict=True):
            environment.reset(**row)
        return endpoints.play(engine, own, None, environments, range(len(rows)), True)

    try:
        yield play_rows
    finally:
        endpoints.close()
        calls.close()


def play(
    agent: Callable[[EndpointOf, dict[str, Any]], Any],
    rows: Sequence[dict[str, Any]] = ({},),
    engine: Any = None,
    fixed: bool = True,
    tokenizer: Any = TOKENIZER,
    beside: Beside | None = None,
    options: dict[str, Any] | None = None,
    **params: Any,
):
    """The environments and trajectories of an agent's runs, one for each row."""
    environments = [Endpoint(agent, **({"timeout": 200.0} | (options or {}))) for _ in rows]
    for environment, row in zip(environments, rows, strict=True):
        environment.reset(**row)
    own = SamplingParams(**({"max_tokens": 200, "stop_token_ids": (EOS_ID,)} | params))
    engine = engine or tiny_engine()
    calls = beside or Beside()
    endpoints = Endpoints(tokenizer, None, calls)
    try:
        found = endpoints.play(engine, own, None, environments, range(len(rows)), fixed)
    finally:
        endpoints.close()
        calls.close()
    if isinstance(engine, Watched):  # nothing is held but of what was being drawn at the end
        assert all(each.stage == "drawing" for each in engine.last._sequences.values())
        assert not engine.last._kept
        assert set(engine.last._uniforms) <= set(engine.last._sequences.values())
    return environments, found


def check_logprobs(model, trajectory, temperature=1.0, bound=1e-4):
    """What the policy is said to have drawn has the log-probabilities that the model gives it in one pass."""
    ids = [*trajectory.prompt_ids, *trajectory.token_ids]
    with torch.no_grad():
        logits_TV = model(torch.tensor([ids])).logits[0].double() / temperature
    logprobs_TV = logits_TV.log_softmax(-1)
    begin = len(trajectory.prompt_ids)
    for at, (token, own, value) in enumerate(
        zip(trajectory.token_ids, trajectory.written, trajectory.logprobs, strict=True)
    ):
        expected = logprobs_TV[begin + at - 1, token].item() if own else 0.0
        assert abs(value - expected) < bound, (at, own, value, expected)
