"""The packed row computes what a padded batch of the same samples computes."""

from itertools import pairwise

import pytest
import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qerl.update.packed_row import IGNORE, Lengths, PackedRow, Sample, pack_row
from tests.support.samples import samples_of

CPU = torch.device("cpu")


def causal_mask_11LL(row: PackedRow) -> torch.Tensor:
    length = row.input_ids_1L.size(1)
    return sdpa_mask(
        batch_size=1,
        q_length=length,
        kv_length=length,
        mask_function=row.mask_function(causal_mask_function),
        allow_is_causal_skip=False,
    )


def test_layout_of_two_samples_of_one_prompt():
    samples = samples_of([[5, 6, 7], [5, 6, 7]], [[8, 9], [10]])
    row = pack_row(samples, [0, 1], CPU)
    assert row.input_ids_1L.tolist() == [[5, 6, 7, 8, 7]]
    assert row.position_ids_1L.tolist() == [[0, 1, 2, 3, 2]]
    assert row.labels_1L.tolist() == [[IGNORE, IGNORE, 8, 9, 10]]
    assert causal_mask_11LL(row)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_a_group_shares_its_prompt_in_whatever_order_its_samples_come():
    samples = samples_of([[5, 6, 7], [4, 3], [5, 6, 7]], [[8, 9], [1], [10]])
    row = pack_row(samples, [0, 1, 2], CPU)
    assert row.input_ids_1L.tolist() == [[5, 6, 7, 8, 7, 4, 3]]
    assert row.sample_L.tolist() == [-1, -1, 0, 0, 2, -1, 1]
    assert row.input_ids_1L.size(1) == Lengths.of(samples).tokens([0, 1, 2])


def test_scatter_puts_values_where_their_tokens_are():
    samples = samples_of([[5, 6], [5, 6], [4]], [[8, 9], [1], [10, 11, 12]])
    row = pack_row(samples, [0, 2], CPU)
    values = row.labels_1L[0, row.sample_L >= 0].float()
    assert row.scatter(values, 3, 3).tolist() == [[8, 9, 0], [0, 0, 0], [10, 11, 12]]


def test_a_masked_sample_is_its_first_token():
    samples = samples_of([[5, 6], [5, 6]], [[8, 9, 3], [1, 2]])
    samples[0].masked = True
    row = pack_row(samples, [0, 1], CPU)
    assert row.input_ids_1L.tolist() == [[5, 6, 6, 1]]
    assert row.labels_1L.tolist() == [[IGNORE, 8, 1, 2]]
    assert samples[0].loss_mask == [0, 0, 0] and samples[1].loss_mask == [1, 1]


def test_one_prompt_in_two_groups_is_there_twice():
    """As where two rollouts of an optimizer step drew it: environments may make other prompts of one row."""
    samples = samples_of([[5, 6, 7], [5, 6, 7]], [[8], [9]])
    samples[1].group += 1
    assert pack_row(samples, [0, 1], CPU).input_ids_1L.tolist() == [[5, 6, 7, 5, 6, 7]]


@pytest.mark.parametrize(
    "lengths",
    [
        [(3, [2, 1])],
        [(1, [4, 2])],
        [(7, [5, 2, 1]), (1, [3]), (2, [1, 1]), (4, [6])],
    ],
)
def test_segments_say_what_the_mask_says(lengths):
    prompts, completions = [], []
    for prompt, group in lengths:
        tokens = torch.randint(1, 99, (prompt,)).tolist()
        prompts += [tokens] * len(group)
        completions += [torch.randint(1, 99, (n,)).tolist() for n in group]
    row = pack_row(samples_of(prompts, completions), range(len(prompts)), CPU)
    branches, length = row.branches, row.input_ids_1L.size(1)
    seen = torch.zeros(length, length, dtype=torch.bool)
    own = torch.full((length,), -1)
    queries, keys = branches.query_offsets_N.tolist(), branches.key_offsets_N.tolist()
    assert queries[-1] == length and keys[-1] == branches.keys_M.numel()
    for (q0, q1), (k0, k1) in zip(pairwise(queries), pairwise(keys), strict=True):
        assert q1 - q0 <= branches.longest_query and k1 - k0 <= branches.longest_key
        for q in range(q0, q1):
            visible = k1 - (q1 - 1 - q)  # causal, aligned at the ends
            seen[q, branches.keys_M[k0:visible]] = True
            own[q] = k1 - (q1 - q)
    assert torch.equal(seen, causal_mask_11LL(row)[0, 0])
    assert torch.equal(branches.own_L, own)
    copied = torch.zeros(length, dtype=torch.long)
    for prompt, index_BP in branches.copies:
        assert (branches.keys_M[index_BP] == torch.arange(prompt.start, prompt.stop)).all()
        copied[prompt] += index_BP.size(0)
    assert torch.equal(copied + 1, torch.bincount(branches.keys_M, minlength=length))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_log_probs_and_gradients_equal_the_samples_of(tiny_model, family, checkpointing):
    torch.manual_seed(0)
    model = tiny_model(family).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    vocabulary = model.config.vocab_size
    draw = lambda n: torch.randint(1, vocabulary, (n,)).tolist()  # noqa: E731
    first, second = draw(7), draw(1)
    samples = samples_of([first, first, second, second], [draw(5), draw(2), draw(4), draw(1)])
    padded, mask = padded_logps(model, samples)
    weight = torch.randn(mask.shape, dtype=torch.double) * mask
    expected = gradients(model, (padded * weight).sum())
    row = pack_row(samples, [0, 1, 2, 3], CPU)
    logits = model(
        input_ids=row.input_ids_1L,
        position_ids=row.position_ids_1L,
        attention_mask=causal_mask_11LL(row),
        use_cache=False,
    ).logits
    labels = row.labels_1L.clamp(min=0)
    values = logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    shared = row.scatter(values[0, row.sample_L >= 0], *mask.shape)
    torch.testing.assert_close(shared, padded * mask, rtol=0, atol=1e-11)
    actual = gradients(model, (shared * weight).sum())
    for name, grad in expected.items():
        # RMSNorm computes in float32 whatever the model is, so gradients differ by its rounding.
        error = (actual[name] - grad).norm() / grad.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


def padded_logps(model: torch.nn.Module, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [B, C] and their mask from a plain forward pass, prompts padded left, completions
    right."""
    P, C = (max(len(getattr(s, part)) for s in samples) for part in ("prompt", "tokens"))
    ids = torch.tensor([
        [0] * (P - len(s.prompt)) + s.prompt + s.tokens + [0] * (C - len(s.tokens)) for s in samples
    ])  # fmt: skip
    mask = torch.tensor([
        [0] * (P - len(s.prompt)) + [1] * len(s.prompt + s.tokens) + [0] * (C - len(s.tokens))
        for s in samples
    ])  # fmt: skip
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    logps = logits[:, -C - 1 : -1].log_softmax(-1).gather(-1, ids[:, -C:, None])[..., 0]
    return logps, mask[:, -C:]


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
