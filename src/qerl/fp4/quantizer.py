"""The quantizer ``qerl_nvfp4``, by which transformers loads and saves four-bit models.

`from_pretrained` is given a `QeRLQuantizationConfig`, and each layer is handled in one of three ways.

* It is packed in the checkpoint: an empty packed layer takes its place, and the tensors are read straight
  into that layer's buffers. transformers' own quantizer for compressed-tensors would decompress the whole
  model on its first forward pass.
* It is to be packed: its weight is quantised as it is read, so that no more than one dense matrix is in
  memory. q/k/v and gate/up share a global scale, but transformers passes one tensor at a time; when the first
  tensor of a group arrives, the others are therefore read from the checkpoint, once. The bytes are those that
  ``qerl quantize`` writes.
* It is in FP8: its weight is converted to 16 bits as it is read, or packed in the second way.

``save_pretrained`` writes the layout of compressed-tensors: packed tensors, and in ``config.json`` a
``quantization_config`` of compressed-tensors rather than this quantizer's own. Nothing in the folder names
this quantizer; `qerl.models.load.load_model` loads it packed again.

transformers catches exceptions inside a conversion and goes on loading. The error of a bad weight is
therefore stored, and raised after loading.
"""

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qerl.errors import QeRLError
from qerl.families.experts import experts_of, own_memory, separate_experts
from qerl.fp4.checkpoint import packed_tensors, quantization_config
from qerl.fp4.format import BLOCK_FORMATS, BlockFormat, block_format
from qerl.fp4.groups import fused_group, is_quantized, left_out
from qerl.fp4.linear import PackedLinear
from qerl.fp4.published import FP8_SCALES, Held, dequantize_fp8
from qerl.fp4.rounding import check_rounding, largest_magnitude, quantize
from qerl.ranks import is_first_process
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding

logger = logging.getLogger(__name__)

QUANT_METHOD = "qerl_nvfp4"


