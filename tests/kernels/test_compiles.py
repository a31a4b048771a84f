"""Every Triton kernel compiles for each class of GPUs, on a machine without one, and fits its memory.

Triton's interpreter, in which the other tests run the kernels, takes what the compiler refuses. Here steps
are run whose launches are recorded, and what was recorded is compiled, in a process of its own, because a
kernel is either interpreted or compiled from its definition on. `make setup` brings the oldest allowed Triton
for this, which refuses more than the installed one; its interpreter does not run beside the present NumPy.

Compiling takes the time, so a class gets what differs there, and of that the largest launch of each kernel:
every class many tokens, and few, with LoRA of rank 32; Hopper and the class with the least shared memory what
has no product, and so needs no tensor cores, large ranks, few tokens or heads of 80, experts, and gated delta
nets; one class for each kind of tensor cores the widest heads. 8.9 is 8.6 with FP8, so it gets what reads or
writes keys and values.

As many processes compile as there are cores. What the compiler said of a launch stands in compiled.tsv behind
a hash of all that it depends on: kernel, types, constants and options, Triton, ptxas, and how this file asks.
So a launch is compiled only when one of them has changed, and until the file is written anew:

    .venv/bin/python tests/kernels/test_compiles.py --write

Without the file everything is compiled.
"""

import gc
import inspect
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

if __name__ == "__main__":  # ahead of the import of any Triton
    sys.path[:0] = map(str, Path(sys.prefix).glob("oldest"))
pytest.importorskip("triton", reason="Triton is not installed")

KERNELS = {
    "_residual_norm", "_rope_kv", "_attend", "_combine_splits", "_combine_of_token", "_act_mul",
    "_act_mul_of_many",
    "_partial_softmax", "_choose", "_filter", "_add_parts", "_norm", "_norm_backward", "_swiglu",
    "_swiglu_backward", "_rotate", "_token_logps",
    "_sum_product", "_cap_logits", "_find_slots", "_delta_inputs", "_gated_norm",
    "_gated_rms_norm", "_gated_rms_norm_backward",
    "_delta_inverse", "_delta_scan", "_delta_scan_backward",
    "_route", "_arrange", "_spread", "_act_items", "_product_of_items",
    "_items_times_a", "_add_items_times_b",
    "_gate_pairs", "_gate_pairs_backward", "_add_pairs", "_add_pairs_backward", "_quantize_rows",
}  # fmt: skip
OF_EXPERTS = {
    "_route", "_arrange", "_spread", "_act_items", "_product_of_items",
    "_items_times_a", "_add_items_times_b",
    "_gate_pairs", "_gate_pairs_backward", "_add_pairs", "_add_pairs_backward",
}  # fmt: skip
OF_FP8 = {"_rope_kv", "_attend"}
ONLY_FP8 = {"_quantize_rows"}
OF_GEMMA = {"_sum_product", "_cap_logits"}
OF_DELTA_NETS = {
    "_delta_inputs", "_gated_norm", "_gated_rms_norm", "_gated_rms_norm_backward",
    "_delta_inverse", "_delta_scan", "_delta_scan_backward",
}  # fmt: skip
AROUND_EXPERTS = {
    "_rope_kv", "_attend", "_combine_splits", "_combine_of_token", "_partial_softmax", "_choose", "_filter",
}  # fmt: skip
"""What a decoder with experts has as others do; it is compiled for those."""
WITHOUT_PRODUCTS = {
    "_partial_softmax", "_choose", "_filter", "_add_parts", "_norm", "_norm_backward", "_swiglu",
    "_swiglu_backward", "_rotate", "_token_logps", "_find_slots", "_quantize_rows",
}  # fmt: skip
OF_OPERANDS = {
    "_residual_norm", "_act_mul", "_act_mul_of_many", "_combine_splits", "_gated_norm", "_spread",
    "_act_items", "_items_times_a",
}  # fmt: skip
TARGETS = (80, 86, 89, 90, 100, 120)
LEAST_MEMORY, HOPPER = 86, 90
KNOWN = Path(__file__).with_name("compiled.tsv")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles_and_fits_for_every_class_of_gpus():
    import torch

    if torch.cuda.is_available():
        pytest.skip("tests/gpu runs the kernels themselves")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [Compiled.of(line) for line in done.stdout.splitlines() if line.startswith("_")]
    for target in TARGETS:
        found = [row for row in rows if row.target == target]
        wanted = KERNELS
        if target == LEAST_MEMORY:
            wanted = KERNELS - ONLY_FP8
        elif target != HOPPER:
            wanted = KERNELS - OF_GEMMA - OF_DELTA_NETS - OF_EXPERTS - WITHOUT_PRODUCTS
        assert {row.kernel for row in found} == (OF_FP8 if target == 89 else wanted), target
        assert max(row.shared for row in found if row.kernel == "_attend") > 32 * 1024, "pages of keys"
        for row in found:
            assert row.shared <= limit(target), f"{row} wants too much shared memory"
            assert 0 <= row.spilled <= SPILLS.get(row.walk, 96), f"{row} spills registers"
            assert not row.halves or row.kernel not in OF_OPERANDS, (
                f"{row} stores an operand number by number"
            )


