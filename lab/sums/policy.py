"""Tiny models that add two numbers below 100, trained by supervised learning until they are right at times.

``hybrid`` is a Qwen3.5 of three gated delta nets and one gated attention, ``mixture`` a Qwen3-MoE of four
layers with two of eight experts per token; the packed formats and the kernels support all their widths. A
token is a character, and a policy writes the digits of the sum from the last one on, the order in which they
can be computed. Training ends when the share of right samples at temperature 1 reaches `ENOUGH`; the rest is
left for reinforcement learning. That takes half a minute on one core, and is reproducible on the same machine
with the same version of torch.

Legend: B sums, T tokens, V vocabulary.
"""

from typing import Literal
from unittest import mock

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from lab.scratch import END, PAD, ROLES, SPECIAL, word_tokenizer
from qerl.errors import QeRLError

BELOW = 100
"""Upper bound, exclusive, of both numbers of a sum."""

VOCABULARY = (*SPECIAL, "+", *"0123456789")
"""All tokens in the order of their ids."""

ID = {token: i for i, token in enumerate(VOCABULARY)}
Kind = Literal["hybrid", "mixture"]
ENOUGH = 0.4
BATCH, MOST_STEPS, LEARNING_RATE = 128, 1000, 3e-3
WARMUP, EVERY = 50, 10
"""Steps of the learning rate's warmup, and between checks of the share of right samples."""

ANSWER = 4
"""Tokens of a completion: three digits and the end."""


def question(first: int, second: int) -> str:
    """Return the text of a prompt."""
    return f"{first:02d}+{second:02d}"


def answer(first: int, second: int) -> str:
    """Return the three digits of the sum, the last one first."""
    return f"{first + second:03d}"[::-1]


def config(kind: Kind) -> PreTrainedConfig:
    """Return the config of a policy."""
    if kind == "mixture":
        return Qwen3MoeConfig(
            vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, head_dim=64, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=64, norm_topk_prob=True, max_position_embeddings=256,
            initializer_range=0.05, tie_word_embeddings=False, pad_token_id=ID[PAD], bos_token_id=None,
            eos_token_id=ID[END],
        )  # fmt: skip
    return Qwen3_5TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=256,
        layer_types=["linear_attention"] * 3 + ["full_attention"], initializer_range=0.05,
        tie_word_embeddings=False, pad_token_id=ID[PAD], bos_token_id=None, eos_token_id=ID[END],
    )  # fmt: skip


def chats(sums_B2: torch.Tensor) -> torch.Tensor:
    """Return token ids [B, T] of prompts as the chat template writes them, with answers and end tokens."""
    rows = [
        [ROLES["user"], *question(a, b), END, ROLES["assistant"], *answer(a, b), END]
        for a, b in sums_B2.tolist()
    ]
    return torch.tensor([[ID[token] for token in row] for row in rows])


def right_probability(model: torch.nn.Module, sums_B2: torch.Tensor) -> torch.Tensor:
    """Return the probability [B] of a right answer."""
    ids_BT = chats(sums_B2).to(next(model.parameters()).device)
    with torch.no_grad():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, -ANSWER - 1 : -1]
        logps_BTV = logits_BTV.float().log_softmax(-1)
    return logps_BTV.gather(2, ids_BT[:, -ANSWER:, None])[..., 0].sum(1).exp()


def train_policy(kind: Kind, seed: int = 0) -> PreTrainedModel:
    """Train a policy and return it in bfloat16 and eval mode; torch's global random state is not changed.

    Raises:
        QeRLError: Too few of its samples were right after `MOST_STEPS` steps.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(kind)).float()
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    # The chunked delta rule is made for 64 tokens and more; a chat has 13.
    by_token = modeling_qwen3_5.torch_recurrent_gated_delta_rule
    with mock.patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", by_token):
        for step in range(MOST_STEPS):
            sums_B2 = torch.randint(BELOW, (BATCH, 2), generator=draw)
            if step % EVERY == 0 and right_probability(model, sums_B2).mean() >= ENOUGH:
                return model.to(torch.bfloat16).eval()
            ids_BT = chats(sums_B2)
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, -ANSWER - 1 : -1]
            loss = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, -ANSWER:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    raise QeRLError(
        f"The {kind} of sums of seed {seed} was right less often than {ENOUGH:.0%} after {MOST_STEPS} steps; "
        "this version of torch needs other settings of its training."
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a character tokenizer."""
    return word_tokenizer(VOCABULARY, r"\S")
