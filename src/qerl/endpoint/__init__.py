"""OpenAI's chat API over sequences of the engine, for agents that live in a program of their own.

    bodies     what clients send, read and checked, and the shape of errors
    history    which messages stand for which tokens: the conversations of one trajectory as a tree
    answers    what clients are sent, whole or in pieces
    reply      an answer in the making, between the thread that draws and those that send
    stops      what ends the turn of one request
    http       the routes
    listening  a server of its own in a thread, as training has it

Whoever draws tokens is a `Desk`: a trainer's rollout (`qerl.agents.desk`), or `qerl serve`. Nothing here
knows a model or a session.

The routes are Starlette's, so that `qerl serve` mounts the same ones that training runs by itself. Both it
and uvicorn are requirements of the package, and not of the server's alone: two small wheels of plain Python
whose own requirements (anyio, click, h11) come with huggingface_hub's HTTP client anyway, while what the
server needs beside them (protobuf, prometheus-client) has no use in training.
"""
