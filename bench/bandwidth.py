"""Microseconds of the kernels that memory bounds, with the bytes that they move and their share of its speed.

    python -m bench bandwidth --shape 7b --tokens 8 64 --update_tokens 8192

One function per kernel file makes a launch on random inputs and counts what the kernel must read and write: a
decode step's kernels with LoRA, the update's forward and backward. Products are timed by
`python -m bench kernels`; attention and the draw of a token, whose work depends on the batch, are timed
within a step by `python -m bench rollout --profile`.

Shapes: T tokens, D hidden, I intermediate, N columns of q, k and v, R rank.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.result import write_result
from bench.rollout import read_bandwidth
from qerl.families.sizes import Sizes
from qerl.kernels.decode import act_mul, filters, residual_norm, rope_kv
from qerl.kernels.decode.launch import LoraA, LoraB
from qerl.kernels.limits import PAGE
from qerl.kernels.tensors import head_positions
from qerl.kernels.update.experts import gate_pairs, gate_pairs_backward
from qerl.kernels.update.fp8 import quantize_rows
from qerl.kernels.update.gated_norm import gated_norm
from qerl.kernels.update.rms_norm import rms_norm
from qerl.kernels.update.rotary import rotated_heads
from qerl.kernels.update.swiglu import swiglu
from qerl.kernels.update.token_logps import token_logps
from qerl.kernels.weights.product import LoraSum


@dataclass(frozen=True)
class Launch:
    """A kernel on inputs of its own.

    Attributes:
        run: Launches it once.
        bytes: What it must read and write.
    """

    run: Callable[[], Any]
    bytes: int


@dataclass(frozen=True)
class Work:
    """What a kernel is launched on.

    Attributes:
        dtype: 16-bit; FP32 only for the interpreter, which multiplies 16-bit numbers wrongly.
    """

    sizes: Sizes
    tokens: int
    rank: int = 32
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def half(self, *shape: int) -> torch.Tensor:
        """Normal random numbers in the 16-bit dtype."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def single(self, *shape: int) -> torch.Tensor:
        """Normal random numbers in FP32."""
        return torch.randn(*shape, device=self.device)

    def sum(self, ranks: int) -> LoraSum:
        """The sum x A^T of a product."""
        return LoraSum(sum_TR=self.single(self.tokens, ranks))

    def parts(self, count: int, ranks: int) -> LoraSum:
        """Room for so many parts of the sum x A^T of a product."""
        return LoraSum(self.single(count, self.tokens, ranks))


