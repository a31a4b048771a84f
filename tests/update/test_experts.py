"""Grouped products of experts: what the experts one by one give, in whatever order their bytes lie."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from qerl.families.experts import ClampedGate, Expert, Experts, Gate
from qerl.families.layer import Clamp
from qerl.fp4.format import MXFP4, NVFP4
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import quantize
from qerl.lora.adapter import _with_own_layers
from qerl.lora.experts import share
from qerl.rollout.paged.binding import _stack_experts
from qerl.update import experts as grouped
from qerl.update import fused
from qerl.update.path import why_not_grouped
from tests.support.families import tiny
from tests.support.kernels import DEVICE, GPU

EXPERTS, HIDDEN, INNER, CHOSEN = 6, 128, 64, 3
BF16 = torch.bfloat16 if GPU else torch.float32


def made(order, clamp):
    """Random experts with biases if they clamp, and the same ones in FP32."""
    gated = ClampedGate(clamp) if clamp else Gate(nn.SiLU())
    like = {"bias": clamp is not None, "device": DEVICE, "dtype": torch.float32}
    experts = Experts(Expert(HIDDEN, INNER, gated, **like) for _ in range(EXPERTS))
    experts.requires_grad_(False)
    if order == "dense":
        return experts.to(BF16), copy.deepcopy(experts).float()
    for expert in experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(expert, name)
            packed = quantize(linear.weight.data, MXFP4 if order == "mxfp4" else NVFP4, "rtn")
            linear.weight.data = PackedLinear.of(packed).dense()
            setattr(expert, f"{name}_packed", PackedLinear.of(packed, linear.bias))
    exact = copy.deepcopy(experts)
    for expert in experts:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(expert, name, expert._modules.pop(f"{name}_packed"))
    for expert in exact:
        for name in [name for name in expert._modules if name.endswith("_packed")]:
            del expert._modules[name]
    if order != "rows":
        _stack_experts([[expert.gate_proj, expert.up_proj] for expert in experts])
        _stack_experts([[expert.down_proj] for expert in experts])
    return experts.to(BF16), exact


def given(tokens):
    """Input, experts of each token, of which one has nobody, and weights."""
    x_TD = torch.randn(tokens, HIDDEN, device=DEVICE)
    scores = torch.rand(tokens, EXPERTS, device=DEVICE)
    scores[:, 4] = -1
    return x_TD, scores.topk(CHOSEN).indices, torch.rand(tokens, CHOSEN, device=DEVICE)


def computed(forward, x_TD, expert_TC, weight_TC, pull_TD):
    x_TD, weight_TC = (each.clone().requires_grad_() for each in (x_TD, weight_TC))
    out_TD = forward(x_TD, expert_TC, weight_TC)
    (out_TD.double() * pull_TD).sum().backward()
    return out_TD.detach(), x_TD.grad, weight_TC.grad


CHUNKS = (1, 3 * 2 * INNER * HIDDEN * BF16.itemsize, 1 << 27)
PAIRS = [
    (order, chunk, Clamp(1.7, 0.4) if (i + j) % 2 else None)
    for i, order in enumerate(["dense", "rows", "tiles", "mxfp4"])
    for j, chunk in enumerate(CHUNKS)
]
"""Every order with every chunk and with every clamp, and every chunk with every clamp."""


@pytest.mark.parametrize(("order", "chunk", "clamp"), PAIRS)
def test_groups_give_what_experts_give_one_by_one(monkeypatch, order, clamp, chunk):
    monkeypatch.setattr(grouped, "EXPERTS_BYTES", chunk)
    torch.manual_seed(0)
    experts, exact = made(order, clamp)
    assert why_not_grouped(experts) is None
    assert (grouped._stacks(experts)[0].tiles is None) == (order in ("dense", "rows"))
    for tokens in (1, 33):
        batch, pull_TD = given(tokens), torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.float64)
        rounded = batch[0].to(BF16), batch[1], batch[2].to(BF16)
        found = computed(lambda *args: grouped.grouped_forward(experts, *args), *rounded, pull_TD)
        plain = computed(experts, *rounded, pull_TD)
        wanted = computed(exact, rounded[0].float(), rounded[1], rounded[2].float(), pull_TD)
        for mine, theirs, right in zip(found, plain, wanted, strict=True):
            assert mine.dtype == BF16
            # In 16 bits a gate may be on the other side of its limit, and its gradient is another then.
            allowed = 1.5 * (theirs.float() - right).norm() if GPU else 0
            assert (mine.float() - right).norm() < allowed + (5e-3 if GPU else 1e-5) * right.norm()


def test_stacks_are_made_anew_when_experts_move():
    experts, _ = made("tiles", None)
    first = grouped._stacks(experts)
    assert grouped._stacks(experts)[0] is first[0]
    for expert in experts:
        expert.down_proj.use(expert.down_proj.storage.to_rows())
    again = grouped._stacks(experts)
    assert again[1].tiles is None and again[1] is not first[1]


def test_stacks_are_made_anew_when_one_expert_in_the_middle_is_replaced():
    experts, _ = made("tiles", None)
    first, weight = grouped._stacks(experts), experts[2].down_proj.storage
    experts[2].down_proj = PackedLinear.of(weight.to_rows())
    assert grouped._stacks(experts)[1] is not first[1]


def test_biases_are_those_of_the_moment():
    experts, _ = made("tiles", Clamp(1.7, 0.4))
    batch = given(9)
    rounded = batch[0].to(BF16), batch[1], batch[2].to(BF16)
    before = grouped.grouped_forward(experts, *rounded)
    experts[3].down_proj.bias.data += 1
    after, wanted = grouped.grouped_forward(experts, *rounded), experts(*rounded)
    assert not torch.equal(after, before)
    torch.testing.assert_close(after, wanted, rtol=2e-2, atol=2e-2 if GPU else 1e-5)


def test_experts_that_train_are_not_grouped(monkeypatch):
    """Also where they come to train once the model's layers have their kernels."""
    experts, batch = fused_experts(monkeypatch)
    experts[3].down_proj.bias.requires_grad_()
    assert why_not_grouped(experts) == "an expert's own weights or biases train"
    experts(*batch).sum().backward()
    assert experts[3].down_proj.bias.grad.any()
    experts.requires_grad_(False)
    assert why_not_grouped(experts) is None
    check_groups(experts, batch)


