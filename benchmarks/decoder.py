"""Random weights of a shape, made directly on the GPU in the form the engine keeps."""

import torch

from qerl.families.sizes import Sizes
from qerl.kernels.limits import pad_rank
from qerl.kernels.weights.gemm import Weight
from qerl.kernels.weights.nf4 import BLOCK, NF4
from qerl.kernels.weights.packed_gemm import Blob
from qerl.rollout.paged.weights import Decoder, Layer, Lora, Matrix

WEIGHTS = ("nvfp4", "bf16", "nf4", "mxfp4")
"""Formats of the linear layers that benchmarks take."""


def random_blob(rows: int, width: int, device: str = "cuda", most: float = 1.875) -> Blob:
    """Random codes and scales between 1 and ``most``, below 2; N must be a multiple of 128."""
    groups, tiles = rows // 64, width // 64
    codes = torch.randint(0, 256, (groups, tiles, 128, 16), dtype=torch.uint8, device=device)
    one = 56  # in E4M3, whose three bits after it are eighths
    end = one + 1 + int(8 * (most - 1))
    scales = torch.randint(one, end, (groups, tiles, 32, 4, 2), dtype=torch.uint8, device=device)
    return Blob(codes, scales, (rows, width))


def random_nf4(rows: int, width: int, device: str = "cuda") -> NF4:
    """Random codes, whose mean square is 0.268, and absmax such that a weight's mean square is 1 / K."""
    codes = torch.randint(0, 256, (rows * width // 2, 1), dtype=torch.uint8, device=device)
    absmax = torch.full((rows * width // BLOCK,), (0.268 * width) ** -0.5, device=device)
    return NF4(codes, absmax, (rows, width))


def random_decoder(
    sizes: Sizes, weights: str, rank: int, positions: int, device: str = "cuda", layers: int | None = None
) -> Decoder:
    """A decoder of random weights whose activations stay near one.

    Args:
        sizes: The shape.
        weights: One of `WEIGHTS`.
        rank: LoRA rank on all linears; 0 for none.
        positions: Positions the rotary table covers.
        layers: Fewer layers than the shape has, for tests.
    """
    s = sizes
    table = torch.empty(s.vocabulary, s.hidden, dtype=torch.bfloat16, device=device)
    frequency = 1e6 ** -(torch.arange(0, s.head_size, 2, device=device) / s.head_size)
    angle = torch.arange(positions, device=device)[:, None] * frequency[None, :]
    return Decoder(
        embedding_VD=table.normal_(),
        layers=[_layer(s, weights, rank, device) for _ in range(layers or s.layers)],
        final_norm_D=_norm(s.hidden, device),
        head_VD=torch.empty_like(table).normal_(std=s.hidden**-0.5),
        cos_ME=angle.cos(), sin_ME=angle.sin(), heads=s.heads, kv_heads=s.kv_heads, head_size=s.head_size,
        intermediate=s.intermediate, eps=1e-6,
    )  # fmt: skip


def _layer(sizes: Sizes, weights: str, rank: int, device: str) -> Layer:
    products = {name: (parts, rows, width) for name, rows, width, parts in sizes.products}
    w = {name: _matrix(*product, weights, device) for name, product in products.items()}
    lora = {name: _lora(*product, rank, device) for name, product in products.items()}
    columns = products["qkv"][1]
    return Layer(
        input_norm_D=_norm(sizes.hidden, device),
        qkv=w["qkv"],
        bias_N=torch.randn(columns, device=device).bfloat16() if sizes.qkv_bias else None,
        qk_norm_2E=_norm(2 * sizes.head_size, device).view(2, -1) if sizes.qk_norm else None,
        o=w["o"],
        post_norm_D=_norm(sizes.hidden, device),
        gate_up=w["gate_up"],
        down=w["down"],
        lora_qkv=lora["qkv"],
        lora_o=lora["o"],
        lora_gate_up=lora["gate_up"],
        lora_down=lora["down"],
    )


def _matrix(parts: int, rows: int, width: int, weights: str, device: str) -> Matrix:
    scale = 1.0
    if weights == "bf16":
        dense = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
        weight: Weight = dense.normal_(std=width**-0.5)
    elif weights == "nf4":
        weight = random_nf4(rows, width, device)
    elif weights == "mxfp4":
        # The engine holds MXFP4 as NVFP4 whose block scales are powers of two, here all one.
        weight = random_blob(-(-rows // 128) * 128, width, device, most=1.0)
        scale = (7.2 * width) ** -0.5  # codes have a mean square of 7.2
    else:
        weight = random_blob(-(-rows // 128) * 128, width, device)
        scale = (16.6 * width) ** -0.5  # code times block scale has a mean square of 16.6 or so
    factor = torch.full((parts,), scale, device=device)
    return Matrix(weight, factor, factor * 256)


def _lora(parts: int, rows: int, width: int, rank: int, device: str) -> Lora | None:
    if rank == 0:
        return None
    a = torch.randn(parts * pad_rank(rank), width, device=device) * width**-0.5
    b = torch.randn(rows, pad_rank(rank), device=device) * 0.1
    return Lora(a.bfloat16(), b.bfloat16())


def _norm(size: int, device: str) -> torch.Tensor:
    return torch.rand(size, device=device) + 0.5
