"""Layers that carry a state, on packed rows: which sequences a row holds, and what happens where they leak.

`tests/update/test_family_rows.py` compares rows with single samples, gradients included.
"""

import dataclasses

import pytest
import torch

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.update import delta_net
from qerl.update.driver import LossDriver
from qerl.update.head import score
from qerl.update.kernels import use_kernels
from qerl.update.losses import Datum
from qerl.update.packed_row import PackedRow, pack_row
from qerl.update.row_check import check_packed_row
from tests.support.families import DELTA_NETS, tiny
from tests.support.models import move_adapter
from tests.support.samples import samples_of

WIDTH = 4
PROMPTS = [[3, 4, 5, 6, 7, 8], [9], [10, 11]]
SAMPLES = [
    (PROMPTS[0], [20, 21, 22, 23, 24]),
    (PROMPTS[1], [30, 31]),
    (PROMPTS[0], [40]),
    (PROMPTS[2], [50, 51, 52]),
    (PROMPTS[1], [60, 61, 62]),
]


def row() -> PackedRow:
    return pack_row(samples_of(*zip(*SAMPLES, strict=True)), range(len(SAMPLES)), torch.device("cpu"))


def logps(model) -> torch.Tensor:
    """Of one sample after the other, in the order of the row."""
    found = []
    for number in (0, 2, 1, 4, 3):
        prompt, completion = SAMPLES[number]
        logits = model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits
        of_tokens = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(of_tokens.gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(found)


def checked(model) -> None:
    check_packed_row(model, lambda row: score(model, model, row, False)[0])


def test_sequences_hold_each_token_once_behind_those_of_its_own_sample():
    packed = row()
    sequences = packed.sequences(WIDTH)
    assert sequences.prompt_offsets == [0, 5, 6] and sequences.prompt_B.tolist() == [0, 0, -1, -1, 1]
    assert sequences.branch_offsets == [0, 5, 6, 8, 11, 14]
    order = sequences.taps_LW[:, -1]
    ids = packed.input_ids_1L[0]
    assert order[sequences.place_L].tolist() == list(range(len(ids)))
    texts = {(*p, *c) for p, c in SAMPLES}
    for taps in sequences.taps_LW.tolist():
        seen = tuple(ids[tap].item() for tap in taps if tap >= 0)
        begins = len(seen) < WIDTH
        assert any(
            text[at : at + len(seen)] == seen for text in texts for at in range(1 if begins else len(text))
        )


def test_prompts_of_one_token_begin_from_nothing():
    model = tiny(DELTA_NETS)
    delta_net.read_sequences(model)
    found = score(model, model, row(), False)[0]
    torch.testing.assert_close(found, logps(model), rtol=2e-6, atol=1e-5)
    alone = pack_row(samples_of([[9]], [[30, 31]]), [0], torch.device("cpu"))
    torch.testing.assert_close(score(model, model, alone, False)[0], found[6:8], rtol=2e-6, atol=1e-5)


def test_a_layer_without_sequences_is_its_own():
    model, ids = tiny(DELTA_NETS), torch.arange(3, 40)[None]
    before = model(ids, use_cache=False).logits
    delta_net.read_sequences(model)
    assert torch.equal(model(ids, use_cache=False).logits, before)


def test_the_check_of_rows_passes():
    model = tiny(DELTA_NETS)
    path = use_kernels(model)
    assert (path.attention.total, path.delta_nets.total) == (1, 3)
    checked(model)


def as_one(sequences):
    """Branches that begin where the one before them ended, not where their prompt did."""
    return dataclasses.replace(
        sequences, branch_offsets=[0, sequences.branch_offsets[-1]], prompt_B=torch.tensor([0])
    )


LEAKS = {
    "states between branches": as_one,
    "states between prompts": lambda s: dataclasses.replace(s, prompt_B=s.prompt_B * 0),
    "no states from prompts": lambda s: dataclasses.replace(s, prompt_B=s.prompt_B * 0 - 1),
    "taps between branches": lambda s: dataclasses.replace(
        s, taps_LW=(s.taps_LW[:, -1:] - torch.arange(WIDTH).flip(0)).clamp(min=-1)
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
def test_the_check_of_rows_refuses_what_leaks(monkeypatch, leak):
    model, right = tiny(DELTA_NETS), PackedRow.sequences
    use_kernels(model)
    monkeypatch.setattr(PackedRow, "sequences", lambda row, width: LEAKS[leak](right(row, width)))
    with pytest.raises(QeRLError, match="other log-probabilities in a packed row"):
        checked(model)


def test_the_check_of_rows_refuses_layers_that_do_not_read_sequences(monkeypatch):
    model = tiny(DELTA_NETS)
    monkeypatch.setattr("qerl.update.kernels.read_sequences", lambda model: None)
    use_kernels(model)
    with pytest.raises(QeRLError, match="other log-probabilities in a packed row"):
        checked(model)


def test_a_driver_of_losses_computes_what_the_samples_alone_would():
    model = move_adapter(add_lora(tiny(DELTA_NETS), rank=4, alpha=8, dropout=0.0))
    texts = [torch.tensor(prompt + completion) for prompt, completion in SAMPLES]
    data = [
        Datum(text[:-1], {"target_tokens": text[1:], "weights": torch.ones(len(text) - 1)}) for text in texts
    ]
    found = LossDriver(model).forward_backward(data, "cross_entropy")
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    for text, logprobs in zip(texts, found.logprobs, strict=True):
        logits = model(input_ids=text[None, :-1], use_cache=False).logits[0]
        wanted = logits.log_softmax(-1).gather(1, text[1:, None])[:, 0]
        torch.testing.assert_close(logprobs, wanted.detach(), rtol=2e-6, atol=1e-5)
        (-wanted.sum()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            error = (gradients[name] - parameter.grad).norm() / parameter.grad.norm()
            assert error < 1e-5, f"{name}: {error:.1e}"
