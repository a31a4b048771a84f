"""Which FlashAttention a row of the update gets, and what a run says of it; no kernel is called."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from qerl.errors import QeRLError
from qerl.kernels.cards import CARDS, chosen
from qerl.kernels.flash import choice, compile_flash4, flash_for, flash_words, why_not_flash4
from qerl.kernels.flash.flash2 import Flash2
from qerl.trainer import ready
from qerl.update import kernels, path

CUDA = torch.device("cuda", 0)
NOT_RUN = "FlashAttention-4 was not run on such GPUs"
MISSING = "flash-attn-4 is not installed: pip install 'flash-attn-4==4.0.0b36'"


@pytest.fixture(autouse=True)
def nothing_kept():
    """What is found is kept for the process; each test finds anew."""
    yield
    why_not_flash4.cache_clear()
    choice._flash4.cache_clear()


@pytest.fixture
def installed(monkeypatch) -> dict[str, str]:
    """The version of the package that appears installed; a test changes it."""
    versions = {choice.PACKAGE: "4.0.0b36"}
    monkeypatch.setattr(choice, "_installed", lambda: versions.get(choice.PACKAGE))
    return versions


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """A GPU of Hopper, and a package whose kernels note their calls."""
    noted = []

    def forward(q, k, v, **named):
        noted.append(("forward", tuple(q.shape), tuple(k.shape), named))
        return q, torch.zeros(q.shape[1], q.shape[0]), None

    def backward(q, k, v, out, dout, lse, **named):
        noted.append(("backward", tuple(q.shape), tuple(k.shape), named))
        return q, k, v

    package, module = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
    package.cute = module
    module.interface = SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.delitem(sys.modules, "qerl.kernels.flash.flash4", raising=False)
    monkeypatch.setattr(choice, "card_of", lambda device: CARDS[9, 0])
    yield noted
    sys.modules.pop("qerl.kernels.flash.flash4", None)


def row(tokens: int, stretches: int, size: int = 128, dtype: torch.dtype = torch.bfloat16):
    """Queries of a row, and where its stretches begin and end."""
    offsets = torch.empty(stretches + 1, dtype=torch.int32, device="meta")
    q_LHE = SimpleNamespace(shape=(tokens, 28, size), dtype=dtype, device=CUDA)
    return q_LHE, choice.Extents(offsets, offsets, tokens // stretches, tokens // stretches)


@pytest.mark.parametrize(
    ("tokens", "stretches", "long"),
    [
        (16639, 2, True),
        (16894, 18, True),
        (14832, 36, True),
        (8192, 20, True),
        (8192, 21, False),
        (8191, 2, False),
        (131072, 256, True),
        (131072, 257, False),
        (4100, 9, False),
    ],
)
def test_rows_that_are_long_enough_get_flash_attention_4(calls, installed, tokens, stretches, long):
    assert isinstance(flash_for(*row(tokens, stretches)), Flash2) != long
    assert isinstance(flash_for(*row(tokens, stretches, size=64)), Flash2)
    assert isinstance(flash_for(*row(tokens, stretches, dtype=torch.float16)), Flash2)


@pytest.mark.parametrize("capability", CARDS)
def test_only_hopper_gets_it(monkeypatch, installed, capability):
    monkeypatch.setattr(choice, "card_of", lambda device: CARDS[capability])
    assert why_not_flash4(128, torch.bfloat16, CUDA) == ("" if capability == (9, 0) else NOT_RUN)


def test_a_card_treated_as_an_older_one_does_not_get_it(monkeypatch, installed):
    monkeypatch.setenv("QERL_ARCH", "80")
    card = chosen((9, 0), 227 * 1024)
    monkeypatch.setattr(choice, "card_of", lambda device: card)
    assert why_not_flash4(128, torch.bfloat16, CUDA) == NOT_RUN


def test_why_not_is_said(calls, installed):
    assert why_not_flash4(128, torch.bfloat16, torch.device("cpu")) == "FlashAttention-4 needs a CUDA GPU"
    assert why_not_flash4(64, torch.bfloat16, CUDA) == (
        "FlashAttention-4 was seen to gain with heads of 128, and these have 64"
    )
    assert why_not_flash4(128, torch.float16, CUDA) == "FlashAttention-4 was not run in float16"
    installed[choice.PACKAGE] = "4.0.0b40"
    assert why_not_flash4(128, torch.bfloat16, CUDA) == (
        "flash-attn-4 4.0.0b40 is installed and 4.0.0b36 was tested: pip install 'flash-attn-4==4.0.0b36'"
    )


def test_without_the_package_long_rows_get_flash_attention_2(calls, installed):
    installed.clear()
    assert isinstance(flash_for(*row(16639, 2)), Flash2)
    assert flash_words(why_not_flash4(128, torch.bfloat16, CUDA)) == f"FlashAttention-2 ({MISSING})"


def test_a_package_that_cannot_be_imported_is_refused(calls, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert isinstance(flash_for(*row(4100, 9)), Flash2)
    with pytest.raises(QeRLError, match=r"flash-attn-4 4.0.0b36 is installed and cannot be imported \(.+\)"):
        flash_for(*row(16639, 2))


def test_the_version_is_the_one_that_the_extra_asks_for():
    file = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(file.read_text())["project"]["optional-dependencies"]
    asked = {wanted.name: wanted for wanted in map(Requirement, extras["long"])}
    assert str(asked[choice.PACKAGE].specifier) == f"=={choice.TESTED}"


HEADS = choice.Heads(28, 4, 128, torch.bfloat16, torch.device("cpu"))


def test_it_is_compiled_for_the_heads_of_the_model_with_the_settings_of_a_step(calls, installed, monkeypatch):
    monkeypatch.setattr(choice, "why_not_flash4", lambda *asked: "")
    compile_flash4(HEADS)
    (forward, q, k, of_forward), (backward, *shapes, of_backward) = calls
    assert (forward, backward) == ("forward", "backward") and shapes == [q, k]
    assert q[1:] == (28, 128) and k[1:] == (4, 128)
    assert of_forward["causal"] and of_backward["causal"] and of_backward["deterministic"]
    # Kernels of backward differ where the longest stretch is one block, of 64 queries or of 128 keys.
    assert 128 < of_backward["max_seqlen_q"] <= choice.LEAST_MEAN
    assert 128 < of_backward["max_seqlen_k"] <= choice.LEAST_MEAN


def test_nothing_is_compiled_for_a_model_that_does_not_get_it(calls, installed, monkeypatch):
    compile_flash4(HEADS)
    monkeypatch.setattr(choice, "why_not_flash4", lambda *asked: "")
    compile_flash4(HEADS, choice.LEAST_TOKENS - 1)
    assert calls == []
    compile_flash4(HEADS, choice.LEAST_TOKENS)
    assert [name for name, *_ in calls] == ["forward", "backward"]


@pytest.mark.parametrize("part", ["_flash_attn_fwd", "_flash_attn_bwd"])
def test_a_package_that_cannot_be_compiled_is_refused(calls, installed, monkeypatch, part):
    monkeypatch.setattr(choice, "why_not_flash4", lambda *asked: "")
    for error, raised, said in (
        (
            RuntimeError("no arch.\n more"),
            QeRLError,
            r"compiled for heads of 128 \(no arch\); .* pip uninstall",
        ),
        (torch.OutOfMemoryError("full"), torch.OutOfMemoryError, "full"),
    ):

        def fails(*args, error=error, **named):
            raise error

        monkeypatch.setattr(sys.modules["flash_attn.cute"].interface, part, fails)
        with pytest.raises(raised, match=said):
            compile_flash4(HEADS)


def test_a_model_on_its_kernels_has_them_compiled(monkeypatch, tiny_model):
    """Where its attention reads stretches; a model that reads dense masks calls no FlashAttention."""
    model, compiled = tiny_model("llama"), []
    monkeypatch.setattr(kernels, "why_unfit", lambda model: "")
    monkeypatch.setattr(kernels, "compile_flash4", lambda *asked: compiled.append(asked))
    monkeypatch.setattr("qerl.update.fused.fuse", lambda model: None)
    for reason in (None, "attention has dropout, which it has in training alone"):
        monkeypatch.setattr(kernels, "use_branch_attention", lambda model, reason=reason: reason)
        kernels.use_kernels(model, 4096)
    config = model.config
    wanted = (config.num_attention_heads, config.num_key_value_heads)
    assert [(heads[:2], longest) for heads, longest in compiled] == [(wanted, 4096)]


@pytest.mark.parametrize(
    ("tokens", "prompt", "completion", "longest"),
    [(4096, 1000, 2000, 4096), (2048, 1000, 2000, 3000), (None, 1000, 2000, None), (4096, None, 2000, None)],
)
def test_a_run_says_how_long_its_rows_get(monkeypatch, tiny_model, tokens, prompt, completion, longest):
    """A sample has a row of its own where it is longer than `tokens_per_forward`."""

    class Told(Exception):
        pass

    def told(model, longest=0):
        raise Told(longest)

    monkeypatch.setattr(ready, "use_kernels", told)
    args = SimpleNamespace(
        tokens_per_forward=tokens, max_prompt_length=prompt, max_completion_length=completion
    )
    with pytest.raises(Told) as caught:
        ready.ready_for_rows(tiny_model("llama"), args)
    assert caught.value.args == (longest,)


def test_a_run_says_which_one_it_takes(monkeypatch, tiny_model, calls, installed):
    model = tiny_model("llama")
    monkeypatch.setattr(path, "why_unfit", lambda model: "")
    for reason, said in (
        ("", "FlashAttention-4 (heads of 128, rows of 8192 tokens or more, 400 or more a stretch; else "),
        (MISSING, f"FlashAttention-2 ({MISSING})."),
    ):
        monkeypatch.setattr(path, "why_not_flash4", lambda *asked, reason=reason: reason)
        found = path.find_path(model, None)
        assert f"attention kernel {said}" in found.sentence()
        assert "attention kernel" not in path.find_path(model, "some reason").record()
