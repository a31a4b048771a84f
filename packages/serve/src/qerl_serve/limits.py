"""Limits that keep clients from filling the server's memory; each refusal names its limit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of the server's records.

    Attributes:
        context: Maximum tokens of a prompt plus its completion, or of a datum, for the trainable model.
        max_rank: Largest rank of an adapter.
        max_models: Maximum number of models of all clients together.
        connections: Maximum open connections of all clients; a client is told to use at most half of them to
            wait for samples.
        body: Maximum bytes of a request body with tensors; :meth:`json` bounds the others.
        datums: Maximum datums per request; clients split longer batches into several requests.
        elements: Maximum elements of all tensors of a request together; sparse tensors count as dense.
        num_samples: Maximum completions per request.
        topk: Maximum number of most probable tokens per prompt position.
        waiting: Maximum number of waiting requests and of results, fetched or not, of all clients together.
        held: Maximum bytes of these requests and results, until the results are forgotten;
            `qerl_serve.futures` says what may exceed it. Incoming bodies may take as much again.
        snapshots: Maximum ephemeral snapshots per session, and likewise open samplers of saved weights; the
            least recently used goes first.
        silence_s: Silence after which a client is considered dead and its session ends, with its models.
        gone_s: Silence after which a client's session may already be ended to make room for another client's
            model. Clients of the package `tinker` send a heartbeat every 10 seconds.
        keep_s: Time for which a fetched result can be fetched again.
        unfetched_s: Time for which an unfetched result is kept.
        poll_s: Time that a client's request for a result waits before the client is told to ask again.
        gather_s: Time without a new sampling request that ends a burst.
        gather_most_s: Maximum length of a burst. Client 0.38 takes 0.26 to 0.49 s to send 128 requests.
        pause_s: Time that a batch of samples may keep an update waiting before it is paused.
    """

    context: int
    max_rank: int = 32
    max_models: int = 8
    connections: int = 512
    body: int = 64 << 20
    datums: int = 4096
    elements: int = 1 << 24
    num_samples: int = 1024
    topk: int = 128
    waiting: int = 100_000
    held: int = 10**9
    snapshots: int = 16
    silence_s: float = 300.0
    gone_s: float = 60.0
    keep_s: float = 300.0
    unfetched_s: float = 3600.0
    poll_s: float = 30.0
    gather_s: float = 0.02
    gather_most_s: float = 0.5
    pause_s: float = 10.0

    def json(self, context: int) -> int:
        """Return the maximum bytes of a JSON body: 16 per token of `context` and 1 MiB for all else, at most
        `body`."""
        return min(self.body, 16 * context + (1 << 20))
