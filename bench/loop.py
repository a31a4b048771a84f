"""Seconds of a step of reinforcement learning against any server of the Tinker API, such as a rival's.

    qerl serve MODEL --api_key tml-of-the-benchmarks  # or another server; one after the other on the same GPU
    export TINKER_API_KEY=tml-of-the-benchmarks TINKER_TELEMETRY=0
    python -m bench loop --url http://127.0.0.1:8000 --model MODEL --server "qerl serve" --shape qwen3-4b \
        --weights nvfp4 --out rows.json

The loop is that of `bench.serve`, from outside: it uses the server's API alone, so the server's memory is not
measured. All samples of a prompt are one request, which helps servers that start a batch with the requests
they find when they poll; with `--single` each sample is a request of its own, as in the cookbook.

Servers need different client versions: skyrl-tx 0.3.0 reads tensors as JSON, which the package tinker sends
up to 0.13.1. This loop works with any version from 0.13.1 on, and the row records the version.
"""

import argparse
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.result import Row, write_result
from bench.serve_loop import Loop, result_of
from qerl.errors import QeRLError
from qerl.weight_formats import FORMATS

COUNTED = ("sample_s", "update_s", "total_s", "tokens_per_s")


class OutsideLoop(Loop):
    """The loop with servers that report neither their memory nor metrics of a step."""

    def sample(self, model: Any) -> list[Any]:
        """Return a batch of samples from the model's current weights, as data for its update."""
        if self._args.single:
            return super().sample(model)
        sampler = result_of(model.save_weights_and_get_sampling_client())
        asked = [
            (prompt, sampler.sample(inputs, self._args.samples, self._params()))
            for prompt, inputs in self._prompts()
        ]
        return [
            self._datum(prompt, drawn) for prompt, future in asked for drawn in result_of(future).sequences
        ]

    def update(self, model: Any, data: Sequence[Any]) -> dict[str, float]:
        """Run an optimizer step with some data.

        Returns:
            Mean absolute difference, in nats, of the update's log-probabilities and the sampler's.
        """
        passed = model.forward_backward(data, "importance_sampling")
        stepped = model.optim_step(self._tinker.types.AdamParams(learning_rate=1e-5))
        outputs = result_of(passed).loss_fn_outputs
        result_of(stepped)
        gaps = []
        for datum, output in zip(data, outputs, strict=True):
            told = datum.loss_fn_inputs["logprobs"].tolist()[-self._args.tokens :]
            found = output["logprobs"].tolist()[-self._args.tokens :]
            gaps += [abs(one - other) for one, other in zip(told, found, strict=True)]
        return {"logprob_gap": statistics.fmean(gaps)}


def measure(args: argparse.Namespace) -> Row:
    """Time the steps of one model; the first ones compile and are not counted."""
    loop = OutsideLoop(args.url, args, args.vocabulary, dict, args.model)
    loop.grow(1)
    steps = []
    for _ in range(args.warm_up + args.steps):
        steps.append(loop.timed_step())
        print(f"step {len(steps)}: {steps[-1]['total_s']:.2f} s", flush=True)
    counted = steps[args.warm_up :]
    return {
        "server": args.server, "shape": args.shape, "weights": args.weights, "client": version("tinker"),
        "lora_rank": args.rank, "prompts": args.prompts, "samples": args.samples,
        "prompt_tokens": args.prompt, "completion_tokens": args.tokens, "single": args.single,
        "warm_up": args.warm_up, **{key: statistics.median(step[key] for step in counted) for key in COUNTED},
        "steps": steps,
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run `python -m bench loop` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench loop", description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True, help="URL of the server; its key is in TINKER_API_KEY")
    parser.add_argument("--model", required=True, help="base model, as the server names it")
    parser.add_argument("--server", required=True, help="name of the server, for the result")
    parser.add_argument("--shape", required=True, help="shape of the model, for the result")
    parser.add_argument(
        "--weights", required=True, choices=tuple(FORMATS), help="its weight format, for the result"
    )
    parser.add_argument("--vocabulary", type=int, default=151936, help="vocabulary size of the prompts")
    parser.add_argument("--rank", type=int, default=32, help="rank of the adapter")
    parser.add_argument("--prompts", type=int, default=8, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sample")
    parser.add_argument("--single", action="store_true", help="request each sample separately")
    parser.add_argument("--warm_up", type=int, default=1, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=3, help="counted steps; the median is reported")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(arguments)
    if find_spec("tinker") is None:
        raise QeRLError("`python -m bench loop` needs the package tinker; install it with pip.")
    row = measure(args)
    print(
        f"{row['server']}: sample {row['sample_s']:.2f} s, update {row['update_s']:.2f} s, step "
        f"{row['total_s']:.2f} s, {row['tokens_per_s']:.0f} tokens/s"
    )
    if args.out:
        write_result(args.out, " ".join(["loop", *arguments]), [row])
