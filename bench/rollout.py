"""Decode speed of a model shape with random weights.

    python -m bench rollout --shape 7b --weights nvfp4 --rank 32 --batch 1 8 64 128

The KV cache of the prompts is random; only decoding is timed, from the first token on, with the attention's
work growing as in a rollout. A group shares its prompt. With `--peers`, vLLM does the same work in the same
run (`bench.peers`).

    python -m bench rollout --shape 7b --batch 128 --decode 1024 --lengths lognormal:400

With `--lengths` whole calls of the engine are timed, including prefill, scheduling and fetching; completions
end at drawn lengths (`bench.lengths`), the same for every engine.
"""

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from bench.lengths import KINDS, call_row, draw_lengths, random_ids
from bench.peers import vllm_decode
from bench.peers.process import PATIENCE_MINUTES, peer_rows
from bench.peers.vllm_decode import PEERS
from bench.result import write_result
from qerl.errors import QeRLError
from qerl.families.layer import DeltaNet, RoutedMLP
from qerl.families.sizes import Sizes
from qerl.fp4.published import declared_format
from qerl.kernels.limits import PAGE
from qerl.measure.decode import decode_speed, fill_rows, random_cache
from qerl.measure.gauge import Gauge, gauge
from qerl.measure.model_config import declared, model_config, shape_of, sizes_of
from qerl.measure.random_model import as_if_trained, random_decoder, random_policy
from qerl.rollout.engine import KV_DTYPES, SamplingParams
from qerl.rollout.paged.decode import DecodeStep
from qerl.rollout.paged.engine import PagedEngine
from qerl.rollout.paged.limits import BlockDemand, KVGeometry, States
from qerl.rollout.paged.machine import CudaGraphs
from qerl.rollout.paged.weights import Decoder, Projection, RoutedWeights
from qerl.rollout.session import whole_completions
from qerl.weight_formats import AS_PUBLISHED, FORMATS, WeightFormatName


def without_adapter(decoder: Decoder) -> Decoder:
    """Return the decoder without LoRA, sharing its weights.

    Raises:
        QeRLError: Experts have LoRA, or narrow linears are computed together with LoRA's x A^T.
    """
    shares = any(isinstance(s.mlp, RoutedMLP) and s.mlp.shared for s in decoder.sizes.specs)
    adapted = any(isinstance(x.mlp, RoutedWeights) and x.mlp.gate_up_lora is not None for x in decoder.layers)
    if shares or adapted or any(isinstance(spec.mixer, DeltaNet) for spec in decoder.sizes.specs):
        raise QeRLError(
            "This model's adapter cannot be taken off for --no_adapter; measure it with --rank 0."
        )

    def plain(part: Any) -> Any:
        parts = {field.name: getattr(part, field.name) for field in fields(part)}
        bare = {name: replace(one, lora=None) for name, one in parts.items() if isinstance(one, Projection)}
        return replace(part, **bare)

    layers = [replace(each, mixer=plain(each.mixer), mlp=plain(each.mlp)) for each in decoder.layers]
    return replace(decoder, layers=layers)


