"""The linear layers of a decoder layer as Llama has them: their names, and which are multiplied at once.

Llama, Mistral, Qwen2 and Qwen3 have exactly these. Four-bit scales, LoRA, the memory plan and the paged
engine read the names from here.
"""

PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Places of the linears that read the same input, by the name of their joint product."""

LINEARS = tuple(place.rpartition(".")[2] for places in PRODUCTS.values() for place in places)
"""Names of the seven linears, in the order of the products."""

JOINT = tuple(
    tuple(place.rpartition(".")[2] for place in places) for places in PRODUCTS.values() if len(places) > 1
)
"""Names of the linears that inference engines run as one matrix: q, k and v, and gate and up."""