def _bytes(*tensors: torch.Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def norm_of_residual(work: Work) -> Launch:
    """residual_norm: the MLP's output into the residual stream, and A of the next q, k and v."""
    t, d, r = work.tokens, work.sizes.hidden, work.rank
    residual, w_D, u_TD = work.single(t, d), work.single(d), work.half(t, d)
    squares = work.single(-(-d // residual_norm.block_d(t)), t)
    product, b_NR, a_RK = work.single(1, t, d), work.half(d, r), work.half(3 * r, d)
    scale = torch.ones(1, device=work.device)
    b, a = LoraB(work.sum(r), b_NR), LoraA(a_RK, work.parts(len(squares), 3 * r))
    return Launch(
        lambda: residual_norm.residual_norm(
            residual, w_D, u_TD, squares, gemm_STN=product, scale_1=scale, b=b, a=a
        ),
        _bytes(residual, residual, w_D, u_TD, squares, product, b_NR, a_RK, b.xa.sum_TR, a.xa.parts_PTR),
    )


def rotation_into_cache(work: Work) -> Launch:
    """rope_kv: q, k and v turned, and k and v written to the cache."""
    hidden, s = work.sizes.hidden, work.sizes.attention
    t, r = work.tokens, work.rank
    columns = s.queries + 2 * s.keys
    product, b_NR = work.single(1, t, columns), work.half(columns, r)
    cos_MP, sin_MP = work.single(512, s.head_size // 2), work.single(512, s.head_size // 2)
    position = torch.arange(t, device=work.device, dtype=torch.int32) % 512
    slot = torch.arange(t, device=work.device, dtype=torch.int32) * PAGE
    q_THE = work.half(t, s.heads, s.head_size)
    k_cache, v_cache = (work.half(t, s.kv_heads, PAGE, s.head_size) for _ in range(2))
    squares, scale = work.single(1, t).abs(), torch.ones(3, device=work.device)
    b = LoraB(work.sum(3 * r), b_NR)
    written = t * 2 * s.keys * k_cache.element_size()
    return Launch(
        lambda: rope_kv.rope_kv(
            product,
            scale,
            squares,
            cos_MP,
            sin_MP,
            position,
            slot,
            q_THE,
            k_cache,
            v_cache,
            width=hidden,
            eps=1e-6,
            b=b,
        ),
        _bytes(product, b_NR, q_THE, b.xa.sum_TR) + written,
    )


def gated_product(work: Work) -> Launch:
    """act_mul: silu(gate) * up, and A of down."""
    t, i, r = work.tokens, work.sizes.mlp.intermediate, work.rank
    product, h_TI = work.single(1, t, 2 * i), work.half(t, i)
    b_NR, a_RK = work.half(2 * i, r), work.half(r, i)
    squares, scale = work.single(1, t).abs(), torch.ones(2, device=work.device)
    b, a = LoraB(work.sum(2 * r), b_NR), LoraA(a_RK, work.parts(-(-i // act_mul.BLOCK_I), r))
    return Launch(
        lambda: act_mul.act_mul(
            product, scale, squares, h_TI, intermediate=i, width=work.sizes.hidden, eps=1e-6, b=b, a=a
        ),
        _bytes(product, h_TI, b_NR, a_RK, b.xa.sum_TR, a.xa.parts_PTR),
    )


def token_filters(work: Work) -> Launch:
    """filters: top-p of a row, whose logits it reads once from memory and then from the cache.

    Launched again it finds log-probabilities in the place of the logits, which take it as long.
    """
    logits_TV = 3 * work.single(work.tokens, work.sizes.vocabulary)
    squares = torch.ones(1, work.tokens, device=work.device)
    running = torch.zeros(work.tokens, dtype=torch.int32, device=work.device)
    settings = filters.RowSettings.free(work.tokens, work.device)
    settings.mode_R.fill_(filters.FILTERED.value)
    settings.top_p_R.fill_(0.95)
    return Launch(
        lambda: filters.apply_filters(logits_TV, squares, running, settings, width=1, eps=0.0),
        2 * _bytes(logits_TV),
    )


def norm_of_update(work: Work) -> Launch:
    """rms_norm: forward and backward."""
    x, w_D = work.half(work.tokens, work.sizes.hidden).requires_grad_(), work.half(work.sizes.hidden)
    dy = work.half(*x.shape)
    return Launch(lambda: torch.autograd.grad(rms_norm(x, w_D, 1e-6), x, dy), 5 * _bytes(x))


def gated_norm_of_update(work: Work) -> Launch:
    """gated_norm: as many values as the residual stream is wide, in heads of 128, forward and backward."""
    size = 128
    x, z = (work.half(work.tokens * work.sizes.hidden // size, size).requires_grad_() for _ in range(2))
    w_E, dy = work.half(size), work.half(*x.shape)
    return Launch(lambda: torch.autograd.grad(gated_norm(x, z, w_E, 1e-6), (x, z), dy), 8 * _bytes(x))


def swiglu_of_update(work: Work) -> Launch:
    """swiglu: forward and backward."""
    x = work.half(work.tokens, 2 * work.sizes.mlp.intermediate).requires_grad_()
    dy = work.half(work.tokens, work.sizes.mlp.intermediate)
    return Launch(lambda: torch.autograd.grad(swiglu(x), x, dy), 3 * _bytes(x) + 2 * _bytes(dy))


def gates_of_experts(work: Work) -> Launch:
    """experts: gates of one pair per token, as wide as the MLP, forward and backward."""
    t, i = work.tokens, work.sizes.mlp.intermediate
    y, dh = work.half(t, 2 * i), work.half(t, i)
    factor_E2, expert_S = work.single(8, 2), torch.arange(t, device=work.device, dtype=torch.int32) % 8

    def run() -> None:
        gate_pairs(y, factor_E2, None, expert_S, None)
        gate_pairs_backward(dh, y, factor_E2, None, expert_S, None)

    return Launch(run, 3 * _bytes(y) + 2 * _bytes(dh))


def rotation_of_update(work: Work) -> Launch:
    """rotary: queries, keys and values of the update, forward and backward."""
    s, t = work.sizes.attention, work.tokens
    qkv = work.half(1, t, s.queries + 2 * s.keys).requires_grad_()
    cos, sin = work.half(2, 1, t, s.head_size)

    def run() -> None:
        heads = rotated_heads(qkv, cos, sin, s.heads, s.kv_heads)
        torch.autograd.grad(heads, qkv, heads)

    return Launch(run, 4 * _bytes(qkv))


DECODE = {
    "residual_norm": norm_of_residual, "rope_kv": rotation_into_cache, "act_mul": gated_product,
    "filters": token_filters,
}  # fmt: skip


def head_of_update(work: Work) -> Launch:
    """token_logps: a tile of logits, read twice, and their gradient in its place."""
    rows = head_positions(work.tokens, work.sizes.vocabulary)
    logits = work.single(rows, work.sizes.vocabulary)
    gradient = logits.view(work.dtype)[:, : work.sizes.vocabulary]
    target = torch.zeros(rows, dtype=torch.int64, device=work.device)
    return Launch(
        lambda: token_logps(logits, target, 1.0, None, 1.0, gradient), 2 * _bytes(logits) + _bytes(gradient)
    )


def rows_in_fp8(work: Work) -> Launch:
    """fp8: gradients of gate and up, rounded for a product in FP8; read again from the cache."""
    d = work.half(work.tokens, 2 * work.sizes.mlp.intermediate)
    return Launch(lambda: quantize_rows(d), _bytes(d) + d.numel())


UPDATE = {
    "fp8": rows_in_fp8,
    "rms_norm": norm_of_update,
    "gated_norm": gated_norm_of_update,
    "swiglu": swiglu_of_update,
    "experts": gates_of_experts,
    "rotary": rotation_of_update,
    "token_logps": head_of_update,
}
"""The launch of each kernel by the name of its file, in `qerl.kernels.decode` and `qerl.kernels.update`."""


def main(arguments: list[str]) -> None:
    """Run `python -m bench bandwidth` with these arguments."""
    from triton.testing import do_bench, do_bench_cudagraph

    parser = argparse.ArgumentParser(
        prog="python -m bench bandwidth", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank in a decode step")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128], help="of a decode step")
    parser.add_argument("--update_tokens", type=int, nargs="+", default=[8192], help="of a forward pass")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    sizes, limit = Sizes.by_name(args.shape), read_bandwidth()
    rows: list[dict[str, Any]] = []
    for where, kernels, counts, time in (
        ("decode", DECODE, args.tokens, do_bench_cudagraph),
        ("update", UPDATE, args.update_tokens, do_bench),
    ):
        for name, make in kernels.items():
            for tokens in counts:
                launch = make(Work(sizes, tokens, args.rank))
                us = 1e3 * time(launch.run, return_mode="median")
                speed = launch.bytes / us / 1e3
                row = {"kernel": f"{where}/{name}", "shape": args.shape, "tokens": tokens, "us": us}
                rows.append({**row, "bytes": launch.bytes, "gb_s": speed, "limit_fraction": speed / limit})
                print(
                    f"{where}/{name} {args.shape} {tokens} tokens: {us:.1f} us, {speed:.0f} GB/s, "
                    f"{speed / limit:.0%} of the limit",
                    flush=True,
                )
    if args.out:
        write_result(args.out, " ".join(["bandwidth", *arguments]), rows, read_gb_s=limit)
