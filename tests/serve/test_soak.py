"""A server of a real, tiny model under clients that die, repeat and reorder, and under two at once."""

import gc
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("google.protobuf", reason="needs the extra serve")

from qerl_serve import descriptors as wire
from tests.fuzz.server import Kind, ModelClient, run
from tests.support.http import Client, connected
from tests.support.serve import tiny_backend

pytestmark = pytest.mark.slow

LAST_ANSWER_BYTES = 1000
"""May still be held; an adapter of rank 4 has sixteen times as many."""


def tensor_bytes() -> int:
    """Of all tensors that are alive in this process, each memory counted once."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held(backend):
    """What is neither how updates are computed nor a sum of what was done, but there for a client."""
    others = ("update_", "prefilled_")
    return {name: value for name, value in backend.gauges().items() if not name.startswith(others)}


def test_clients_that_come_and_go_leave_no_adapter_no_sampler_and_no_memory(tmp_path):
    backends = [tiny_backend(tmp_path / "first", most=10_000), tiny_backend(tmp_path / "then", most=10_000)]
    kinds = [Kind(lambda _, backend=backend: backend, ModelClient, held) for backend in backends]
    run(60, 0, tmp_path, kinds[0])  # so that what is made once is there
    before = tensor_bytes()
    did = run(300, 1, tmp_path, kinds[1])  # which also asks that nothing is held at the end
    assert did["steps"] > 5 and did["samples"] > 5 and did["clients"] > 5
    assert tensor_bytes() < before + LAST_ANSWER_BYTES


PROMPTS = ((5, 9, 77), (5, 9, 77, 31, 6), (64, 7), (3,))


class Sampler(threading.Thread):
    """One client's requests for samples of the base and of a model that has learnt, as its own thread."""

    def __init__(self, client: Client, seed: int, start: threading.Barrier) -> None:
        super().__init__()
        self._client, self._seed, self._barrier = client, seed, start
        self.tokens: list[list[int]] = []

    def run(self) -> None:
        client = self._client
        model = client.ask(
            "create_model", session_id=client.session, model_seq_id=0, base_model="tiny",
            lora_config={"rank": 4, "seed": self._seed},
        )["model_id"]  # fmt: skip
        for step in range(3):
            client.send_pass(model, 2 * step + 1, [5, 9, self._seed])
            client.ask("optim_step", model_id=model, seq_id=2 * step + 2, adam_params={"learning_rate": 0.05})
        learnt = client.ask("save_weights_for_sampler", model_id=model, seq_id=7)["sampling_session_id"]
        base = client.post("create_sampling_session", session_id=client.session, base_model="tiny")
        self._barrier.wait()
        asked = [
            client.post(
                "asample", sampling_session_id=sampler, seq_id=number, num_samples=2,
                prompt={"chunks": [{"tokens": list(prompt)}]},
                sampling_params={"max_tokens": 6, "seed": self._seed + number, "stop": []},
            )["request_id"]
            for sampler in (base["sampling_session_id"], learnt)
            for number, prompt in enumerate(PROMPTS * 3)
        ]  # fmt: skip
        for request_id in asked:
            answer = wire.SampleResponse.FromString(client.result(request_id))
            self.tokens += [np.frombuffer(s.tokens, "<i4").tolist() for s in answer.sequences]


def drawn(folder, seeds: list[int]) -> tuple[list[list[list[int]]], float]:
    """What clients of these seeds draw who are there at the same time, and how many requests were the most
    that were decoded together."""
    with connected(folder, tiny_backend(folder), context=512, gather_s=0.2) as first:
        clients = [first, *(Client(first.http, first.server, first.backend) for _ in seeds[1:])]
        barrier = threading.Barrier(len(seeds))
        samplers = [Sampler(c, seed, barrier) for c, seed in zip(clients, seeds, strict=True)]
        for sampler in samplers:
            sampler.start()
        for sampler in samplers:
            sampler.join()
        batches = first.server.metrics.registry.get_sample_value(
            "qerl_sample_batch_requests_bucket", {"le": "+Inf"}
        )
        return [sampler.tokens for sampler in samplers], batches


def test_two_clients_at_once_draw_what_each_draws_alone(tmp_path):
    seeds = [11, 70]
    together, batches = drawn(tmp_path / "both", seeds)
    assert batches < 2 * len(PROMPTS) * 3 * 2  # requests of both were decoded together
    for number, seed in enumerate(seeds):
        ((alone,), _) = drawn(tmp_path / str(seed), [seed])
        assert len(alone) == 2 * 2 * 3 * len(PROMPTS)
        assert together[number] == alone
    assert together[0] != together[1]