@register_quantization_config(QUANT_METHOD)
class QeRLQuantizationConfig(QuantizationConfigMixin):
    """The four-bit format, the rounding to it, and the formats in the checkpoint.

    Args:
        format: Format of `qerl.weight_formats`; only a four-bit one packs layers that are not packed yet.
        rounding: ``rtn`` or ``mse``; of no effect on layers that are packed already.
        held: Format of each module in the checkpoint; empty for a plain one.
        stored: Returns the checkpoint's tensor of a name; dropped when all have been loaded.
        block: Rows and columns that share a scale in FP8.

    Attributes:
        ignore: After loading, the linear layers that are not packed.

    Raises:
        QeRLError: There is no such format or rounding.
    """

    def __init__(
        self,
        format: str = DEFAULT_FORMAT,
        rounding: Rounding = DEFAULT_ROUNDING,
        held: Mapping[str, Held] | None = None,
        stored: Callable[[str], torch.Tensor | None] = lambda _: None,
        block: tuple[int, int] = (128, 128),
    ) -> None:
        if format not in FORMATS:
            block_format(format)
        check_rounding(rounding)
        self.quant_method = QUANT_METHOD
        self.rounding: Rounding = rounding
        self.held = dict(held or {})
        self.stored = stored  # a function, since transformers copies configs with all that is in them
        self.block = block
        projections = {held for module, held in self.held.items() if is_quantized(module)}
        self.to_format = format if projections != {format} else ""
        self.ignore: list[str] = []

    @property
    def pack(self) -> BlockFormat | None:
        """The format to which layers are packed on loading; None if none are."""
        return BLOCK_FORMATS.get(self.to_format)

    @property
    def format(self) -> BlockFormat | None:
        """The format of layers that are packed already or on loading; None if there are none."""
        held = (BLOCK_FORMATS[name] for name in self.held.values() if name in BLOCK_FORMATS)
        return self.pack or next(held, None)

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``config.json``: the description of compressed-tensors."""
        if (
            self.format is None
        ):  # asked while loading; a model without packed layers is saved without an entry
            return {"quant_method": QUANT_METHOD}
        return quantization_config(self.format, self.ignore)


@register_quantizer(QUANT_METHOD)
class QeRLQuantizer(HfQuantizer):
    """Quantizer that puts packed layers into a model while transformers loads it."""

    quantization_config: QeRLQuantizationConfig

    def __init__(self, quantization_config: QeRLQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        # With nothing to convert, transformers reads tensors in several threads.
        self.pre_quantized = (
            quantization_config.pack is None and "fp8" not in quantization_config.held.values()
        )
        self.failure: QeRLError | None = None
        self._has_experts = False
        self._narrow: set[str] = set()  # layers whose width the block size does not divide; not packed
        self._kept_in_fp32: set[str] = set()  # as the family itself has it
        self._amax: dict[tuple[str, ...], float] = {}

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Return the state for `save_pretrained`, packed weights in the layout on disk."""
        state = dict(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, PackedLinear):
                weight = module.storage
                for buffer in weight.tensors():
                    del state[f"{name}.{buffer}"]
                state |= packed_tensors(name, weight.to_rows())
        return state, {}

    @property
    def is_trainable(self) -> bool:
        """True: LoRA on top is trained."""
        return True

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        module = param_name.removesuffix(".weight")
        if module == param_name or not isinstance(model.get_submodule(module), nn.Linear):
            return False
        return self.to_pack(module) is not None or self.quantization_config.held.get(module) == "fp8"

    def to_pack(self, module: str) -> BlockFormat | None:
        """Return the format to which a linear layer is quantised on loading; None if it is not quantised."""
        return self.quantization_config.pack if is_quantized(module) and module not in self._narrow else None

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes that one element takes once it is on the device."""
        format = self.to_pack(param_name.removesuffix(".weight"))
        if format is not None and self.param_needs_quantization(model, param_name):
            return FORMATS[format.name].bytes_per_element
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return _QuantizeOnArrival(self)

    def update_weight_conversions(self, weight_conversions: list[Any], *model: PreTrainedModel) -> list[Any]:
        """Return transformers' conversions of loaded tensors without its merging of experts. Version 5.17
        does not pass the model."""
        found = super().update_weight_conversions(weight_conversions, *model)
        if not self._has_experts:
            return found
        return [
            each
            for each in found
            if not (
                isinstance(each, WeightConverter) and any("experts" in end for end in each.target_patterns)
            )
        ]

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        separate_experts(model)
        self._has_experts = any(experts_of(model))
        self._insert_empty_layers(model)
        if self.quantization_config.pack is not None:
            self._prepare_to_quantize(model)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if self.failure is not None:
            raise self.failure
        for _name, experts in experts_of(model):
            own_memory(experts)
        self.quantization_config.ignore = list(_linears(model))
        self.quantization_config.stored = lambda _: None
        if self.quantization_config.pack is not None:
            model._keep_in_fp32_modules_strict = self._kept_in_fp32
        if self.quantization_config.format is None:
            self.remove_quantization_config(model)
        return model

    def _insert_empty_layers(self, model: PreTrainedModel) -> None:
        linears = _linears(model)
        packed = {
            name: BLOCK_FORMATS[held]
            for name, held in self.quantization_config.held.items()
            if held in BLOCK_FORMATS
        }
        for name, format in packed.items():
            if name not in linears:
                raise QeRLError(
                    f"The checkpoint has packed weights for {name}, which is no linear layer of "
                    f"{type(model).__name__}; this model family is not supported."
                )
            linear = linears[name]
            if linear.in_features % format.block_size:
                raise QeRLError(
                    f"{name} has {linear.in_features} inputs, not a multiple of {format.block_size}, so "
                    f"{format.name} cannot store it; the checkpoint is damaged."
                )
            empty = PackedLinear(
                linear.in_features,
                linear.out_features,
                format,
                bias=linear.bias is not None,
                device="meta",
                dtype=linear.weight.dtype,
            )
            model.set_submodule(name, empty)

    def _prepare_to_quantize(self, model: PreTrainedModel) -> None:
        linears = {name: linear for name, linear in _linears(model).items() if is_quantized(name)}
        packed = any(isinstance(module, PackedLinear) for module in model.modules())
        if not linears and not packed:
            raise QeRLError(
                f"{type(model).__name__} has no decoder layers with projections named *_proj, as Llama, Qwen "
                "and Mistral have; this model family cannot be quantised."
            )
        if half := next((name for name in _linears(model) if left_out(name)), None):
            raise QeRLError(
                f"{type(model).__name__} has linear layers that are not named *_proj ({half}) and would stay "
                "unquantised; load it with weights: bf16."
            )
        self._leave_narrow(linears, not packed)
        # transformers casts a tensor to the model's dtype before it is quantised here; FP32 loses nothing.
        self._kept_in_fp32 = set(model._keep_in_fp32_modules_strict or ())
        exactly = {f"^{re.escape(name)}\\.weight$" for name in linears.keys() - self._narrow}
        model._keep_in_fp32_modules_strict = self._kept_in_fp32 | exactly

    def _leave_narrow(self, linears: dict[str, nn.Linear], all_there_are: bool) -> None:
        """Exclude the layers that the format cannot store, and warn once.

        Args:
            linears: Layers to quantise.
            all_there_are: True if no other layer is packed.

        Raises:
            QeRLError: The format can store none of the layers.
        """
        format = self.quantization_config.pack
        assert format is not None
        self._narrow = {name for name, linear in linears.items() if linear.in_features % format.block_size}
        if not self._narrow:
            return
        first = min(self._narrow)
        words = f"{first} has {linears[first].in_features} inputs, not a multiple of {format.block_size}"
        if all_there_are and len(self._narrow) == len(linears):
            raise QeRLError(f"{words}, and no other layer fits either; load the model with weights: bf16.")
        if is_first_process():
            logger.warning(
                "%s of %s layers stay unquantised, since %s cannot store them: %s.",
                *(len(self._narrow), len(linears), format.name, words),
            )

    def group_amax(self, key: str) -> float:
        """Largest magnitude of all weights that share a global scale with this tensor of the checkpoint.

        Raises:
            QeRLError: The tensor is not in the checkpoint under that name.
        """
        group, stored = fused_group(key.removesuffix(".weight")), self.quantization_config.stored
        if group not in self._amax:
            members = [(module, stored(f"{module}.weight")) for module in group]
            found = [self.dense(module, weight) for module, weight in members if weight is not None]
            if not found:
                raise QeRLError(
                    "no tensor of its own in a safetensors file; this model family cannot be quantised."
                )
            self._amax[group] = max(float(largest_magnitude(weight)) for weight in found)
        return self._amax[group]

    def dense(self, module: str, weight_NK: torch.Tensor) -> torch.Tensor:
        """Return the dense weight of a layer that is not packed: FP8 dequantised to FP32, others as they are.

        Raises:
            QeRLError: The scales of an FP8 weight do not fit it.
        """
        config = self.quantization_config
        if config.held.get(module) != "fp8":
            return weight_NK
        scales = [config.stored(f"{module}.{name}") for name in FP8_SCALES]
        return dequantize_fp8(weight_NK, next(scale for scale in scales if scale is not None), config.block)


class _QuantizeOnArrival(ConversionOps):
    """Conversion of a weight that was just read: packs it, or dequantises FP8 to 16 bits."""

    def __init__(self, quantizer: QeRLQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: set[str],
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        missing_keys.discard(full_layer_name)
        if self.quantizer.failure is None:
            ((weight_NK,),) = input_dict.values()
            name = full_layer_name.removesuffix(".weight")
            linear = model.get_submodule(name)
            try:
                weight_NK = self.quantizer.dense(name, weight_NK)
                format = self.quantizer.to_pack(name)
                if format is None:
                    return {full_layer_name: weight_NK.to(linear.weight.dtype)}
                model.set_submodule(name, self._pack(linear, weight_NK, source_patterns[0], format))
            except QeRLError as error:
                self.quantizer.failure = QeRLError(f"{name}: {error}")
        return {}  # nothing is left for transformers to put anywhere

    def _pack(self, linear: Any, weight_NK: torch.Tensor, key: str, format: BlockFormat) -> PackedLinear:
        amax = self.quantizer.group_amax(key)
        packed = quantize(weight_NK, format, self.quantizer.quantization_config.rounding, amax)
        return PackedLinear.of(packed, linear.bias)


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
