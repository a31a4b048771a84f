"""The package verifiers, as it is, plays several turns against the policy: sums with a calculator at hand.

`qerl train docs/examples/verifiers-calculator.yaml` runs `play` for each sample. The conversation, its trace
and the reward are verifiers'; the calculator is its user, who answers an expression with the value. What the
policy is asked goes through verifiers' own proxy to the endpoint of the run.

verifiers' harness `null` starts a program for every turn, in an environment that uv makes. For a conversation
that needs no machine that is most of the time on two cores, so `InProcess` asks from here, with the same
client of OpenAI. A harness that needs its program is named in `AgentConfig(harness=...)` instead, and the
line that replaces it is left out. The client is made once: a new one reads all certificates of the system,
which takes 30 ms of a CPU, as long as the policy's tokens of a turn. That of verifiers is made for each
conversation, since each has a key.
"""

import functools
import itertools
import os
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from qerl.agents.process import EndpointOf
from qerl.environments.calculator import Calculator

_NUMBERS = itertools.count()
_TOKENS = 40
"""Of a turn; a calculation and an answer take about ten each."""


class Sum(vf.TaskData):
    """A problem, whose prompt has worked examples before it."""

    answer: str


class Sums(vf.Task[Sum]):
    """A problem with its reward."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last turn states the answer behind ####."""
        said = str(trace.assistant_messages[-1].content) if trace.assistant_messages else ""
        return float(said.rpartition("####")[2].strip() == self.data.answer and "####" in said)


class InProcess(vf.Harness):
    """Asks for one turn of the policy, without a program of its own."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """See `Harness.launch`."""
        assert isinstance(data.prompt, list)
        client = _client().with_options(base_url=endpoint, api_key=secret)
        messages: Any = [message_to_wire(message) for message in data.prompt]
        await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


@functools.cache
def _client() -> openai.AsyncOpenAI:
    """Keeps no connection: each conversation has a proxy of its own."""
    http = openai.DefaultAsyncHttpxClient(limits=httpx.Limits(max_keepalive_connections=0))
    return openai.AsyncOpenAI(api_key="each turn's", http_client=http)


async def play(endpoint: EndpointOf, row: dict[str, Any]) -> float:
    """The reward of one conversation: the policy calculates, hears values, and answers."""
    variable = f"QERL_ENDPOINT_KEY_{next(_NUMBERS)}"  # verifiers looks for keys in the environment alone
    os.environ[variable] = endpoint.api_key
    try:
        agent = vf.make_agent(
            vf.AgentConfig(
                harness={"id": "null"},
                runtime={"type": "subprocess"},
                model=endpoint.model,
                client={"type": "eval", "base_url": endpoint.base_url, "api_key_var": variable},
                sampling={"max_tokens": _TOKENS},
            )
        )
        agent.harness = InProcess(agent.config.harness)
        task = Sums(Sum(prompt=row["prompt"], answer=row["answer"]))
        async with agent.interaction(task) as talk:
            turn = await talk.turn()
            for _ in range(2):  # a calculation, a second one after a slip
                value = Calculator().respond(turn.last_reply)
                if value is None:
                    break
                turn = await talk.turn(value)
    finally:
        del os.environ[variable]
    if not talk.trace.ok and "context_length_exceeded" in str(talk.trace.errors):
        return 0.0  # it has used up its tokens without an answer
    if not talk.trace.ok:
        raise RuntimeError(f"verifiers could not finish the conversation: {talk.trace.errors}")
    return float(talk.trace.reward)
