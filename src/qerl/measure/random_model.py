"""Random models of given sizes: the policy that trains, and the decoder that the paged engine makes of it.

A policy is made on its device layer by layer. So it takes no more memory than its final weights, and a model
of 72B can be made wherever it can be trained.
"""

import copy
import math
from typing import TypeAlias

import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from qerl.families.experts import separate_experts
from qerl.families.layer import RoutedMLP
from qerl.families.sizes import Sizes
from qerl.fp4.format import block_format
from qerl.fp4.linear import PackedLinear
from qerl.fp4.published import declared_format
from qerl.lora.adapter import add_lora
from qerl.lora.experts import LINEARS
from qerl.measure.model_config import model_config
from qerl.rollout.paged.binding import Binding
from qerl.rollout.paged.weights import Decoder
from qerl.weight_formats import AS_PUBLISHED

Shape: TypeAlias = "Sizes | PreTrainedConfig"
"""Sizes of a decoder like Llama's, or the config of a model of any family."""

_ROUTER_SHARPNESS = 4.0
"""Standard deviation of a random router's logits. With 1 a token's lightest expert weighs almost as much as
its heaviest, so that much changes when rounding makes the router choose another one."""

_LOG_STEPS = math.log(0.001), math.log(0.1)
"""Range of the logarithm of a delta net's time step at gate 0, as flash-linear-attention initialises it. With
transformers' own initial step of 1.3 a state is forgotten within one token, so that a random model would show
neither the cost nor the errors of states."""


