"""Order, repeats, failures and turns of the server's queue, without HTTP and without a model."""

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl.errors import QeRLError
from qerl_serve.clients import Clients
from qerl_serve.futures import Answer, Busy, Failure, Future, Futures
from qerl_serve.line import Job, Line
from qerl_serve.messages import sample_bytes
from qerl_serve.metrics import Metrics
from qerl_serve.queue import SampleJob, WorkQueue
from qerl_serve.types import SampleRequest, SampleResult
from qerl_serve.worker import Worker
from tests.support.wire import BAD_TOKEN, DEFECT_TOKEN, FakeBackend, limits


def sample_bytes_of(result: SampleResult) -> Answer:
    return Answer(sample_bytes(result), protobuf=True)


def job(ran: list[int], number: int, kind: str = "forward_backward", fails: bool = False) -> Job:
    def run(backend) -> Answer:
        ran.append(number)
        if fails:
            raise QeRLError("that was wrong")
        return Answer(b"")

    return Job(Future(f"m:{number}", kind, "s"), run)


class Playground:
    """A queue with a worker, whose jobs note that they ran."""

    def __init__(self, tmp_path: Path) -> None:
        self.queue = WorkQueue(0.0, 0.5, 0.05)
        self.backend = FakeBackend(tmp_path)
        self.metrics = Metrics()
        self.worker = Worker(self.queue, self.backend, self.metrics)

    def __enter__(self) -> "Playground":
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()
        if self.worker.ident is not None:
            self.worker.join()

    def submit(self, made: Job, number: int | None, model: str = "m") -> str:
        return self.queue.submit(model, number, lambda request_id, line: made)


def settled(future: Future, seconds: float = 5.0) -> Answer | Failure:
    event = threading.Event()
    future.when_settled(event.set)
    assert event.wait(seconds), f"{future.request_id} was not settled"
    assert future.outcome is not None
    return future.outcome


@pytest.fixture
def ground(tmp_path: Path):
    with Playground(tmp_path) as made:
        yield made


@pytest.mark.parametrize("seed", range(20))
def test_requests_run_once_each_in_their_order_however_they_arrive(ground: Playground, seed: int):
    rng, ran, count = random.Random(seed), {"a": [], "b": []}, 30
    for model in ran:
        ground.queue.add_line(model)
    arrivals = [(model, number) for model in ran for number in range(count) for _ in range(rng.randint(1, 3))]
    rng.shuffle(arrivals)
    futures = {}
    started = rng.randrange(len(arrivals))
    for place, (model, number) in enumerate(arrivals):
        if place == started:
            ground.worker.start()
        made = job(ran[model], number, rng.choice(["forward_backward", "optim_step"]))
        assert ground.submit(made, number, model) == f"{model}:{number}"
        futures.setdefault((model, number), made.future)  # later ones are repeats, which are not taken
    for future in futures.values():
        settled(future)
    assert ran == {"a": [*range(count)], "b": [*range(count)]}


def test_a_request_waits_for_the_one_before_it(ground: Playground):
    ran: list[int] = []
    ground.queue.add_line("m")
    ground.worker.start()
    ground.submit(job(ran, 0), 0)
    late = job(ran, 2)
    ground.submit(late, 2)
    time.sleep(0.05)
    assert late.future.outcome is None
    assert ground.queue.missing("m") == 1
    ground.submit(job(ran, 1), 1)
    settled(late.future)
    assert ran == [0, 1, 2]
    assert ground.queue.missing("m") is None


def test_a_request_without_a_number_gets_the_next_one(ground: Playground):
    ground.queue.add_line("m")
    ran: list[int] = []
    assert [ground.submit(job(ran, number), None) for number in range(3)] == ["m:0", "m:1", "m:2"]
    with pytest.raises(QeRLError, match="has just ended"):
        ground.submit(job(ran, 0), None, "gone")
    with pytest.raises(QeRLError, match="seq_id is -1"):
        ground.submit(job(ran, 0), -1)
    with pytest.raises(QeRLError, match="without gaps"):
        ground.submit(job(ran, 0), 10**9)


