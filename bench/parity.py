"""Log-probabilities of the same tokens by the policy that samples and the policy that trains.

    python -m bench parity --shape 7b --tokens 1024

A random model of the shape, with an adapter whose B is not zero, samples with the paged engine; the trainer's
forward then scores the completions. Printed are the mean and the largest absolute difference of the
log-probabilities, and the mean difference of either from FP32 on the same weights, for few samples of one
prompt and for many of several prompts. Then a greedy completion is cut at every 4th token, and the engine
prefills prompt and beginning to draw one more token, whose log-probability is compared with that of decoding.

With `--model`, a real model's policy and first step are compared instead, see `bench.first_step`.
"""

import argparse
import copy
import dataclasses
from pathlib import Path

import torch
from torch import nn

from bench import first_step
from bench.result import write_result
from qerl.measure.model_config import shape_of, sizes_of
from qerl.measure.random_model import as_if_trained, random_policy
from qerl.rollout.engine import KV_DTYPES, RolloutEngine, SamplingParams
from qerl.rollout.paged.engine import PagedEngine


@torch.no_grad()
def trainer_logprobs(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Return fp32 log-probabilities of the completion under the model's own forward."""
    ids = torch.tensor([prompt + completion], device="cuda")
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def compare(
    model: nn.Module, engine: RolloutEngine, prompts: list[list[int]], samples: int, tokens: int
) -> dict[str, float]:
    """Compare the engine's log-probabilities with the trainer's, and both with FP32; differences in nats."""
    result = engine.generate(prompts, samples, SamplingParams(max_tokens=tokens, seed=1))
    exact = copy.deepcopy(model).float()
    pairs = [(prompts[i // samples], c.token_ids) for i, c in enumerate(result.completions)]
    trainer = torch.cat([trainer_logprobs(model, *pair) for pair in pairs])
    truth = torch.cat([trainer_logprobs(exact, *pair) for pair in pairs])
    found = torch.cat([torch.tensor(c.logprobs, device="cuda") for c in result.completions])
    return {
        "samples": len(pairs), "tokens": found.numel(), "logprob": float(found.mean()),
        "sampler_trainer": _gap(found, trainer), "largest": float((found - trainer).abs().max()),
        "sampler_fp32": _gap(found, truth), "trainer_fp32": _gap(trainer, truth),
        "kl_sampler_trainer": _kl(found, trainer), "kl_sampler_fp32": _kl(found, truth),
    }  # fmt: skip


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean())


def _kl(sampler: torch.Tensor, other: torch.Tensor) -> float:
    """Return KL(sampler || other) per token, estimated as `sampling/kl`."""
    return float(((other - sampler).expm1() - (other - sampler)).mean())


def _line(found: dict[str, float]) -> str:
    return (
        f"{found['tokens']} tokens: mean |sampler - trainer| {found['sampler_trainer']:.2e}, largest "
        f"{found['largest']:.2e}; mean |sampler - FP32| {found['sampler_fp32']:.2e}, |trainer - FP32| "
        f"{found['trainer_fp32']:.2e}; KL(sampler, trainer) {found['kl_sampler_trainer']:.1e}, "
        f"KL(sampler, FP32) {found['kl_sampler_fp32']:.1e}, mean log-probability {found['logprob']:.3f}"
    )


def compare_prefill(engine: PagedEngine, prompt: list[int], tokens: int) -> str:
    """Compare log-probabilities of greedy decoding with those after a prefill of all previous tokens.

    Returns:
        One line of text.
    """
    greedy = SamplingParams(max_tokens=tokens, temperature=0.0)
    decoded = engine.generate([prompt], 1, greedy).completions[0]
    cuts = range(1, tokens, 4)
    again = engine.generate(
        [prompt + decoded.token_ids[:cut] for cut in cuts], 1, dataclasses.replace(greedy, max_tokens=1)
    )
    gaps = [
        abs(one.logprobs[0] - decoded.logprobs[cut])
        for cut, one in zip(cuts, again.completions, strict=True)
        if one.token_ids[0] == decoded.token_ids[cut]
    ]
    if not gaps:
        return f"none of {len(cuts)} tokens the same"
    return (
        f"{len(gaps)} of {len(cuts)} tokens the same: mean |difference| {sum(gaps) / len(gaps):.2e}, "
        f"largest {max(gaps):.2e}"
    )


def main(arguments: list[str]) -> None:
    """Run `python -m bench parity` with these arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench parity", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int, help="number of layers, fewer than the shape has")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens compared")
    parser.add_argument("--kv_cache_dtype", default="auto", choices=KV_DTYPES, help="dtype of the KV cache")
    parser.add_argument("--model", help="Hub id or folder: compare the first step of a real model")
    parser.add_argument("--steps", type=int, help="with --model: steps over which sampling/kl is measured")
    parser.add_argument("--out", type=Path, help="JSON file; with --model of the first step, or the steps")
    args = parser.parse_args(arguments)
    if args.model and args.steps:
        found = first_step.sampling_gap(args.model, args.steps)
        print(f"sampling/kl {found['kl']:.3e} nats per token, mean of {found['tokens']}")
        if args.out:
            command = f"parity --model {Path(args.model).name} --steps {args.steps}"
            write_result(args.out, command, [found])
        return
    if args.model:
        policy, engine, prompts = first_step.sampler(args.model, args.kv_cache_dtype)
        print(f"4 prompts, 8 samples: {_line(compare(policy.eval(), engine, prompts, 8, 32))}")
        del policy, engine
        torch.cuda.empty_cache()
        steps = first_step.compare(args.model)
        for found in steps:
            print(f"first step, {first_step.line(found)}")
        if args.out:
            write_result(args.out, f"parity --model {Path(args.model).name}", steps)
        return
    torch.manual_seed(0)
    shape = shape_of(args.shape, args.layers or 0)
    model = as_if_trained(random_policy(shape, "nvfp4", rank=32, positions=4096)).eval()
    prompt = torch.randint(0, sizes_of(shape).vocabulary, (100,)).tolist()
    reference = trainer_logprobs(model, prompt[:50], prompt[50:])
    engine = PagedEngine(model, pad_token_id=0, kv_cache_dtype=args.kv_cache_dtype)
    moved = trainer_logprobs(model, prompt[:50], prompt[50:])
    print(
        f"trainer before and after the engine rearranged the weights: {(reference - moved).abs().max():.1e}"
    )
    few = compare(model, engine, [prompt], 4, args.tokens // 4)
    print(f"4 samples: {_line(few)}")
    many = compare(model, engine, [prompt, prompt[:37], prompt[:1], prompt[:65]], 8, 64)
    print(f"32 samples: {_line(many)}")
    print(f"decode and prefill: {compare_prefill(engine, prompt, args.tokens // 4)}")
    if args.out:
        given = {"shape": args.shape, "layers": sizes_of(shape).layers}
        write_result(args.out, " ".join(["parity", *arguments]), [given | few, given | many])
