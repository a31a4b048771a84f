"""Model folders whose layers are held in several formats, written tensor by tensor."""

import json

import torch
from safetensors.torch import load_file, save_file

from qerl.fp4.format import MXFP4, NVFP4, dequantize
from qerl.fp4.rounding import quantize
from tests.support.models import make_tiny_model

FP8_MAX = 448.0


def fp8(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in E4M3, its scales (one, one a row, or one for each block of 32 x 48), and both in FP64."""
    n, k = weight.shape
    if kind == "tensor":
        scale = weight.abs().max() / FP8_MAX
        whole = scale
    elif kind == "channel":
        scale = whole = weight.abs().amax(1, keepdim=True) / FP8_MAX
    else:
        scale = torch.empty(-(-n // 32), -(-k // 48))
        whole = torch.empty(n, k)
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                place = (slice(32 * i, 32 * i + 32), slice(48 * j, 48 * j + 48))
                scale[i, j] = weight[place].abs().max() / FP8_MAX
                whole[place] = scale[i, j]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return codes, scale, codes.double() * whole.double()


def write(
    folder,
    formats,
    declared,
    layout="compressed-tensors",
    model=None,
    scale="weight_scale",
    fp8_kind="tensor",
):
    """A folder whose modules are held as ``formats(module)`` says, its dense model and weights."""
    model = model or make_tiny_model("qwen3", seed=int(torch.randint(1 << 30, ())))
    model.save_pretrained(folder)
    stored, dense = load_file(folder / "model.safetensors"), {}
    for name in list(stored):
        module = name.removesuffix(".weight")
        held = formats(module) if name != module and stored[name].ndim == 2 else None
        weight = stored[name]
        if held == "fp8":
            stored[name], scales, dense[module] = fp8(weight, fp8_kind)
            stored[f"{module}.{scale}"] = scales
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
        elif held in ("nvfp4", "mxfp4"):
            packed = quantize(stored.pop(name), NVFP4 if held == "nvfp4" else MXFP4, "rtn")
            dense[module] = dequantize(packed)
            if layout == "modelopt":
                stored |= {name: packed.codes, f"{module}.weight_scale": packed.scales}
                stored[f"{module}.weight_scale_2"] = (1 / packed.global_scale).squeeze()
            else:
                stored |= {f"{module}.{key}": tensor for key, tensor in packed.tensors().items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    return model, dense