def test_what_was_sent_before_a_failure_was_known_does_not_run():
    line, ran = Line("m"), []
    jobs = [job(ran, number, fails=number == 1) for number in range(5)]
    for number in (0, 1, 2, 4):  # part of a call, the step after it
        line.add(number, jobs[number])
    assert line.refusal(line.pop()) is None
    wrong = line.pop()
    assert line.refusal(wrong) is None
    line.failed(wrong, Failure("that was wrong", "user"))
    refusal = line.refusal(line.pop())
    assert refusal is not None and "m:1" in refusal.error and "that was wrong" in refusal.error
    line.told("m:1")
    line.add(3, jobs[3])  # sent by a client that knew
    assert line.refusal(line.pop()) is None
    assert line.refusal(line.pop()) is None  # the failure is over, whoever came first


@pytest.mark.parametrize(("fetched", "knows"), [("m:0", False), ("m:1", True), ("m:2", True)])
def test_only_who_fetched_this_failure_knows_of_it(fetched: str, knows: bool):
    line, jobs = Line("m"), [job([], 0, "forward"), *(job([], number) for number in range(1, 4))]
    for number in range(3):
        line.add(number, jobs[number])
    for _ in range(2):  # a pass without gradients, and one with
        taken = line.pop()
        assert line.refusal(taken) is None
        line.failed(taken, Failure("that was wrong", "user"))
    assert line.refusal(line.pop()) is not None
    line.told(fetched)
    line.add(3, jobs[3])
    assert (line.refusal(line.pop()) is None) == knows


def test_a_pass_that_changes_nothing_may_fail_without_consequence():
    line, ran = Line("m"), []
    for number, kind in enumerate(["forward", "optim_step"]):
        line.add(number, job(ran, number, kind))
    failed = line.pop()
    line.refusal(failed)
    line.failed(failed, Failure("no", "user"))
    assert line.refusal(line.pop()) is None


def test_failures_reach_their_request_alone(ground: Playground):
    ground.queue.add_line("m")
    ground.queue.add_line("n")
    ran: list[int] = []
    bad, other = job(ran, 0, fails=True), job(ran, 0)
    ground.submit(bad, 0)
    ground.submit(other, 0, "n")
    ground.worker.start()
    assert settled(bad.future) == Failure("that was wrong", "user")
    assert settled(other.future) == Answer(b"")
    assert 'outcome="user"' in ground.metrics.text().decode()


def sample_request(*prompt: int) -> SampleRequest:
    return SampleRequest("base", prompt, seed=0, max_tokens=1)


def test_a_defect_ends_a_batch_and_not_the_server(ground: Playground):
    ground.backend.samplers["base"] = [0.0]
    futures = [Future(f"s:{number}", "sample", "s") for number in range(4)]
    for future, token in zip(futures, (1, BAD_TOKEN, 2, DEFECT_TOKEN), strict=True):
        ground.queue.sample(future, sample_request(token), sample_bytes_of)
    ground.worker.start()
    assert {settled(future).category for future in futures} == {"server"}
    futures = [Future(f"t:{number}", "sample", "s") for number in range(2)]
    for future, token in zip(futures, (1, BAD_TOKEN), strict=True):
        ground.queue.sample(future, sample_request(token), sample_bytes_of)
    assert isinstance(settled(futures[0]), Answer)
    assert settled(futures[1]).category == "user"


