"""Activation memory of one decoder layer in the update, computed from its `LayerSpec`.

Bytes everywhere. T tokens in the packed row of a forward pass, M keys that its segments attend to, D hidden
size, I intermediate size, Q and G width of all query and all key heads together, R LoRA rank; for a delta net
C channels of the convolution, V value heads, and Y width of all values together. bf16 unless stated
otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from qerl.families.layer import Attention, DeltaNet, LayerSpec, Linear, RoutedMLP
from qerl.kernels.delta_rule import WORKING_BYTES, numbers_of_key_head
from qerl.kernels.delta_scan import CHUNK
from qerl.kernels.limits import EXPERTS_BYTES, MAX_HEAD
from qerl.plan.work import FULL, HALF, Work


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of a layer with a mixer and a gated MLP or experts; other kinds would need formulas of their
    own."""

    spec: LayerSpec
    work: Work

    @cached_property
    def kept(self) -> int:
        """Activations kept for backward, up to the mixer's last linear and after it; with attention
        ``2 T (3 D + 2 Q + 2 G + 3 I + 7 R)``."""
        return self._up_to_mixer + self._behind_mixer

    @property
    def _up_to_mixer(self) -> int:
        mixer = self.spec.mixer
        return self._delta_net(mixer) if isinstance(mixer, DeltaNet) else self._attention(mixer)

    def _attention(self, m: Attention) -> int:
        """``2 T (D + 2 Q + 2 G + 3 R)``: the input of q/k/v, queries, keys, values, the attention output, and
        x A^T of the adapters; in fp32 one number per token for the norm and per attention head. If heads are
        normalised, their inputs to the norm are kept as well, with one number per norm; normalised values
        are kept in fp32, since transformers' own code computes them. Gated attention keeps the sigmoid of its
        gates and the gated output, ``2 T 2 Q``. Without fused products (NF4, dropout) layers run through
        PEFT, which keeps the input of each linear in fp32, here ``4 T 3 D``, instead of one in bf16, and with
        dropout a mask of one byte per number."""
        hidden = self.spec.hidden
        wide, single, inputs = hidden + 2 * m.queries + 2 * m.keys, 1 + m.heads, 3 * hidden
        if m.qk_norm:
            wide += m.queries + m.keys
            single += m.heads + m.kv_heads if m.qk_norm == "head" else 2
        if m.v_norm:
            single += m.keys
        if m.gated:
            wide += m.queries if self.work.why_not_fused else 2 * m.queries
        if self.work.why_not_fused:
            wide -= hidden
        return self._kept(wide + 3 * self.work.rank, single, inputs)

    def _delta_net(self, m: DeltaNet) -> int:
        """``2 T (D + 2 C + 3 Y + 2 R)``: the input of the linears, input and output of the convolution, z,
        the rule's output before and after its norm, and x A^T of the adapters; in fp32 one number per token
        for the norm, and per value head the input of softplus, decay and beta; in fp32 also the state before
        each branch. Through PEFT ``4 T 2 D``, as with attention."""
        hidden = self.spec.hidden
        wide, single, inputs = hidden + 2 * m.channels + 3 * m.values, 1 + 3 * m.value_heads, 2 * hidden
        if self.work.why_not_fused:
            wide -= hidden + m.values
        return self._kept(wide + 2 * self.work.rank, single, inputs) + self._states(m)

    def _states(self, m: DeltaNet) -> int:
        """One state per branch, in fp32."""
        return FULL * self.work.branches * m.state

    @cached_property
    def _behind_mixer(self) -> int:
        """``2 T (2 D + 3 I + 4 R)``: the residual, the input of gate/up, gate, up and their product, and
        x A^T of the adapters; in fp32 one number per token for the norm. The inputs of norms after mixer and
        MLP are kept as well. Through PEFT ``4 T (2 D + I)`` and the input of the mixer's last linear in fp32
        instead of the inputs of gate/up and of down in bf16."""
        hidden, mlp = self.spec.hidden, self.spec.mlp
        last = self.spec.mixer.products(hidden)[-1]
        around = self.spec.around
        behind = bool(around.behind_mixer) + bool(around.behind_mlp)
        if isinstance(mlp, RoutedMLP):
            wide = (2 + behind) * hidden + self.work.rank
            if mlp.shared:  # beside them gate, up and product of the shared MLP, its result, and x A^T
                wide += 3 * mlp.shared + hidden + 3 * self.work.rank
            return self._experts(mlp) + self._kept(wide, 1 + behind, last.inputs)
        intermediate = mlp.intermediate
        wide, inputs = 2 * hidden + 3 * intermediate, 2 * hidden + last.inputs + intermediate
        if self.work.why_not_fused:
            wide -= hidden + intermediate
        return self._kept(wide + behind * hidden + 4 * self.work.rank, 1 + behind, inputs)

    def _experts(self, mlp: RoutedMLP) -> int:
        """``2 T C (2 I + D)`` for C experts per token: gate, up and the output of each, which the gradient of
        its routing weight needs; 20 bytes of indices per expert and token; router logits and softmax in fp32.
        Experts with adapters keep the layer's input; without fused products (NF4, dropout) they are computed
        one by one, and keep the product as well, and without a clamp ``act(gate)``."""
        chosen, work = mlp.chosen, self.work
        inner = 2 if not self._one_by_one else 3 if mlp.clamp else 4
        per_token = HALF * chosen * (inner * mlp.intermediate + self.spec.hidden) + 20 * chosen
        if self._adapts_experts:
            per_token += HALF * self.spec.hidden
        return work.tokens * (per_token + 2 * FULL * mlp.experts)

    @property
    def _one_by_one(self) -> bool:
        """True if experts are computed one by one instead of as a grouped product."""
        return self._adapts_experts and self.work.why_not_fused is not None

    @property
    def _adapts_experts(self) -> bool:
        """True if experts have adapters."""
        return any(linear.is_target(self.work.targets) for linear in self.spec.expert_linears)

    def _kept(self, wide: int, single: int, inputs: int) -> int:
        """Bytes of ``wide`` numbers per token in bf16, ``single`` in fp32, and of the inputs that PEFT
        keeps."""
        work = self.work
        if work.why_not_fused:
            single += inputs
        masks = inputs if work.why_not_fused and work.lora_dropout else 0
        return work.tokens * (HALF * wide + FULL * single + masks)

    @cached_property
    def backward(self) -> int:
        """Peak of a layer's backward pass on top of its kept activations, the larger of two moments: in the
        MLP ``2 T (2 I + D)``, the gradients of gate and up and the incoming gradient, while that of the
        product overwrites the product; and in the mixer, when the activations kept after it are freed."""
        mixer = self.spec.mixer
        mlp = HALF * self.work.tokens * self._widest_of_mlp
        of_mixer = (
            self._delta_net_backward(mixer)
            if isinstance(mixer, DeltaNet)
            else self._attention_backward(mixer)
        )
        return max(mlp, of_mixer - self._behind_mixer)

    @property
    def _widest_of_mlp(self) -> int:
        """Numbers per token that the MLP's backward pass holds beside the kept activations. For all experts
        of a token: the gradients of gate and up, and the larger of the product's gradient and the inputs';
        with adapters the inputs as well, and the adapters' part of the inputs' gradient. For experts one by
        one: the gradients of outputs, in expert order and in token order, and of inputs. In FP8 the gradients
        of gate and up are held once more, one byte each, in the place of the product's gradient, and the
        gradient of the input beside them."""
        mlp, hidden = self.spec.mlp, self.spec.hidden
        if isinstance(mlp, RoutedMLP):
            inner = mlp.intermediate
            each = 2 * inner + (3 * hidden if self._adapts_experts else max(inner, hidden))
            if self._one_by_one:
                each = 3 * hidden
            return mlp.chosen * each + 2 * hidden
        return 2 * mlp.intermediate + (2 if self.work.fp8_backward else 1) * hidden

    def _attention_backward(self, m: Attention) -> int:
        """``2 T (D + 4 Q) + 8 M G + 4 M Q``: the incoming gradient, the gradients of the attention output and
        of the queries, the latter in fp32 as well, and of gates if there are any; keys and values gathered
        for all segments, with their gradients; with grouped-query attention also a gradient of keys and
        values per query head, which FlashAttention-2 sums afterwards. Heads too large for FlashAttention-2
        have keys and values per query head as well. With long prompts and many samples M is many times T."""
        per_head = 2 * m.queries if m.heads != m.kv_heads else 0
        if m.head_size > MAX_HEAD:
            per_head = 4 * m.queries
        own = self.spec.hidden + (5 if m.gated else 4) * m.queries
        return HALF * (self.work.tokens * own + self.work.keys * (4 * m.keys + per_head))

    def _delta_net_backward(self, m: DeltaNet) -> int:
        """The larger of two moments, each on top of the incoming gradient and that of z, ``2 T (D + Y)``. In
        the rule: the gradients of its output and of its inputs, ``2 T (Y + 2 C)``, and of the states before
        branches in fp32, with those of inputs and states held both per group of heads and joined, and the
        recomputed tensors. In the convolution ``22 T C``: the gradient of its output, and five tensors of
        that size in fp32."""
        tokens = self.work.tokens
        rule = HALF * tokens * (m.values + 2 * m.channels) + 2 * self._states(m) + self._made_again(m)
        convolution = tokens * (HALF + 5 * FULL) * m.channels
        return HALF * tokens * (self.spec.hidden + m.values) + max(rule, convolution)

    def _made_again(self, m: DeltaNet) -> int:
        """Tensors that the rule's backward pass recomputes, in fp32, for as many key heads at a time as
        `WORKING_BYTES` hold, at least one."""
        values = m.value_heads // m.key_heads
        chunks = -(-self.work.tokens // CHUNK) + self.work.branches  # the last of a sequence is not full
        each = FULL * chunks * numbers_of_key_head(values, m.key_size, m.value_size, keep=True)
        return max(each, min(WORKING_BYTES, m.key_heads * each))

    @cached_property
    def workspace(self) -> int:
        """The largest weight in bf16 with R more rows or columns, mostly gate and up together; for experts,
        all that are dequantised at a time."""
        largest = HALF * max(self._written_at_once(group) for group in self._groups)
        mlp = self.spec.mlp
        if not isinstance(mlp, RoutedMLP) or self._one_by_one:
            return largest
        each = HALF * max(product.outputs * product.inputs for product in mlp.of_expert(self.spec.hidden))
        return max(largest, each * min(mlp.experts, max(1, EXPERTS_BYTES // each)))

    @property
    def workspace_e4m3(self) -> int:
        """The largest weight in E4M3; 0 unless gradients pass in FP8."""
        if not self.work.fp8_backward:
            return 0
        return max(sum(linear.outputs for linear in group) * group[0].inputs for group in self._groups)

    @property
    def _groups(self) -> Iterator[tuple[Linear, ...]]:
        """Groups of linears that the update computes as one product (`qerl.update.fused`).

        Linears form a group only if all are adapted and none runs through PEFT. A mixer's input linears do so
        only for attention that does nothing to heads but rotate them.
        """
        for product in self.spec.products:
            adapted = all(linear.is_target(self.work.targets) for linear in product.linears)
            if self.work.why_not_fused or not adapted or (product.name in self._alone):
                yield from ((linear,) for linear in product.linears)
            else:
                yield product.linears

    @property
    def _alone(self) -> set[str]:
        """Names of products whose linears the update computes one after the other."""
        mixer = self.spec.mixer
        if isinstance(mixer, DeltaNet):
            return {"qkvz"}
        return {"qkv"} if mixer.qk_norm or mixer.position_scale else set()

    def _written_at_once(self, group: tuple[Linear, ...]) -> int:
        rows = sum(linear.outputs for linear in group)
        rank = self.work.rank * len(group)
        return rows * group[0].inputs + rank * max(rows, group[0].inputs)
