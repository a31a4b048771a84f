"""The table of described families: what their layers have, what was measured, and which checkpoints load."""

from typing import Any

from transformers import AutoConfig

from bench.result import RESULTS, read_rows
from lab.writers.captions import table
from qerl.families.layer import LayerSpec
from qerl.families.sizes import PUBLISHED, SIZES
from qerl.families.table import FAMILIES


def families() -> str:
    """What is fast, per family."""
    measured = _measured()
    lines = []
    for model_type, family in FAMILIES.items():
        specs = {run.spec for run in family.sizes(AutoConfig.for_model(model_type)).runs}
        has = [words for words, there in _FEATURES.items() if any(there(spec) for spec in specs)]
        shapes = ", ".join(measured.get(model_type, [])) or "none"
        lines.append(
            (family.name, f"`{model_type}`", ", ".join(has) or "as Llama", shapes, family.checkpoints)
        )
    head = ("Family", "`model_type`", "its layers, by default", "timed on a GPU", "checkpoints read")
    caption = "Of `qerl.families.table` and the results of `bench rollout` and `bench step`."
    return table(head, lines, caption)


_FEATURES: dict[str, Any] = {
    "windows": lambda spec: spec.mixer.window,
    "sinks": lambda spec: spec.mixer.sinks,
    "no rotary embedding in some": lambda spec: spec.mixer.rotary is None,
    "a part of each head turned": lambda spec: _partly(spec),
    "normalised heads": lambda spec: spec.mixer.qk_norm == "head",
    "queries and keys normalised together": lambda spec: spec.mixer.qk_norm == "all",
    "queries scaled by position": lambda spec: spec.mixer.position_scale,
    "norms behind parts": lambda spec: spec.around.behind_mixer,
    "GELU": lambda spec: spec.mlp.activation != "silu",
    "joined linears": lambda spec: spec.mixer.fused,
}


def _partly(spec: LayerSpec) -> bool:
    rotary = spec.mixer.rotary
    return rotary is not None and 2 * rotary.pairs < spec.mixer.head_size


def _measured() -> dict[str, list[str]]:
    """Shapes of random weights of which decoding or a step was timed, by model type."""
    found: dict[str, dict[str, None]] = {}
    for file in sorted((*RESULTS.glob("rollout-*.json"), *RESULTS.glob("step-*.json"))):
        for row in read_rows(file.stem):
            shape = row.get("shape")
            if shape in PUBLISHED:
                found.setdefault(PUBLISHED[shape]["model_type"], {})[shape] = None
            elif shape in SIZES and row.get("engine", "qerl") == "qerl":
                mixer = SIZES[shape].spec.mixer  # the benchmark's model: see qerl.measure.model_config
                kind = "qwen2" if mixer.qkv_bias else "qwen3" if mixer.qk_norm else "llama"
                found.setdefault(kind, {})[shape] = None
    return {kind: list(shapes) for kind, shapes in found.items()}