def measure_calls(
    engine: PagedEngine, batch: int, prompt_tokens: int, group: int, lengths: list[int], repeats: int = 3
) -> dict[str, Any]:
    """Time whole calls of the engine, after one that captures its steps.

    Args:
        engine: The engine to time.
        batch: Completions per call.
        prompt_tokens: Tokens of each prompt; every call has new prompts.
        group: Completions per prompt.
        lengths: Tokens of each completion.
        repeats: Timed calls.
    """
    group = min(group, batch)
    times = []
    for call in range(repeats + 1):
        prompts = random_ids(call, batch // group, prompt_tokens)
        params = [SamplingParams(length, seed=call) for length in lengths]
        result = whole_completions(engine.session(params[0]), prompts, group, params)
        assert [len(completion.token_ids) for completion in result.completions] == lengths
        times.append(result.seconds)
    return call_row(times[1:], lengths)


def bytes_on_engine(shape: str, weights: WeightFormatName, place: str) -> float:
    """Return the engine's bytes per weight of the linear at ``place`` in a decoder layer."""
    held = declared_format(declared(shape), f"model.layers.0.{place}") if weights == AS_PUBLISHED else weights
    return FORMATS["bf16" if held == "fp8" else held].on_engine.bytes_per_element


def step_bytes(
    sizes: Sizes,
    bytes_of: Callable[[str], float],
    rank: int,
    rows: int,
    prompt: int,
    decoded: int,
    group: int,
    kv_bytes: int,
) -> float:
    """Return the bytes that a decode step must move: weights, head, LoRA, states, and the KV cache halfway
    through the completion. Experts count as many as ``rows`` rows hit on average, all equally likely."""
    layers = sum(
        run.layers
        * (
            p.outputs * p.inputs * bytes_of(p.linears[0].place)
            + (p.outputs + p.inputs * len(p.linears)) * rank * 2
        )
        for run in sizes.runs
        for p in run.spec.products
    )
    for run in sizes.runs:
        if isinstance(mlp := run.spec.mlp, RoutedMLP):
            taken = mlp.experts * (1 - (1 - mlp.chosen / mlp.experts) ** rows)
            elements = sum(linear.elements for linear in run.spec.expert_linears)
            per_weight = bytes_of(f"{mlp.EXPERTS}.0.{mlp.PLACES['down'][0]}")
            layers += run.layers * (taken * elements * per_weight + 2 * mlp.experts * run.spec.hidden)
    groups = -(-rows // group)
    geometry = KVGeometry.of(sizes, kv_bytes)
    cache = 0.0
    for layer in geometry.layers:
        if isinstance(layer, States):
            cache += rows * layer.moved_bytes
        else:
            window = cast(int | None, geometry.pools[layer.pool])
            tokens = groups * min(prompt, window or prompt) + rows * min(decoded / 2, window or decoded)
            cache += tokens * sum(array.bytes for array in layer.arrays) / PAGE
    return layers + cache + sizes.vocabulary * sizes.hidden * 2


def profile(
    decoder: Decoder,
    rows: int,
    prompt_tokens: int,
    group: int,
    kv_dtype: torch.dtype,
    steps: int = 4,
) -> list[tuple[str, int, float]]:
    """Return (kernel, calls, microseconds) of one decode step, longest first.

    Measured outside the CUDA graph: inside, kernels overlap, and the time of each would include its wait for
    the previous one.
    """
    pools = KVGeometry.of(decoder.sizes, kv_dtype.itemsize).pools
    demand = BlockDemand(prompt_tokens, 64, group, pools, ahead_tokens=64)
    cache = random_cache(decoder, demand.blocks(rows), kv_dtype)
    step = DecodeStep(decoder, cache, rows, 64, demand.table_width, CudaGraphs())
    fill_rows(step, cache, prompt_tokens, group, 64)
    step.run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            step.run()
        torch.cuda.synchronize()
    found = [(e.key, e.count // steps, e.self_device_time_total / steps) for e in trace.key_averages()]
    return sorted(found, key=lambda row: -row[2])


def read_bandwidth() -> float:
    """Return the GB/s at which this GPU reads memory, a decode step's limit: the best of 5 sums over 8 GB."""
    data = torch.ones(1 << 31, dtype=torch.float32, device="cuda")
    speeds = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        data.sum()
        end.record()
        end.synchronize()
        speeds.append(data.numel() * 4 / start.elapsed_time(end) / 1e6)
    return max(speeds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench rollout", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument(
        "--weights",
        nargs="*",
        default=["nvfp4"],
        choices=tuple(FORMATS),
        help="weight formats; empty: only --peers",
    )
    parser.add_argument("--peers", nargs="+", default=[], choices=PEERS, help="also measure these")
    parser.add_argument("--rank", type=int, default=32, help="LoRA rank; 0 for none")
    parser.add_argument("--lora_experts", choices=["shared", "each"], help="also adapt experts")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 128])
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--decode", type=int, default=256, help="tokens")
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument(
        "--kv_cache_dtype", default="auto", choices=KV_DTYPES, help="KV cache dtype of our own rows"
    )
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has, for a trial")
    parser.add_argument("--lengths", help=f"time whole calls with completions of these lengths: {KINDS}")
    parser.add_argument(
        "--no_adapter", action="store_true",
        help="measure without the adapter as well, which for a peer is the speed of merged weights",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="also list the kernels of one step")
    parser.add_argument(
        "--peer_minutes", type=float, default=PATIENCE_MINUTES, help="minutes that a peer may take per row"
    )
    parser.add_argument("--repeats", type=int, default=3, help="timed runs; the median is reported")
    parser.add_argument("--out", type=Path, help="JSON file")
    return parser


def _own_rows(args: argparse.Namespace, state: Gauge) -> Iterator[dict[str, Any]]:
    """Yield a row of `decode_speed` per weight format, batch and, with `--no_adapter`, also without LoRA.

    With `--profile` each has the GPU's state from before its profile.
    """
    kv_dtype = KV_DTYPES[args.kv_cache_dtype]
    for weights in args.weights:
        shape, positions = shape_of(args.shape, args.layers or 0), args.prompt + args.decode + PAGE
        decoder = random_decoder(shape, weights, args.rank, positions, lora_experts=args.lora_experts)
        for batch in args.batch:
            for rank in _ranks(args):
                fixed = (decoder if rank else without_adapter(decoder), batch, args.prompt)
                seen = decode_speed(*fixed, args.decode, args.group, args.repeats, kv_dtype)
                row = _own_row(args, weights, rank, batch) | seen
                if args.profile:
                    row["gpu_state"] = state.take()
                    row["kernels"] = [
                        {"us": round(micros, 1), "calls": calls, "name": name}
                        for name, calls, micros in profile(*fixed, args.group, kv_dtype)[:10]
                    ]
                yield row
        del decoder


def _own_calls(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row of :func:`measure_calls` per weight format, LoRA rank and batch."""
    for weights, rank in itertools.product(args.weights, _ranks(args)):
        shape, positions = shape_of(args.shape, args.layers or 0), args.prompt + args.decode + PAGE
        policy = random_policy(shape, weights, rank, positions, lora_experts=args.lora_experts)
        engine = PagedEngine(as_if_trained(policy), 0, kv_cache_dtype=args.kv_cache_dtype)
        for batch in args.batch:
            lengths = draw_lengths(args.lengths, batch, args.decode)
            seen = measure_calls(engine, batch, args.prompt, args.group, lengths, args.repeats)
            yield _own_row(args, weights, rank, batch) | seen
        del policy, engine
        gc.collect()


def _own_row(args: argparse.Namespace, weights: str, rank: int, batch: int) -> dict[str, Any]:
    return {
        "engine": "qerl", "weights": weights, "lora_rank": rank, "batch": batch,
        "kv_cache_dtype": args.kv_cache_dtype,
        **({"lora_experts": args.lora_experts} if args.lora_experts else {}),
    }  # fmt: skip


def _ranks(args: argparse.Namespace) -> list[int]:
    """Return the LoRA ranks to measure; 0 is no adapter."""
    return [args.rank, 0] if args.no_adapter and args.rank else [args.rank]


def _peer_rows(args: argparse.Namespace, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the same rows of other engines, each measured in a subprocess with a model of this config."""
    spec = {
        "config": config,
        "batches": args.batch, "prompt_tokens": args.prompt,
        "decode_tokens": args.decode, "group": args.group, "repeats": args.repeats, "lengths": args.lengths,
    }  # fmt: skip
    for peer, rank in itertools.product(args.peers, _ranks(args)):
        weights, quantization = PEERS[peer]
        settings = {"engine": peer, "weights": weights, "lora_rank": rank, "kv_cache_dtype": "auto"}
        wanted = {**spec, "rank": rank, "weights": weights, "quantization": quantization}
        for row in peer_rows(peer, vllm_decode.__name__, wanted, args.peer_minutes):
            yield {**settings, **row}


def _with_bandwidth(
    row: dict[str, Any], args: argparse.Namespace, sizes: Sizes, limit: float
) -> dict[str, Any]:
    """Add to a row the GB/s that its decode steps move, and the share of the memory bandwidth ``limit``."""
    moved = step_bytes(
        sizes, partial(bytes_on_engine, args.shape, row["weights"]), row["lora_rank"], row["batch"],
        args.prompt, args.decode, args.group,
        KV_DTYPES[row["kv_cache_dtype"]].itemsize,
    )  # fmt: skip
    speed = moved / row["step_ms"] / 1e6
    return row | {"gb_s": speed, "limit_fraction": speed / limit}


def _print(row: dict[str, Any]) -> None:
    head = f"{row['engine']} {row['shape']} {row['weights']} r{row['lora_rank']} batch {row['batch']}"
    if "call_s" in row:
        found = (
            f"{row['call_s']:.3f} s a call of {row['tokens']} tokens, {row['call_tok_s']:.0f} tok/s, the "
            f"longest has {row['longest']}"
        )
    else:
        found = (
            f"{row['decode_tok_s']:.0f} tok/s, {row['step_ms']:.3f} ms a step, {row['gb_s']:.0f} GB/s, "
            f"{row['limit_fraction']:.0%} of the limit"
        )
    print(f"{head}: {found}, spread {row['spread']:.1%}", flush=True)
    for kernel in row.get("kernels", []):
        print(f"    {kernel['us']:9.1f} us {kernel['calls']:5d} x {kernel['name'][:90]}")


def main(arguments: list[str]) -> None:
    """Run `python -m bench rollout` with these arguments."""
    args = _parser().parse_args(arguments)
    sizes = sizes_of(shape_of(args.shape, args.layers or 0))
    if args.lengths:
        draw_lengths(args.lengths, 1, args.decode)  # raises on a mistake before anything is made
    for_peers = model_config(sizes, "bf16", sizes.positions).to_dict() if args.peers else {}
    limit = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, reads {limit:.0f} GB/s")
    common = {
        "shape": args.shape, "prompt_tokens": args.prompt, "decode_tokens": args.decode, "group": args.group,
        **({"lengths": args.lengths} if args.lengths else {}),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    with gauge() as state:
        own = _own_calls(args) if args.lengths else _own_rows(args, state)
        for row in itertools.chain(own, _peer_rows(args, for_peers)):
            if not args.lengths:
                row = _with_bandwidth(row, args, sizes, limit)
            rows.append({"gpu_state": state.take()} | row | common)
            _print(rows[-1])
            if args.out:
                write_result(args.out, " ".join(["rollout", *arguments]), rows, read_gb_s=limit)