def fused_experts(monkeypatch):
    """The experts of a layer of a small gpt-oss whose layers have their kernels, and a batch of theirs."""
    monkeypatch.setattr(fused, "is_16bit_cuda", lambda x: True)
    model = tiny("gpt_oss").requires_grad_(False).to(DEVICE, BF16)
    fused.fuse(model)
    like = {"device": DEVICE, "dtype": BF16}
    expert_TC = torch.randint(4, (40, 2), device=DEVICE)
    batch = torch.randn(40, 64, **like), expert_TC, torch.rand(40, 2, **like)
    return model.model.layers[0].mlp.experts, batch


def check_groups(experts, batch):
    one_by_one = type(experts).forward(experts, *batch)
    torch.testing.assert_close(experts(*batch), one_by_one, rtol=2e-2, atol=2e-2 if GPU else 1e-5)


def adapted(experts, targets, rank, **settings):
    """With an adapter that gives something, in FP32."""
    config = LoraConfig(r=rank, lora_alpha=3, target_modules=targets, init_lora_weights=False, **settings)
    return inject_adapter_in_model(_with_own_layers(config, experts), experts)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("targets", [["gate_proj", "up_proj", "down_proj"], ["up_proj"], ["down_proj"]])
@pytest.mark.parametrize(("order", "clamp", "rank"), [("dense", None, 8), ("tiles", Clamp(1.7, 40.0), 3)])
def test_adapters_of_experts_in_groups(order, clamp, rank, targets, shared):
    """What PEFT's layers give one by one, and the gradients of their matrices. No gate is at its limit, on
    which side of which rounding would decide."""
    torch.manual_seed(0)
    experts, exact = (adapted(each, targets, rank) for each in made(order, clamp))
    for first, each, right in zip([experts[0]] * EXPERTS, experts, exact, strict=True):
        for name in targets:
            source = first if shared else each
            for layer in (each, right):
                copied = {k: v for k, v in getattr(source, name).state_dict().items() if "lora" in k}
                getattr(layer, name).load_state_dict(copied, strict=False)
    if shared:
        for each in (experts, exact):
            share(nn.ModuleDict({"experts": each}))
    assert why_not_grouped(experts) is None
    batch, pull_TD = given(33), torch.randn(33, HIDDEN, device=DEVICE, dtype=torch.float64)
    rounded = batch[0].to(BF16), batch[1], batch[2].to(BF16)

    def gradients(layer, *given):
        found = computed(layer, *given, pull_TD)
        parameters = experts if layer is not exact else exact
        of_all = {name: each.grad for name, each in parameters.named_parameters() if each.requires_grad}
        for each in parameters.parameters():
            each.grad = None
        return dict(enumerate(found)) | of_all

    mine = gradients(lambda *args: grouped.grouped_forward(experts, *args), *rounded)
    theirs = gradients(experts, *rounded)
    wanted = gradients(exact, rounded[0].float(), rounded[1], rounded[2].float())
    assert len(wanted) == 3 + 2 * len(targets) * (1 if shared else EXPERTS)
    for name, right in wanted.items():
        assert mine[name].dtype == theirs[name].dtype
        allowed = 1.5 * (theirs[name].float() - right).norm() if GPU else 0
        error = (mine[name].float() - right).norm()
        assert error <= allowed + (5e-3 if GPU else 1e-5) * right.norm(), (name, float(error), float(allowed))


def test_adapters_that_are_not_grouped(monkeypatch):
    experts, batch = fused_experts(monkeypatch)
    dropped = adapted(experts, ["gate_proj"], 4, lora_dropout=0.5)
    assert "dropout" in why_not_grouped(dropped)
    dropped.eval()
    assert why_not_grouped(dropped) is None
    check_groups(dropped, batch)
    for expert in dropped:
        expert.gate_proj.enable_adapters(False)
    assert why_not_grouped(dropped) is None
    check_groups(dropped, batch)


def test_adapters_of_several_ranks_are_not_grouped():
    experts = made("dense", None)[0]
    found = adapted(experts, ["up_proj"], 4, rank_pattern={"2.up_proj": 8})
    reason = "the adapters of up_proj differ in kind, rank or scaling from expert to expert"
    assert why_not_grouped(found) == reason
