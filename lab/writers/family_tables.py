"""The table of described model families: features of their layers, timed shapes, and readable checkpoints."""

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig

from bench.result import RESULTS, read_rows
from lab.writers.captions import table
from qerl.families.layer import Attention, DeltaNet, LayerSpec
from qerl.families.sizes import PUBLISHED, SIZES
from qerl.families.table import FAMILIES


def families() -> str:
    """Return the table of model families."""
    measured = _measured()
    lines = []
    for model_type, family in FAMILIES.items():
        specs = {run.spec for run in family.sizes(AutoConfig.for_model(model_type)).runs}
        mixers = [spec.mixer for spec in specs]
        attention = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        has = ["gated delta nets"] * any(isinstance(mixer, DeltaNet) for mixer in mixers)
        has += [words for words, there in _OF_ATTENTION.items() if any(map(there, attention))]
        has += [words for words, there in _OF_LAYERS.items() if any(map(there, specs))]
        shapes = ", ".join(measured.get(model_type, [])) or "none"
        lines.append(
            (family.name, f"`{model_type}`", ", ".join(has) or "as Llama", shapes, family.checkpoints)
        )
    head = ("Family", "`model_type`", "its layers, by default", "timed on a GPU", "checkpoints read")
    caption = "Of `qerl.families.table` and the results of `bench rollout` and `bench step`."
    return table(head, lines, caption)


_OF_ATTENTION: dict[str, Callable[[Attention], Any]] = {
    "gated attention": lambda mixer: mixer.gated,
    "windows": lambda mixer: mixer.window,
    "sinks": lambda mixer: mixer.sinks,
    "no rotary embedding in some": lambda mixer: mixer.rotary is None,
    "a part of each head turned": lambda mixer: mixer.rotary and 2 * mixer.rotary.pairs < mixer.head_size,
    "normalised heads": lambda mixer: mixer.qk_norm == "head",
    "queries and keys normalised together": lambda mixer: mixer.qk_norm == "all",
    "queries scaled by position": lambda mixer: mixer.position_scale,
    "joined linears": lambda mixer: mixer.fused,
}
_OF_LAYERS: dict[str, Callable[[LayerSpec], Any]] = {
    "experts": lambda spec: spec.experts,
    "norms behind parts": lambda spec: spec.around.behind_mixer,
    "GELU": lambda spec: spec.mlp.activation != "silu",
}


def _measured() -> dict[str, list[str]]:
    """Return the shapes for which decoding or a step was timed, by model type."""
    found: dict[str, dict[str, None]] = {}
    for file in sorted((*RESULTS.glob("rollout-*.json"), *RESULTS.glob("step-*.json"))):
        for row in read_rows(file.stem):
            shape = row.get("shape")
            if shape in PUBLISHED:
                found.setdefault(PUBLISHED[shape]["model_type"], {})[shape] = None
            elif shape in SIZES and row.get("engine", "qerl") == "qerl":
                mixer = SIZES[shape].attention  # the benchmark's model, see qerl.measure.model_config
                kind = "qwen2" if mixer.qkv_bias else "qwen3" if mixer.qk_norm else "llama"
                found.setdefault(kind, {})[shape] = None
    return {kind: list(shapes) for kind, shapes in found.items()}
