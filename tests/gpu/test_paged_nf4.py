"""NF4 on a GPU: bitsandbytes' kernels on stacked weights against float64, in a graph too; the paged engine on
such a model against its trainer and against FP32."""

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import bitsandbytes as bnb
from bitsandbytes.functional import get_4bit_type

from bench.random_weights import random_nf4
from qerl.kernels.weights.nf4 import BLOCK, NF4Stack
from qerl.lora.adapter import add_lora
from qerl.rollout.engine import SamplingParams
from qerl.rollout.paged.binding import why_not
from qerl.rollout.paged.engine import PagedEngine
from tests.support.models import move_adapter

PROMPTS = [list(range(5, 75)), [7], list(range(100, 129))]


def decoded(weight):
    """float64 [N, K], by the format's definition."""
    levels_16 = get_4bit_type("nf4", device="cuda").double()
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=-1).flatten().long()
    return (levels_16[codes].view(-1, BLOCK) * weight.absmax.double()[:, None]).view(weight.shape)


@pytest.mark.parametrize("shape", [(4608, 3584), (37888, 512), (512, 18944), (448, 192)])
def test_product_in_a_graph(shape):
    """Within 1.8 times the error of a product with the weight rounded to bf16. By the roundings that it makes
    the kernel of few tokens should have 1.42."""
    torch.manual_seed(0)
    weight = random_nf4(*shape)
    weight = dataclasses.replace(weight, absmax=weight.absmax * (0.5 + torch.rand_like(weight.absmax)))
    exact_NK = decoded(weight)
    for tokens in (1, 3, 4, 8, 16, 33, 64, 100, 600, 2048):
        x_TK = torch.randn(tokens, shape[1], device="cuda").bfloat16()
        weight.gemm(x_TK)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TN = weight.gemm(x_TK)
        x_TK.normal_()
        graph.replay()
        truth_TN = x_TK.double() @ exact_NK.T
        rounded_TN = x_TK @ exact_NK.bfloat16().T
        error, usual = ((y.double() - truth_TN).norm() / truth_TN.norm() for y in (out_TN, rounded_TN))
        print(f"{shape} {tokens} tokens: {error:.2e}, with the weight in bf16 {usual:.2e}")
        assert error < 1.8 * usual


def test_training_reads_the_stack():
    """Outputs and gradients of layers that became views are those from before, bit for bit."""
    torch.manual_seed(0)
    layers = []
    for rows in (384, 128, 128):
        layer = bnb.nn.Linear4bit(384, rows, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        layers.append(layer.cuda())
    x_TK = torch.randn(600, 384, device="cuda").bfloat16().requires_grad_()

    def run(layer):
        y_TN = layer(x_TK)
        (dx_TK,) = torch.autograd.grad(y_TN.square().sum(), x_TK)
        return y_TN, dx_TK

    before = [run(layer) for layer in layers]
    NF4Stack.of(layers)
    for layer, wanted in zip(layers, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(run(layer), wanted, strict=True))


@pytest.fixture
def policy(tiny_model, to_nf4):
    """A bf16 model with NF4 weights and an adapter, on the GPU."""

    def build(family):
        model = tiny_model(
            family, vocab_size=1000, hidden_size=384, intermediate_size=448, num_hidden_layers=3,
            num_attention_heads=6, head_dim=64, initializer_range=0.07,
        )  # fmt: skip
        torch.manual_seed(0)
        model = add_lora(to_nf4(model.bfloat16().cuda()), rank=8, alpha=16, dropout=0.0)
        return move_adapter(model, 0.05).eval()

    return build


def in_fp32(model):
    """The same policy with its weights decoded; the model must be bound to an engine."""
    exact = copy.deepcopy(model).float()
    for module in list(exact.modules()):
        layer = getattr(module, "base_layer", None)
        if not isinstance(layer, bnb.nn.Linear4bit):
            continue
        dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
        shape, state = (layer.out_features, layer.in_features), layer.weight.quant_state
        dense.weight.data = decoded(NF4Stack(layer.weight.data, state.absmax, shape, torch.ones(1))).float()
        dense.bias = layer.bias
        module.base_layer = dense
    return exact


def score(model, prompt, token_ids):
    ids = torch.tensor([prompt + token_ids], device="cuda")
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("samples", [1, 2, 20])
@torch.no_grad()
def test_sampler_is_the_trainer(policy, family, samples):
    model = policy(family)
    assert why_not(model) is None
    engine = PagedEngine(model, pad_token_id=0)
    exact = in_fp32(model)
    for prompts in (PROMPTS[1:2], PROMPTS):
        result = engine.generate(prompts, samples, SamplingParams(max_tokens=70, seed=3))
        pairs = [(prompts[i // samples], c.token_ids) for i, c in enumerate(result.completions)]
        found = torch.cat([torch.tensor(c.logprobs, device="cuda") for c in result.completions])
        trainer, truth = (torch.cat([score(m, *pair) for pair in pairs]) for m in (model, exact))
        to_trainer, engine_error, trainer_error = (
            float((a - b).abs().mean()) for a, b in ((found, trainer), (found, truth), (trainer, truth))
        )
        print(
            f"{family} {len(pairs)} sequences: mean |difference| {to_trainer:.1e}, from fp32: engine "
            f"{engine_error:.1e}, trainer {trainer_error:.1e}"
        )
        assert len(found) == 70 * len(pairs)
        assert engine_error < 1.6 * trainer_error
        assert to_trainer < 2.2 * trainer_error
