"""The layers that are quantised, and the groups that share a global scale.

Both follow from the name of a layer in the checkpoint, so that a file can be quantised without building the
model. The projections inside decoder layers are quantised. The LM head, embeddings and norms stay as they
are: together they are small, and a language model's output is most sensitive there. So do the few linears of
`LEFT_WHOLE`. A projection has a name that ends in ``_proj``, or begins with ``in_proj_``; a family whose
layers hold other linears as well is refused, since these would silently stay in 16 bits.

Inference engines run q/k/v, and gate/up, as one matrix with one global scale (vLLM takes the largest of the
three and only warns), so the members of such a group are quantised with a common one.
"""

import re

from qerl.families.layer import FUSED
from qerl.families.supported import LEFT_WHOLE

# "layers" at the start or right after "model", or after a wrapper's "language_model": not an image encoder's.
_DECODER_LAYER = re.compile(r"(?:^|.*\b(?:language_)?model\.)layers\.\d+\.")
_PROJECTION = re.compile(_DECODER_LAYER.pattern + r"(?:.+\.)?(?:\w+_proj|in_proj_\w+)")


def is_quantized(module: str) -> bool:
    """Return True if the layer of this name (``model.layers.0.mlp.up_proj``) is stored in four bits."""
    return _PROJECTION.fullmatch(module) is not None and not _left_whole(module)


def left_out(module: str) -> bool:
    """Return True if a linear layer of a decoder layer should be quantised, but has no projection's name."""
    return _DECODER_LAYER.match(module) is not None and not (is_quantized(module) or _left_whole(module))


def _left_whole(module: str) -> bool:
    return module.rpartition(".")[2] in LEFT_WHOLE


def fused_group(module: str) -> tuple[str, ...]:
    """Qualified names of all layers that share this one's global scale, itself included, in a fixed order.

    The same tuple comes back for every member, so it serves as the key of the group.
    """
    parent, _, name = module.rpartition(".")
    for group in FUSED:
        if name in group:
            return tuple(f"{parent}.{member}" for member in group)
    return (module,)
