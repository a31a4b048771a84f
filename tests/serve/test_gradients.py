"""A gradient that goes over HTTP is the loss's: the adapter after a step is the one that torch computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")

from qerl.update.losses import Datum
from qerl_serve.names import split_path
from tests.support import by_hand
from tests.support.families import DELTA_NETS, tiny
from tests.support.http import Client, connected
from tests.support.serve import small_model, tiny_backend

TOKENS = [[5, 9, number, *range(3, 99, 4 + number)] for number in (1, 1, 2, 3, 3, 40)]
"""Some begin with the same tokens, and some are the same."""
LR, EPS = 10.0, 100.0
"""With so large an epsilon a step is nearly the gradient times the rate, and not its sign."""
BOUND = 1e-5
"""Of the largest difference, in parts of the largest change of any matrix. With delta nets three times as
much: there what torch computes in FP32 differs by as much from FP64, for some of the random adapters."""


def saved(client: Client, model: str, seq_id: int, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter as the server writes it."""
    path = client.ask("save_weights_for_sampler", model_id=model, seq_id=seq_id, path=f"n{seq_id}")["path"]
    return load_file(folder.joinpath(*split_path(path)) / "adapter_model.safetensors")


def data(seed: int = 0, near: list[torch.Tensor] | None = None) -> list[Datum]:
    """Sequences whose first target is of the prompt; the sampler's log-probabilities are around `near`."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number, tokens in enumerate(TOKENS):
        drawn_T = torch.ones(len(tokens) - 1)
        drawn_T[0] = 0
        advantages_T = torch.randn(len(drawn_T), generator=generator)
        apart_T = torch.rand(len(drawn_T), generator=generator) * 3 - 1  # ratios from 0.37 to 7.4
        inputs: dict[str, Any] = {"target_tokens": torch.tensor(tokens[1:])}
        if near is None:
            inputs["weights"] = drawn_T
        else:
            inputs["logprobs"] = (near[number].detach() - apart_T) * drawn_T
            inputs["advantages"] = advantages_T * drawn_T
        found.append(Datum(torch.tensor(tokens[:-1]), inputs))
    return found


def data_of(loss: str, near: list[torch.Tensor]) -> list[Datum]:
    if loss == "cross_entropy":
        return data(1)
    found = data(2, near)
    if loss == "dro":  # which pulls at prompts too, so their sampler's log-probabilities are given
        return [
            Datum(d.tokens, {**d.inputs, "logprobs": p.detach() + 0.3})
            for d, p in zip(found, near, strict=True)
        ]
    if loss == "gspo":
        return [
            Datum(d.tokens, {**d.inputs, "sequence_ratio_mask": (d.inputs["advantages"] != 0).float()})
            for d in found
        ]
    return found


def delta_nets():
    """A model with one layer of each kind."""
    layers = ["linear_attention", "full_attention"]
    return tiny(DELTA_NETS, max_position_embeddings=512, num_hidden_layers=2, layer_types=layers)


@pytest.mark.parametrize(
    ("make", "loss", "bound"),
    [
        *((small_model, loss, BOUND) for loss in by_hand.LOSSES),
        (delta_nets, "importance_sampling", 3 * BOUND),
    ],
)
def test_a_step_over_http_is_the_one_that_torch_alone_makes(
    tmp_path: Path, make: Any, loss: str, bound: float
):
    with connected(tmp_path, tiny_backend(tmp_path, make()), context=512) as client:
        model = client.model()
        client.send_data(model, 1, data(), "cross_entropy")  # after which B is not 0, and A has a gradient
        client.ask("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.05})
        path = client.ask("save_weights", model_id=model, seq_id=3, path="warm")["path"]
        client.ask("load_weights", model_id=model, seq_id=4, path=path, optimizer=False)
        before = saved(client, model, 5, tmp_path)
        base = make()
        sent = data_of(loss, by_hand.logprobs(base, before, data()))
        client.send_data(model, 6, sent, loss)
        assert isinstance(client.result(f"{model}:6"), bytes)
        adam = {"learning_rate": LR, "eps": EPS, "weight_decay": 0.0, "grad_clip_norm": 0.0}
        assert "error" not in client.ask("optim_step", model_id=model, seq_id=7, adam_params=adam)
        after = saved(client, model, 8, tmp_path)
    expected = by_hand.step(base, before, sent, by_hand.LOSSES[loss], LR, EPS)
    assert after.keys() == expected.keys() and any("lora_A" in name for name in after)
    change = max(float((expected[name] - before[name]).abs().max()) for name in after)
    off = max(float((after[name] - expected[name]).abs().max()) for name in after)
    print(f"{loss}: largest change {change:.3g}, largest difference {off:.2g}, {off / change:.1g} of it")
    assert change > 1e-3
    assert off < bound * change
