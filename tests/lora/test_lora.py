"""LoRA on packed layers: what trains, what is saved, who can read it."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel

from qerl.errors import QeRLError
from qerl.fp4.format import dequantize
from qerl.fp4.linear import PackedLinear
from qerl.lora.adapter import PackedLoraLinear, add_lora, load_adapter
from qerl.lora.product import _adapter, _split_gradients
from qerl.models.load import load_model
from qerl.run_folder import MANIFEST_FILE
from tests.support.plan import LINEARS

IDS = torch.arange(40).reshape(2, 20)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.fixture
def plain(tiny_model, tmp_path) -> Path:
    tiny_model("qwen2").save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def packed_model(plain: Path, weights="nvfp4", dtype=torch.float32):
    return load_model(plain, weights, dtype, "cpu")


def randomize(model: PeftModel, seed: int = 0) -> None:
    """As if trained: B is no longer zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("weights", ["nvfp4", "mxfp4"])
def test_adapts_all_seven_linears_and_trains_nothing_else(plain, weights: str) -> None:
    base = packed_model(plain, weights)
    before = logits(base)
    model = add_lora(base, rank=4, alpha=8, dropout=0.0)
    assert torch.equal(logits(model), before)
    adapted = [name for name, module in model.named_modules() if isinstance(module, PackedLoraLinear)]
    assert len(adapted) == 2 * len(LINEARS)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trainable) == 2 * len(adapted) and all("lora_" in name for name in trainable)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}


def test_gradients_are_those_of_the_dense_model(plain) -> None:
    packed, dense = packed_model(plain), packed_model(plain, "bf16")
    for name, layer in packed.named_modules():
        if isinstance(layer, PackedLinear):
            dense.get_submodule(name).weight.data = dequantize(layer.storage.to_rows())
    gradients = []
    for base in (packed, dense):
        model = add_lora(base, rank=4, alpha=8, dropout=0.0)
        randomize(model)
        model(IDS, labels=IDS).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[1])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0].values())


def test_seed_decides_the_adapter_and_leaves_the_global_generator_alone(plain) -> None:
    base = packed_model(plain)
    state = torch.get_rng_state()
    adapters = [add_lora(copy.deepcopy(base), 4, 8, 0.0, seed=seed).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name in adapters[0] if "lora_A" in name)
    assert torch.equal(adapters[0][name], adapters[1][name])
    assert not torch.equal(adapters[0][name], adapters[2][name])


def test_rank_is_not_capped_and_targets_can_be_chosen(plain) -> None:
    model = add_lora(packed_model(plain), rank=96, alpha=24, dropout=0.0, target_modules=["q_proj"])
    shapes = {tuple(p.shape) for n, p in model.named_parameters() if "lora_A" in n}
    assert shapes == {(96, 64)}
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling == {"default": 24 / 96}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "LoRA cannot be added"),
        ({"dropout": 1.5}, "so adapters get no input; set it below 1"),
        ({"target_modules": ["query"]}, "query"),
    ],
)
def test_bad_settings(plain, settings: dict, message: str) -> None:
    with pytest.raises(QeRLError, match=message):
        add_lora(packed_model(plain), **({"rank": 4, "alpha": 8, "dropout": 0.0} | settings))


def test_merge_is_refused(plain) -> None:
    model = add_lora(packed_model(plain), 4, 8, 0.0)
    with pytest.raises(QeRLError, match="Cannot merge into 4-bit weights"):
        model.merge_and_unload()


def test_saved_adapter_is_plain_peft(plain, tmp_path) -> None:
    model = add_lora(packed_model(plain), rank=4, alpha=8, dropout=0.0)
    randomize(model)
    model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(plain)

    dense = packed_model(plain, "bf16")
    without = logits(dense)
    on_dense = PeftModel.from_pretrained(dense, str(tmp_path / "adapter"))
    # What the adapter changes is far more than what quantisation does to that change.
    change, packed_change = logits(on_dense) - without, logits(model) - logits(packed_model(plain))
    assert change.norm() > 0.1 * without.norm()
    assert torch.nn.functional.cosine_similarity(change.flatten(), packed_change.flatten(), dim=0) > 0.7

    for name, layer in packed_model(plain).named_modules():
        if isinstance(layer, PackedLinear):
            on_dense.get_base_model().get_submodule(name).base_layer.weight.data = dequantize(
                layer.storage.to_rows()
            )
    assert torch.equal(logits(on_dense), logits(model))


