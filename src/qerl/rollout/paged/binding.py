"""From the model that trains to the decode step's weights, without a second copy.

Packed weights of q/k/v and of gate/up are put on top of each other in the order tensor cores read; the
layers' own buffers become views of that memory, and training dequantises from there. MXFP4 is written as
NVFP4 first, which changes no number. NF4 and 16-bit weights are stacked likewise and the layers' parameters
become views; NF4's double quantisation is undone (`qerl.kernels.nf4`). LoRA matrices and RMSNorm weights are
small and are copied before each rollout.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from qerl.errors import QeRLError
from qerl.kernels import nf4
from qerl.kernels.blob import to_blob
from qerl.modules import base_model
from qerl.nvfp4.convert import as_nvfp4, fits_nvfp4
from qerl.nvfp4.linear import MXFP4Linear, PackedLinear
from qerl.rollout.paged.weights import Decoder, Layer, Lora, Matrix

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def refusal(model: nn.Module) -> str | None:
    """Why this model cannot run on the paged engine, or None where it can."""
    base = base_model(model)
    config = base.config.get_text_config(decoder=True)
    if base.device.type != "cuda":
        return "the model is not on a CUDA device"
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(FAMILIES)}"
    if base.dtype != torch.bfloat16:
        return f"the model's dtype is {base.dtype}, not bfloat16"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") in ("dynamic", "longrope"):
        return f"its rotary embedding is of the type {rope['rope_type']}, which changes with the length"
    if getattr(config, "use_sliding_window", config.model_type == "mistral") and config.sliding_window:
        return "it attends to a sliding window"
    for name, layer in _linears(base):
        if getattr(layer, "bias", None) is not None and name.split(".")[-1][0] not in "qkv":
            return f"{name} has a bias"
        if nf4.quant_state(layer) is not None:
            if reason := nf4.refusal(layer):
                return f"{name} {reason}"
            continue
        packed = layer if isinstance(layer, PackedLinear) else None
        if not packed and not (type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16):
            return f"{name} is a {type(layer).__name__}, neither NVFP4, MXFP4, NF4 nor bfloat16"
        if packed and (packed.in_features % 64 or packed.out_features % 64):
            return f"{name} is {packed.out_features} x {packed.in_features}, which 64 does not divide"
        if isinstance(packed, MXFP4Linear) and not fits_nvfp4(packed.packed):
            return f"the block scales of {name} are further apart than 2^17"
    return None


def _linears(base: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in base.named_modules():
        parts = name.split(".")
        if parts[-1].endswith("_proj"):
            yield name, _inner(module)


def _inner(module: nn.Module) -> nn.Module:
    return cast(nn.Module, getattr(module, "base_layer", module))


class Binding:
    """The weights of one model as the engine reads them.

    Args:
        model: A causal LM for which :func:`refusal` finds nothing, PEFT-wrapped or not.
        positions: Positions of the rotary table.

    Attributes:
        decoder: The weights.
    """

    def __init__(self, model: nn.Module, positions: int) -> None:
        self._base = base_model(model)
        config = self._base.config.get_text_config(decoder=True)
        body = cast(Any, self._base).model
        self._lora_sources: list[tuple[Lora, list[tuple[nn.Module, int, int]]]] = []
        self._norms: list[tuple[torch.Tensor, str, nn.Module]] = []
        self._names = {module: name for name, module in self._base.named_modules()}
        self._rank = max((_rank(m) for m in self._base.modules()), default=0)
        frequency = body.rotary_emb.inv_freq.float()
        angle = torch.arange(positions, device=frequency.device)[:, None] * frequency[None, :]
        scaling = body.rotary_emb.attention_scaling
        self.decoder = Decoder(
            embedding_VD=body.embed_tokens.weight.data,
            layers=[self._layer(layer) for layer in body.layers],
            final_norm_D=self._norm(body.norm),
            head_VD=self._base.get_output_embeddings().weight.data,
            cos_ME=angle.cos() * scaling,
            sin_ME=angle.sin() * scaling,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=body.layers[0].self_attn.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
        )

    @property
    def has_lora(self) -> bool:
        """Whether the model carries an adapter."""
        return self._rank > 0

    @torch.no_grad()
    def refresh(self, norm_offsets: Mapping[str, torch.Tensor]) -> None:
        """Copies what training may have changed: LoRA, and RMSNorm weights plus this call's noise.

        Raises:
            QeRLError: Noise for a norm that this model does not have.
        """
        known = {name for _, name, _ in self._norms}
        unknown = sorted(set(norm_offsets) - known)
        if unknown:
            raise QeRLError(f"There is noise for {unknown[0]}, which is no RMSNorm of this model.")
        for buffer, name, norm in self._norms:
            buffer.copy_(cast(torch.Tensor, norm.weight))
            if name in norm_offsets:
                buffer.add_(norm_offsets[name].to(buffer.device))
        for lora, sources in self._lora_sources:
            _copy_lora(lora, sources, self._padded_rank)

    @property
    def _padded_rank(self) -> int:
        return -(-self._rank // 16) * 16

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        biases = [getattr(_inner(part), "bias", None) for part in qkv]
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        qk_norm_2E = None
        if norms[0] is not None:
            qk_norm_2E = torch.empty(2, attention.head_dim, device=self._base.device)
            for row, norm in zip(qk_norm_2E, cast(list[nn.Module], norms), strict=True):
                self._norms.append((row, self._names[norm], norm))
        return Layer(
            input_norm_D=self._norm(layer.input_layernorm),
            qkv=_matrix(qkv),
            bias_N=torch.cat([b.data for b in biases if b is not None]) if biases[0] is not None else None,
            qk_norm_2E=qk_norm_2E,
            o=_matrix([attention.o_proj]),
            post_norm_D=self._norm(layer.post_attention_layernorm),
            gate_up=_matrix([mlp.gate_proj, mlp.up_proj]),
            down=_matrix([mlp.down_proj]),
            lora_qkv=self._lora(qkv),
            lora_o=self._lora([attention.o_proj]),
            lora_gate_up=self._lora([mlp.gate_proj, mlp.up_proj]),
            lora_down=self._lora([mlp.down_proj]),
        )

    def _norm(self, norm: nn.Module) -> torch.Tensor:
        buffer = torch.empty(cast(torch.Tensor, norm.weight).numel(), device=self._base.device)
        self._norms.append((buffer, self._names[norm], norm))
        return buffer

    def _lora(self, parts: list[nn.Module]) -> Lora | None:
        if not self._rank:
            return None
        inner = [cast(Any, _inner(part)) for part in parts]
        rows = sum(layer.out_features for layer in inner)
        device, rank = self._base.device, self._padded_rank
        lora = Lora(
            torch.zeros(rank * len(parts), inner[0].in_features, dtype=self._base.dtype, device=device),
            torch.zeros(rows, rank, dtype=self._base.dtype, device=device),
        )
        sources, row = [], 0
        for index, (part, layer) in enumerate(zip(parts, inner, strict=True)):
            if _rank(part):
                sources.append((part, index, row))
            row += layer.out_features
        self._lora_sources.append((lora, sources))
        return lora


def _rank(module: nn.Module) -> int:
    ranks = getattr(module, "r", None)
    return max(ranks.values(), default=0) if isinstance(ranks, dict) and hasattr(module, "lora_A") else 0


def _copy_lora(lora: Lora, sources: list[tuple[nn.Module, int, int]], padded: int) -> None:
    for part, index, row in sources:
        module = cast(Any, part)
        names = [name for name in module.active_adapters if name in module.lora_A]
        if len(names) > 1:
            raise QeRLError(
                f"Adapters {', '.join(names)} are active at once; the rollout engine applies one."
            )
        if not names or module.disable_adapters:
            lora.a_RK[index * padded : (index + 1) * padded].zero_()
            continue
        a_RK, b_NR = module.lora_A[names[0]].weight, module.lora_B[names[0]].weight
        rank = a_RK.shape[0]
        lora.a_RK[index * padded : index * padded + rank].copy_(a_RK)
        lora.b_NR[row : row + b_NR.shape[0], :rank].copy_(b_NR * module.scaling[names[0]])


def _matrix(parts: list[nn.Module]) -> Matrix:
    layers = [cast(Any, _inner(part)) for part in parts]
    device = layers[0].bias.device if layers[0].bias is not None else _device(layers[0])
    if not isinstance(layers[0], PackedLinear):
        stacked = nf4.stack(layers) if nf4.quant_state(layers[0]) is not None else _stack_dense(layers)
        ones = torch.ones(len(layers), device=device)
        return Matrix(stacked, ones, ones)
    if layers[0].weight_packed.ndim == 4:
        raise QeRLError("This model already belongs to a paged engine; use that one.")
    for layer in layers:
        if isinstance(layer, MXFP4Linear):
            written = as_nvfp4(layer.packed)
            layer.weight_scale, layer.weight_global_scale = written.scales, written.global_scale
    scale_P = torch.stack([1.0 / layer.weight_global_scale[0] for layer in layers])
    blob = to_blob(
        torch.cat([layer.weight_packed for layer in layers]),
        torch.cat([layer.weight_scale.view(torch.uint8) for layer in layers]),
    )
    group = 0
    for layer in layers:
        until = group + -(-layer.out_features // 64)
        layer.weight_packed = blob.codes[group:until]
        layer.weight_scale = blob.scales[group:until].view(torch.float8_e4m3fn)
        group = until
    return Matrix(blob, scale_P, scale_P * 256)


def _stack_dense(layers: list[Any]) -> torch.Tensor:
    """Weights on top of each other, of which the layers' own become views."""
    if len(layers) == 1:
        return layers[0].weight.data
    stacked, row = torch.cat([layer.weight.data for layer in layers]), 0
    for layer in layers:
        layer.weight.data = stacked[row : row + layer.out_features]
        row += layer.out_features
    return stacked


def _device(layer: Any) -> torch.device:
    tensor = layer.weight_packed if isinstance(layer, PackedLinear) else layer.weight
    return cast(torch.Tensor, tensor).device