def test_no_kernel_is_left_out():
    """Helpers that kernels call have names without an underscore."""
    files = (Path(__file__).parents[2] / "src" / "qerl").rglob("*.py")
    assert {
        name
        for file in files
        for name in re.findall(r"@triton\.jit(?:\(.*\))?\ndef (_\w+)", file.read_text())
    } == KERNELS


@pytest.mark.slow
def test_the_dense_weight_is_written_on_every_class_of_gpus(tmp_path):
    """dequantize.cu; packed_gemm.cu has a test of its own."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from qerl.kernels.cards import CARDS
    from qerl.kernels.nvrtc import compile_source
    from qerl.kernels.weights import dequantize

    for card in CARDS.values():
        all_out = dequantize._OUT.values() if card.number == 80 else (0,)
        for out in (*all_out, *([dequantize._OUT_E4M3] if card.fp8 else [])):
            defines = {"TILES": dequantize._TILES, "OUT": out}
            cubin = tmp_path / f"{card.number}"
            cubin.write_bytes(compile_source(dequantize._SOURCE, defines, card.target))
            registers, stack, _ = resources(cubin)
            assert registers * 128 <= 1 << 16 and stack == 0, f"{card.number}: registers are spilled"
    staged = max(dequantize._STAGED_BYTES, dequantize._TURNED_BYTES)
    assert min(card.shared_bytes for card in CARDS.values()) >= staged


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "size"), [(32, 128), (48, 128), (4, 40)])
def test_the_step_of_a_delta_net_compiles_for_every_class_of_gpus(tmp_path, heads, size):
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from qerl.kernels.cards import CARDS
    from qerl.kernels.decode.delta_net import STEP_SOURCE, block_columns
    from qerl.kernels.limits import STATE_TOKENS
    from qerl.kernels.nvrtc import compile_source

    defines = {"U": heads // 2, "V": heads, "K": size, "E": size, "P": STATE_TOKENS - 1}
    defines["COLUMNS"] = block_columns(size)
    for card in CARDS.values():
        cubin = tmp_path / f"{card.number}"
        cubin.write_bytes(compile_source(STEP_SOURCE, defines, card.target))
        registers, stack, shared = resources(cubin)
        assert registers <= 128 and stack == 0, f"{card.number}: registers are spilled"
        assert 4 * (shared + 1024) <= card.shared_bytes, f"{card.number}: four blocks share no multiprocessor"


def resources(cubin):
    """Registers, bytes of the stack and of shared memory of a kernel's threads and blocks."""
    cuobjdump = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    used = subprocess.run([cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True)
    return [int(re.search(rf"{name}:(\d+)", used.stdout).group(1)) for name in ("REG", "STACK", "SHARED")]


AS_OLDER = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from qerl.kernels.update.rms_norm import _norm
signature = {"x_TD": "*bf16", "w_GD": "*bf16", "y_TD": "*bf16", "rstd_T": "*fp32"}
signature |= {"D": "i32", "part": "i32", "eps": "fp32", "added": "fp32"}
constants = {"ROUND_UNIT": True, "BLOCK": 512}
source = ASTSource(_norm, signature | dict.fromkeys(constants, "constexpr"), constants, {})
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(re.findall(r"[.]target (\\w+)", kernel.asm["ptx"])[0], kernel.asm["cubin"][49])
"""


@pytest.mark.slow
def test_a_card_treated_as_an_older_one_assembles_that_classs_code_for_itself(tmp_path):
    environment = {**os.environ, "QERL_ARCH": "80", "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    run = [sys.executable, "-W", "ignore", "-c", AS_OLDER]
    done = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["sm_80", str(90)], "PTX of 8.0, and machine code of 9.0"


SPILLS = {
    "heads of 256": 512, "rank 256": 1536, "rank 256, few": 1536, "delta rule": 768,
    "delta rule, small heads": 768,
}  # fmt: skip
"""Bytes that a thread may spill, by walk: sizes that few models and adapters have; and what the delta rule
holds of states and both halves of its operands, whose time are products."""


def limit(target: int) -> int:
    """Bytes of shared memory that a program may have."""
    from qerl.kernels.cards import CARDS

    return CARDS[target // 10, target % 10].shared_bytes


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a launch: bytes of shared memory, a thread's registers and bytes spilled, and
    its stores of single 16-bit numbers."""

    kernel: str
    target: int
    walk: str
    shared: int
    registers: int
    spilled: int
    halves: int

    @classmethod
    def of(cls, line: str) -> "Compiled":
        kernel, target, walk, *numbers = line.split("\t")
        return cls(kernel, int(target), walk, *map(int, numbers))

    def line(self) -> str:
        return "\t".join(map(str, vars(self).values()))


class Recorder:
    """Stands in for `triton.JITFunction.run`; keeps each kind of launch once, with the walk that met it."""

    def __init__(self) -> None:
        self.met: dict[tuple[Any, ...], tuple[str, Any, dict[str, Any], dict[Any, Any]]] = {}
        self.walk = ""

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        import torch

        types = {
            torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
            torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8",
        }  # fmt: skip
        values = dict(zip(function.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in function.arg_names}
        values |= {name: value for name, value in kwargs.items() if name in function.arg_names}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(function.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + types[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]  # as a launch finds out
        key = (function.__name__, *signature.values(), *constants.values(), *options.values())
        if key not in self.met:
            from triton.compiler import ASTSource

            source = ASTSource(function, signature, constants, attributes)
            self.met[key] = self.walk, source, options, constants


DECODERS: dict[str, Any] = {}
"""Those of the walks, which are the same for each class: making them takes most of a walk."""


def walk(recorder: Recorder, target: int) -> None:
    """Launches the kernels of decode steps, prefill and update as on a GPU of this class."""
    import torch
    from transformers import Gemma4TextConfig, GptOssConfig, Qwen3_5MoeTextConfig, Qwen3MoeConfig

    from qerl.families.layer import Clamp
    from qerl.families.sizes import Sizes
    from qerl.kernels.cards import ARCH, CARDS, card_of
    from qerl.kernels.decode import attend
    from qerl.kernels.update.fp8 import quantize_rows
    from qerl.kernels.update.gated_norm import gated_norm
    from qerl.kernels.update.rms_norm import rms_norm
    from qerl.kernels.update.rotary import rotated_heads
    from qerl.kernels.update.swiglu import swiglu
    from qerl.kernels.update.token_logps import token_logps
    from qerl.kernels.weights.dense import DenseStack
    from qerl.kernels.weights.experts import DenseExperts, NVFP4Experts
    from qerl.kernels.weights.packed_gemm import MAX_TOKENS, padded_tokens
    from qerl.measure.random_model import random_decoder
    from qerl.rollout.paged import decode as paged_decode
    from qerl.rollout.paged.decode import DecodeGraphs, DecodeStep, Way
    from qerl.rollout.paged.kv_cache import KVCache
    from qerl.rollout.paged.limits import KVGeometry, Units
    from qerl.rollout.paged.prefill import Prefill
    from qerl.rollout.paged.scheduler import Pace, Span
    from tests.support.machine import Eager, NoGraphs

    os.environ[ARCH] = str(target)
    card_of.cache_clear()
    card = CARDS[target // 10, target % 10]
    for module in [m for name, m in sys.modules.items() if name.startswith("qerl.kernels")]:
        if hasattr(module, "dependent"):
            launch = {"PDL": True, "launch_pdl": True} if card.dependent_launch else {"PDL": False}
            module.dependent = lambda tensor, launch=launch: launch

    for module in (attend, paged_decode):  # how keys are split and asked for; a CPU would seem to be full
        module.multiprocessors = lambda device: 132

    def operand_tokens(weight: DenseStack, tokens: int) -> int:
        """As of a weight in NVFP4 on a GPU."""
        return padded_tokens(tokens) if tokens <= MAX_TOKENS[card.math] else 0

    DenseStack.padded_tokens = operand_tokens  # type: ignore[method-assign]

    def decode(
        tokens: int,
        rank: int,
        size: int,
        fp8: bool,
        whole: bool = False,
        shape: Any = None,
        expert_rank: int = 0,
        apart: bool = True,
        long: bool = False,
        parts: int = 1,
        pages: int = 2,
    ) -> None:
        norm = tokens > 8
        dtype = torch.float8_e4m3fn if fp8 and card.fp8 else torch.bfloat16
        sizes = Sizes.uniform(256, 512, 1, 28, 4, size, 5000, qkv_bias=not norm, qk_norm=norm)
        made_of = f"{shape or sizes} {rank}"
        if made_of not in DECODERS:
            DECODERS[made_of] = random_decoder(shape or sizes, "bf16", rank, 256, device="cpu")
        decoder = DECODERS[made_of]
        for layer in decoder.layers if expert_rank else ():
            adapt_experts(layer.mlp, expert_rank)
        pools = len(KVGeometry.of(decoder.sizes, 2).pools)
        cache = KVCache.of_blocks(decoder, Units([4] * pools), dtype)
        step = DecodeStep(decoder, cache, tokens, 8, pages, NoGraphs())
        step.forward.cut_as(step.number_of[Way(apart, long, parts)])
        step.run()
        if whole:
            DecodeStep(decoder, cache, 8, 8, 2, NoGraphs()).run()
            graphs = DecodeGraphs(decoder, cache, Eager(), Pace().small_rows)
            graphs.make_room(8, pages)
            prefill = Prefill(decoder, cache, graphs, Pace().prefill_tokens)
            prefill.run([Span([1, 2, 3], 0, {pool: [0] for pool in range(pools)})])

    recorder.walk = "many"
    decode(128, 32, 128, fp8=True, whole=True)
    if target == 89:
        return
    recorder.walk = "products of 128 tokens"
    read_products(128, 32, True)
    recorder.walk = "products of 256 tokens"
    read_products(256, 32, card.math == "wgmma")
    recorder.walk = "many"
    if card.fp8:
        quantize_rows(torch.randn(4, 37888, dtype=torch.bfloat16))
    x = torch.randn(4, 3584, dtype=torch.bfloat16, requires_grad=True)
    rms_norm(x, torch.ones(3584, dtype=torch.bfloat16), 1e-6).sum().backward()
    swiglu(x, x).sum().backward()
    gradient, pulls = torch.empty(4, 5000, dtype=torch.bfloat16), (torch.ones(4), torch.ones(4))
    token_logps(torch.randn(4, 5000), torch.ones(4, dtype=torch.int64), 1.0, 30.0, 1.0, gradient, pulls)
    table = torch.ones(1, x.shape[0], 128, dtype=torch.bfloat16)
    rotated_heads(x[None], table, table, 20, 4)[0].sum().backward()
    if target in (LEAST_MEMORY, HOPPER, 100):
        recorder.walk = "heads of 256"
        decode(128, 32, 256, fp8=False, whole=True)
    if target in (LEAST_MEMORY, HOPPER):
        recorder.walk = "windows, wide heads, norms behind"
        gemma = Gemma4TextConfig(
            vocab_size=5000, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=4, num_global_key_value_heads=1, head_dim=256,
            attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
            layer_types=["sliding_attention", "full_attention"], max_position_embeddings=256,
        )  # fmt: skip
        decode(128, 32, 0, fp8=False, whole=True, shape=gemma)
        recorder.walk = "experts"
        mixture = Qwen3MoeConfig(
            vocab_size=5000, hidden_size=2048, num_hidden_layers=1, num_attention_heads=8,
            num_key_value_heads=4, head_dim=128, max_position_embeddings=256, norm_topk_prob=True,
        )  # fmt: skip
        DenseExperts.in_order, DenseExperts.sizes = True, NVFP4Experts.sizes
        decode(128, 32, 0, fp8=False, whole=True, shape=mixture, expert_rank=64)
        DenseExperts.sizes = (16, 64)
        decode(8, 32, 0, fp8=False, shape=mixture, expert_rank=16)
        recorder.walk = "experts with biases and clamps"
        biased = GptOssConfig(
            vocab_size=5000, hidden_size=576, intermediate_size=320, num_hidden_layers=1,
            num_attention_heads=8, num_key_value_heads=4, num_local_experts=32, max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        )  # fmt: skip
        decode(64, 32, 0, fp8=False, shape=biased)
        recorder.walk = "experts beside a shared one"
        shared = Qwen3_5MoeTextConfig(
            vocab_size=5000, hidden_size=512, num_hidden_layers=1, layer_types=["full_attention"],
            num_experts=32, moe_intermediate_size=128, shared_expert_intermediate_size=256,
            max_position_embeddings=256,
        )  # fmt: skip
        DenseExperts.in_order = True
        decode(64, 32, 0, fp8=False, shape=shared)
        recorder.walk = "pairs of experts"
        pairs(128, 8, 2048, 768, None)
        pairs(32, 4, 2880, 2880, Clamp(1.7, 7.0))
        recorder.walk = "rank 256"
        decode(128, 256, 128, fp8=True)
        decode(256, 256, 128, fp8=True)
        recorder.walk = "rank 256, few"
        decode(8, 256, 128, fp8=False)
        recorder.walk = "gated delta nets"
        delta_net_step(128, 32)
        gated_attention(128, 32)
        gated_norm(x[:, :128], x[:, 128:256], torch.ones(128), 1e-6).sum().backward()
        recorder.walk = "delta rule"
        delta_rule(128)
    if target == LEAST_MEMORY:
        recorder.walk = "delta rule, small heads"
        delta_rule(48)
        recorder.walk = "heads of 80"
        decode(128, 32, 80, fp8=False)
    if target == HOPPER:
        recorder.walk = "products of 256 tokens, rank 64"
        read_products(256, 64, card.math == "wgmma")
        recorder.walk = "Gemma with noise"  # a norm's weight in fp32
        rms_norm(x, torch.ones(3584), 1e-6, 1.0, False).sum().backward()
        swiglu(x, x, gelu=True).sum().backward()
        recorder.walk = "few"
        decode(8, 32, 128, fp8=False)
        recorder.walk = "16 bits"  # the launch of own tokens has fewer registers
        decode(128, 32, 128, fp8=False)
        recorder.walk = "prompts of their own"
        decode(128, 32, 128, fp8=False, apart=False)
        recorder.walk = "long prompts"  # of many splits
        for tokens in (8, 12):
            decode(tokens, 32, 128, fp8=False, pages=513)
        recorder.walk = "rows of different age"
        decode(128, 32, 128, fp8=False, parts=8, pages=131)
        recorder.walk = "one row in a long context"
        decode(1, 32, 128, fp8=False, apart=False, long=True, pages=513)
        recorder.walk = "one row in a long context, heads of 256"
        decode(1, 32, 256, fp8=False, apart=False, long=True, pages=513)


def adapt_experts(mlp: Any, rank: int) -> None:
    """Gives all experts of a mixture one adapter."""
    import torch

    from qerl.kernels.decode.expert_lora import ExpertLoraMatrices

    def made(rows: int, width: int, linears: int) -> ExpertLoraMatrices:
        shapes = (1, linears, rank, width), (1, linears, rows // linears, rank)
        return ExpertLoraMatrices(*(torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes))

    mlp.gate_up_lora, mlp.down_lora = made(*mlp.gate_up.shape, 2), made(*mlp.down.shape, 1)


def pairs(experts: int, chosen: int, hidden: int, inner: int, clamp: Any) -> None:
    """Launches what stands around experts' products in the update, with biases if there is a clamp."""
    import torch

    from qerl.kernels.update.experts import add_pairs, add_pairs_backward, gate_pairs, gate_pairs_backward

    tokens = 4
    single, half, integer = (
        partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)
    )
    y_SN, z_SD = half(tokens * chosen, 2 * inner), half(tokens * chosen, hidden)
    place_TC, weight_TC = integer(tokens, chosen), half(tokens, chosen)
    gate_up_bias = half(experts, 2 * inner) if clamp else None
    of_gate = single(experts, 2), gate_up_bias, integer(tokens * chosen), clamp
    gate_pairs_backward(gate_pairs(y_SN, *of_gate), y_SN, *of_gate)
    of_sum = place_TC, weight_TC, place_TC, single(experts), half(experts, hidden) if clamp else None
    add_pairs_backward(add_pairs(z_SD, *of_sum), z_SD, *of_sum)
    add_pairs(z_SD, place_TC)


def read_products(tokens: int, rank: int, cut: bool) -> None:
    """Launches what reads the products of an MLP, in partial sums or not; those of 16 bits have none."""
    import torch

    from qerl.kernels.decode.act_mul import act_mul, programs
    from qerl.kernels.decode.launch import LoraA, LoraB
    from qerl.kernels.decode.residual_norm import block_d, residual_norm
    from qerl.kernels.weights.packed_gemm import sums_dtype
    from qerl.kernels.weights.product import LoraSum

    single, half, integer = (
        partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)
    )
    inner, hidden, padded = 2048, 1024, tokens if cut else 0
    product = partial(torch.empty, dtype=sums_dtype(tokens) if cut else torch.bfloat16)
    count, blocks = programs(inner, tokens, rank, torch.device("cpu")), hidden // block_d(tokens)
    act_mul(
        product(2 if cut else 1, tokens, 2 * inner), single(2), single(28, tokens), half(tokens * inner),
        intermediate=inner, width=hidden, eps=1e-6, padded_tokens=padded,
        partials_G=integer(2 * inner // 64),
        b=LoraB(LoraSum(sum_TR=single(tokens, 2 * rank)), half(2 * inner, rank)),
        a=LoraA(half(rank, inner), LoraSum(single(count, tokens, rank))),
    )  # fmt: skip
    residual_norm(
        single(tokens, hidden), single(hidden), half(tokens * hidden), single(blocks, tokens),
        padded_tokens=padded, gemm_STN=product(6 if cut else 1, tokens, hidden),
        partials_G=integer(hidden // 64), scale_1=single(1),
        b=LoraB(LoraSum(sum_TR=single(tokens, rank)), half(hidden, rank)),
        a=LoraA(half(3 * rank, hidden), LoraSum(single(blocks, tokens, 3 * rank))),
    )  # fmt: skip


def delta_net_step(tokens: int, rank: int) -> None:
    """Launches what is between the products of a gated delta net of 16 heads of keys and 32 of values."""
    import torch

    from qerl.kernels.decode.delta_net import delta_inputs, gated_norm
    from qerl.kernels.decode.launch import LoraA, LoraB
    from qerl.kernels.weights.product import LoraSum

    key_heads, heads, size, taps = 16, 32, 128, 4
    inner, channels = heads * size, (2 * key_heads + heads) * size
    single, half, integer = (
        partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)
    )
    convolved, z = single(tokens, channels), single(tokens, inner)
    gates, out = single(2, tokens, heads), single(tokens, heads, size)
    delta_inputs(
        single(2, tokens, channels + inner), single(2), single(64, tokens), half(taps, channels),
        single(heads), single(heads), integer(tokens), integer(tokens), half(tokens, taps, channels),
        convolved, z, gates, key_heads=key_heads, width=4096, eps=1e-6,
        b=LoraB(LoraSum(sum_TR=single(tokens, 2 * (rank + heads))), half(channels + inner, rank)),
        partials_G=integer((channels + inner) // 64),
    )  # fmt: skip
    gated_norm(
        out, z, single(size), half(tokens * inner), eps=1e-6, padded_tokens=tokens,
        a=LoraA(half(rank, inner), LoraSum(single(heads, tokens, rank))),
    )  # fmt: skip


def delta_rule(size: int) -> None:
    """Launches the rule over two sequences, and its gradients."""
    import torch

    from qerl.kernels import delta_kernels
    from qerl.kernels.delta_scan import CHUNK, Chunks, Local

    key_heads, heads = 16, 32
    chunks = Chunks.of([0, CHUNK, 2 * CHUNK + 1], torch.device("cpu"))
    new, half = torch.empty, partial(torch.empty, dtype=torch.bfloat16)
    square, keys = (3, heads, CHUNK, CHUNK), (3, key_heads, CHUNK, size)
    local = Local(new(keys), new(keys), new(3, heads, CHUNK), delta_kernels.inverse(new(square)), new(square))
    x, states = half(3, CHUNK, heads, size), new(2, heads, size, size)
    delta_kernels.scan(local, x, states, chunks, keep=True)
    delta_kernels.scan_backward(local, x, states, chunks)


def gated_attention(tokens: int, rank: int) -> None:
    """Launches what makes and applies gates of heads of 256."""
    import torch

    from qerl.kernels.decode.attend import combine_splits
    from qerl.kernels.decode.launch import LoraA, LoraB
    from qerl.kernels.decode.rope_kv import Heads, rope_kv
    from qerl.kernels.weights.product import LoraSum

    heads, kv_heads, size, pairs = 16, 4, 256, 32
    columns, inner = 2 * (heads + kv_heads) * size, heads * size
    single, half, integer = (
        partial(torch.empty, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int32)
    )
    gate, caches = single(tokens, heads, size), [half(1, kv_heads, 64, size) for _ in range(2)]
    rope_kv(
        single(2, tokens, columns), single(3), single(64, tokens), single(1, pairs), single(1, pairs),
        integer(tokens), integer(tokens), half(tokens, heads, size), *caches, width=4096, eps=1e-6,
        heads=Heads(norm_N=single(2, size), turned=(pairs, pairs), gated=True), gate_THE=gate,
        partials_G=integer(columns // 64),
        b=LoraB(LoraSum(sum_TR=single(tokens, 3 * rank)), half(columns, rank)),
    )  # fmt: skip
    combine_splits(
        single(4, tokens, heads, size), single(4, tokens, heads), half(tokens * inner), padded_tokens=tokens,
        gate_THE=gate, a=LoraA(half(rank, inner), LoraSum(single(heads, tokens, rank))),
    )  # fmt: skip


def wanted(recorder: Recorder, target: int) -> list[Any]:
    """The launches that this class compiles: the largest of each kernel in each walk, which for attention is
    that of prefill and those of decoding."""
    largest: dict[Any, tuple[int, Any]] = {}
    for launch in recorder.met.values():
        name, source, _, constants = launch
        kernel = source.fn.__name__
        if (
            (target == 89 and kernel not in OF_FP8)
            or (target not in (LEAST_MEMORY, HOPPER) and kernel in WITHOUT_PRODUCTS)
            or (name == "heads of 256" and kernel != "_attend")
            or (name.startswith("experts") and kernel in AROUND_EXPERTS)
        ):
            continue
        size = sum(value for value in constants.values() if value)
        many = name in ("many", "16 bits", "rows of different age")
        key = name, kernel, many and tuple(map(constants.get, ("ROWS", "LAUNCH", "KEYS")))
        largest[key] = max(largest.get(key, (-1, None)), (size, launch), key=lambda pair: pair[0])
    return [launch for _, launch in largest.values()]


JOBS: list[tuple[int, str, Any, dict[str, Any], dict[Any, Any]]] = []
"""What to compile; the processes that compile are forks, so they have it."""


@cache
def known() -> dict[str, str]:
    """Lines of `Compiled`, by hash."""
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    return dict(line.split("\t", 1) for line in lines)


def compile_one(number: int) -> tuple[str, str]:
    """The hash of a launch, and what it is as a line of `Compiled`, known or compiled to machine code; where
    that fails, what went wrong."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key

    target, name, source, options, constants = JOBS[number]
    card = GPUTarget("cuda", target, 32)
    backend = make_backend(card)
    key = get_cache_key(source, backend, backend.parse_options(options), {})
    made_of = f"{key} {target} {name} {inspect.getsource(compile_one)} {inspect.getsource(Compiled)}"
    kept = sha256(made_of.encode()).hexdigest()
    if kept in known():
        return kept, known()[kept]
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    try:
        with redirect_stdout(log):
            kernel = triton.compile(source, target=card, options=options)
    except Exception as error:
        return kept, f"{source.fn.__name__} for {target} of {constants}: {error}"
    registers, spilled = (
        max(map(int, re.findall(pattern, log.getvalue())), default=-1)
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    halves = len(re.findall(r"st[.]global[.]b16", kernel.asm["ptx"]))
    found = Compiled(source.fn.__name__, target, name, kernel.metadata.shared, registers, spilled, halves)
    return kept, found.line()


def main() -> None:
    import tempfile

    import torch
    import triton

    gc.disable()  # a collection walks all that torch and transformers brought: a sixth of the time
    torch.Tensor.normal_ = lambda tensor, *args, **kwargs: tensor  # type: ignore[assignment]  # nobody reads it
    recorder = Recorder()
    triton.JITFunction.run = lambda *args, **kwargs: recorder.run(*args, **kwargs)  # binds the function
    for target in TARGETS:
        recorder.met.clear()
        walk(recorder, target)
        JOBS.extend((target, *launch) for launch in wanted(recorder, target))
    for _, _, source, *_ in JOBS:
        source.hash()  # in this order: a kernel's depends on those of others that were asked for before
    # Triton's cache keeps machine code, and not what the compiler had said of it.
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(cores, get_context("fork")) as pool:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = dict(pool.map(compile_one, range(len(JOBS))))
    lines = found.values()
    print("\n".join(lines))
    if any(not line.startswith("_") or "\t" not in line for line in lines):
        sys.exit(1)
    if "--write" in sys.argv:
        KNOWN.write_text(
            "".join(f"{kept}\t{line}\n" for kept, line in sorted(found.items(), key=lambda item: item[1]))
        )


if __name__ == "__main__":
    # A third of the time that imports take; nothing here needs them.
    sys.modules.update(dict.fromkeys(["bitsandbytes", "scipy"]))
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / "src"), str(root)]
    main()
