"""Bytes that one decoder layer keeps and computes in the update, by its description.

T tokens in the packed row of a forward pass, M keys that its segments attend to, D hidden size, I
intermediate size, Q and G all query and all key heads together, R LoRA rank. bf16 unless said otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from qerl.families.layer import LayerSpec, Linear
from qerl.kernels.limits import MAX_HEAD
from qerl.plan.work import FULL, HALF, Work


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of a layer of attention and a gated MLP. Other kinds would have formulas beside these."""

    spec: LayerSpec
    work: Work

    @property
    def kept(self) -> int:
        """``2 T (3 D + 2 Q + 2 G + 3 I + 7 R)``: activations kept up to attention, and behind it."""
        return self._up_to_attention + self._behind_attention

    @property
    def _up_to_attention(self) -> int:
        """``2 T (D + 2 Q + 2 G + 3 R)``: the input of q/k/v, queries, keys, values and their result, and
        x A^T of the adapters; in fp32 one number per token for the norm and each head of attention. Where
        heads are normalised, queries and keys are kept before that as well, and a number for each; values
        that are, by transformers' own code, in fp32. Without
        fused products (NF4, dropout) layers run through PEFT, which keeps the input of each linear in fp32,
        here ``4 T 3 D``, instead of one in bf16, and with dropout a mask of a byte for each number."""
        hidden, m = self.spec.hidden, self.spec.mixer
        wide, single, inputs = hidden + 2 * m.queries + 2 * m.keys, 1 + m.heads, 3 * hidden
        if m.qk_norm:
            wide += m.queries + m.keys
            single += m.heads + m.kv_heads if m.qk_norm == "head" else 2
        if m.v_norm:
            single += m.keys
        if self.work.why_not_fused:
            wide -= hidden
        return self._kept(wide + 3 * self.work.rank, single, inputs)

    @property
    def _behind_attention(self) -> int:
        """``2 T (2 D + 3 I + 4 R)``: the residual, the input of gate/up, gate, up and their product, and
        x A^T of the adapters; in fp32 one number per token for the norm. What norms behind the parts read is
        kept as well. Through PEFT ``4 T (2 D + Q + I)``
        instead of the inputs of gate/up and of down in bf16."""
        hidden, intermediate = self.spec.hidden, self.spec.mlp.intermediate
        wide, inputs = 2 * hidden + 3 * intermediate, 2 * hidden + self.spec.mixer.queries + intermediate
        if self.work.why_not_fused:
            wide -= hidden + intermediate
        around = self.spec.around
        behind = bool(around.behind_mixer) + bool(around.behind_mlp)
        return self._kept(wide + behind * hidden + 4 * self.work.rank, 1 + behind, inputs)

    def _kept(self, wide: int, single: int, inputs: int) -> int:
        """Bytes of ``wide`` numbers per token in bf16, ``single`` in fp32, and of the inputs that PEFT
        keeps."""
        work = self.work
        if work.why_not_fused:
            single += inputs
        masks = inputs if work.why_not_fused and work.lora_dropout else 0
        return work.tokens * (HALF * wide + FULL * single + masks)

    @property
    def backward(self) -> int:
        """The larger of two moments, on top of a layer.

        Of the MLP ``2 T (2 I + D)``: gradients of gate and up, that of their product in the place of the
        product itself, and the one that came in.

        Of attention, when what is kept behind it is gone, ``2 T (D + 4 Q) + 8 M G + 4 M Q``: the gradient
        that came in, those of attention's result and of the queries, the latter in fp32 as well; keys and
        values gathered for all segments, with their gradients; and where query heads share key heads, a
        gradient of keys and values for each query head, which FlashAttention-2 adds up afterwards. Heads that
        it does not take have keys and values for each query head, too. With long prompts of many samples M
        is many times T."""
        hidden, mixer, t = self.spec.hidden, self.spec.mixer, self.work.tokens
        mlp = HALF * t * (2 * self.spec.mlp.intermediate + hidden)
        per_head = 2 * mixer.queries if mixer.heads != mixer.kv_heads else 0
        if mixer.head_size > MAX_HEAD:
            per_head = 4 * mixer.queries
        attention = t * (hidden + 4 * mixer.queries) + self.work.keys * (4 * mixer.keys + per_head)
        return max(mlp, HALF * attention - self._behind_attention)

    @property
    def workspace(self) -> int:
        """The largest weight in bf16 with R more rows or columns: mostly that of gate and up together."""
        return HALF * max(self._written_at_once(group) for group in self._groups)

    @property
    def _groups(self) -> Iterator[tuple[Linear, ...]]:
        """Linears whose products the update computes as one (`qerl.update.fused`).

        Only where all of them are adapted and none runs through PEFT, and q, k and v not where heads are
        normalised.
        """
        for product in self.spec.products:
            adapted = {linear.name for linear in product.linears} <= set(self.work.targets)
            mixer = self.spec.mixer
            alone = product.name == "qkv" and (mixer.qk_norm or mixer.position_scale)
            if self.work.why_not_fused or not adapted or alone:
                yield from ((linear,) for linear in product.linears)
            else:
                yield product.linears

    def _written_at_once(self, group: tuple[Linear, ...]) -> int:
        rows = sum(linear.outputs for linear in group)
        rank = self.work.rank * len(group)
        return rows * group[0].inputs + rank * max(rows, group[0].inputs)
