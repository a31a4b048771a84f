"""The real client of the Tinker API against a real, tiny model: the same numbers however they are asked for.

`make tinker` runs this too.
"""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="needs the package tinker, which `make tinker` has")

from tests.support.wire import KEY, RunningServer

os.environ["TINKER_API_KEY"] = KEY
os.environ["TINKER_TELEMETRY"] = "0"

import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types

from qerl.update.losses import Datum
from qerl_serve.imported import read_imported, save_imported
from qerl_serve.names import split_path
from tests.serve.test_imported import made
from tests.support import by_hand
from tests.support.serve import small_model, tiny_backend

pytestmark = pytest.mark.filterwarnings("ignore")  # of what later versions will call otherwise
ADAM = types.AdamParams(learning_rate=1e-2)
TOKENS = [[5, 9, 77, 31, 6, 80], [5, 9, 77, 100, 3], [64, 7, 8], [5, 9, 12, 90]]


def running(folder: Path) -> RunningServer:
    return RunningServer(tiny_backend(folder), context=512, max_models=8)


def result(future: Any) -> Any:
    while hasattr(future, "result"):
        future = future.result()
    return future


def datums(kind: str = "cross_entropy") -> list[types.Datum]:
    found = []
    for tokens in TOKENS:
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if kind == "cross_entropy":
            inputs["weights"] = [1.0] * (len(tokens) - 1)
        else:
            inputs["logprobs"] = [-4.0] * (len(tokens) - 1)
            inputs["advantages"] = [0.5] * (len(tokens) - 1)
        found.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return found


def new_model(service: Any, rank: int) -> Any:
    return result(service.create_lora_training_client(base_model="tiny", rank=rank, seed=7))


def train(model: Any, steps: int, kind: str = "cross_entropy") -> list[float]:
    losses = []
    for _ in range(steps):
        passed, stepped = model.forward_backward(datums(kind), kind), model.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def test_two_clients_of_different_rank_get_what_each_gets_alone(tmp_path):
    kinds = {8: "cross_entropy", 4: "importance_sampling"}
    alone = {}
    for rank, kind in kinds.items():
        with running(tmp_path / str(rank)) as server:
            alone[rank] = train(new_model(tinker.ServiceClient(base_url=server.url), rank), 3, kind)
    with running(tmp_path / "both") as server:
        models = {rank: new_model(tinker.ServiceClient(base_url=server.url), rank) for rank in kinds}
        together: dict[int, list[float]] = {rank: [] for rank in kinds}
        for _ in range(3):
            passed = {
                rank: model.forward_backward(datums(kinds[rank]), kinds[rank])
                for rank, model in models.items()
            }
            stepped = [model.optim_step(ADAM) for model in models.values()]
            for rank, future in passed.items():
                together[rank].append(future.result().metrics["loss:sum"])
            [future.result() for future in stepped]
    assert together == alone
    assert alone[8][-1] < alone[8][0]


def test_what_is_sampled_has_the_probability_that_is_computed(tmp_path):
    with running(tmp_path) as server:
        model = new_model(tinker.ServiceClient(base_url=server.url), 8)
        train(model, 1)
        sampler = result(model.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
        prompt = types.ModelInput.from_ints([5, 9, 77])
        drawn = result(sampler.sample(prompt, num_samples=1, sampling_params=params)).sequences[0]
        whole = [5, 9, 77, *drawn.tokens]
        scored = result(sampler.compute_logprobs(types.ModelInput.from_ints(whole)))
        inputs = {"target_tokens": whole[1:], "weights": [1.0] * (len(whole) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]), loss_fn_inputs=inputs)
        passed = model.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert scored[1:] == pytest.approx(passed, abs=1e-5)
        assert drawn.logprobs == pytest.approx(passed[2:], abs=1e-5)
        before = result(sampler.compute_logprobs(prompt))
        train(model, 1)
        assert result(sampler.compute_logprobs(prompt)) == before  # a snapshot stays as it was


def test_a_server_that_begins_again_goes_on_bit_for_bit(tmp_path):
    with running(tmp_path) as server:
        model = new_model(tinker.ServiceClient(base_url=server.url), 8)
        train(model, 2)
        path = model.save_state("two").result().path
        expected = train(model, 2)
    with running(tmp_path) as server:
        service = tinker.ServiceClient(base_url=server.url)
        again = result(service.create_training_client_from_state_with_optimizer(path))
        assert train(again, 2) == expected
        fresh = result(service.create_training_client_from_state(path))
        assert train(fresh, 2) != expected  # without the optimizer


def saved(model: Any, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter as the server writes it."""
    path = result(model.save_weights_for_sampler(name)).path
    return load_file(folder.joinpath(*split_path(path)) / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", ["importance_sampling", "a loss of one's own"])
def test_a_step_is_the_one_that_torch_alone_makes(tmp_path, kind):
    def square(p_T: torch.Tensor, _: Any) -> torch.Tensor:
        return 0.5 * p_T.square().sum()

    def squares(data: Any, found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        total = sum(square(p_T, None) for p_T in found)
        return total, {"squares": float(total)}

    own = kind != "importance_sampling"
    with running(tmp_path) as server:
        model = new_model(tinker.ServiceClient(base_url=server.url), 8)
        train(model, 1)  # after which B is not 0, and A has a gradient
        path = model.save_state("warm").result().path
        model.load_state(path).result()  # without the optimizer
        before = saved(model, "before", tmp_path)
        sent = datums("cross_entropy" if own else kind)
        passed = model.forward_backward_custom(sent, squares) if own else model.forward_backward(sent, kind)
        result(passed)
        model.optim_step(types.AdamParams(learning_rate=10.0, eps=100.0)).result()
        after = saved(model, "after", tmp_path)
    data = [
        Datum(
            torch.tensor(tokens[:-1]),
            {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()},
        )
        for tokens, datum in zip(TOKENS, sent, strict=True)
    ]
    loss = square if own else by_hand.LOSSES[kind]
    expected = by_hand.step(small_model(), before, data, loss, 10.0, 100.0)
    change = max(float((expected[name] - before[name]).abs().max()) for name in after)
    off = max(float((after[name] - expected[name]).abs().max()) for name in after)
    print(f"{kind}: largest change {change:.3g}, largest difference {off:.2g}, {off / change:.1g} of it")
    assert change > 1e-3
    assert off < 1e-5 * change


def test_a_client_goes_on_from_an_adapter_that_was_trained_elsewhere(tmp_path):
    folder = made(tmp_path / "elsewhere", r=4)
    backend = tiny_backend(tmp_path / "server")
    path = save_imported(read_imported(f"mine={folder}", 16), backend._base, backend._store)
    with torch.no_grad():
        logits_TV = PeftModel.from_pretrained(small_model(), folder)(
            input_ids=torch.tensor([TOKENS[0]])
        ).logits[0]
    expected = logits_TV.log_softmax(-1)[range(len(TOKENS[0]) - 1), TOKENS[0][1:]].tolist()
    with RunningServer(backend, context=512) as server:
        service = tinker.ServiceClient(base_url=server.url)
        sampler = result(service.create_sampling_client(model_path=path))
        scored = result(sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS[0])))
        assert scored[1:] == pytest.approx(expected, abs=1e-5)
        model = result(service.create_training_client_from_state(path))
        assert model.get_info().lora_rank == 4
        passed = model.forward(datums()[:1], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        assert passed == pytest.approx(expected, abs=1e-5)
        losses = train(model, 3)
        assert losses[-1] < losses[0]
