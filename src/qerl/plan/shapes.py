"""Sizes of well-known decoders by name: Qwen2.5 unless the name says otherwise."""

from dataclasses import dataclass

from qerl.errors import QeRLError


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

    @property
    def products(self) -> list[tuple[str, int, int, int]]:
        """(name, N, K, linears on top of each other) of the four products of a layer."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        return [
            ("qkv", q + 2 * kv, self.hidden, 3),
            ("o", self.hidden, q, 1),
            ("gate_up", 2 * self.intermediate, self.hidden, 2),
            ("down", self.hidden, self.intermediate, 1),
        ]


SHAPES = {
    "1.5b": Shape(1536, 8960, 28, 12, 2, 128, 151936, bias=True),
    "3b": Shape(2048, 11008, 36, 16, 2, 128, 151936, bias=True),
    "7b": Shape(3584, 18944, 28, 28, 4, 128, 152064, bias=True),
    "14b": Shape(5120, 13824, 48, 40, 8, 128, 152064, bias=True),
    "32b": Shape(5120, 27648, 64, 40, 8, 128, 152064, bias=True),
    "72b": Shape(8192, 29568, 80, 64, 8, 128, 152064, bias=True),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, qk_norm=True),
    "qwen3-14b": Shape(5120, 17408, 40, 40, 8, 128, 151936, qk_norm=True),
    "qwen3-32b": Shape(5120, 25600, 64, 64, 8, 128, 151936, qk_norm=True),
    "mistral-7b": Shape(4096, 14336, 32, 32, 8, 128, 32768),
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
