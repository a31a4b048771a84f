"""Every Triton kernel of a decode step compiles for a Hopper GPU, on a machine without one.

Triton's interpreter, in which the other tests run the kernels, takes what the compiler refuses. Here a step
is run whose launches are compiled for sm_90 instead, in a process of its own, because a kernel is either
interpreted or compiled from its definition on.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on a Hopper GPU."""


def test_a_decode_step_compiles_for_hopper():
    import torch

    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith("_"))
    assert set(found) == {
        "_residual_norm", "_rope_kv", "_attend", "_combine_splits", "_silu_mul", "_partial_softmax",
        "_choose", "_norm", "_norm_backward", "_swiglu", "_swiglu_backward", "_rotate",
    }  # fmt: skip
    assert int(found["_attend"]) >= 4, "16 and 64 rows, bf16 and fp8"


def compile_instead(compiled: set[tuple[Any, ...]]) -> None:
    """Makes every launch a compilation for sm_90."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
        torch.float8_e4m3fn: "fp8e4nv",
    }  # fmt: skip

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        values |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + types[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        key = (self.__name__, *signature.values(), *constants.values(), *options.values())
        if key not in compiled:
            source = ASTSource(self, signature, constants, attributes)
            kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            assert kernel.metadata.shared <= SHARED, f"{self.__name__} of {constants} wants too much"
            compiled.add(key)

    triton.JITFunction.run = run


def main() -> None:
    """Steps of few and of many tokens, with LoRA, with both kinds of cache; the update's kernels."""
    import torch

    from bench.random_model import random_decoder
    from qerl.families.sizes import Sizes
    from qerl.kernels.update.rms_norm import rms_norm
    from qerl.kernels.update.rotary import rotated_heads
    from qerl.kernels.update.swiglu import swiglu
    from qerl.rollout.engine import SamplingParams
    from qerl.rollout.paged.decode import DecodeStep
    from qerl.rollout.paged.kv_cache import KVCache
    from qerl.rollout.paged.machine import NoGraphs
    from qerl.rollout.paged.pace import Pace
    from qerl.rollout.paged.prefill import Prefill
    from qerl.rollout.paged.scheduler import Span

    compiled: set[tuple[Any, ...]] = set()
    compile_instead(compiled)
    for module in [m for name, m in sys.modules.items() if name.startswith("qerl.kernels")]:
        if hasattr(module, "dependent"):
            module.dependent = lambda tensor: {"PDL": True, "launch_pdl": True}
    few, many = (8, torch.bfloat16, False), (128, torch.float8_e4m3fn, True)
    for (tokens, dtype, norm), rank in ((few, 32), (many, 32), (many, 256)):
        sizes = Sizes(256, 512, 1, 28, 4, 128, 5000, qkv_bias=not norm, qk_norm=norm)
        decoder = random_decoder(sizes, "bf16", rank, 256, device="cpu")
        cache = KVCache.of_blocks(decoder, 4, dtype)
        params = SamplingParams(8, stop_token_ids=(1, 2))
        DecodeStep(decoder, cache, tokens, 8, 2, params, NoGraphs()).run()
        Prefill(decoder, Pace().prefill_tokens).run([Span([1, 2, 3], 0, [0])], cache)
    x = torch.randn(4, 3584, dtype=torch.bfloat16, requires_grad=True)
    for dtype in (torch.bfloat16, torch.float32):  # without noise and with it
        rms_norm(x, torch.ones(3584, dtype=dtype), 1e-6).sum().backward()
    swiglu(x, x).sum().backward()
    table = torch.ones(1, x.shape[0], 128, dtype=torch.bfloat16)
    rotated_heads(x[None], table, table, 20, 4)[0].sum().backward()
    names = [key[0] for key in compiled]
    for name in sorted(set(names)):
        print(name, names.count(name))


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "src"), str(root)]
    main()
