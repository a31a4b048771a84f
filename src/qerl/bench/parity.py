"""The policy that samples against the policy that trains: log-probabilities of the same tokens.

    python -m qerl.bench.parity --shape 7b --tokens 1024

A random model of the shape is quantised, gets an adapter with a random B, and samples with the paged engine;
the trainer's forward then scores the completions. Printed: mean and largest absolute difference of the
log-probabilities, and the same after the sequences are cut in half and the engine computes the second half
anew from a prefill.
"""

import argparse

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl.bench.shapes import shape
from qerl.lora import add_lora
from qerl.nvfp4.format import NVFP4, quantize
from qerl.nvfp4.linear import NVFP4Linear
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.engine import PagedEngine


def random_model(name: str, layers: int | None, seed: int = 0) -> nn.Module:
    """A Qwen2 model of the shape on the GPU, NVFP4 linears, LoRA of rank 32 whose B is not zero."""
    sizes = shape(name)
    config = Qwen2Config(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden, intermediate_size=sizes.intermediate,
        num_hidden_layers=layers or sizes.layers, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    for name_, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5) if "norm" in name_ else parameter.data.normal_(std=0.2)
        else:
            parameter.data.normal_(std=0.02)
    rotary = model.model.rotary_emb
    size = sizes.head_size
    rotary.inv_freq.copy_(10000.0 ** -(torch.arange(0, size, 2, device="cuda") / size))
    for module in list(model.modules()):
        for child_name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child_name.endswith("_proj"):
                packed = quantize(child.weight.data.float(), NVFP4)
                setattr(module, child_name, NVFP4Linear.from_packed(packed, child.bias))
    adapted = add_lora(model, rank=32, alpha=64, dropout=0.0)
    for name_, parameter in adapted.named_parameters():
        if "lora_B" in name_:
            parameter.data.normal_(std=0.02)
    return adapted


@torch.no_grad()
def trainer_logprobs(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """fp32 log-probabilities of the completion under the model's own forward."""
    ids = torch.tensor([prompt + completion], device="cuda")
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


def compare(
    model: nn.Module, engine: PagedEngine, prompts: list[list[int]], samples: int, tokens: int
) -> str:
    """One line: differences between the engine's log-probabilities and the trainer's."""
    result = engine.generate(prompts, samples, SamplingParams(max_tokens=tokens, seed=1))
    differences, kls = [], []
    for index, completion in enumerate(result.completions):
        truth = trainer_logprobs(model, prompts[index // samples], completion.token_ids)
        found = torch.tensor(completion.logprobs, device="cuda")
        differences.append((found - truth).abs())
        kls.append(found - truth)
    gap = torch.cat(differences)
    return (
        f"{gap.numel()} tokens: mean |difference| {gap.mean():.2e}, largest {gap.max():.2e}, "
        f"KL(sampler, trainer) {torch.cat(kls).mean():.1e}, mean log-probability "
        f"{sum(sum(c.logprobs) for c in result.completions) / gap.numel():.3f}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Runs the comparison from the command line."""
    parser = argparse.ArgumentParser(prog="python -m qerl.bench.parity", description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens compared")
    args = parser.parse_args(arguments)
    model = random_model(args.shape, args.layers).eval()
    prompt = torch.randint(0, shape(args.shape).vocabulary, (100,)).tolist()
    reference = trainer_logprobs(model, prompt[:50], prompt[50:])
    engine = PagedEngine(model, pad_token_id=0)
    moved = trainer_logprobs(model, prompt[:50], prompt[50:])
    print(f"trainer before and after the weights were laid out anew: {(reference - moved).abs().max():.1e}")
    print(f"4 samples: {compare(model, engine, [prompt], 4, args.tokens // 4)}")
    print(f"32 samples: {compare(model, engine, [prompt, prompt[:37], prompt[:1], prompt[:65]], 8, 64)}")


if __name__ == "__main__":
    main()
