"""How transformers loads and saves four-bit models: a quantizer named ``qerl_nvfp4``.

``from_pretrained`` goes one of two ways.

* The checkpoint is packed: linear layers are replaced by empty packed ones, and the tensors go straight into
  their buffers. transformers' own quantizer for compressed-tensors would decompress the whole model on its
  first forward pass.
* The checkpoint is plain and `QeRLQuantizationConfig` is passed: each weight is quantised as it is read, so
  that no more than one dense matrix is in memory. q/k/v and gate/up share a global scale, but transformers
  hands over one tensor at a time; the others of its group are therefore looked at in the checkpoint's files,
  once, at the moment the first of them arrives. The bytes are those that ``qerl quantize`` writes.

``save_pretrained`` writes what compressed-tensors reads: packed tensors, and in ``config.json`` a
``quantization_config`` of compressed-tensors rather than this quantizer's own. A folder says nothing about
who loads it; `qerl.models.load.load_model` is what brings it back packed.

transformers catches exceptions inside a conversion and goes on loading. A bad weight is therefore remembered,
and raised when loading has ended.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qerl.errors import QeRLError
from qerl.families.supported import check_dense
from qerl.fp4.checkpoint import Checkpoint, packed_tensors, quantization_config
from qerl.fp4.format import block_format
from qerl.fp4.groups import fused_group, is_quantized, left_out
from qerl.fp4.linear import PackedLinear
from qerl.fp4.rounding import check_rounding, largest_magnitude, quantize
from qerl.ranks import is_first_process
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding

logger = logging.getLogger(__name__)

QUANT_METHOD = "qerl_nvfp4"


@register_quantization_config(QUANT_METHOD)
class QeRLQuantizationConfig(QuantizationConfigMixin):
    """The four-bit format, and the rounding of a plain checkpoint to it.

    Args:
        format: ``nvfp4`` or ``mxfp4``.
        rounding: ``rtn`` or ``mse``; of no effect on a packed checkpoint.
        packed: Qualified names of the layers that are packed in the checkpoint; empty for a plain one.
        quant_method: Always this quantizer's name; transformers hands back what `for_checkpoint` gave it.

    Attributes:
        ignore: After loading, the linear layers that are not packed.

    Raises:
        QeRLError: There is no such format or rounding.
    """

    def __init__(
        self,
        format: str = DEFAULT_FORMAT,
        rounding: Rounding = DEFAULT_ROUNDING,
        packed: Sequence[str] = (),
        quant_method: str = QUANT_METHOD,
    ) -> None:
        block_format(format)
        check_rounding(rounding)
        self.quant_method = quant_method
        self.format = format
        self.rounding: Rounding = rounding
        self.packed = list(packed)
        self.ignore: list[str] = []

    @staticmethod
    def for_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
        """Takes the place of ``config.quantization_config`` before a packed checkpoint is loaded."""
        assert checkpoint.format is not None
        names = [name for headers in checkpoint.shards.values() for name in headers]
        # Both packed layouts have a tensor of this name, and plain layers have none.
        packed = [name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")]
        return {"quant_method": QUANT_METHOD, "format": checkpoint.format.name, "packed": packed}

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``config.json``: the description of compressed-tensors."""
        return quantization_config(block_format(self.format), self.ignore)


