"""Agents of their own: programs that speak OpenAI's chat API to the policy, and give back a reward.

    def agent(endpoint, row):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        said = client.chat.completions.create(model=endpoint.model, messages=row["prompt"])
        return float(row["answer"] in said.choices[0].message.content)

Each trajectory of a rollout is one run of the agent, with a key of its own. The agents run in threads, on the
event loop of `qerl.calls.beside` if they are coroutine functions, or somewhere else altogether, and ask as
they like; one thread draws (`qerl.agents.play`). What they ask is taken in between two rounds of the engine,
so that nobody waits for anybody: a request that continues a conversation goes on with its sequence, whose
keys and values are kept (`Session.go_on`), and any other starts one (`qerl.endpoint.history` says which
does), which computes what no other has computed where the engine keeps prefixes.

An answer wakes the server and then its client, which take Python's lock from the thread that launches the
engine's work, some milliseconds for each of them. So answers go out once the next round was given to the
device: requests are then read and written while it computes, and not while it waits for the host. A turn
becomes text when its answer goes out, and a request becomes tokens in the server's thread, which mostly is at
that time too. Agents may run in a process of their own (`qerl.agents.process`), which leaves the server.

**What costs what.** An agent that raises, or whose time is up, costs its own row, as a tool that fails does.
A client that is gone costs nothing: what it asked for is drawn, and is there if it asks again. A request that
is sent again, word by word and in the same trajectory, gets the first one's answer, so it is not drawn or
counted twice; who wants another continuation asks for `n`, or with another `seed`. What was still being drawn
when a trajectory ended is left out.

**Sampling.** In training the temperature and the filters are the run's, because the update computes the
policy's log-probabilities with them; a request that asks for others is refused. An evaluation has no update,
and there a request that asks has what it asks for.

Seeds are keyed by the trajectory and by what a request says, so the order in which requests come in does not
matter. Which rows decode together follows from when agents answer; so a run that is repeated may differ in
the last bit of a log-probability, and at times by a token.
"""

from typing import Any

from qerl.agents.process import Agent, named
from qerl.errors import QeRLError


class Endpoint:
    """The environment of an agent of its own: one run of it, and its reward.

    Args:
        agent: What runs.
        timeout: Seconds that a trajectory may take.
        at_once: Agents that run at the same time; the others wait for their turn.
        host, port: Where the endpoint listens; port 0 takes a free one.
        process: Whether it runs in a process of agents beside this one (`qerl.agents.process`).

    Attributes:
        row: Columns of the row.
        reward: What the agent gave; None while there is none.
        error: Why there is none.
    """

    def __init__(
        self,
        agent: Agent,
        timeout: float = 600.0,
        at_once: int = 256,
        host: str = "127.0.0.1",
        port: int = 0,
        process: bool = False,
    ) -> None:
        if not callable(agent):
            raise QeRLError(f"The agent of an endpoint is a {type(agent).__name__}; pass a function.")
        if not 0 < timeout < float("inf"):
            raise QeRLError(f"timeout of the endpoint is {timeout}; give seconds above 0.")
        if at_once < 1:
            raise QeRLError(f"at_once of the endpoint is {at_once}; at least one agent must run at a time.")
        if process:
            named(agent)
        self.agent, self.timeout, self.at_once, self.host, self.port = agent, timeout, at_once, host, port
        self.process = process
        self.row: dict[str, Any] = {}
        self.reward: float | None = None
        self.error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is a reward, or a reason why there is none."""
        return self.reward is not None or self.error is not None

    def reset(self, **row: Any) -> None:
        """Take the row; the agent begins with the rollout."""
        self.row, self.reward, self.error = row, None, None

    def get_reward(self) -> float | None:
        """The reward of the trajectory.

        Raises:
            QeRLError: The agent failed.
        """
        if self.error is not None:
            raise QeRLError(self.error)
        return self.reward
