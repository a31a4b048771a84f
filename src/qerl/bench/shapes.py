"""Model shapes by name, and random weights made directly on the GPU in the form the engine keeps."""

from dataclasses import dataclass

import torch

from qerl.errors import QeRLError
from qerl.kernels.blob import Blob
from qerl.rollout.paged.weights import Decoder, Layer, Lora, Matrix


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    bias: bool = False
    qk_norm: bool = False


SHAPES = {
    "1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, bias=True),
    "3b": Shape(2048, 11008, 36, 16, 2, 128, 151936, bias=True),
    "7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, bias=True),
    "14b": Shape(5120, 13824, 48, 40, 8, 128, 152064, bias=True),
    "32b": Shape(5120, 27648, 64, 40, 8, 128, 152064, bias=True),
    "72b": Shape(8192, 29568, 80, 64, 8, 128, 152064, bias=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8, 128, 151936, qk_norm=True),
    "llama3-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama3-70b": Shape(8192, 28672, 80, 64, 8, 128, 128256),
}


def shape(name: str) -> Shape:
    """The shape called ``name``.

    Raises:
        QeRLError: No such shape.
    """
    if name not in SHAPES:
        raise QeRLError(f"There is no shape {name!r}; known are {', '.join(SHAPES)}.")
    return SHAPES[name]


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

    def matrix(parts: int, rows: int, width: int) -> Matrix:
        if weights == "bf16":
            dense = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
            weight: Blob | torch.Tensor = dense.normal_(std=width**-0.5)
            scale = 1.0
        else:
            padded = -(-rows // 128) * 128
            codes = torch.randint(
                0, 256, (padded // 64, width // 64, 128, 16), dtype=torch.uint8, device=device
            )
            # Scales 1 to 1.875: a weight has mean square 2.3 * 7.2 or so.
            scales = torch.randint(
                56, 64, (padded // 64, width // 64, 32, 4, 2), dtype=torch.uint8, device=device
            )
            weight = Blob(codes, scales, (padded, width))
            scale = (16.6 * width) ** -0.5
        factor = torch.full((parts,), scale, device=device)
        return Matrix(weight, factor, factor * 256)

    def lora(parts: int, rows: int, width: int) -> Lora | None:
        if rank == 0:
            return None
        padded = -(-rank // 16) * 16
        a = torch.randn(parts * padded, width, device=device) * width**-0.5
        b = torch.randn(rows, padded, device=device) * 0.1
        return Lora(a.bfloat16(), b.bfloat16())

    def norm(size: int) -> torch.Tensor:
        return torch.rand(size, device=device) + 0.5

    s = sizes
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    stack = []
    for _ in range(layers or s.layers):
        stack.append(
            Layer(
                input_norm_D=norm(s.hidden),
                qkv=matrix(3, q + 2 * kv, s.hidden),
                bias_N=torch.randn(q + 2 * kv, device=device).bfloat16() if s.bias else None,
                qk_norm_2E=torch.rand(2, s.head_size, device=device) + 0.5 if s.qk_norm else None,
                o=matrix(1, s.hidden, q),
                post_norm_D=norm(s.hidden),
                gate_up=matrix(2, 2 * s.intermediate, s.hidden),
                down=matrix(1, s.hidden, s.intermediate),
                lora_qkv=lora(3, q + 2 * kv, s.hidden),
                lora_o=lora(1, s.hidden, q),
                lora_gate_up=lora(2, 2 * s.intermediate, s.hidden),
                lora_down=lora(1, s.hidden, s.intermediate),
            )
        )
    table = torch.empty(s.vocabulary, s.hidden, dtype=torch.bfloat16, device=device).normal_()
    head = torch.empty(s.vocabulary, s.hidden, dtype=torch.bfloat16, device=device).normal_(
        std=s.hidden**-0.5
    )
    frequency = 1e6 ** -(torch.arange(0, s.head_size, 2, device=device) / s.head_size)
    angle = torch.arange(positions, device=device)[:, None] * frequency[None, :]
    return Decoder(
        embedding_VD=table, layers=stack, final_norm_D=norm(s.hidden), head_VD=head, cos_ME=angle.cos(),
        sin_ME=angle.sin(), heads=s.heads, kv_heads=s.kv_heads, head_size=s.head_size,
        intermediate=s.intermediate, eps=1e-6,
    )  # fmt: skip
