"""What the kernels may use on which GPU, and a card that is treated as one of an older class."""

import pytest
import torch

from qerl.kernels import needs
from qerl.kernels.cards import CARDS, chosen


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(capability)``: the CUDA device has this compute capability, and every package is there."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    monkeypatch.setattr(needs, "has_module", lambda module: True)
    return make


def reasons(**wanted):
    return [obstacle.reason for obstacle in needs.obstacles(**wanted)]


def test_a_hopper_card_is_compiled_for_itself(gpu):
    card = chosen((9, 0), 227 * 1024)
    assert card == CARDS[9, 0] and card.target == "sm_90a"
    gpu((9, 0))
    assert not reasons(fp8=True)


def test_shared_memory_is_what_the_gpu_has_up_to_what_its_class_has():
    assert chosen((8, 0), 99 * 1024).shared_bytes == 99 * 1024
    assert chosen((8, 9), 227 * 1024).shared_bytes == 99 * 1024


@pytest.mark.parametrize("number,capability", [("80", (8, 0)), ("86", (8, 6)), ("89", (8, 9))])
def test_a_card_treated_as_an_older_one_gets_portable_code(number, capability, monkeypatch):
    monkeypatch.setenv("QERL_ARCH", number)
    card = chosen((9, 0), 227 * 1024)
    assert card.capability == capability and card.target == f"compute_{number}"
    assert (card.loader, card.math, card.quack) == ("cp.async", "mma.sync", False)
    assert not card.dependent_launch and card.shared_bytes == CARDS[capability].shared_bytes


def test_an_older_class_of_hoppers_instructions_leaves_out_those_of_hopper_alone(monkeypatch):
    monkeypatch.setenv("QERL_ARCH", "90")
    card = chosen((12, 0), 99 * 1024)
    assert (card.math, card.loader, card.quack, card.target) == ("mma.sync", "bulk", False, "compute_90")
    assert chosen((9, 0), 227 * 1024).target == "sm_90a", "the GPU's own class changes nothing"


def test_only_cards_on_which_the_kernels_were_run_are_taken_unasked(gpu, monkeypatch):
    monkeypatch.setattr(needs, "RUN_AS", frozenset())
    for capability in CARDS.keys() - needs.RUN_ON:
        gpu(capability)
        assert "were not run" in reasons()[0]
        monkeypatch.setenv("QERL_ARCH", "80")
        assert not reasons()
        monkeypatch.delenv("QERL_ARCH")


@pytest.mark.parametrize(
    "capability,asked,said",
    [
        ((7, 5), "", "the GPU has compute capability 7.5, and 8.0 is needed"),
        ((9, 0), "100", "QERL_ARCH=100 asks for a newer GPU than this one, which has compute capability 9.0"),
        ((9, 0), "8.0", "QERL_ARCH is '8.0'; set one of 80, 86, 87, 89, 90, 100, 103, 120, 121"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(gpu, monkeypatch, capability, asked, said):
    gpu(capability)
    monkeypatch.setenv("QERL_ARCH", asked)
    (reason,) = reasons()
    assert reason.startswith(said)


def test_fp8_keys_and_values_are_refused_where_numbers_cannot_be_converted(gpu, monkeypatch):
    gpu((9, 0))
    monkeypatch.setenv("QERL_ARCH", "86")
    assert reasons(fp8=True) == ["FP8 needs compute capability 8.9, and this is 8.6"]
    assert not reasons()
    monkeypatch.setenv("QERL_ARCH", "89")
    assert not reasons(fp8=True)


@pytest.mark.parametrize("capability,taken", [((11, 0), (10, 3)), ((13, 0), (12, 1)), ((8, 8), (8, 7))])
def test_a_gpu_that_is_newer_than_its_class_gets_the_code_before_it(capability, taken, gpu, monkeypatch):
    card = chosen(capability, 99 * 1024)
    assert (card.capability, card.native, card.math, card.quack) == (taken, False, "mma.sync", False)
    assert card.shared_bytes == 99 * 1024
    gpu(capability)
    monkeypatch.setattr(needs, "RUN_AS", frozenset({(8, 0)}))
    assert not reasons()


def test_with_an_older_classs_code_run_only_cards_below_it_are_refused(gpu, monkeypatch):
    monkeypatch.setattr(needs, "RUN_AS", frozenset({(8, 0)}))
    for capability in CARDS:
        gpu(capability)
        assert not reasons()
    gpu((7, 5))
    assert reasons() == ["the GPU has compute capability 7.5, and 8.0 is needed"]


def test_what_was_run_on_which_card_is_said(monkeypatch):
    monkeypatch.setattr(needs, "has_module", lambda module: True)
    monkeypatch.setattr(needs, "RUN_AS", frozenset())
    assert needs.run_on(CARDS[9, 0]) == "run on such GPUs"
    assert {needs.run_on(card) for card in CARDS.values() if card.capability != (9, 0)} == {"compiled"}
    monkeypatch.setattr(needs, "RUN_AS", frozenset({(8, 0)}))
    assert needs.run_on(CARDS[8, 0]) == "run on 9.0"
    for capability in ((8, 6), (8, 7), (8, 9)):
        assert needs.run_on(CARDS[capability]) == "compiled; that of 8.0 run on 9.0"
    assert needs.run_on(CARDS[10, 0]) == needs.run_on(CARDS[12, 0]) == "compiled"
    assert "the copy engine and wgmma for few tokens, quack-kernels for many" in needs.card_sentence(
        CARDS[9, 0]
    )