def test_load_adapter_round_trip(plain, tmp_path) -> None:
    model = add_lora(packed_model(plain), rank=4, alpha=8, dropout=0.1)
    randomize(model)
    model.save_pretrained(tmp_path / "adapter")
    again = load_adapter(packed_model(plain), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model.eval()))
    assert not any(parameter.requires_grad for parameter in again.parameters())
    assert not torch.equal(logits(again), logits(packed_model(plain)))


def test_load_adapter_says_what_is_wrong(plain, tmp_path, tiny_model) -> None:
    folder = tmp_path / "adapter"
    with pytest.raises(QeRLError, match=r"There is no .*adapter_config\.json"):
        load_adapter(packed_model(plain), folder)
    stopped = tmp_path / "run" / "checkpoint-3"
    stopped.mkdir(parents=True)
    (stopped / MANIFEST_FILE).write_text("{}")
    with pytest.raises(
        QeRLError, match=r"its run has not ended, so name its last checkpoint, .*run/checkpoint-3"
    ):
        load_adapter(packed_model(plain), tmp_path / "run")
    add_lora(packed_model(plain), rank=4, alpha=8, dropout=0.0).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"

    tiny_model("qwen2", hidden_size=32).save_pretrained(tmp_path / "other")
    with pytest.raises(
        QeRLError, match=r"does not fit this model \(size mismatch .*\); give the model that it"
    ):
        load_adapter(packed_model(tmp_path / "other"), folder)
    tiny_model("qwen2", num_hidden_layers=1).save_pretrained(tmp_path / "shallow")
    with pytest.raises(QeRLError, match=r"layers\.1.* is in only one of the two"):
        load_adapter(packed_model(tmp_path / "shallow"), folder)

    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(QeRLError, match="is in only one of the two"):
        load_adapter(packed_model(plain), folder)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(QeRLError, match="damaged or incomplete"):
        load_adapter(packed_model(plain), folder)
    file.unlink()
    with pytest.raises(QeRLError, match=r"There is no .*adapter_model\.safetensors"):
        load_adapter(packed_model(plain), folder)


def test_ddp_leaves_packed_weights_alone(plain, tmp_path) -> None:
    """Gloo raises on FP8, which is what the scales are."""
    model = add_lora(packed_model(plain), rank=4, alpha=8, dropout=0.0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        DistributedDataParallel(model)(IDS, labels=IDS).loss.backward()
    finally:
        dist.destroy_process_group()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_adapters_of_joined_layers_are_one_adapter():
    """A below A, s B as blocks on a diagonal: products and gradients are those of the layers alone."""
    shapes, scalings = [(5, 2), (3, 4), (4, 1)], [2.0, 0.5, 1.0]
    x_TK = torch.randn(7, 6, dtype=torch.float64)
    all_a = [torch.randn(r, 6, dtype=torch.float64, requires_grad=True) for _, r in shapes]
    all_b = [torch.randn(n, r, dtype=torch.float64, requires_grad=True) for n, r in shapes]
    y_TN = torch.cat([x_TK @ a.T @ b.T * s for a, b, s in zip(all_a, all_b, scalings, strict=True)], dim=1)
    dy_TN = torch.randn_like(y_TN)
    truth = torch.autograd.grad(y_TN, [*all_a, *all_b], dy_TN)
    with torch.no_grad():
        a_RK, b_NR = _adapter([*all_a, *all_b], scalings, torch.float64)
        torch.testing.assert_close(x_TK @ a_RK.T @ b_NR.T, y_TN)
        da_RK, db_NR = (dy_TN @ b_NR).T @ x_TK, dy_TN.T @ (x_TK @ a_RK.T)
        found = _split_gradients(da_RK, db_NR, [*all_a, *all_b], scalings)
    for one, other in zip(found, truth, strict=True):
        torch.testing.assert_close(one, other)
