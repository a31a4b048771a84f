"""The agent of `bench agents --shape`: a conversation by the package openai's asynchronous client.

A file of its own, which a process of agents runs without all that the benchmark imports.
"""

import functools
from typing import Any

ANSWER = "That is not right yet. Look at it again, step by step, and give the answer in the last line."
"""What the policy hears after each turn but the last."""


@functools.cache
def _client() -> Any:
    import openai  # which a recipe's agent may not need

    return openai.AsyncOpenAI(api_key="each conversation's", base_url="http://each.conversation", timeout=600)


async def again(endpoint: Any, row: dict[str, Any]) -> float:
    """The conversation that `bench.agents.Again` leads, as a client of the endpoint."""
    client = _client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = list(row["prompt"])
    for turn in range(row["turns"]):
        messages += [{"role": "user", "content": ANSWER}] if turn else []
        said = await client.chat.completions.create(model=endpoint.model, messages=messages)
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
    return 1.0
