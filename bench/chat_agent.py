"""The agent of `bench agents --shape`: a conversation by the asynchronous client of the package openai.

It is a file of its own, so that a subprocess of agents need not import the whole benchmark.
"""

import functools
from typing import Any

ANSWER = "That is not right yet. Look at it again, step by step, and give the answer in the last line."
"""The answer to each turn of the policy but the last."""


@functools.cache
def _client() -> Any:
    import openai  # a recipe's agent may not need it

    return openai.AsyncOpenAI(api_key="each conversation's", base_url="http://each.conversation", timeout=600)


async def again(endpoint: Any, row: dict[str, Any]) -> float:
    """Lead the same conversation as `bench.agents.Again`, as a client of the endpoint."""
    client = _client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = list(row["prompt"])
    for turn in range(row["turns"]):
        messages += [{"role": "user", "content": ANSWER}] if turn else []
        said = await client.chat.completions.create(model=endpoint.model, messages=messages)
        messages.append({"role": "assistant", "content": said.choices[0].message.content})
    return 1.0