def test_sampling_and_updates_take_turns(ground: Playground):
    ground.backend.samplers["base"], ground.backend.seconds = [0.0], 0.01
    order: list[str] = []
    for model in "ab":
        ground.queue.add_line(model)
        for number in range(4):

            def run(backend, model=model) -> Answer:
                order.append(model)
                return Answer(b"")

            kind = "optim_step" if number % 2 else "forward_backward"
            made = Job(Future(f"{model}:{number}", kind, "s"), run)
            ground.queue.submit(model, number, lambda request_id, line, made=made: made)
    last = made.future
    for number in range(3):
        future = Future(f"s:{number}", "sample", "s")
        future.when_settled(lambda: order.append("s"))
        ground.queue.sample(future, sample_request(1), sample_bytes_of)
    ground.worker.start()
    settled(last)
    assert order == ["s"] * 3 + list("aabbbbaa") or order == ["s"] * 3 + list("aabbaabb")


def test_a_batch_takes_in_what_arrives_unless_an_update_waits(ground: Playground):
    ground.backend.samplers["base"], ground.backend.seconds = [0.0], 0.1
    futures = [Future(f"s:{number}", "sample", "s") for number in range(3)]
    ground.queue.sample(futures[0], sample_request(1), sample_bytes_of)
    ground.worker.start()
    time.sleep(0.03)
    ground.queue.sample(futures[1], sample_request(2), sample_bytes_of)
    settled(futures[1])
    assert ground.backend.batches in ([], [2])  # one batch, which may not have ended yet
    time.sleep(0.15)
    assert ground.backend.batches == [2]


def test_a_batch_is_paused_for_an_update_that_it_has_kept_waiting(monkeypatch: pytest.MonkeyPatch):
    """For five seconds, counted anew in each batch and behind each pause."""
    now = 100.0
    monkeypatch.setattr("qerl_serve.queue.time", SimpleNamespace(monotonic=lambda: now))
    queue, asked = WorkQueue(0.0, 0.0, 5.0), [0]
    queue.add_line("m")

    def update() -> None:
        queue.submit("m", None, lambda request_id, line: job([], 0))

    def late() -> list[SampleJob]:
        asked[0] += 1
        queue.sample(Future(f"s:{asked[0]}", "sample", "s"), sample_request(1), sample_bytes_of)
        return queue.late_samples()

    late()
    assert not queue.update_overdue()
    update()
    now += 60.0  # a long round
    assert not queue.update_overdue() and not late()
    now += 4.0
    assert not queue.update_overdue()
    now += 1.0
    assert queue.update_overdue()
    (line,) = queue.ready_lines()
    update()
    queue.next_update(line)
    now += 60.0  # of updates
    assert not queue.update_overdue()
    assert len(late()) == 2 and not late()  # what has arrived during the wait, and nothing behind it
    now += 4.0
    assert not queue.update_overdue()
    assert queue.next_update(line)  # as if its session had ended
    assert not queue.update_overdue() and len(late()) == 2
    update()
    assert not queue.update_overdue()
    now += 5.0
    assert queue.update_overdue()
    assert not queue.take_samples() and not queue.update_overdue(), "another batch"


