"""Formats of the linear layers of a published model folder, layer by layer.

Publishers quantise some layers and leave others: MLPs in NVFP4 beside attention in FP8 or BF16. A folder
records the formats twice. The headers of a layer's tensors show how it is stored; `stored_format` reads them,
and loading relies on that. ``quantization_config`` declares the formats by names and patterns, in four
dialects:

    compressed-tensors   ``config_groups`` with ``targets``, ``ignore``
    modelopt             the same, or ``quant_algo`` with ``exclude_modules``, or ``quantized_layers`` by name
    fp8                  all linears but ``modules_to_not_convert``; ``weight_block_size`` for blocks
    mxfp4                gpt-oss: experts alone, as ``*_blocks`` and ``*_scales``

`declared_format` reads the dialects for the memory plan, which may have only the config. NVFP4 and MXFP4 stay
packed. FP8 is read, but no kernel multiplies with it: such a weight is converted to 16 bits on loading
(`dequantize_fp8`). Scales of activations are left out, because activations stay in 16 bits.

Shapes: N outputs, K inputs.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

import torch

from qerl.errors import QeRLError, first_line
from qerl.families.towers import spellings
from qerl.weight_formats import AS_PUBLISHED, DEFAULT_FORMAT, FORMATS, PACKED_FORMATS, WeightFormatName

Held = Literal["nvfp4", "mxfp4", "fp8", "bf16"]
"""Format of a layer in a folder; bf16 stands for every layer that is not quantised."""

ACTIVATIONS = ("input_scale", "input_global_scale", "activation_scale", "q_scale", "k_scale", "v_scale")
"""Last parts of names of tensors that belong to activations."""

FP8_SCALES = ("weight_scale", "weight_scale_inv")
"""Last parts of names of the scale that multiplies an FP8 weight; a layer has one of the two."""

_METHODS = ("compressed-tensors", "modelopt", "fp8", "mxfp4")
_FLOATS = ("BF16", "F16", "F32")
_BLOCK = (128, 128)


@dataclass(frozen=True)
class Header:
    """A shard's entry for a tensor, before any of its bytes are read.

    Attributes:
        shape: As stored.
        dtype: Name in safetensors, such as ``BF16`` or ``F8_E4M3``.
    """

    shape: tuple[int, ...]
    dtype: str


def stored_format(module: str, tensors: Mapping[str, Header], where: object) -> Held:
    """Return the format of a module of a quantised folder, from its tensors' headers by last part of name.

    Raises:
        QeRLError: The format is not supported; ``where`` is the folder.
    """
    weight = tensors.get("weight_packed", tensors.get("weight"))
    scale = next((tensors[name] for name in FP8_SCALES if name in tensors), None)
    if "pre_quant_scale" not in tensors:
        if weight and scale and weight.dtype == "U8":
            if scale.dtype == "F8_E4M3":
                return "nvfp4"
            if scale.dtype == "U8" and "weight_packed" in tensors:
                return "mxfp4"
        elif weight and scale and weight.dtype == "F8_E4M3" and scale.dtype in _FLOATS:
            return "fp8"
        elif scale is None and not any(_is_quantised(header) for header in tensors.values()):
            return "bf16"
    quantised = [name for name, header in tensors.items() if _is_quantised(header)]
    odd = next(name for name in ("pre_quant_scale", *quantised, *tensors) if name in tensors)
    raise QeRLError(
        f"{where} holds {module} in a format that is not read here ({odd} is {tensors[odd].dtype}); use its "
        "16-bit model, or a checkpoint in NVFP4, MXFP4 or FP8."
    )


def _is_quantised(header: Header) -> bool:
    return header.dtype in ("U8", "I8", "U4", "I4", "I32") or header.dtype.startswith(("F8", "F4"))


def check_declared(quantization: Mapping[str, Any], where: object) -> None:
    """Raise if the ``quantization_config`` of a folder is damaged or of another kind.

    Raises:
        QeRLError: It is damaged or not supported; ``where`` is the folder.
    """
    method = quantization.get("quant_method")
    try:
        for module in ("model.layers.0.mlp.up_proj", *(quantization.get("quantized_layers") or ())):
            declared_format(quantization, module)
        block_shape(quantization)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, re.error) as error:
        raise QeRLError(
            f"{where} has a quantization_config that is not valid ({first_line(error)}); fetch it again."
        ) from error
    # A transform rotates weights against activations; weights alone would be a different model.
    if method in _METHODS and not quantization.get("transform_config"):
        return
    detail = "with transforms" if method in _METHODS else quantization.get("quant_algo") or "another format"
    raise QeRLError(
        f"{where} is quantised with {method} ({detail}), which is not read here; use the 16-bit model, or a "
        f"checkpoint of {', '.join(_METHODS)} without transforms."
    )


def declared_format(quantization: Mapping[str, Any] | None, module: str) -> Held:
    """Return the format that ``quantization_config`` declares for a linear layer.

    Args:
        quantization: The ``quantization_config``; None for a folder that is not quantised.
        module: Name of the layer in the causal LM.
    """
    if quantization is None:
        return "bf16"
    if quantization.get("quant_method") == "mxfp4":
        return "mxfp4" if ".experts." in module else "bf16"
    left_out = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
    if any(_matches(pattern, module) for name in left_out for pattern in quantization.get(name) or ()):
        return "bf16"
    layers = quantization.get("quantized_layers")
    if layers is not None:
        exact = (name for name in spellings(module) if name in layers)
        name = next(exact, None) or next((name for name in layers if _matches(name, module)), None)
        return "bf16" if name is None else _of_algorithm(layers[name]["quant_algo"])
    groups = list((quantization.get("config_groups") or {}).values())
    for general in (False, True):  # a name or a pattern counts before the type
        for group in groups:
            targets = group.get("targets") or ["Linear"]
            if ("Linear" in targets) if general else any(_matches(target, module) for target in targets):
                return _of_weights(group.get("weights") or {})
    if groups:
        return "bf16"
    named = (quantization.get(name) for name in ("quant_algo", "format", "quant_method"))
    return _of_algorithm(next(filter(None, named), ""))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in spellings(module))
    return any(fnmatch(name, pattern) or f".{pattern}." in f".{name}." for name in spellings(module))


def _of_algorithm(name: str) -> Held:
    known: dict[str, Held] = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "fp8": "fp8", "float-quantized": "fp8"}
    return next((format for word, format in known.items() if word in name.lower()), "bf16")


def _of_weights(weights: Mapping[str, Any]) -> Held:
    if weights.get("num_bits") == 4:
        return "mxfp4" if weights.get("group_size") == FORMATS["mxfp4"].block_size else "nvfp4"
    return "fp8" if weights.get("num_bits") == 8 else "bf16"


def choose_weights(name: object, held: Collection[Held], wanted: WeightFormatName | None) -> WeightFormatName:
    """Choose the format in which a folder is loaded.

    Args:
        name: The user's name for the model.
        held: Formats of the projections of its decoder layers.
        wanted: The user's choice; None takes the folder's format if that is a single four-bit one, else
            `AS_PUBLISHED` if any layer is quantised, else the default.

    Raises:
        QeRLError: The folder cannot be loaded in that format.
    """
    packed = [format for format in PACKED_FORMATS if format in held]
    quantised = bool(packed) or "fp8" in held
    if len(packed) > 1:
        raise QeRLError(
            f"{name} holds both {' and '.join(packed)} weights; use a checkpoint with one of them."
        )
    if wanted is None:
        return DEFAULT_FORMAT if not quantised else packed[0] if set(held) == set(packed) else AS_PUBLISHED
    if wanted == AS_PUBLISHED and not quantised:
        raise QeRLError(
            f"{name} is published in 16 bits; set weights to bf16, or to {DEFAULT_FORMAT} to quantise it."
        )
    if packed and wanted not in (AS_PUBLISHED, packed[0]):
        raise QeRLError(
            f"{name} holds {packed[0]} weights, which cannot become {wanted}; set weights to {packed[0]} or "
            "name the 16-bit model."
        )
    if quantised and FORMATS[wanted].package is not None:
        raise QeRLError(
            f"{name} holds FP8 weights, which {FORMATS[wanted].package} cannot convert to {wanted}; set "
            f"weights to {AS_PUBLISHED} or {DEFAULT_FORMAT}, or name the 16-bit model."
        )
    return wanted


def block_shape(quantization: Mapping[str, Any] | None) -> tuple[int, int]:
    """Rows and columns of the blocks that share a scale in FP8; 128 x 128 unless the folder declares them."""
    declared = (quantization or {}).get("weight_block_size")
    for group in ((quantization or {}).get("config_groups") or {}).values():
        declared = declared or (group.get("weights") or {}).get("block_structure")
    if isinstance(declared, str):
        raise ValueError(f"the block {declared} is no pair of numbers")
    return (int(declared[0]), int(declared[1])) if declared else _BLOCK


def dequantize_fp8(weight_NK: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Dequantise an E4M3 matrix to FP32, with one scale for the matrix, per row, or per block.

    Args:
        weight_NK: E4M3, or a cast of it.
        scale: One number, N numbers, or [N / rows, K / columns] rounded up.
        block: Rows and columns of a block.

    Raises:
        QeRLError: The scales have another shape.
    """
    n, k = weight_NK.shape
    dense_NK, scale = weight_NK.float(), scale.to(weight_NK.device, torch.float32)
    if scale.numel() == 1 or (scale.numel() == n and scale.shape[0] == n):
        return dense_NK * scale.reshape(-1, 1)
    rows, columns = block
    if list(scale.shape) != [-(-n // rows), -(-k // columns)]:
        raise QeRLError(
            f"its scales have shape {list(scale.shape)}; an FP8 weight of {n} x {k} has one, {n}, or one for "
            f"each block of {rows} x {columns}."
        )
    scale_NK = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    return dense_NK * scale_NK
