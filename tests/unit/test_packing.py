"""The packed row computes what the padded batch computes."""

from itertools import pairwise

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qerl.trainer.update.packing import IGNORE, PackedBatch, pack


def padded_batch(prompts: list[list[int]], completions: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Left-padded prompts and right-padded completions with their masks, pad token 0."""
    P, C = max(map(len, prompts)), max(map(len, completions))
    prompt_ids = torch.tensor([[0] * (P - len(p)) + p for p in prompts])
    prompt_mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompts])
    completion_ids = torch.tensor([c + [0] * (C - len(c)) for c in completions])
    completion_mask = torch.tensor([[1] * len(c) + [0] * (C - len(c)) for c in completions])
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def causal_mask_11LL(packed: PackedBatch) -> torch.Tensor:
    length = packed.input_ids_1L.size(1)
    return sdpa_mask(
        batch_size=1,
        q_length=length,
        kv_length=length,
        mask_function=packed.mask_function(causal_mask_function),
        allow_is_causal_skip=False,
    )


def test_layout_of_two_samples_of_one_prompt():
    batch = padded_batch([[5, 6, 7], [5, 6, 7]], [[8, 9], [10]])
    packed = pack(*batch, rows=[0, 1])
    assert packed.input_ids_1L.tolist() == [[5, 6, 7, 8, 7]]
    assert packed.position_ids_1L.tolist() == [[0, 1, 2, 3, 2]]
    assert packed.labels_1L.tolist() == [[IGNORE, IGNORE, 8, 9, 10]]
    assert causal_mask_11LL(packed)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_scatter_puts_values_where_their_tokens_are():
    batch = padded_batch([[5, 6], [5, 6], [4]], [[8, 9], [1], [10, 11, 12]])
    packed = pack(*batch, rows=[0, 2])
    values = packed.labels_1L[:, packed.sample_L >= 0].float()
    assert packed.scatter(values, 3, 3).tolist() == [[8, 9, 0], [0, 0, 0], [10, 11, 12]]


@pytest.mark.parametrize(
    "lengths",
    [
        [(3, [2, 1])],
        [(1, [4, 2])],
        [(7, [5, 2, 1]), (1, [3]), (2, [1, 1]), (4, [6])],
    ],
)
def test_stretches_say_what_the_mask_says(lengths):
    prompts, completions = [], []
    for prompt, group in lengths:
        tokens = torch.randint(1, 99, (prompt,)).tolist()
        prompts += [tokens] * len(group)
        completions += [torch.randint(1, 99, (n,)).tolist() for n in group]
    packed = pack(*padded_batch(prompts, completions), rows=list(range(len(prompts))))
    branches, length = packed.branches, packed.input_ids_1L.size(1)
    seen = torch.zeros(length, length, dtype=torch.bool)
    own = torch.full((length,), -1)
    queries, keys = branches.first_query_S.tolist(), branches.first_key_S.tolist()
    assert queries[-1] == length and keys[-1] == branches.keys_M.numel()
    for (q0, q1), (k0, k1) in zip(pairwise(queries), pairwise(keys), strict=True):
        assert q1 - q0 <= branches.longest_query and k1 - k0 <= branches.longest_key
        for q in range(q0, q1):
            visible = k1 - (q1 - 1 - q)  # causal, aligned at the ends
            seen[q, branches.keys_M[k0:visible]] = True
            own[q] = k1 - (q1 - q)
    assert torch.equal(seen, causal_mask_11LL(packed)[0, 0])
    assert torch.equal(branches.own_L, own)
    copied = torch.zeros(length, dtype=torch.long)
    for prompt, index_BP in branches.copies:
        assert (branches.keys_M[index_BP] == torch.arange(prompt.start, prompt.stop)).all()
        copied[prompt] += index_BP.size(0)
    assert torch.equal(copied + 1, torch.bincount(branches.keys_M, minlength=length))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_and_gradients_equal_the_padded_batch(tiny_model, family, checkpointing):
    torch.manual_seed(0)
    model = tiny_model(family).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    vocabulary = model.config.vocab_size
    draw = lambda n: torch.randint(1, vocabulary, (n,)).tolist()  # noqa: E731
    first, second = draw(7), draw(1)
    batch = padded_batch([first, first, second, second], [draw(5), draw(2), draw(4), draw(1)])
    weight = torch.randn(batch[2].shape, dtype=torch.double) * batch[3]

    padded = padded_logps(model, batch)
    expected = gradients(model, (padded * weight).sum())
    packed = pack(*batch, rows=[0, 1, 2, 3])
    logits = model(
        input_ids=packed.input_ids_1L,
        position_ids=packed.position_ids_1L,
        attention_mask=causal_mask_11LL(packed),
        use_cache=False,
    ).logits
    labels = packed.labels_1L.clamp(min=0)
    values = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    shared = packed.scatter(values[:, packed.sample_L >= 0], 4, batch[2].size(1))
    torch.testing.assert_close(shared, padded * batch[3], rtol=0, atol=1e-11)
    actual = gradients(model, (shared * weight).sum())
    for name, grad in expected.items():
        # RMSNorm computes in float32 whatever the model is, so gradients differ by its rounding.
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


def padded_logps(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Log-probabilities [B, C] from the ordinary padded forward."""
    prompt_ids, prompt_mask, completion_ids, completion_mask = batch
    ids = torch.cat([prompt_ids, completion_ids], dim=1)
    mask = torch.cat([prompt_mask, completion_mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    C = completion_ids.size(1)
    return logits[:, -C - 1 : -1].log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
