"""Fixtures: tiny random models of each family and a tiny chat tokenizer, made in memory."""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

# Where there is no GPU, kernels written in Triton run in its interpreter. Triton reads this once, on import.
os.environ.setdefault("TRITON_INTERPRET", str(int(not torch.cuda.is_available())))

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.support.models import make_tiny_model, make_tiny_tokenizer, replace_projections

if os.environ["TRITON_INTERPRET"] == "1" and find_spec("triton"):
    from tests.support.interpreter import hurry

    hurry()

if not torch.cuda.is_available():
    # `torch.manual_seed` keeps a seed and a formatted stack for each kind of card that is not there.
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *args, **kwargs: None

pytest_plugins = ["tests.support.tiny_run"]


@pytest.fixture(scope="session", autouse=True)
def imports_are_not_garbage() -> Iterator[None]:
    """Every run of a trainer collects garbage; walking what was imported takes longer than tiny steps do."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """``tiny_model(family, seed=0, **config)``, see `make_tiny_model`."""
    return make_tiny_model


@pytest.fixture(scope="session")
def to_nf4() -> Callable[[PreTrainedModel], PreTrainedModel]:
    """``to_nf4(model)``: the same model, its projections replaced by bitsandbytes' NF4 layers."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")

    def layer(linear: torch.nn.Linear) -> torch.nn.Module:
        weight = linear.weight.data
        made = bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype,
            quant_type="nf4", device="meta",
        )  # fmt: skip
        made.weight = bnb.nn.Params4bit(weight, quant_type="nf4").to(weight.device)
        made.bias = linear.bias
        # Otherwise some CPUs write a layer's codes in an order of their own when it first runs.
        made.support_avx512bf16_for_cpu = False
        return made

    def convert(model: PreTrainedModel) -> PreTrainedModel:
        replace_projections(model, layer)
        model.is_loaded_in_4bit = True  # as transformers marks a model that it quantised; PEFT looks at it
        return model

    return convert


@pytest.fixture
def step_sizes(monkeypatch) -> list[int]:
    """Rows of the step that the paged engine takes, one number for each round."""
    from qerl.rollout.paged.decode import DecodeGraphs

    sizes: list[int] = []
    fit = DecodeGraphs.fit

    def spy(*args):
        step = fit(*args)
        sizes.append(step.rows.count)
        return step

    monkeypatch.setattr(DecodeGraphs, "fit", spy)
    return sizes


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """See `make_tiny_tokenizer`."""
    return make_tiny_tokenizer()


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory) -> Path:
    """A tiny Llama and its tokenizer, saved. All tests read the same folder; none writes into it."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    make_tiny_model("llama").save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return folder
