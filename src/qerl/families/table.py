"""Model families whose decoder layers the project's own kernels and the memory plan know, as descriptions.

All of them have RMSNorm in front of attention and MLP, rotary embedding of whole heads, several query heads
per key head, SwiGLU, and keys and values of every token as their state. The description says in what they
differ; `qerl.families.sizes` makes layers of it and of a config (`qerl.families.layer`). A family that
differs in nothing else is a line here. Another kind of norm, attention, MLP or state needs a kind of layer
and one kernel or function per reader; ARCHITECTURE says where each would lie.

What samples and trains without these kernels needs no entry: the portable engine and the update check a
model by what it computes (`qerl.families.supported`, `qerl.update.row_check`), and noise finds norms
by data flow.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Family:
    """The differences of one ``model_type``'s decoder layers from those of the others.

    Attributes:
        name: As people write it.
        qkv_bias: True if q, k and v have a bias whatever the config says; o and the MLP have one only where
            the config says so.
        qk_norm: True if each head of q and k is normalised before it is turned.
        window_field: Field of the config that must be true for a sliding window; None where the width alone
            (``sliding_window``) says it.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    window_field: str | None = "use_sliding_window"

    def slides(self, config: Any) -> bool:
        """True if a model with this config attends to a sliding window in any layer."""
        windowed = self.window_field is None or getattr(config, self.window_field, False)
        return bool(windowed and getattr(config, "sliding_window", None))

    @property
    def fused_qkv(self) -> bool:
        """True if the update computes q, k and v as one product and turns its heads as they come out."""
        return not self.qk_norm


FAMILIES = {
    "llama": Family("Llama"),
    "mistral": Family("Mistral", window_field=None),
    "qwen2": Family("Qwen2", qkv_bias=True),
    "qwen3": Family("Qwen3", qk_norm=True),
}
"""By ``model_type`` of config.json."""
