"""Train the testbed's model, or resume its training, and record its cost and its priors.

    python -m lab testbed --output_dir runs/testbed --out bench/results/testbed-h200.json

OUTPUT_DIR/model is the model for studies and for `qerl train --model`. One H200 is expected to take nine
minutes; on a time limit (``--limit_s``) the command saves its state in OUTPUT_DIR and ends with status 130,
and the same command resumes. Priors are measured in bfloat16 and packed in NVFP4, which changes them.
"""

import argparse
import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.result import write_result
from lab.testbed.measure import Prior, measure
from lab.testbed.pretraining import Pretraining, Run, train, write_model
from qerl.models.load import load_model
from qerl.weight_formats import WeightFormatName

MODEL = "model"
"""Folder of the model within that of its run."""

FORMATS: tuple[WeightFormatName, ...] = ("bf16", "nvfp4")
"""Formats in which the priors are measured."""

NEAR = 0.25
"""Relative error of a prior above which the command's last line names it."""


def weights_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of the tensors in a folder's safetensors, however they are sharded."""
    from safetensors import safe_open

    hashed, tensors = hashlib.sha256(), dict[str, torch.Tensor]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(tensors):
        hashed.update(name.encode())
        hashed.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def main(arguments: list[str]) -> int:
    """Run `python -m lab testbed` with these arguments; returns the exit status, 130 if steps are left."""
    parser = argparse.ArgumentParser(prog="python -m lab testbed", description=__doc__.split("\n")[0])
    usual = Pretraining()
    for name in ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "steps", "batch",
                 "warmup", "seed"):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    parser.add_argument("--learning_rate", type=float, default=usual.learning_rate)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/testbed"))
    parser.add_argument("--limit_s", type=float, default=86400.0, help="seconds of training in this call")
    parser.add_argument("--compile", action="store_true", help="train with torch.compile")
    parser.add_argument(
        "--problems", type=int, default=1024, help="problems per cell, scored without sampling"
    )
    parser.add_argument("--samples", type=int, default=8192, help="samples per cell")
    parser.add_argument("--shard", default="15MB", help="maximum size of a weight file")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    of = replace(usual, **{k: v for k, v in vars(args).items() if k in asdict(usual)})
    console = Console(highlight=False, soft_wrap=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console.print(f"{of.steps} steps of {of.batch} rows, {of.flops:.2g} FLOP in products.")
    run = train(of, args.output_dir, device, args.limit_s, args.compile, console.print)
    if run.done < of.steps:
        console.print(f"{run.done} of {of.steps} steps are done; run the same command to continue.")
        return 130
    folder = args.output_dir / MODEL
    write_model(run.model, folder, args.shard)
    rows = [_row(run, folder, device)]
    for weights in FORMATS:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        priors = measure(load_model(folder, weights, dtype, device).eval(), args.problems, args.samples)
        rows += [{"row": "prior", "weights": weights, **prior.plain()} for prior in priors]
        console.print(_said(weights, priors))
    if args.out:
        write_result(args.out, " ".join(["testbed", *arguments]), rows, program="lab")
    console.print(f"Wrote {folder}, weights {rows[0]['sha256']}.")
    return 0


def _row(run: Run, folder: Path, device: torch.device) -> dict[str, Any]:
    """Result row about the model and its cost."""
    return {
        "row": "model", **asdict(run.of), "parameters": sum(p.numel() for p in run.model.parameters()),
        "device": device.type, "seconds": round(run.seconds, 3), "flops": run.of.flops,
        "losses": run.losses, "sha256": weights_hash(folder),
    }  # fmt: skip


def _said(weights: str, priors: list[Prior]) -> str:
    """Message with the measured priors of a format, and those that are far from the priors of the text."""
    lines = [
        f"{weights} {one.kind} x{one.length} {one.prior:g}: exact {one.exact:.5f} ({one.spread:.5f} over "
        f"prompts), sampled {one.sampled:.5f} ({one.low:.5f} to {one.high:.5f})"
        for one in priors
    ]
    off = [f"{p.kind} x{p.length} {p.prior:g}" for p in priors if abs(p.exact / p.prior - 1) > NEAR]
    return "\n".join([*lines, f"{weights}: off by more than {NEAR:.0%}: {', '.join(off) or 'none'}."])