def random_policy(
    shape: Shape,
    weights: str,
    rank: int,
    positions: int,
    device: str = "cuda",
    lora_experts: str | None = None,
) -> PeftModel | PreTrainedModel:
    """Make a bfloat16 model with random frozen weights and fresh LoRA; norms change nothing, biases are zero.

    It is the same in every process, whatever seed the process has on its GPU, because one process may train
    on a sample that another one drew.

    Args:
        shape: Shape of the model; see `qerl.measure.model_config.model_config` for sizes.
        weights: Format of the linear layers, a name of `qerl.weight_formats.FORMATS`; as-published takes the
            formats that a config declares.
        rank: LoRA rank on all linears; 0 for no adapter.
        positions: Positions of a model that is given by its sizes.
        device: Device of the whole model.
        lora_experts: The field of that name if experts get adapters, too; else None.
    """
    config = model_config(shape, "bf16", positions) if isinstance(shape, Sizes) else copy.deepcopy(shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        separate_experts(model)
    with torch.device(device):
        for name, module in list(model.model.named_modules()):
            if type(module).__name__.endswith("RotaryEmbedding"):
                model.model.set_submodule(name, type(module)(module.config))
    with torch.random.fork_rng([] if device == "cpu" else [torch.cuda.current_device()]):
        torch.manual_seed(0)
        _fill(model, weights, device)
    if Sizes.of(config).mixture is not None:
        _steady(model)
    vars(model.config).pop("quantization_config", None)  # the model is not to be loaded that way
    model.tie_weights()
    for module in model.modules():
        # Scores of heads that are normalised and not scaled would be far too large.
        if getattr(module, "scaling", None) == 1.0 and hasattr(module, "q_norm"):
            for norm in (module.q_norm, module.k_norm):
                norm.weight.fill_(module.head_dim**-0.25)
    # transformers' flag for such a model, by which PEFT takes its layer for NF4 and TRL a bf16 adapter.
    model.is_loaded_in_4bit = weights == "nf4"
    if not rank:
        return model
    targets = adapted_linears(Sizes.of(config), lora_experts)
    shares = lora_experts == "shared"
    return add_lora(model, rank, 2 * rank, 0.0, targets, share_experts=shares)


def adapted_linears(sizes: Sizes, lora_experts: str | None) -> tuple[str, ...]:
    """The linears that `random_policy` adapts."""
    return sizes.targets if lora_experts is None else (*sizes.targets, *LINEARS)


@torch.no_grad()
def _fill(model: PreTrainedModel, weights: str, device: str) -> None:
    """Draw the weights of a model on the meta device, on ``device``."""
    specs = {run.spec for run in Sizes.of(model.config).runs}
    targets = {linear.name for spec in specs for linear, _ in spec.matrices}
    routers = {
        layer.get_submodule(spec.mlp.router)
        for layer, spec in zip(model.model.layers, Sizes.of(model.config).specs, strict=True)
        if isinstance(spec.mlp, RoutedMLP)
    }
    declared = getattr(model.config, "quantization_config", None)
    for place, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            held = declared_format(declared, f"{place}.{name}") if weights == AS_PUBLISHED else weights
            if name in targets and held != "bf16":
                setattr(module, name, _random_linear(child, held, device))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                made = torch.zeros(parameter.shape, dtype=torch.bfloat16, device=device)
                if made.ndim >= 2:
                    sharper = _ROUTER_SHARPNESS if module in routers else 1.0
                    made.normal_(std=sharper * made.shape[-1] ** -0.5)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
        own = list(module.parameters(recurse=False))
        if own and all(parameter.ndim < 2 for parameter in own):
            model._init_weights(module)  # norms (those of 1 + w begin at 0) and rates of decay
        if hasattr(module, "dt_bias"):
            module.dt_bias.copy_(
                _inverse_softplus(torch.empty_like(module.dt_bias).uniform_(*_LOG_STEPS).exp())
            )
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:  # a factor of embeddings or of a layer's result
                value = getattr(module, f"scalar_{name}", 1.0)
                setattr(module, name, torch.full(buffer.shape, value, device=device))


@torch.no_grad()
def _steady(model: PreTrainedModel) -> None:
    """Scale layers so that they add little to the residual stream, as those of trained models do.

    Otherwise a random mixture of experts with many layers amplifies rounding until two passes in 16 bits have
    little in common, since its routers choose other experts in each layer. A sample of a gpt-oss of 24 layers
    and width 256, alone and in a padded batch, differs by 0.26 nats in BF16, by 0.017 with this scaling, and
    by 3e-5 in FP32.
    """
    steps = round(math.log2((2 * model.config.num_hidden_layers) ** 0.5))
    model.get_input_embeddings().weight.mul_(model.config.hidden_size**0.5)
    for name, module in model.named_modules():
        if not name.endswith(("o_proj", "out_proj", "down_proj")):
            continue
        if not isinstance(module, PackedLinear):
            module.weight.div_(2**steps)
        elif module.weight_global_scale is not None:
            module.weight_global_scale.mul_(2**steps)
        else:
            module.weight_scale.sub_(steps)


def _inverse_softplus(y: torch.Tensor) -> torch.Tensor:
    return y + torch.log(-torch.expm1(-y))


@torch.no_grad()
def as_if_trained(model: nn.Module) -> nn.Module:
    """Randomise norms, biases, sinks and LoRA's B in place, so that none is one or zero; return the model."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
        elif name.endswith(".bias"):
            parameter.normal_(std=0.2)
        elif name.endswith("sinks"):
            parameter.normal_()
        elif "lora_B" in name:
            parameter.normal_(std=0.02)
    return model


def random_decoder(
    shape: Shape,
    weights: str,
    rank: int,
    positions: int,
    device: str = "cuda",
    lora_experts: str | None = None,
) -> Decoder:
    """The paged engine's view of a random policy; arguments as :func:`random_policy`."""
    policy = random_policy(shape, weights, rank, positions, device, lora_experts)
    binding = Binding(as_if_trained(policy), positions)
    binding.refresh({})
    return binding.decoder


def _random_linear(linear: nn.Linear, weights: str, device: str) -> nn.Module:
    """Make a layer of random weights in the format, with a mean square of about 1 / K, and zero biases."""
    k, n, bias = linear.in_features, linear.out_features, linear.bias is not None
    if weights == "nf4":
        import bitsandbytes as bnb

        layer = bnb.nn.Linear4bit(
            k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
        )
        dense = torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(std=k**-0.5)
        layer.weight = bnb.nn.Params4bit(dense, requires_grad=False, quant_type="nf4").to(device)
    else:
        packed = PackedLinear(k, n, block_format(weights), device=device)
        packed.weight_packed.random_(0, 256)
        # Codes have a mean square of 7.2, E4M3 scales of 1 to 1.875 one of 2.2; together 16.
        scales = packed.weight_scale.view(torch.uint8)
        if packed.weight_global_scale is not None:
            scales.random_(56, 64)
            packed.weight_global_scale.fill_((16 * k) ** 0.5)
        else:
            scales.fill_(127 - round(math.log2((7.2 * k) ** 0.5)))
        layer = packed
    if bias:
        layer.bias = nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device=device), requires_grad=False)
    return layer
