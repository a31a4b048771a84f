"""The server against the real client of the Tinker API: what a recipe does, with a backend that counts.

`make tinker` runs this in environments of their own, one for each version of the client.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="needs the package tinker, which `make tinker` has")

from tests.support.wire import BAD_TOKEN, BASE, DEFECT_TOKEN, KEY, FakeBackend, RunningServer

os.environ["TINKER_API_KEY"] = KEY
os.environ["TINKER_TELEMETRY"] = "0"

import tinker
import torch
from starlette.routing import Match
from tinker import types

pytestmark = pytest.mark.filterwarnings("ignore")  # of what later versions will call otherwise


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with RunningServer(FakeBackend(tmp_path_factory.mktemp("runs")), max_models=100) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: RunningServer) -> Any:
    return tinker.ServiceClient(base_url=server.url)


def result(future: Any) -> Any:
    """What a call gives: older clients return some things at once, newer ones as a future."""
    while hasattr(future, "result"):
        future = future.result()
    return future


@pytest.fixture
def model(service: Any) -> Any:
    return result(service.create_lora_training_client(base_model=BASE, rank=8))


def datum(tokens: list[int], weights: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": tokens, "weights": weights},
    )


ROUTE = re.compile(r"""["'](?:/)?(api/v1/[^"' ]*)["']""")


def test_every_route_of_the_client_is_answered_or_refused_by_name(server: RunningServer):
    """A route that a newer client brings is found here, and not by its users."""
    package = Path(tinker.__file__).parent
    sources = [path.read_text() for path in package.rglob("*.py") if not path.stem.endswith("_test")]
    asked = {route for source in sources for route in ROUTE.findall(source)}
    known = [route for route in server.server.app.routes if route.path != "/{path:path}"]
    assert len(asked) > 20
    for path in asked:
        named = re.sub(r"\{[^}]*checkpoint_id[^}]*\}", "weights/name", path)
        scope = {"type": "http", "method": "GET", "path": "/" + re.sub(r"\{[^}]*\}", "x", named)}
        assert any(route.matches(scope)[0] is not Match.NONE for route in known), path


RENAMED = {"TopkLogprobs": "TopkPromptLogprobs", "length": "prompt_length"}
"""Our names that older clients do not have, by what those call them."""


def test_messages_have_the_numbers_of_the_client():
    from tinker.proto import tinker_public_pb2 as theirs

    from qerl_serve import descriptors as wire

    compared = 0
    theirs_by_name = theirs.DESCRIPTOR.message_types_by_name
    for ours in wire.ForwardBackwardRequest.DESCRIPTOR.file.message_types_by_name.values():
        other = theirs_by_name.get(ours.name, theirs_by_name.get(RENAMED.get(ours.name, "")))
        for field in ours.fields if other is not None else ():
            same = other.fields_by_number.get(field.number)
            assert same is None or same.name in (field.name, RENAMED.get(field.name))
            enum = same is not None and same.enum_type is not None
            assert same is None or same.type == field.type or enum, (ours.name, field.name)
            compared += same is not None
    assert compared > 35
    assert dict(theirs.StopReason.items()) == {"STOP_REASON_STOP": 0, "STOP_REASON_LENGTH": 1}
    assert theirs.DType.Value("DTYPE_FLOAT32") == wire.FLOAT32
    assert theirs.DType.Value("DTYPE_INT64") == wire.INT64


ADAM = types.AdamParams(learning_rate=0.5)


def test_the_server_says_what_it_serves(service):
    supported = result(service.get_server_capabilities()).supported_models
    assert [model.model_name for model in supported] == [BASE]


def test_a_model_is_trained_and_sampled_from(model, service):
    info = result(model.get_info())
    assert (info.lora_rank, info.model_data.tokenizer_id) == (8, BASE)
    passed = model.forward_backward([datum([1, 2], [1, 1]), datum([3, 4, 5], [1, 0, 0])], "cross_entropy")
    stepped = model.optim_step(ADAM)
    output = passed.result()
    assert output.metrics["loss:sum"] == 3
    assert [item["logprobs"].to_torch().tolist() for item in output.loss_fn_outputs] == [[-1] * 2, [-1] * 3]
    assert stepped.result().metrics == {"gradient": 3}
    only = model.forward([datum([1], [1])], "cross_entropy").result()
    assert only.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == [0.5]  # w is -1.5


def test_a_snapshot_stays_as_it_was(model):
    snapshot = result(model.save_weights_and_get_sampling_client())
    model.forward_backward([datum([1], [1])], "cross_entropy").result()
    model.optim_step(ADAM).result()
    prompt = types.ModelInput.from_ints([7, 8, 9])
    params = types.SamplingParams(max_tokens=5, seed=3, stop=["\n\nUser:"])
    drawn = result(snapshot.sample(prompt, num_samples=2, sampling_params=params))
    assert [sequence.tokens for sequence in drawn.sequences] == [[3, 4, 5, 6, 7], [4, 5, 6, 7, 8]]
    assert drawn.sequences[0].logprobs == [-1] * 5
    assert drawn.sequences[0].stop_reason == "length"
    now = result(model.save_weights_and_get_sampling_client())
    assert result(now.compute_logprobs(prompt)) == [None, -0.5, -0.5]
    topk = result(now.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=1))
    assert topk.topk_prompt_logprobs == [None, [(8, -0.5)], [(9, -0.5)]]


def test_weights_are_saved_and_loaded(model, service):
    model.forward_backward([datum([1], [2])], "cross_entropy").result()
    model.optim_step(ADAM).result()
    path = model.save_state("one").result().path
    saved = model.save_weights_for_sampler("two").result().path
    assert path.startswith("tinker://") and path.endswith("/weights/one")
    prompt = types.ModelInput.from_ints([1, 2])
    sampler = result(service.create_sampling_client(model_path=saved))
    assert result(sampler.compute_logprobs(prompt)) == [None, 0.0]
    base = result(service.create_sampling_client(base_model=BASE))
    assert result(base.compute_logprobs(prompt)) == [None, -1.0]
    for make in (
        service.create_training_client_from_state, service.create_training_client_from_state_with_optimizer,
    ):  # fmt: skip
        again = result(make(path))
        output = again.forward([datum([1], [1])], "cross_entropy").result()
        assert output.loss_fn_outputs[0]["logprobs"].to_torch().tolist() == [0]
        assert again.optim_step(ADAM).result().metrics == {"gradient": 0}


def test_checkpoints_are_listed_downloaded_and_deleted(model, service, tmp_path: Path):
    import io
    import tarfile
    import urllib.request

    path = model.save_weights_for_sampler("last").result().path
    rest = service.create_rest_client()
    run = path.split("/")[2]
    found = result(rest.list_checkpoints(run)).checkpoints
    assert [(item.tinker_path, item.checkpoint_type) for item in found] == [(path, "sampler")]
    assert path in [item.tinker_path for item in result(rest.list_user_checkpoints()).checkpoints]
    assert result(rest.get_training_run(run)).lora_rank == 8
    assert run in [item.training_run_id for item in result(rest.list_training_runs()).training_runs]
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = result(rest.get_checkpoint_archive_url_from_tinker_path(path)).url
        with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(url).read())) as archive:
            assert archive.getnames() == ["other.bin", "state.json"]
    if hasattr(rest, "get_external_weights_urls"):
        external = model.save_weights_external("last").result().path
        urls = result(rest.get_external_weights_urls(external)).urls
        assert urllib.request.urlopen(urls["other.bin"]).read() == bytes(700)
        kinds = {
            item.tinker_path: item.checkpoint_type for item in result(rest.list_checkpoints(run)).checkpoints
        }
        assert kinds == {path: "sampler", external: "external"}
        result(rest.delete_checkpoint_from_tinker_path(external))
    result(rest.delete_checkpoint_from_tinker_path(path))
    assert result(rest.list_checkpoints(run)).checkpoints == []


def test_what_a_recipe_notes_is_there_when_it_goes_on(service):
    notes = {"renderer_name": "qwen3"}
    model = result(service.create_lora_training_client(base_model=BASE, rank=8, user_metadata=notes))
    path = model.save_state("noted", ttl_seconds=7200).result().path
    rest = service.create_rest_client()
    assert result(rest.get_training_run_by_tinker_path(path)).user_metadata == notes

    def expires() -> Any:
        return result(rest.list_checkpoints(path.split("/")[2])).checkpoints[0].expires_at

    assert expires() is not None
    result(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert expires() is None
    again = result(service.create_training_client_from_state(path, user_metadata={"again": "yes"}))
    assert result(rest.get_training_run(result(again.get_info()).model_id)).user_metadata == {"again": "yes"}


def test_a_custom_loss_is_a_pass_and_its_gradient(model):
    def loss(data: list, logprobs: list) -> tuple:
        return sum((3 * item).sum() for item in logprobs), {"mine": 1.0}

    output = result(model.forward_backward_custom([datum([1, 2], [1, 1])], loss))
    assert output.metrics["loss:sum"] == -6 and output.metrics["mine"] == 1
    assert model.optim_step(ADAM).result().metrics == {"gradient": -6}


def test_a_call_is_cut_into_parts(model, monkeypatch):
    config = model.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 2})
    monkeypatch.setattr(model.holder, "_client_config", config)
    data = [datum([number], [number]) for number in range(1, 10)]
    output = model.forward_backward(data, "cross_entropy").result()
    assert output.metrics["loss:sum"] == 45 and len(output.loss_fn_outputs) == 9
    assert model.optim_step(ADAM).result().metrics == {"gradient": 45}


def test_soft_targets_come_as_sparse_tensors(model):
    targets, weights = torch.zeros(20, 8, dtype=torch.int64), torch.zeros(20, 8)
    targets[3, :2], weights[3, :2] = torch.tensor([4, 5]), torch.tensor([0.25, 0.5])
    soft = types.Datum(
        model_input=types.ModelInput.from_ints([1] * 20),
        loss_fn_inputs={"target_tokens": targets, "weights": weights},
    )
    output = model.forward_backward([soft, datum([1], [1])], "cross_entropy").result()
    assert output.metrics["loss:sum"] == 1.75
    assert [list(item["logprobs"].shape) for item in output.loss_fn_outputs] == [[20, 8], [1]]


def test_what_is_wrong_reaches_the_user(model, service, server):
    cases = [
        (datum([1], [1]), "unheard_of", "unknown"),
        (datum([BAD_TOKEN], [1]), "cross_entropy", "not in the vocabulary"),
        (datum([1] * 65, [1] * 65), "cross_entropy", "takes 1 to 64"),
        (datum([1, 2], [1, 1, 1]), "cross_entropy", "one row for each token"),
        (datum([DEFECT_TOKEN], [1]), "cross_entropy", "RuntimeError: out of luck"),
    ]
    for wrong, loss, sentence in cases:
        with pytest.raises(tinker.RequestFailedError, match=sentence) as caught:
            model.forward_backward([datum([1], [1]), wrong], loss).result()
        assert caught.value.category.value == ("server" if "luck" in sentence else "user")
    with pytest.raises(tinker.RequestFailedError, match="not on this server"):
        result(service.create_lora_training_client(base_model="no/such"))
    with pytest.raises(tinker.RequestFailedError, match="rank is 99"):
        result(service.create_lora_training_client(base_model=BASE, rank=99))
    with pytest.raises(tinker.BadRequestError, match="not on this server"):
        result(service.create_sampling_client(base_model="no/such"))
    with pytest.raises(tinker.BadRequestError, match="Nothing is saved"):
        result(service.create_sampling_client(model_path="tinker://no/weights/such"))
    with pytest.raises(tinker.RequestFailedError, match="not begin with a dot"):
        model.save_state("../../etc").result()
    sampler = result(service.create_sampling_client(base_model=BASE))
    params = types.SamplingParams(max_tokens=65)
    with pytest.raises(tinker.RequestFailedError, match="exceed the 64 tokens"):
        result(sampler.sample(types.ModelInput.from_ints([1]), 1, params))
    with pytest.raises(tinker.AuthenticationError, match="not this server's"):
        result(tinker.ServiceClient(base_url=server.url, api_key="tml-other").get_server_capabilities())
    assert model.forward_backward([datum([1], [1])], "cross_entropy").result().metrics["loss:sum"] == 1


def test_no_step_is_made_with_half_a_gradient(model, server):
    passed = model.forward_backward([datum([1], [1])], "cross_entropy")
    failed = model.forward_backward([datum([BAD_TOKEN], [1])], "cross_entropy")
    stepped = model.optim_step(ADAM)
    passed.result()
    with pytest.raises(tinker.RequestFailedError, match="not in the vocabulary"):
        failed.result()
    # Whether the step was sent before the client heard of the failure is the network's to say.
    steps = server.backend.weights[model.model_id].steps
    try:
        stepped.result()
    except tinker.RequestFailedError as error:
        assert "Not run, because forward_backward" in str(error)
        assert steps == 0


def test_a_burst_is_sampled_together(service, server):
    sampler = result(service.create_sampling_client(base_model=BASE))
    before = len(server.backend.batches)
    server.backend.seconds = 0.05
    params = types.SamplingParams(max_tokens=2)
    futures = [sampler.sample(types.ModelInput.from_ints([n + 1]), 1, params) for n in range(40)]
    drawn = [result(future).sequences[0].tokens for future in futures]
    server.backend.seconds = 0.0
    assert len({tuple(tokens) for tokens in drawn}) > 20  # a seed for each, where the client gave none
    assert len(server.backend.batches) - before < 20


def test_the_metrics_count(server):
    import urllib.request

    text = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    assert 'qerl_requests_total{kind="optim_step",outcome="done"}' in text
    assert "qerl_fake_memory_bytes 1.0" in text
