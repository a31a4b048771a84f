"""The KV cache: keys, values and states of all layers, in blocks that sequences own and share.

The memory lies at fixed addresses, which captured steps contain. Between rollouts it can be given up and
taken back; a cache that has become too small is closed, and the steps captured with its addresses go too.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from qerl.errors import QeRLError
from qerl.kernels.limits import PAGE
from qerl.kernels.tensors import upload
from qerl.rollout.paged.blocks import KnownPages
from qerl.rollout.paged.limits import KVGeometry, Pages, States, Units
from qerl.rollout.paged.memory import Memory, PlainMemory
from qerl.rollout.paged.weights import Decoder

_READ_TOGETHER = 1 << 15
"""Tokens whose experts are gathered at a time, which takes some megabytes."""


class KVCache:
    """The cache of one model; it has no block until `reserve` is called.

    Args:
        decoder: The model.
        dtype: Dtype of keys and values, bf16 or E4M3; that of the activations if None.
        memory: Makes a memory range of a given number of bytes.

    Attributes:
        layers: Tensors of each layer. The first axis is the block, the others are those of `Pages.arrays`
            (keys, values, numbers of experts) or of `States.arrays`.
        blocks: Number of blocks of each pool.
        geometry: Shape and size of a block.
        known: Blocks with known content.
        is_limited: True if the call that reserved the blocks wanted more of them than its budget allowed.
    """

    def __init__(self, decoder: Decoder, dtype: torch.dtype | None, memory: Callable[[int], Memory]) -> None:
        self._dtype, self._make_memory = dtype or decoder.dtype, memory
        self._dtypes = {
            Pages: (self._dtype,) * 2 + (torch.uint8,),
            States: (decoder.dtype,) * 3 + (torch.float32,),
        }
        self.geometry = KVGeometry.of(decoder.sizes, self._dtype.itemsize, decoder.dtype.itemsize)
        self._device = decoder.embedding_VD.device
        self.known = KnownPages()
        self._set(PlainMemory(0, self._device), self._none)
        self.is_limited = False

    @classmethod
    def of_blocks(cls, decoder: Decoder, blocks: Units, dtype: torch.dtype | None = None) -> "KVCache":
        """Return a cache of zeros with these numbers of blocks, in torch's memory on the model's device."""
        cache = cls(decoder, dtype, lambda size: PlainMemory(size, decoder.embedding_VD.device))
        cache._allocate(blocks)
        return cache

    @property
    def given_up(self) -> bool:
        """True if the memory was freed by `give_up` and has not been taken back."""
        return self._memory.given_up

    @property
    def held_bytes(self) -> int:
        """Bytes that closing the cache frees."""
        return 0 if self.given_up else self.geometry.bytes(self.blocks)

    def serves(self, wanted: Units, least: Units) -> bool:
        """Return True if a call can run with the present blocks.

        A cache limited by its budget is not replaced for a call that wants more: sequences wait instead.

        Args:
            wanted, least: As in `reserve`.
        """
        return self.blocks >= (least if self.is_limited else wanted)

    def check_affordable(self, least: Units, budget: int) -> None:
        """Raise if a budget does not hold one sequence.

        Args:
            least, budget: As in `reserve`.

        Raises:
            QeRLError: It does not.
        """
        if budget < (needed := self.geometry.bytes(least)):
            raise QeRLError(
                f"The KV cache may take {max(0, budget) / 1e9:.1f} GB of the free GPU memory, but one "
                f"sequence needs {needed / 1e9:.1f} GB; lower max_tokens or free memory."
            )

    def reserve(self, wanted: Units, least: Units, budget: int) -> None:
        """Allocate blocks for a call, as many as it wants or as its budget allows.

        Args:
            wanted: Blocks of each pool that the call wants.
            least: Blocks of the sequence that needs most.
            budget: Bytes that the cache may take.

        Raises:
            QeRLError: The budget does not hold one sequence.
        """
        self.check_affordable(least, budget)
        blocks = self.geometry.affordable(wanted, least, budget)
        self.is_limited = blocks < wanted
        self._allocate(blocks)

    def give_up(self) -> None:
        """Free the memory until `take_back`; keys and values are lost, addresses stay."""
        self.known.forget()
        self._memory.give_up()

    def take_back(self) -> None:
        """Put zeroed memory under the addresses again, if it was given up."""
        if self._memory.given_up:
            self._memory.take_back()
            self._clear()

    def close(self) -> None:
        """Free memory and addresses; the cache then has no blocks."""
        self._memory.close()
        self._set(PlainMemory(0, self._device), self._none)

    @property
    def _none(self) -> Units:
        return Units([0] * len(self.geometry.pools))

    def _allocate(self, blocks: Units) -> None:
        self._set(self._make_memory(self.geometry.bytes(blocks)), blocks)
        self._clear()

    def _set(self, memory: Memory, blocks: Units) -> None:
        self.known.forget()
        self._memory, self.blocks = memory, blocks
        self.layers: list[tuple[torch.Tensor, ...]] = []
        offset = 0
        for layer in self.geometry.layers:
            tensors: list[torch.Tensor] = []
            for array, dtype in zip(layer.arrays, self._dtypes[type(layer)], strict=False):
                tensors.append(memory.tensor((blocks[layer.pool], *array.shape), dtype, offset))
                offset += tensors[-1].nbytes
            self.layers.append(tuple(tensors))

    @property
    def kept_choices(self) -> torch.Tensor | None:
        """Experts of the tokens of each block, uint8 [blocks, block tokens, mixtures, chosen]; None if not
        kept."""
        keeper = self.geometry.layer_of_choices
        return None if keeper is None else self.layers[keeper][2]

    def choices(self, blocks: list[list[int]], tokens: list[int]) -> np.ndarray:
        """Read the experts of the tokens in lists of blocks, uint8 [tokens, mixtures, chosen].

        Args:
            blocks: Lists of blocks of the pool that keeps the experts (`KVGeometry.pool_of_choices`).
            tokens: Number of tokens to read of each list, from the first on.
        """
        assert self.kept_choices is not None
        kept_SMC = self.kept_choices.flatten(0, 1)
        places = [np.arange(count) for count in tokens]
        slots = [
            np.asarray(own, np.int64)[place // PAGE] * PAGE + place % PAGE
            for own, place in zip(blocks, places, strict=True)
        ]
        slot_N = torch.from_numpy(np.concatenate(slots))
        found_NMC = np.empty((len(slot_N), *kept_SMC.shape[1:]), np.uint8)
        for first in range(0, len(slot_N), _READ_TOGETHER):
            here = slice(first, first + _READ_TOGETHER)
            found_NMC[here] = kept_SMC[upload(slot_N[here], self._device)].cpu()
        return found_NMC

    def copy(self, sources: Mapping[int, int | None]) -> None:
        """Copy blocks in all layers of the pool of states; in a cache without states, of the first pool.

        Args:
            sources: Target block -> source block; None for zeros, the state before the first token.
        """
        pools = self.geometry.pools
        pool = pools.index("state") if "state" in pools else 0
        held = zip(self.geometry.layers, self.layers, strict=True)
        tensors = [_bytes_of(each) for layer, own in held if layer.pool == pool for each in own]
        empty = [block for block, source in sources.items() if source is None]
        copied = {block: source for block, source in sources.items() if source is not None}
        empty_N, to_N, from_N = (
            upload(torch.tensor([*blocks], dtype=torch.int64), self._device)
            for blocks in (empty, copied.keys(), copied.values())
        )
        for tensor in tensors:
            tensor.index_fill_(0, empty_N, 0)
            tensor.index_copy_(0, to_N, tensor.index_select(0, from_N))

    def _clear(self) -> None:
        """Zero the memory: NaN in it would survive the product of a masked key with zero."""
        self._memory.tensor((self.geometry.bytes(self.blocks),), torch.uint8).zero_()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of blocks as bytes, which can be copied whatever their dtype."""
    return tensor.flatten(1).view(torch.uint8)
