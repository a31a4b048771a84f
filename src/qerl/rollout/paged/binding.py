"""Binding of the trained model's weights to the decode step, without a second copy.

Packed weights of q/k/v and of gate/up are stacked in the order in which tensor cores read; the layers' own
buffers become views of that memory, and training dequantises from there. MXFP4 is rewritten as NVFP4 first,
which changes no value. NF4 and 16-bit weights are stacked likewise and the layers' parameters become views;
NF4's double quantisation is undone (`qerl.kernels.weights.nf4`). LoRA (`qerl.rollout.paged.adapter`), RMSNorm
weights and biases are small and are copied before each rollout.

A view is valid as long as the model still computes with that tensor. Every call therefore compares addresses:
a weight that was replaced since (merged into a copy, moved, loaded again) raises an error instead of sampling
from an old policy.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from qerl.errors import QeRLError
from qerl.families.experts import Experts
from qerl.families.layer import Attention, DeltaNet, LayerSpec, Product, Rotary, RoutedMLP
from qerl.families.parts import base_model
from qerl.families.sizes import Sizes, rope_parameters
from qerl.families.table import why_not_described
from qerl.fp4.linear import PackedLinear
from qerl.fp4.storage import stack_tiles, why_no_tiles
from qerl.kernels.decode.rope_kv import Heads
from qerl.kernels.limits import MAX_KEY
from qerl.kernels.weights import nf4
from qerl.kernels.weights.dense import DenseStack
from qerl.kernels.weights.experts import DenseExperts, ExpertWeights, NVFP4Experts
from qerl.kernels.weights.nvfp4 import NVFP4Stack
from qerl.kernels.weights.packed_gemm import OUTPUT_SCALE
from qerl.rollout.paged.adapter import Adapter, check_adapter, inner, linears_of, why_not_with_adapters
from qerl.rollout.paged.weights import (
    AttentionWeights,
    Decoder,
    DeltaNetWeights,
    Layer,
    MLPWeights,
    Projection,
    RoutedWeights,
)

HEAD_SIZES = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 512)
MOST_GROUPED = 64
"""Maximum query heads per key head: the rows of an attention tile."""


def why_not(model: nn.Module) -> str | None:
    """Return why this model cannot run on the paged engine, or None if it can."""
    base = base_model(model)
    if not isinstance(base, PreTrainedModel):
        return f"it is a {type(base).__name__}, neither a transformers model nor a PeftModel around one"
    if base.device.type != "cuda":
        return "the model is not on a CUDA device"
    return (
        _why_not_with_sizes(base)
        or _why_not_with_routers(base)
        or _why_not_with_linears(base)
        or _why_not_with_experts(base)
        or why_not_with_adapters(base)
    )


def _why_not_with_sizes(base: PreTrainedModel) -> str | None:
    """Return why the kernels cannot run a model of these sizes, or None."""
    config = base.config.get_text_config(decoder=True)
    if reason := why_not_described(config):
        return reason
    if base.dtype != torch.bfloat16:
        return f"the model's dtype is {base.dtype}, not bfloat16"
    for rope in rope_parameters(config):
        if rope.get("rope_type", "default") in ("dynamic", "longrope"):
            return f"its rotary embedding is of the type {rope['rope_type']}, which changes with the length"
    for run in Sizes.of(config).runs:
        mixer = run.spec.mixer
        if isinstance(mixer, DeltaNet):
            if mixer.key_size > MAX_KEY or mixer.value_size % 8:
                return (
                    f"its delta nets have keys of {mixer.key_size} and values of {mixer.value_size} numbers; "
                    f"the kernels take keys up to {MAX_KEY} and values of a multiple of 8"
                )
            continue
        if mixer.head_size not in HEAD_SIZES:
            sizes = ", ".join(map(str, HEAD_SIZES))
            return f"its heads are {mixer.head_size} wide, and the kernels take {sizes}"
        if any(rows % 16 for outputs in run.spec.summed.values() for rows in outputs):
            return "it has a bias, or a norm of a whole product, whose width is not a multiple of 16"
        if mixer.group > MOST_GROUPED:
            return f"{mixer.group} query heads share a key head, and the kernels take {MOST_GROUPED}"
        if mixer.rotary is not None:
            found = cast(Any, base).model.get_buffer(mixer.rotary.frequencies).numel()
            if found != mixer.rotary.stride:
                return (
                    f"its rotary embedding has {found} angles, but its config asks for {mixer.rotary.stride}"
                )
    return None


def _why_not_with_linears(base: PreTrainedModel) -> str | None:
    """Return why the kernels cannot multiply with one of the layers, or None."""
    for index, product, modules in _products(base):
        if len({type(module) for module in modules}) > 1:
            names = ", ".join(linear.name for linear in product.linears)
            return f"{names} of layer {index} are multiplied as one matrix but stored in different formats"
        for linear, module in zip(product.linears, modules, strict=True):
            if linear.bias != (getattr(module, "bias", None) is not None):
                there = "no bias" if linear.bias else "a bias"
                return f"{linear.name} of layer {index} has {there}, which contradicts its config"
    for name, layer in _weights(base):
        if nf4.quant_state(layer) is not None:
            if reason := nf4.why_not(layer):
                return f"{name} {reason}"
            continue
        if isinstance(layer, PackedLinear):
            if reason := why_no_tiles(layer.storage):
                return f"{name} {reason}"
        elif not (type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16):
            return f"{name} is a {type(layer).__name__}, neither NVFP4, MXFP4, NF4 nor bfloat16"
    return None


def _why_not_with_routers(base: PreTrainedModel) -> str | None:
    """Return why the kernels cannot take the experts of a layer, or choose among them, or None."""
    for name, mixture, spec in _mixtures(base):
        assert isinstance(spec.mlp, RoutedMLP)
        if not isinstance(mixture.experts, Experts):
            return f"the experts of {name} are parameters of transformers' module, not linears of their own"
        weight, wanted = mixture.get_submodule(_router(spec)).weight, (spec.experts, spec.hidden)
        if weight.dtype != base.dtype or weight.shape != wanted:
            found = f"{weight.dtype} {list(weight.shape)}"
            return f"the router of {name} is {found}, not {base.dtype} {list(wanted)}"
        clamp = getattr(mixture.experts[0].gated, "clamp", None)
        if clamp != spec.mlp.clamp:
            return (
                f"the experts of {name} clamp their gates with {clamp}, but its config says {spec.mlp.clamp}"
            )
    return None


def _why_not_with_experts(base: PreTrainedModel) -> str | None:
    """Return why the kernels cannot multiply with the experts of one of the layers, or None."""
    formats: dict[str, type[nn.Module]] = {}
    for name, layer in _experts(base):
        if nf4.quant_state(layer) is not None:
            return f"{name} is in NF4, which the kernels do not support for experts"
        if formats.setdefault(name.partition(RoutedMLP.EXPERTS)[0], type(layer)) is not type(layer):
            return f"{name} is stored in a different format than other experts of its layer"
    return None


def _linears(base: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears of all decoder layers below their adapters, each with its name."""
    for index, product, modules in _products(base):
        for linear, module in zip(product.linears, modules, strict=True):
            yield f"model.layers.{index}.{linear.place}", module


