"""A mixture between two norms: router, items, experts' products and what the residual stream adds up.

It runs on a GPU or in Triton's interpreter and is compared with float64; outputs are poisoned. On a GPU
experts in NVFP4 are multiplied too, with items of every size.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from bench.products import dequantised
from bench.random_weights import random_tiles
from qerl.errors import QeRLError
from qerl.families.layer import Clamp, RoutedMLP
from qerl.kernels.decode.expert_lora import ExpertLoraMatrices
from qerl.kernels.decode.residual_norm import residual_norm
from qerl.kernels.decode.route import Items, Kept, arrange, route
from qerl.kernels.limits import item_size, most_items
from qerl.kernels.weights.experts import DenseExperts, NVFP4Experts
from qerl.kernels.weights.packed_gemm import OUTPUT_SCALE, to_operand
from qerl.rollout.paged.experts import Mixtures
from qerl.rollout.paged.weights import RoutedWeights
from tests.support.kernels import DEVICE, EPS, GPU, HALF, error, half, poison

EXACT = torch.float32 == HALF
pytestmark = pytest.mark.usefixtures("in_bounds")
on_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")


def dense(experts: int, rows: int, width: int, linears: int) -> tuple[DenseExperts, torch.Tensor]:
    """Experts, and what they multiply with in fp64."""
    weight_ENK = half(experts, rows, width, scale=width**-0.5)
    scale_EL = torch.rand(experts, linears, device=DEVICE) + 0.5
    factor_EN1 = scale_EL.double().repeat_interleave(rows // linears, dim=1)[..., None]
    return DenseExperts(weight_ENK, scale_EL), weight_ENK.double() * factor_EN1


def packed(experts: int, rows: int, width: int, linears: int) -> tuple[NVFP4Experts, torch.Tensor]:
    """The same of experts in NVFP4."""
    tiles = random_tiles(experts * rows, width)
    scale_EL = (torch.rand(experts, linears, device=DEVICE) + 0.5) / (4 * width**0.5)
    factor_EN1 = scale_EL.double().repeat_interleave(rows // linears, dim=1)[..., None]
    exact = dequantised(tiles).view(experts, rows, width) * factor_EN1
    return NVFP4Experts(tiles, scale_EL / OUTPUT_SCALE, (rows, width)), exact


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "chosen", "biased"), [(1, 4, 2, False), (5, 6, 3, True), (33, 128, 8, False)]
)
def test_the_heaviest_experts_of_each_token_are_chosen(tokens, experts, chosen, biased, normalized):
    width, parts = 64, 3
    parts_PTE = torch.randn(parts, tokens, experts, device=DEVICE)
    squares_PT = torch.rand(2, tokens, device=DEVICE) * width
    expert_TC = torch.full((tokens, chosen), -1, dtype=torch.int32, device=DEVICE)
    weight_TC, bias_E = poison(tokens, chosen), torch.randn(experts, device=DEVICE) if biased else None
    slot_T = torch.arange(tokens, dtype=torch.int32, device=DEVICE).flip(0) - 1  # the last is of nobody
    kept = Kept(slot_T, torch.full((tokens, 3, chosen), 255, dtype=torch.uint8, device=DEVICE), 1)
    route(
        parts_PTE, squares_PT, expert_TC, weight_TC, experts=experts, normalized=normalized, width=width,
        eps=EPS, bias_E=bias_E, kept=kept,
    )  # fmt: skip
    rms_T1 = (squares_PT.double().sum(0) / width + EPS).sqrt()[:, None]
    logits = parts_PTE.double().sum(0) / rms_T1 + (0 if bias_E is None else bias_E.double())
    wanted, which = logits.softmax(-1).topk(chosen)
    assert torch.equal(expert_TC, which.int())
    assert torch.equal(kept.kept_SMC[: tokens - 1, 1], which[: tokens - 1].flip(0).to(torch.uint8))
    assert (kept.kept_SMC[:, ::2] == 255).all() and (kept.kept_SMC[tokens - 1] == 255).all()
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalized else wanted
    torch.testing.assert_close(weight_TC.double(), wanted, rtol=1e-5, atol=1e-7)


def test_a_row_that_nobody_uses_may_hold_anything():
    parts_PTE = torch.randn(1, 2, 4, device=DEVICE)
    parts_PTE[0, 1] = float("nan")
    expert_TC = torch.full((2, 2), -1, dtype=torch.int32, device=DEVICE)
    route(
        parts_PTE, torch.ones(1, 2, device=DEVICE), expert_TC, poison(2, 2),
        experts=4, normalized=True, width=64, eps=EPS,
    )  # fmt: skip
    assert torch.equal(expert_TC[1], torch.tensor([0, 1], dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize(("tokens", "experts", "chosen"), [(1, 4, 2), (40, 3, 2), (150, 60, 8)])
def test_items_have_each_token_once_per_expert(tokens, experts, chosen, size):
    """By expert, then in the order of the batch; experts without tokens have none."""
    scores = torch.rand(tokens, experts, device=DEVICE)
    scores[:, experts // 2] -= 2  # nobody chooses it
    expert_TC = scores.topk(chosen).indices.int()
    weight_TC, scale_E = torch.rand(tokens, chosen, device=DEVICE), torch.rand(experts, device=DEVICE)
    items = Items.empty(tokens, experts, chosen, size, torch.device(DEVICE))
    arrange(expert_TC, weight_TC, scale_E, items)
    count = int(items.count_1)
    assert count <= len(items.item_J2) == most_items(tokens, experts, chosen, size)
    found = [
        (expert, items.token_S[j * size : j * size + used].tolist())
        for j, (expert, used) in enumerate(items.item_J2[:count].tolist())
    ]
    wanted = []
    for expert in range(experts):
        mine = (expert_TC == expert).any(-1).nonzero()[:, 0].tolist()
        wanted += [(expert, mine[first : first + size]) for first in range(0, len(mine), size)]
    assert found == wanted
    tokens_of_pairs = items.token_S[items.place_TC.long()]
    assert torch.equal(tokens_of_pairs, torch.arange(tokens, device=DEVICE).int()[:, None].expand(-1, chosen))
    assert torch.equal(items.item_J2[items.place_TC.long() // size, 0], expert_TC)
    assert torch.equal(items.factor_TC, weight_TC * scale_E[expert_TC.long()])


CASES = [
    (1, 4, 2, 64, 32, None, dense),
    (21, 6, 3, 64, 96, Clamp(1.7, 0.5), dense),
    (70, 4, 2, 128, 64, None, dense),
    *(
        pytest.param(tokens, experts, chosen, hidden, 192, clamp, packed, marks=on_gpu)
        for hidden, clamp in [(256, None), (320, Clamp(1.7, 0.5))]
        for tokens, experts, chosen in [(1, 8, 4), (9, 16, 4), (64, 32, 8), (50, 8, 2), (200, 8, 2)]
    ),
]


def adapters(weights: RoutedWeights, groups: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives experts adapters; what they add to the weights of gate and up and of down, in fp64."""
    added, names = [], ("gate_up", "down")
    for name in names:
        product = getattr(weights, name)
        (rows, width), linears = product.shape, product.scale_EL.shape[1]
        a_GLRK = half(groups, linears, rank, width, scale=width**-0.5)
        b_GLNR = half(groups, linears, rows // linears, rank, scale=rank**-0.5)
        setattr(weights, f"{name}_lora", ExpertLoraMatrices(a_GLRK, b_GLNR))
        added.append((b_GLNR.double() @ a_GLRK.double()).flatten(1, 2))
    return added[0], added[1]


@pytest.mark.parametrize("lora", [None, (1, 16), (0, 32)])
@pytest.mark.parametrize(("tokens", "experts", "chosen", "hidden", "inner", "clamp", "made"), CASES)
def test_a_mixture_between_two_norms(tokens, experts, chosen, hidden, inner, clamp, made, lora):
    """Twice, the second time with others' numbers in every buffer; with a clamp there are biases. Adapters
    are one for all experts, or of each."""
    mlp = RoutedMLP(inner, experts, chosen, normalized=True, bias=clamp is not None, clamp=clamp)
    gate_up, gate_up_ENK = made(experts, 2 * inner, hidden, 2)
    down, down_ENK = made(experts, hidden, inner, 1)
    weights = RoutedWeights(half(experts, hidden, scale=hidden**-0.5), gate_up, down)
    router_bias_E, gate_up_bias_EN, down_bias_EN = (
        torch.randn(*shape, device=DEVICE).double() / 4 * mlp.bias
        for shape in [(experts,), (experts, 2 * inner), (experts, hidden)]
    )
    if mlp.bias:
        weights.router_bias_E, weights.gate_up_bias_EN = router_bias_E.float(), gate_up_bias_EN.float()
        weights.down_bias_ED = down_bias_EN.float() / down.scale_EL
    if lora:
        of_gate_up, of_down = adapters(weights, lora[0] or experts, lora[1])
        gate_up_ENK, down_ENK = gate_up_ENK + of_gate_up, down_ENK + of_down
    mixtures = Mixtures(mlp, [weights], tokens, EPS, weights.router_ED)
    for _ in range(2):
        y_TD, out_TD = torch.randn(tokens, hidden, device=DEVICE), half(tokens, hidden)
        residual_TD, w_D = y_TD.clone(), torch.rand(hidden, device=DEVICE) + 0.5
        u = half(tokens * hidden)
        squares_PT = poison(-(-hidden // (64 if tokens <= 32 else 128)), tokens)
        residual_norm(
            residual_TD, w_D, u, squares_PT, gemm_STN=out_TD[None], scale_1=torch.ones(1, device=DEVICE),
            a=mixtures.logits(weights),
        )  # fmt: skip
        u_TD = u.view(tokens, hidden)
        chosen_results = mixtures(weights, u_TD, squares_PT)
        into = residual_TD.clone()
        residual_norm(into, w_D, half(tokens * hidden), squares_PT.clone(), chosen=chosen_results, gain=0.5)
        added = (into - residual_TD).double() * 2

        x_TD = u_TD.double() / (residual_TD.double().square().mean(-1, keepdim=True) + EPS).sqrt()
        logits_TE = x_TD @ weights.router_ED.double().T + router_bias_E
        weight_TC, expert_TC = logits_TE.softmax(-1).topk(chosen)
        weight_TC = weight_TC / weight_TC.sum(-1, keepdim=True)
        both = torch.einsum("td,tcnd->tcn", x_TD, gate_up_ENK[expert_TC]) + gate_up_bias_EN[expert_TC]
        gate, up = both.chunk(2, dim=-1)
        h = torch.nn.functional.silu(gate) * up
        if clamp:
            gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
            h = (up + 1) * gate * (clamp.slope * gate).sigmoid()
        out_TCN = torch.einsum("tci,tcni->tcn", h, down_ENK[expert_TC]) + down_bias_EN[expert_TC]
        wanted = torch.einsum("tcn,tc->tn", out_TCN, weight_TC)
        assert error(added, wanted) < (2e-6 if EXACT else 4e-3)


def test_the_room_for_adapters_is_that_of_the_layer_with_the_widest():
    mlp = RoutedMLP(32, 4, 2, normalized=True)
    plain, adapted = (
        RoutedWeights(half(4, 64), dense(4, 64, 64, 2)[0], dense(4, 64, 32, 1)[0]) for _ in range(2)
    )
    adapters(adapted, 1, 32)
    assert not len(Mixtures(mlp, [plain], 8, EPS, half(1))._xa)
    for layers in ([plain, adapted], [adapted, plain]):
        room = Mixtures(mlp, layers, 8, EPS, half(1))
        assert len(room._xa) == 2 * 32 * len(room._items.token_S)


def test_items_have_room_for_twice_an_experts_share():
    sizes = [item_size(tokens, 128, 8) for tokens in (1, 64, 65, 128, 256, 2048)]
    assert sizes == [8, 8, 16, 16, 32, 64]


@on_gpu
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_four_bit_experts_multiply_items_of_every_size(size):
    experts, rows, width = 5, 384, 320
    weights, exact_ENK = packed(experts, rows, width, 1)
    used = [size, 1, size - 1, size, 3, size // 2]
    of = [0, 0, 2, 3, 3, 4]
    items = Items.empty(size * 8, experts, 1, size, torch.device(DEVICE))
    items.item_J2[: len(of)] = torch.tensor([of, used], dtype=torch.int32, device=DEVICE).T
    items.count_1.fill_(len(of))
    places = len(items.token_S)
    x_SK = half(places, width)
    x = torch.cat([to_operand(rows_MK) for rows_MK in x_SK.split(size)])
    out_SN = poison(places, rows)
    weights.multiply(x, items, out_SN)
    for j, (expert, count) in enumerate(zip(of, used, strict=True)):
        here = slice(j * size, j * size + count)
        wanted = x_SK[here].double() @ exact_ENK[expert].T
        assert error(out_SN[here] * weights.scale_EL[expert, 0], wanted) < 1e-6
        assert out_SN[j * size + count : (j + 1) * size].isnan().all()
    assert out_SN[len(of) * size :].isnan().all()


@on_gpu
def test_operands_of_another_size_are_refused():
    weights, _ = packed(2, 256, 128, 1)
    items = Items.empty(4, 2, 1, 8, torch.device(DEVICE))
    with pytest.raises(QeRLError, match="numbers are not"):
        weights.multiply(half(8, 128), items, poison(8, 256))
