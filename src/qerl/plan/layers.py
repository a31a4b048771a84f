"""Bytes that one decoder layer keeps and computes in the update, by its description.

T tokens in the packed row of a forward pass, M keys that its segments attend to, D hidden size, I
intermediate size, Q and G all query and all key heads together, R LoRA rank. Of a delta net C channels of the
convolution, V value heads, and Y all values together. bf16 unless said otherwise.
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
    """Bytes of a layer of a mixer and a gated MLP, or experts. Other kinds would have formulas beside
    these."""

    spec: LayerSpec
    work: Work

    @cached_property
    def kept(self) -> int:
        """Activations kept up to the mixer's last linear, and from there on; with attention
        ``2 T (3 D + 2 Q + 2 G + 3 I + 7 R)``."""
        return self._up_to_mixer + self._behind_mixer

    @property
    def _up_to_mixer(self) -> int:
        mixer = self.spec.mixer
        return self._delta_net(mixer) if isinstance(mixer, DeltaNet) else self._attention(mixer)

    def _attention(self, m: Attention) -> int:
        """``2 T (D + 2 Q + 2 G + 3 R)``: the input of q/k/v, queries, keys, values and their result, and
        x A^T of the adapters; in fp32 one number per token for the norm and each head of attention. Where
        heads are normalised, queries and keys are kept before that as well, and a number for each; values
        that are, by transformers' own code, in fp32. Gated attention keeps the sigmoid of its gates and what
        becomes of its result, ``2 T 2 Q``. Without fused products (NF4, dropout) layers run through PEFT,
        which keeps the input of each linear in fp32, here ``4 T 3 D``, instead of one in bf16, and with
        dropout a mask of a byte for each number."""
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
        """``2 T (D + 2 C + 3 Y + 2 R)``: the input of the linears, what the convolution reads and what it
        gives, z, the rule's output, and that behind its norm, and x A^T of the adapters; in fp32 one number
        per token for the norm, and of each value head the input of softplus, decay and beta. And the state in
        front of each branch in fp32. Through PEFT ``4 T 2 D``, as with attention."""
        hidden = self.spec.hidden
        wide, single, inputs = hidden + 2 * m.channels + 3 * m.values, 1 + 3 * m.value_heads, 2 * hidden
        if self.work.why_not_fused:
            wide -= hidden + m.values
        return self._kept(wide + 2 * self.work.rank, single, inputs) + self._states(m)

    def _states(self, m: DeltaNet) -> int:
        """A state of each branch, in fp32."""
        return FULL * self.work.branches * m.state

    @cached_property
    def _behind_mixer(self) -> int:
        """``2 T (2 D + 3 I + 4 R)``: the residual, the input of gate/up, gate, up and their product, and
        x A^T of the adapters; in fp32 one number per token for the norm. What norms behind the parts read is
        kept as well. Through PEFT ``4 T (2 D + I)`` and the input of the mixer's last linear in fp32
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
        """``2 T C (2 I + D)`` for C experts per token: of each gate, up and the result, which the gradient of
        its weight wants; 20 bytes for where it lies, and of the router logits and softmax in fp32. Experts
        with adapters keep the layer's input; with dropout they are computed one by one, and keep the product
        as well, and without a clamp ``act(gate)``."""
        chosen, work = mlp.chosen, self.work
        inner = 2 if not self._one_by_one else 3 if mlp.clamp else 4
        per_token = HALF * chosen * (inner * mlp.intermediate + self.spec.hidden) + 20 * chosen
        if self._adapts_experts:
            per_token += HALF * self.spec.hidden
        return work.tokens * (per_token + 2 * FULL * mlp.experts)

    @property
    def _one_by_one(self) -> bool:
        """Whether experts are not multiplied in groups."""
        return self._adapts_experts and self.work.why_not_fused is not None

    @property
    def _adapts_experts(self) -> bool:
        """Whether experts have adapters."""
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
        """The larger of two moments, on top of a layer: of the MLP ``2 T (2 I + D)``, gradients of gate and
        up, that of their product in the place of the product itself, and the one that came in; and of the
        mixer, when what is kept behind it is gone."""
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
        """Numbers per token that the MLP's backward pass has beside what was kept. Of all experts of a
        token gradients of gate and up with that of their product or of the inputs, whichever are more; with
        adapters the inputs as well, and what these add to their gradient; of experts one by one gradients
        of results, in the order of experts and in that of tokens, and of inputs. In FP8 the gradients of
        gate and up once more, a byte each, in the place of that of their product, and that of the input
        beside them."""
        mlp, hidden = self.spec.mlp, self.spec.hidden
        if isinstance(mlp, RoutedMLP):
            inner = mlp.intermediate
            each = 2 * inner + (3 * hidden if self._adapts_experts else max(inner, hidden))
            if self._one_by_one:
                each = 3 * hidden
            return mlp.chosen * each + 2 * hidden
        return 2 * mlp.intermediate + (2 if self.work.fp8_backward else 1) * hidden

    def _attention_backward(self, m: Attention) -> int:
        """``2 T (D + 4 Q) + 8 M G + 4 M Q``: the gradient that came in, those of attention's result and of
        the queries, the latter in fp32 as well, and that of gates; keys and values gathered for all segments,
        with their gradients; and where query heads share key heads, a gradient of keys and values for each
        query head, which FlashAttention-2 adds up afterwards. Heads that it does not take have keys and
        values for each query head, too. With long prompts of many samples M is many times T."""
        per_head = 2 * m.queries if m.heads != m.kv_heads else 0
        if m.head_size > MAX_HEAD:
            per_head = 4 * m.queries
        own = self.spec.hidden + (5 if m.gated else 4) * m.queries
        return HALF * (self.work.tokens * own + self.work.keys * (4 * m.keys + per_head))

    def _delta_net_backward(self, m: DeltaNet) -> int:
        """The larger of two moments, each with the gradients that came in and of z, ``2 T (D + Y)``. Of the
        rule: gradients of its output, of its inputs, ``2 T (Y + 2 C)``, and of the states in front of
        branches in fp32, the latter two once by groups of heads and once together, and what it makes again.
        Of the convolution ``22 T C``: the gradient of its output, and five of as many numbers in fp32."""
        tokens = self.work.tokens
        rule = HALF * tokens * (m.values + 2 * m.channels) + 2 * self._states(m) + self._made_again(m)
        convolution = tokens * (HALF + 5 * FULL) * m.channels
        return HALF * tokens * (self.spec.hidden + m.values) + max(rule, convolution)

    def _made_again(self, m: DeltaNet) -> int:
        """What the backward pass of the rule holds of the key heads that it computes at a time, in fp32: as
        many as `WORKING_BYTES` hold, but one at least."""
        values = m.value_heads // m.key_heads
        chunks = -(-self.work.tokens // CHUNK) + self.work.branches  # the last of a sequence is not full
        each = FULL * chunks * numbers_of_key_head(values, m.key_size, m.value_size, keep=True)
        return max(each, min(WORKING_BYTES, m.key_heads * each))

    @cached_property
    def workspace(self) -> int:
        """The largest weight in bf16 with R more rows or columns: mostly that of gate and up together. Of
        experts as many as are dequantised at a time."""
        largest = HALF * max(self._written_at_once(group) for group in self._groups)
        mlp = self.spec.mlp
        if not isinstance(mlp, RoutedMLP) or self._one_by_one:
            return largest
        each = HALF * max(product.outputs * product.inputs for product in mlp.of_expert(self.spec.hidden))
        return max(largest, each * min(mlp.experts, max(1, EXPERTS_BYTES // each)))

    @property
    def workspace_e4m3(self) -> int:
        """The largest weight in E4M3, where gradients pass in FP8."""
        if not self.work.fp8_backward:
            return 0
        return max(sum(linear.outputs for linear in group) * group[0].inputs for group in self._groups)

    @property
    def _groups(self) -> Iterator[tuple[Linear, ...]]:
        """Linears whose products the update computes as one (`qerl.update.fused`).

        Only where all of them are adapted and none runs through PEFT, and of linears in front of a mixer
        those of attention alone, where it does nothing with heads but turn them.
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
