"""External agents: programs that call the policy through OpenAI's chat API and return a reward.

    def agent(endpoint, row):
        client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
        said = client.chat.completions.create(model=endpoint.model, messages=row["prompt"])
        return float(row["answer"] in said.choices[0].message.content)

Each trajectory of a rollout is one run of the agent, with its own API key. Agents run in threads, on the
event loop of `qerl.calls.beside` if they are coroutine functions, or anywhere else, and send requests at any
time; one thread drives the engine (`qerl.agents.play`). It takes requests between two rounds, so no request
waits for another one to finish. A request that continues a conversation resumes its sequence, whose keys and
values are kept (`Session.go_on`); any other request starts a sequence (`qerl.endpoint.history` decides
which). If the engine keeps prefixes, a new sequence computes only what is not in the cache yet.

An answer wakes the server and then its client. Each of them takes the GIL for some milliseconds from the
thread that launches the engine's work. So answers are sent once the next round has been launched: requests
are then read and written while the device computes, and not while it waits for the host. A turn is decoded to
text when its answer is sent; a request is tokenized in the server's thread, mostly at that time too. Agents
may run in a process of their own (`qerl.agents.process`); then only the server shares the GIL.

**Failures and repeats.** An agent that raises or times out costs its own row, as a failing tool does. A
client that disconnects costs nothing: its request is completed, and the answer is there if it asks again. A
request repeated word by word in the same trajectory gets the first one's answer, so it is not drawn or
counted twice; a client that wants another continuation sets `n` or another `seed`. Turns that are still being
drawn when a trajectory ends are dropped.

**Sampling.** In training the temperature and the filters are the run's, because the update computes the
policy's log-probabilities with them; a request for other values is refused. An evaluation has no update, so a
request gets the values that it asks for.

Seeds are keyed by the trajectory and the content of a request, so the order in which requests arrive does not
matter. Which rows decode together depends on when agents send requests, so a repeated run may differ in the
last bit of a log-probability, and occasionally in a token.
"""

from typing import Any

from qerl.agents.process import Agent, named
from qerl.errors import QeRLError


class Endpoint:
    """The environment of one run of an external agent, with its reward.

    Args:
        agent: The function to run.
        timeout: Time limit of a trajectory in seconds.
        at_once: Maximum number of agents that run at the same time; the others are queued.
        host, port: Address on which the endpoint listens; port 0 takes a free one.
        process: Whether the agent runs in a separate process (`qerl.agents.process`).

    Attributes:
        row: Columns of the row.
        reward: The agent's reward; None until there is one.
        error: Why there is no reward; None unless the agent failed.
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
        """True once there is a reward or an error."""
        return self.reward is not None or self.error is not None

    def reset(self, **row: Any) -> None:
        """Store the row; the agent starts with the rollout."""
        self.row, self.reward, self.error = row, None, None

    def get_reward(self) -> float | None:
        """Return the reward of the trajectory, or None if there is none yet.

        Raises:
            QeRLError: The agent failed.
        """
        if self.error is not None:
            raise QeRLError(self.error)
        return self.reward