@register_quantizer(QUANT_METHOD)
class QeRLQuantizer(HfQuantizer):
    """Puts packed layers into a model while transformers loads it."""

    quantization_config: QeRLQuantizationConfig

    def __init__(self, quantization_config: QeRLQuantizationConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.format = block_format(quantization_config.format)
        self.failure: QeRLError | None = None
        self._narrow: set[str] = set()  # layers whose inputs no blocks divide, which stay as they are
        self._shapes: dict[str, torch.Size] = {}
        self._kept_in_fp32: set[str] = set()  # of the family itself
        self._file_of: dict[str, str] = {}
        self._amax: dict[tuple[str, ...], float] = {}

    def is_serializable(self) -> bool:
        return True

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """The state for `save_pretrained`: packed weights as they lie on disk, whatever their order here."""
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
        """With LoRA on top."""
        return True

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: Any) -> bool:
        module = param_name.removesuffix(".weight")
        if module == param_name or not is_quantized(module) or module in self._narrow:
            return False
        return isinstance(model.get_submodule(module), nn.Linear)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes that one element takes once it is on the device."""
        if self.param_needs_quantization(model, param_name):
            return FORMATS[self.format.name].bytes_per_element
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return _QuantizeOnArrival(self)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> PreTrainedModel:
        if self.pre_quantized:
            self._insert_empty_layers(model)
        else:
            self._prepare_to_quantize(model, checkpoint_files or [])
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: Any) -> PreTrainedModel:
        if self.failure is not None:
            raise self.failure
        for name, tensor in model.state_dict().items():
            expected = self._shapes.get(name, tensor.shape)
            if tensor.shape != expected:
                raise QeRLError(
                    f"{name} has shape {list(tensor.shape)} in the checkpoint but the config asks for "
                    f"{list(expected)}; the two do not belong together."
                )
        dense = list(_linears(model))
        missing = [name for name in dense if is_quantized(name) and name not in self._narrow]
        if missing and not self.pre_quantized:
            raise QeRLError(f"The checkpoint has no tensor {missing[0]}.weight; fetch it again.")
        self.quantization_config.ignore = dense
        if not self.pre_quantized:
            model._keep_in_fp32_modules_strict = self._kept_in_fp32
        return model

    def _insert_empty_layers(self, model: PreTrainedModel) -> None:
        linears = _linears(model)
        for name in self.quantization_config.packed:
            if name not in linears:
                raise QeRLError(
                    f"The checkpoint has packed weights for {name}, which is no linear layer of "
                    f"{type(model).__name__}; this model family is not supported."
                )
            linear = linears[name]
            if not self._fits(linear):
                raise QeRLError(
                    f"{name} has {linear.in_features} inputs, not a multiple of {self.format.block_size}, so "
                    f"{self.format.name} cannot store it; the checkpoint is damaged."
                )
            empty = PackedLinear(
                linear.in_features,
                linear.out_features,
                self.format,
                bias=linear.bias is not None,
                device="meta",
                dtype=linear.weight.dtype,
            )
            model.set_submodule(name, empty)

    def _prepare_to_quantize(self, model: PreTrainedModel, checkpoint_files: list[str]) -> None:
        check_dense(type(model).__name__, (name for name, _ in model.named_parameters()))
        linears = {name: linear for name, linear in _linears(model).items() if is_quantized(name)}
        if not linears:
            raise QeRLError(
                f"{type(model).__name__} has no decoder layers with projections named *_proj, as Llama, Qwen "
                "and Mistral have; this model family cannot be quantised."
            )
        if half := next((name for name in _linears(model) if left_out(name)), None):
            raise QeRLError(
                f"{type(model).__name__} has linear layers that are not named *_proj ({half}) and would stay "
                "unquantised; load it with weights: bf16."
            )
        self._leave_narrow(linears)
        # transformers casts a tensor to the model's dtype before it is quantised here; FP32 loses nothing.
        self._kept_in_fp32 = set(model._keep_in_fp32_modules_strict or ())
        exactly = {f"^{re.escape(name)}\\.weight$" for name in linears.keys() - self._narrow}
        model._keep_in_fp32_modules_strict = self._kept_in_fp32 | exactly
        for file in checkpoint_files:
            with safe_open(file, framework="pt") as shard:
                self._file_of |= dict.fromkeys(shard.keys(), file)

    def _leave_narrow(self, linears: dict[str, nn.Linear]) -> None:
        """Set aside the layers that the format cannot store, and say so once.

        Raises:
            QeRLError: It can store none.
        """
        self._narrow = {name for name, linear in linears.items() if not self._fits(linear)}
        if not self._narrow:
            return
        first = min(self._narrow)
        words = f"{first} has {linears[first].in_features} inputs, not a multiple of {self.format.block_size}"
        if len(self._narrow) == len(linears):
            raise QeRLError(f"{words}, nor has any layer; load the model with weights: bf16.")
        if is_first_process():
            logger.warning(
                "%s of %s layers stay unquantised, since %s cannot store them: %s.",
                *(len(self._narrow), len(linears), self.format.name, words),
            )

    def _fits(self, linear: nn.Linear) -> bool:
        return linear.in_features % self.format.block_size == 0

    def group_amax(self, key: str) -> float:
        """Largest magnitude of all weights that share a global scale with this tensor of the checkpoint.

        Raises:
            QeRLError: The tensor is not in the checkpoint under that name.
        """
        group = fused_group(key.removesuffix(".weight"))
        if group not in self._amax:
            members = [f"{module}.weight" for module in group if f"{module}.weight" in self._file_of]
            if not members:
                raise QeRLError(
                    "no tensor of its own in a safetensors file; this model family cannot be quantised."
                )
            self._amax[group] = max(_amax_on_disk(self._file_of[name], name) for name in members)
        return self._amax[group]


class _QuantizeOnArrival(ConversionOps):
    """Replaces a dense layer, whose weight has just been read, by a packed one."""

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
            try:
                model.set_submodule(
                    name, self._pack(model.get_submodule(name), weight_NK, source_patterns[0])
                )
            except QeRLError as error:
                self.quantizer.failure = QeRLError(f"{name}: {error}")
        return {}  # nothing is left for transformers to put anywhere

    def _pack(self, linear: nn.Module, weight_NK: torch.Tensor, key: str) -> PackedLinear:
        assert isinstance(linear, nn.Linear)
        if weight_NK.shape != linear.weight.shape:
            raise QeRLError(
                f"the checkpoint has shape {list(weight_NK.shape)} but the config asks for "
                f"{list(linear.weight.shape)}; the two do not belong together."
            )
        quantizer = self.quantizer
        amax = quantizer.group_amax(key)
        packed = quantize(weight_NK, quantizer.format, quantizer.quantization_config.rounding, amax)
        return PackedLinear.of(packed, linear.bias)


def _linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _amax_on_disk(file: str, name: str) -> float:
    with safe_open(Path(file), framework="pt") as shard:
        return float(largest_magnitude(shard.get_tensor(name)))
