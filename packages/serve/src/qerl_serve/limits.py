"""Limits of the server, so that no client fills its memory; each refusal names the limit."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests and of the server's records.

    Attributes:
        context: Tokens of a prompt with its completion, or of a datum, for the model that trains.
        max_rank: Largest rank of an adapter.
        max_models: Models of all clients together.
        connections: Connections of all clients together; a client is told to use at most half of them to wait
            for samples.
        body: Bytes of a request that brings tensors; :attr:`json` bounds the others.
        datums: Datums of a request; clients cut longer batches into several requests.
        elements: Elements of all tensors of a request together, those that a sparse one leaves out included.
        num_samples: Completions of a request.
        topk: Most probable tokens at each position of a prompt.
        waiting: Waiting requests and unfetched results of all clients together.
        held: Bytes of those together, of requests while they wait and of results until they are forgotten;
            `qerl_serve.futures` says what may exceed it. Incoming bodies may take as much again.
        snapshots: Ephemeral snapshots of a session's models, and also the number of open samplers of saved
            weights; the least recently used goes first.
        silence_s: Silence after which a client is taken for dead and its models are dropped.
        gone_s: Silence after which it loses its models already if there is no room for another's. Clients of
            the package `tinker` speak every 10 seconds.
        keep_s: Time in which a fetched result can be fetched again.
        unfetched_s: Time for which an unfetched result is kept.
        poll_s: Wait before a client that asks for a result is told to ask again.
        gather_s: Pause between requests for samples that ends a burst.
        gather_most_s: Longest burst. Client 0.38 takes 0.26 to 0.49 s to send 128.
        pause_s: Wait of an update after which the samples that are being decoded are paused for it.
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
        """Bytes of a request in JSON: 16 for each token of the longest context, and 1 MiB for all else."""
        return min(self.body, 16 * context + (1 << 20))
