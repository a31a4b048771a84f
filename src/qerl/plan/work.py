"""The properties of a GRPO step on which its memory depends."""

from bisect import bisect_right
from dataclasses import dataclass

from qerl.families.sizes import Sizes
from qerl.lora.fused import why_not_fused
from qerl.rollout.paged.limits import MAX_ROWS
from qerl.weight_formats import FORMATS, WeightFormat, WeightFormatName

HALF, FULL = 2, 4
"""Bytes of a number in bf16 and in fp32."""


@dataclass(frozen=True)
class Work:
    """A step in which every sample reaches the length limit.

    Attributes:
        weights: Name of the linears' format.
        published: Bytes of the linears in the formats of their folder, used for weights as published.
        rank: LoRA rank R.
        targets: Names of the adapted linears.
        prompt_tokens, completion_tokens: Tokens of the longest prompt and of the longest completion.
        group: Samples per prompt.
        sequences: Samples that decode at the same time.
        max_sequences: Largest number of samples that the engine decodes at the same time.
        microbatch: Samples per loss.
        microbatches: Losses per optimizer step.
        tokens_per_forward: Largest number of tokens per forward and backward pass, whose samples may come
            from any microbatch of a step (`qerl.update.chunks`). None for one pass per microbatch.
        every_n_layers: Every n-th layer is recomputed in backward, the others keep their activations; with 0,
            or more than the number of layers, all keep them.
        offload: True if inputs of the recomputed layers are offloaded to CPU memory.
        optimizer_bytes: Bytes per adapter parameter: 8 for AdamW in fp32, 2 in 8 bits.
        cache_bytes: Bytes per number in the KV cache: 2 for bf16, 1 for fp8.
        processes: GPUs that train together, each with a whole model.
        lora_dropout: Probability of dropout in front of the adapters.
        shared_lora: True if the experts of a layer share an adapter, where they have one.
        copies_adapter: True if the KL penalty keeps a frozen copy of the adapter as its reference; for a
            fresh adapter, the model without one is the reference.
        may_offload: True if the plan may choose `offload`. False for a server, which does not offload, and
            if GPU and CPU share their memory, where offloading gains nothing.
        host_bytes: Bytes of CPU memory that each process may take for offloading; None if unknown.
        fp8_backward: True if gradients pass through packed layers in FP8.
        keeps_keys: True if the KV cache stays allocated during the update (`max_staleness`).
        teacher: Sizes of the teacher, the model's own if the teacher is the base or an adapter on it; None
            without one. Its prompts count as the policy's, so tokens that `teacher_prompt` adds are left out.
        teacher_bytes: Bytes of the teacher's weights beside the model's.
        adapters: Adapters that a server keeps on the GPU, each with gradients and optimizer; one at a time is
            sampled from or trained.
        serves: True for a server, whose engine reserves room for further requests.
    """

    weights: WeightFormatName
    rank: int
    targets: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    group: int
    sequences: int
    microbatch: int
    microbatches: int = 1
    tokens_per_forward: int | None = None
    every_n_layers: int = 1
    offload: bool = False
    optimizer_bytes: int = 2 * FULL
    cache_bytes: int = HALF
    processes: int = 1
    lora_dropout: float = 0.0
    shared_lora: bool = True
    copies_adapter: bool = False
    may_offload: bool = True
    host_bytes: int | None = None
    adapters: int = 1
    serves: bool = False
    max_sequences: int = MAX_ROWS
    published: int | None = None
    keeps_keys: bool = False
    fp8_backward: bool = False
    teacher: Sizes | None = None
    teacher_bytes: int = 0

    @property
    def format(self) -> WeightFormat:
        """Format of the linears."""
        return FORMATS[self.weights]

    @property
    def why_not_fused(self) -> str | None:
        """The reason why adapted layers run through PEFT; None if each layer is fused with its adapter."""
        return why_not_fused(self.weights, self.lora_dropout)

    @property
    def checkpointing(self) -> dict[str, int | bool]:
        """`gradient_checkpointing_kwargs` of this work."""
        return {"every_n_layers": self.every_n_layers, **({"offload": True} if self.offload else {})}

    def tokens_of(self, samples: int) -> int:
        """Tokens of the packed row of ``samples`` samples: each group's prompt once, without its last token,
        and every completion token."""
        prompts = -(-samples // self.group)
        return prompts * (self.prompt_tokens - 1) + samples * self.completion_tokens

    @property
    def tokens(self) -> int:
        """T, tokens of the largest pass: a microbatch, or the largest chunk of the step, which holds at least
        one sample regardless of the limit, and otherwise as many shorter samples as fill the limit."""
        limit = self.tokens_per_forward or self.tokens_of(self.microbatch)
        return min(self.tokens_of(self._samples), max(limit, self.tokens_of(1)))

    @property
    def keys(self) -> int:
        """M, keys that attention gathers in that pass: its tokens, and each sample's prompt once more.
        Counted for samples of full length; more of shorter samples share a pass, each reading its prompt."""
        return self.tokens + self.branches * (self.prompt_tokens - 1)

    @property
    def scored_tokens(self) -> int:
        """S, tokens that predict a completion token: at most all but those of one prompt."""
        return min(self._samples * self.completion_tokens, self.tokens - (self.prompt_tokens - 1))

    @property
    def passes(self) -> int:
        """Smallest number of backward passes per optimizer step."""
        if self.tokens_per_forward is None:
            return self.microbatches
        return -(-self._samples // self.branches)

    @property
    def computed_tokens(self) -> int:
        """Smallest number of tokens in all passes of an optimizer step, a prompt counted in each pass that
        computes it."""
        if self.tokens_per_forward is None:
            return self.microbatches * self.tokens_of(self.microbatch)
        divided = max(0, self.passes - -(-self._samples // self.group))  # at least this many groups
        return self.tokens_of(self._samples) + divided * (self.prompt_tokens - 1)

    @property
    def branches(self) -> int:
        """Number of full-length samples that fit the largest pass, whole groups together."""
        return max(1, bisect_right(range(1, self._samples + 1), self.tokens, key=self.tokens_of))

    @property
    def _samples(self) -> int:
        """Number of samples from which a pass is made up."""
        return self.microbatch * (1 if self.tokens_per_forward is None else self.microbatches)
