"""Model families whose decoder layers the project's own kernels and the memory plan know, as descriptions.

A family is a description and kernels. The description says of which kinds a decoder layer is made; the paged
engine, the joint products of the update and the memory plan read it, and run a family whose kinds they all
have. Adding a family of known kinds is a line here. A new kind is a value here and one kernel or function per
reader; ARCHITECTURE says where each would lie.

What samples and trains without these kernels needs no entry: the portable engine and the update check a
model by what it computes (`qerl.families.supported`, `qerl.trainer.update.row_check`), and noise finds norms
by data flow.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """The kinds of which a decoder layer of one ``model_type`` is made.

    Attributes:
        name: As people write it.
        norm: In front of attention and in front of the MLP. ``rms``: RMSNorm, x / rms(x) * w.
        attention: ``grouped``: rotary embedding of whole heads, causal softmax, several query heads per key
            head.
        mlp: ``swiglu``: down(silu(gate(x)) * up(x)).
        state: What a layer keeps per sequence. ``keys_and_values``: those of every token.
        qkv_bias: Whether q, k and v have a bias whatever the config says; o and the MLP have one only where
            the config says so.
        qk_norm: Whether each head of q and k is normalised before it is turned.
        window_field: Field of the config that must be true for a sliding window; None where the width alone
            (``sliding_window``) says it.
    """

    name: str
    norm: Literal["rms"] = "rms"
    attention: Literal["grouped"] = "grouped"
    mlp: Literal["swiglu"] = "swiglu"
    state: Literal["keys_and_values"] = "keys_and_values"
    qkv_bias: bool = False
    qk_norm: bool = False
    window_field: str | None = "use_sliding_window"

    def slides(self, config: Any) -> bool:
        """Whether a model with this config attends to a sliding window in any layer."""
        windowed = self.window_field is None or getattr(config, self.window_field, False)
        return bool(windowed and getattr(config, "sliding_window", None))

    @property
    def joint_qkv(self) -> bool:
        """Whether the update computes q, k and v as one product and turns its heads as they come out."""
        return not self.qk_norm


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window_field=None),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_norm=True),
}
"""By ``model_type`` of config.json."""
