"""OpenAI's chat API over sequences of the engine, for agents in programs of their own.

    bodies     request bodies, parsed and checked, and the shape of errors
    history    the conversations of one trajectory as a tree, from messages to tokens
    answers    response bodies, whole or streamed
    reply      a pending answer, shared by the engine's thread and the threads that send it
    stops      stops that end the turn of one request
    http       the routes
    listening  a server in a thread, for training

The program that draws tokens implements `Desk`: a trainer's rollout (`qerl.agents.desk`), or `qerl serve`.
Nothing here knows a model or a session.

The routes are Starlette's, so that `qerl serve` mounts the same routes that training serves in a thread.
Starlette and uvicorn are requirements of the package, not only of the server: two small wheels of plain
Python whose own requirements (anyio, click, h11) come with huggingface_hub's HTTP client anyway. The server's
other requirements (protobuf, prometheus-client) have no use in training.
"""