class InRounds(FakeBackend):
    """Samples in rounds until somebody tells it to end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ended = threading.Event()

    def sample(self, requests, arrived, overdue):
        open_requests = list(requests)
        while not self.ended.is_set():
            self._work("", "round")
            open_requests += arrived()
            if (work := overdue()) is not None:
                self._work("", "pause")
                work()
        yield from enumerate(map(self._answer, open_requests))


def test_the_worker_runs_updates_in_the_pauses_of_a_batch(tmp_path: Path):
    ground = Playground(tmp_path)
    ground.worker._backend = ground.backend = backend = InRounds(tmp_path, seconds=0.005)
    backend.samplers["base"] = [0.0]
    with ground:
        began = time.monotonic()
        try:
            future = Future("s:0", "sample", "s")
            ground.queue.sample(future, sample_request(1), sample_bytes_of)
            ground.worker.start()
            ground.queue.add_line("m")

            def run(made: FakeBackend) -> Answer:
                made._work("m", "update")
                time.sleep(0.1)
                return Answer(b"")

            jobs = [
                Job(Future(f"m:{n}", kind, "s"), run)
                for n, kind in enumerate(["forward_backward", "optim_step"] * 2)
            ]
            for number, each in enumerate(jobs):
                ground.submit(each, number)
            for each in jobs:
                assert settled(each.future) == Answer(b"")
            late = Future("s:1", "sample", "s")
            ground.queue.sample(late, sample_request(2), sample_bytes_of)
            assert future.outcome is late.outcome is None
        finally:
            backend.ended.set()
        assert isinstance(settled(future), Answer) and isinstance(settled(late), Answer)
        ground.queue.close()
        ground.worker.join()
        ended = time.monotonic()
    what = [kind for _, kind in backend.log]
    turn = ["pause", "update", "update"]
    first = what.index("pause")
    assert what[first : first + 3] == turn and what.count("pause") == 2 and what.count("update") == 4
    second = what.index("pause", first + 1)
    assert what[second : second + 3] == turn
    assert what[first + 3 : second].count("round") > 2, "it decodes for as long between two pauses"
    said = ground.metrics.registry.get_sample_value
    assert said("qerl_sampling_pauses_total") == 2 and said("qerl_sample_batch_requests_sum") == 2
    assert said("qerl_sampling_seconds_total") < ended - began - 4 * 0.1


@pytest.mark.parametrize(("gap", "most", "taken"), [(0.1, 5.0, 8), (0.1, 0.15, range(2, 8)), (0.0, 5.0, 1)])
def test_the_requests_of_a_burst_are_waited_for(gap: float, most: float, taken: int | range):
    """Eight that come 30 ms apart, more slowly than any of them would be waited for alone."""
    queue = WorkQueue(gap, most, 10.0)

    def burst() -> None:
        for number in range(8):
            queue.sample(Future(f"s:{number}", "sample", "s"), sample_request(number), sample_bytes_of)
            time.sleep(0.03)

    client = threading.Thread(target=burst)
    client.start()
    assert queue.turn() == "samples"
    found = [job.request.prompt[0] for job in queue.take_samples()]
    client.join()
    assert len(found) in (taken if isinstance(taken, range) else [taken])
    assert found == [*range(len(found))]


def test_requests_that_are_given_up_are_not_waited_for(ground: Playground):
    queue = WorkQueue(5.0, 5.0, 10.0)
    queue.sample(Future("s:0", "sample", "gone"), sample_request(1), sample_bytes_of)
    timer = threading.Timer(0.05, lambda: (queue.drop_samples("gone"), queue.close()))
    timer.start()
    began = time.monotonic()
    assert queue.take_samples() == []
    assert time.monotonic() - began < 2


def test_results_stay_for_a_while_and_not_for_ever():
    futures = Futures(max_count=3, max_bytes=100, keep_s=10, unfetched_s=100)
    first, second = futures.add(Future("a", "x", "s")), futures.add(Future("b", "x", "s"))
    first.settle(Answer(b"1"))
    first.settle(Answer(b"2"))
    now = time.monotonic()
    assert first.fetch() == first.fetch() == Answer(b"1")
    futures.sweep(now + 5)
    assert futures.get("a") is first
    futures.sweep(now + 50)
    assert futures.get("a") is None and futures.get("b") is second
    second.settle(Answer(b""))
    futures.sweep(time.monotonic() + 101)
    assert len(futures) == 0
    for name in "cde":
        futures.add(Future(name, "x", "s"))
    with pytest.raises(QeRLError, match="its limit"):
        futures.add(Future("f", "x", "s"))


def test_requests_and_results_are_bounded_by_their_bytes():
    futures = Futures(max_count=10, max_bytes=100, keep_s=1000, unfetched_s=1000)
    futures.add(first := Future("a", "x", "s", bytes=60))
    futures.add(Future("a", "x", "s", bytes=40))  # sent again
    assert futures.bytes == 60
    with pytest.raises(Busy, match=r"holds 60 bytes .* the 41 of this request"):
        futures.add(Future("b", "x", "s", bytes=41))
    with pytest.raises(QeRLError, match="takes 101 bytes"):
        futures.add(Future("b", "x", "s", bytes=101))
    first.settle(Answer(bytes(90)))
    assert futures.bytes == 90
    futures.add(second := Future("b", "x", "s", bytes=10))
    first.fetch()
    with pytest.raises(Busy):  # it may be on its way
        futures.add(Future("c", "x", "s", bytes=1))
    first.fetched -= 100
    with pytest.raises(Busy):  # even without it
        futures.add(Future("c", "x", "s", bytes=91))
    assert futures.get("a") is first
    futures.add(Future("c", "x", "t", bytes=50))
    assert futures.get("a") is None and futures.bytes == 60
    second.settle(Failure("no", "user"))
    assert futures.bytes == 50
    futures.end("t", Failure("gone", "user"))
    assert futures.bytes == 0


def test_what_others_may_wait_for_is_kept_out_by_results_alone():
    futures = Futures(max_count=10, max_bytes=100, keep_s=1000, unfetched_s=1000)
    futures.add(waits := Future("b", "x", "s", bytes=90))
    with pytest.raises(Busy):
        futures.add(Future("a", "x", "s", bytes=60))
    futures.add(Future("a", "x", "s", bytes=60), awaited=True)
    assert futures.bytes == 150
    waits.settle(Answer(bytes(95)))
    with pytest.raises(Busy, match="holds 155 bytes"):
        futures.add(Future("c", "x", "s", bytes=6), awaited=True)
    futures.add(Future("c", "x", "s", bytes=5), awaited=True)
    assert futures.bytes == 160


def test_a_silent_client_loses_what_was_its(tmp_path: Path):
    backend = FakeBackend(tmp_path)
    clients = Clients(backend.models, limits(silence_s=0.2))
    worker = Worker(clients.queue, backend, Metrics())
    worker.start()
    from qerl_serve.requests import CreateModel, OfModel, SaveWeights
    from qerl_serve.samples import Samples
    from qerl_serve.training import Training

    training = Training(clients, Samples(clients))
    sessions = [clients.create_session("test") for _ in range(2)]
    for session in sessions:
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "tests/tiny",
            "lora_config": {"rank": 4},
        }
        settled(clients.futures.get(training.create_model(CreateModel.model_validate(body))))
        saved = training.save_for_sampler(SaveWeights(model_id=f"{session}:train:0"))
        settled(clients.futures.get(saved))
    assert (len(backend.weights), len(backend.samplers)) == (2, 2)
    waits = clients.futures.get(training.unload_model(OfModel(model_id=f"{sessions[0]}:train:0", seq_id=9)))
    time.sleep(0.25)
    clients.heartbeat(sessions[1])
    clients.sweep()
    assert "was silent" in settled(waits).error
    clients.queue.call(lambda _: None).result()  # after the clean-up
    assert [*clients.models] == [f"{sessions[1]}:train:0"] == [*backend.weights]
    assert len(backend.samplers) == len(clients.samplers) == 1
    clients.queue.close()
    worker.join()
    assert backend.closed


def test_only_the_newest_snapshots_of_a_session_stay(tmp_path: Path):
    from qerl_serve.clients import Model
    from qerl_serve.samples import Samples
    from qerl_serve.types import LoraParams

    backend = FakeBackend(tmp_path)
    clients = Clients(backend.models, limits(snapshots=2))
    samples, session = Samples(clients), clients.create_session("test")
    backend.create_model(f"{session}:train:0", LoraParams(4))
    model = clients.models[f"{session}:train:0"] = Model(f"{session}:train:0", session)
    model.info = backend.model_info(model.id)
    ids = [samples.snapshot(backend, model.id, number) for number in range(2)]
    clients.samplers[ids[0]].waiting = 1  # somebody samples from the oldest
    ids += [samples.snapshot(backend, model.id, number) for number in (2, 3)]
    assert [*clients.samplers] == [ids[0], ids[3]]
    assert len(backend.samplers) == 2
