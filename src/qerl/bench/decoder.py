"""Random weights of a shape, made directly on the GPU in the form the engine keeps."""

import torch

from qerl.kernels.blob import Blob
from qerl.plan.shapes import Shape
from qerl.rollout.paged.weights import Decoder, Layer, Lora, Matrix


def random_blob(rows: int, width: int, device: str = "cuda") -> Blob:
    """Random codes and scales between 1 and 1.875; N must be a multiple of 128."""
    groups, tiles = rows // 64, width // 64
    codes = torch.randint(0, 256, (groups, tiles, 128, 16), dtype=torch.uint8, device=device)
    scales = torch.randint(56, 64, (groups, tiles, 32, 4, 2), dtype=torch.uint8, device=device)
    return Blob(codes, scales, (rows, width))


def random_decoder(
    sizes: Shape, weights: str, rank: int, positions: int, device: str = "cuda", layers: int | None = None
) -> Decoder:
    """A decoder of random weights whose activations stay near one.

    Args:
        sizes: The shape.
        weights: ``nvfp4`` or ``bf16``.
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


def _layer(sizes: Shape, weights: str, rank: int, device: str) -> Layer:
    products = {name: (parts, rows, width) for name, rows, width, parts in sizes.products}
    w = {name: _matrix(*product, weights, device) for name, product in products.items()}
    lora = {name: _lora(*product, rank, device) for name, product in products.items()}
    columns = products["qkv"][1]
    return Layer(
        input_norm_D=_norm(sizes.hidden, device),
        qkv=w["qkv"],
        bias_N=torch.randn(columns, device=device).bfloat16() if sizes.bias else None,
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
    if weights == "bf16":
        weight: Blob | torch.Tensor = torch.empty(rows, width, dtype=torch.bfloat16, device=device).normal_(
            std=width**-0.5
        )
        scale = 1.0
    else:
        weight = random_blob(-(-rows // 128) * 128, width, device)
        scale = (16.6 * width) ** -0.5  # code times block scale has a mean square of 16.6 or so
    factor = torch.full((parts,), scale, device=device)
    return Matrix(weight, factor, factor * 256)


def _lora(parts: int, rows: int, width: int, rank: int, device: str) -> Lora | None:
    if rank == 0:
        return None
    padded = -(-rank // 16) * 16
    a = torch.randn(parts * padded, width, device=device) * width**-0.5
    b = torch.randn(rows, padded, device=device) * 0.1
    return Lora(a.bfloat16(), b.bfloat16())


def _norm(size: int, device: str) -> torch.Tensor:
    return torch.rand(size, device=device) + 0.5