def _weights(base: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears of all decoder layers and of their experts, each with its name."""
    yield from _linears(base)
    yield from _experts(base)


def _experts(base: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linears of all experts below their adapters, each with its name."""
    for name, mixture, spec in _mixtures(base):
        for number, expert in enumerate(mixture.experts):
            for linear in spec.expert_linears:
                yield f"{name}.experts.{number}.{linear.place}", inner(expert.get_submodule(linear.place))


def _mixtures(base: PreTrainedModel) -> Iterator[tuple[str, Any, LayerSpec]]:
    """Yield the modules of routers and experts, each with its name and its layer's description."""
    specs = Sizes.of(base.config.get_text_config(decoder=True)).specs
    for index, (layer, spec) in enumerate(zip(cast(Any, base).model.layers, specs, strict=True)):
        if isinstance(spec.mlp, RoutedMLP):
            place = RoutedMLP.EXPERTS.rpartition(".")[0]
            yield f"model.layers.{index}.{place}", layer.get_submodule(place), spec


def _router(spec: LayerSpec) -> str:
    """Return the router's name in the module of a mixture."""
    assert isinstance(spec.mlp, RoutedMLP)
    return spec.mlp.router.rpartition(".")[2]


def _products(base: PreTrainedModel) -> Iterator[tuple[int, Product, list[nn.Module]]]:
    """Yield the products of all layers, each with its layer's number and its linears below their adapters."""
    specs = Sizes.of(base.config.get_text_config(decoder=True)).specs
    for index, (layer, spec) in enumerate(zip(cast(Any, base).model.layers, specs, strict=True)):
        for product in spec.products:
            yield index, product, [inner(module) for module in linears_of(layer, product)]


class Binding:
    """The weights of one model as the engine reads them.

    Args:
        model: A causal LM for which :func:`why_not` finds nothing, PEFT-wrapped or not.
        positions: Number of positions of the rotary table.

    Attributes:
        decoder: The weights.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        self._base = base_model(model)
        self._dtype = self._base.dtype
        config = self._base.config.get_text_config(decoder=True)
        body = cast(Any, self._base).model
        self._biases: list[tuple[torch.Tensor, list[nn.Module]]] = []
        self._norms: list[tuple[torch.Tensor, str, nn.Module]] = []
        self._expert_biases: list[tuple[RoutedWeights, list[list[list[nn.Module]]]]] = []
        self._copies: list[tuple[torch.Tensor, nn.Module, str]] = []
        self._rotary: dict[Rotary, tuple[torch.Tensor, torch.Tensor]] = {}
        self._positions = positions
        self._copied: set[str] = set()  # embedding or head, if training holds it in another dtype
        self._names = {module: name for name, module in self._base.named_modules()}
        self._sizes = sizes = Sizes.of(config)
        self.decoder = Decoder(
            embedding_VD=self._of_vocabulary("embedding_VD", body.embed_tokens),
            layers=[self._layer(*each) for each in zip(body.layers, sizes.specs, strict=True)],
            final_norm_D=self._norm(body.norm),
            head_VD=self._of_vocabulary("head_VD", self._base.get_output_embeddings()),
            sizes=sizes,
            eps=config.rms_norm_eps,
            embedding_scale=_embedding_scale(body.embed_tokens, sizes),
        )
        self._bound = [(name, _address(layer)) for name, layer in self._watched()]
        self._adapter = Adapter(self._base, list(body.layers), self._dtype)
        self._adapter.bind(self.decoder)
        self._changed = False  # in a refresh that an error cut off, perhaps

    @torch.no_grad()
    def refresh(self, norm_offsets: Mapping[str, torch.Tensor]) -> bool:
        """Copy the weights that training may have changed: LoRA, biases, and RMSNorm weights plus noise.

        Returns:
            Whether there are new buffers, because adapters were loaded or a head was replaced: steps captured
            before can then no longer be replayed.

        Raises:
            QeRLError: There is noise for a norm that this model does not have, or of another width; a weight
                was replaced; or the kernels cannot apply a present adapter.
        """
        self._check_offsets(norm_offsets)
        check_adapter(self._base)
        for (name, address), (_, layer) in zip(self._bound, self._watched(), strict=True):
            if _address(layer) != address:
                raise QeRLError(
                    f"The weight of {name} was replaced after the paged engine was made; make a new engine "
                    "for the model."
                )
        self._changed |= self._adapter.bind(self.decoder) | self._renew_vocabulary()
        self._adapter.copy()
        for buffer_N, layers in self._biases:
            members = buffer_N.split([cast(Any, layer).out_features for layer in layers])
            for member, layer in zip(members, layers, strict=True):
                member.copy_(cast(torch.Tensor, layer.bias))
        for buffer, name, norm in self._norms:
            buffer.copy_(cast(torch.Tensor, norm.weight))
            if name in norm_offsets:
                buffer.add_(norm_offsets[name].to(buffer.device))
            if self._sizes.unit_offset:
                buffer.add_(1.0)
        if self._sizes.logit_scale != 1.0:
            self.decoder.final_norm_D.mul_(self._sizes.logit_scale)  # the head is linear
        for buffer, module, name in self._copies:
            buffer.copy_(getattr(module, name))
        for weights, (gate_up, down) in self._expert_biases:
            assert weights.gate_up_bias_EN is not None and weights.down_bias_ED is not None
            weights.gate_up_bias_EN.copy_(_biases(gate_up))
            weights.down_bias_ED.copy_(_biases(down) / weights.down.scale_EL)
        changed, self._changed = self._changed, False
        return changed

    def _watched(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules whose weights must not be replaced, each with its name: linears, experts, routers
        and the gates of shared MLPs."""
        yield from _weights(self._base)
        for name, mixture, spec in _mixtures(self._base):
            yield f"{name}.{_router(spec)}", mixture.get_submodule(_router(spec))
            if isinstance(spec.mlp, RoutedMLP) and spec.mlp.shared:
                gate = spec.mlp.SHARED_GATE.rpartition(".")[2]
                yield f"{name}.{gate}", mixture.get_submodule(gate)

    def _check_offsets(self, norm_offsets: Mapping[str, torch.Tensor]) -> None:
        widths = {name: buffer.numel() for buffer, name, _ in self._norms}
        for name, offset in norm_offsets.items():
            if name not in widths:
                raise QeRLError(
                    f"There is noise for {name}, which is not an RMSNorm of this model; draw the noise with "
                    "an AdaptiveNoise built for this model."
                )
            if offset.shape != (widths[name],):
                raise QeRLError(
                    f"The noise for {name} has the shape {list(offset.shape)}, but the norm has a width of "
                    f"{widths[name]}; draw the noise with an AdaptiveNoise built for this model."
                )

    def _of_vocabulary(self, name: str, module: nn.Module) -> torch.Tensor:
        """Return the weight itself, or a copy if training holds it in another dtype than the rest."""
        weight = cast(torch.Tensor, module.weight).data
        (self._copied.discard if weight.dtype == self._dtype else self._copied.add)(name)
        return weight.to(self._dtype)

    def _renew_vocabulary(self) -> bool:
        """Bind embedding and head again if they were replaced (a head cast to fp32, an adapter's own).

        Returns:
            Whether either has a new buffer.
        """
        changed = False
        sources = {
            "embedding_VD": cast(Any, self._base).model.embed_tokens,
            "head_VD": self._base.get_output_embeddings(),
        }
        for name, module in sources.items():
            weight, held = cast(torch.Tensor, module.weight), getattr(self.decoder, name)
            if weight.data_ptr() == held.data_ptr():
                continue
            if weight.dtype != held.dtype and name in self._copied:
                held.copy_(weight)
                continue
            setattr(self.decoder, name, self._of_vocabulary(name, module))
            changed = True
        return changed

    def _layer(self, layer: Any, spec: LayerSpec) -> Layer:
        first, last, *of_mlp = (self._projection(linears_of(layer, each)) for each in spec.products)
        described, around = spec.mixer, spec.around
        mixer = (
            self._delta_net(layer, first, last)
            if isinstance(described, DeltaNet)
            else self._attention(layer.self_attn, described, first, last)
        )
        norms = [self._norm(layer.get_submodule(place)) if place else None for place in around]
        ones_D = torch.ones(spec.hidden, device=self._base.device)
        before_mixer_D, behind_mixer_D, before_mlp_D, behind_mlp_D = norms
        return Layer(
            spec,
            ones_D if before_mixer_D is None else before_mixer_D,
            mixer,
            ones_D if before_mlp_D is None else before_mlp_D,
            self._mixture(layer, spec, of_mlp) if isinstance(spec.mlp, RoutedMLP) else MLPWeights(*of_mlp),
            behind_mixer_D,
            behind_mlp_D,
            self._copy(layer, spec.scalar) if spec.scalar else None,
        )

    def _attention(
        self, attention: Any, described: Attention, qkv: Projection, o: Projection
    ) -> AttentionWeights:
        heads = Heads(
            norm_N=self._head_norms(attention) if described.qk_norm else None,
            v_norm=described.v_norm,
            k_is_v=described.k_is_v,
            fused=described.fused,
            gated=described.gated,
            turned=(described.rotary.pairs, described.rotary.stride) if described.rotary else (0, 0),
            position_scale=described.position_scale,
        )
        sink_H = self._copy(attention, "sinks") if described.sinks else None
        return AttentionWeights(qkv, o, heads, *self._tables(described.rotary), sink_H)

    def _mixture(self, layer: Any, spec: LayerSpec, of_shared: list[Projection]) -> RoutedWeights:
        assert isinstance(spec.mlp, RoutedMLP)
        experts, products = layer.get_submodule(spec.mlp.EXPERTS), spec.mlp.of_expert(spec.hidden)
        of_products = [
            [[inner(linear) for linear in linears_of(expert, each)] for expert in experts]
            for each in products
        ]
        gate_up, down = map(_stack_experts, of_products)
        router: Any = layer.get_submodule(spec.mlp.router)
        weights = RoutedWeights(router.weight.detach(), gate_up, down)
        weights.shared = MLPWeights(*of_shared) if of_shared else None
        if spec.mlp.bias:
            weights.router_bias_E = self._copy(router, "bias")
            weights.gate_up_bias_EN, weights.down_bias_ED = map(_biases, of_products)
            self._expert_biases.append((weights, of_products))
        return weights

    def _delta_net(self, layer: Any, qkvz: Projection, out: Projection) -> DeltaNetWeights:
        module = layer.linear_attn
        return DeltaNetWeights(
            qkvz,
            out,
            module.conv1d.weight.detach()[:, 0].T.float().contiguous(),
            -module.A_log.detach().float().exp(),
            module.dt_bias.detach().float(),
            module.norm.weight.detach().float(),
        )

    def _projection(self, linears: list[nn.Module]) -> Projection:
        projection = _stack(linears)
        projection.bias_N = self._bias([inner(module) for module in linears])
        return projection

    def _tables(self, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of all positions, the same tensors for layers with the same angles."""
        if rotary is None:
            nothing = torch.zeros(1, device=self._base.device)
            return nothing, nothing
        if rotary not in self._rotary:
            body = cast(Any, self._base).model
            frequency = body.get_buffer(rotary.frequencies)[: rotary.pairs].float()
            place, _, name = rotary.scaling.rpartition(".")
            scaling = getattr(body.get_submodule(place), name)
            angle = torch.arange(self._positions, device=frequency.device)[:, None] * frequency[None, :]
            self._rotary[rotary] = angle.cos() * scaling, angle.sin() * scaling
        return self._rotary[rotary]

    def _head_norms(self, attention: Any) -> torch.Tensor:
        norms = attention.q_norm, attention.k_norm
        widths = [norm.weight.numel() for norm in norms]
        norm_N = torch.empty(sum(widths), device=self._base.device)
        for part, norm in zip(norm_N.split(widths), norms, strict=True):
            self._norms.append((part, self._names[norm], norm))
        return norm_N

    def _copy(self, module: Any, name: str) -> torch.Tensor:
        """Return an fp32 buffer for a tensor of a module, copied before each call."""
        buffer = torch.empty(getattr(module, name).numel(), device=self._base.device)
        self._copies.append((buffer, module, name))
        return buffer

    def _bias(self, linears: list[nn.Module]) -> torch.Tensor | None:
        if getattr(linears[0], "bias", None) is None:
            return None
        buffer_N = torch.cat([cast(torch.Tensor, linear.bias).data for linear in linears])
        self._biases.append((buffer_N, linears))
        return buffer_N

    def _norm(self, norm: nn.Module) -> torch.Tensor:
        buffer = torch.empty(cast(torch.Tensor, norm.weight).numel(), device=self._base.device)
        self._norms.append((buffer, self._names[norm], norm))
        return buffer


def _embedding_scale(embedding: nn.Module, sizes: Sizes) -> float:
    """Return the factor of a model's embeddings: that of their module in their dtype, or the config's."""
    own, weight = getattr(embedding, "embed_scale", None), cast(torch.Tensor, embedding.weight)
    return sizes.embedding_scale if own is None else float(own.to(weight.dtype))


def _stack(adapted: list[nn.Module]) -> Projection:
    """Stack the weights of linears, adapted or not, for one product; the layers' own become views."""
    layers = [cast(Any, inner(module)) for module in adapted]
    if nf4.quant_state(layers[0]) is not None:
        return Projection(nf4.NF4Stack.of(layers))
    if not isinstance(layers[0], PackedLinear):
        return Projection(DenseStack.of(layers))
    tiles, parts = stack_tiles([layer.storage for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.use(part)
    return Projection(NVFP4Stack(tiles, torch.stack([1.0 / part.global_scale[0] for part in parts])))


def _stack_experts(experts: list[list[Any]]) -> ExpertWeights:
    """Stack the weights of experts; the layers' own become views.

    Args:
        experts: Per expert, the linears of one product, all in one format.
    """
    layers, count = [layer for linears in experts for layer in linears], len(experts)
    if not isinstance(layers[0], PackedLinear):
        stack = DenseStack.of(layers)
        return DenseExperts(stack.weight_NK.view(count, -1, stack.shape[1]), stack.scale_L.view(count, -1))
    tiles, parts = stack_tiles([layer.storage for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.use(part)
    scale_L = torch.stack([1.0 / part.global_scale[0] for part in parts]) / OUTPUT_SCALE
    shape = sum(layer.out_features for layer in experts[0]), layers[0].in_features
    return NVFP4Experts(tiles, scale_L.view(count, -1), shape)


def _biases(experts: list[list[nn.Module]]) -> torch.Tensor:
    """Return the biases of one product of all experts, fp32 [E, N]."""
    rows = [[cast(torch.Tensor, each.bias).detach() for each in linears] for linears in experts]
    return torch.stack([torch.cat(row) for row in rows]).float()


def _address(layer: nn.Module) -> int:
    """Return the address of a linear layer's weight."""
    weight = layer.qweight if isinstance(layer, PackedLinear) else layer.weight
    return cast(torch.Tensor, weight).data_ptr()
