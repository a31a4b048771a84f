"""What several GPU tests are made of.

`QERL_ARCH=80 pytest tests/gpu` runs all of them with the kernels of compute capability 8.0, on any newer GPU;
tests of FP8 keys and values are skipped below 89. `python -m bench rollout ... --arch 80` measures that path.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qerl.fp4.linear import PackedLinear
from qerl.lora.adapter import add_lora
from tests.support.models import move_adapter, pack


@pytest.fixture
def nvfp4_llama() -> Callable[..., torch.nn.Module]:
    """``nvfp4_llama(tiles=True, **config)``: bf16 Llama on the GPU with NVFP4 weights, in the kernels' layout
    (``tiles``) or as on disk, and an adapter whose B is not zero; always the same numbers."""
    from qerl.fp4.storage import stack_tiles

    def build(tiles: bool = True, device: str = "cuda", **sizes: Any) -> torch.nn.Module:
        config = LlamaConfig(
            num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=False,
            initializer_range=0.05, **{"head_dim": 64, **sizes},
        )  # fmt: skip
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(device, torch.bfloat16)
        for layer in [module for module in pack(model).modules() if isinstance(module, PackedLinear)]:
            if tiles:
                _, (tiled,) = stack_tiles([layer.storage])
                layer.use(tiled)
        return move_adapter(add_lora(model, rank=16, alpha=32, dropout=0.0), 0.02).train()

    return build
