"""The model behind a server on a GPU: adapters of different rank take turns in the paged engine's buffers,
and what is sampled is what the update scores."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from qerl.lora.adapter import load_adapter
from qerl.rollout.paged.engine import PagedEngine
from qerl_serve.types import AdamParams
from tests.support.models import FAMILIES, pack
from tests.support.serve import datum, lora, request, sampled, tiny_backend, tiny_base

PROMPTS = [tuple(range(5, 75)), (7,), tuple(range(30, 100))]
RANKS = {"a": 8, "b": 4}


def base_model(hidden=192, seed=0):
    config_class, model_class = FAMILIES["llama"]
    config = config_class(
        vocab_size=1000, hidden_size=hidden, intermediate_size=448, num_hidden_layers=3,
        num_attention_heads=6, num_key_value_heads=2, head_dim=64, max_position_embeddings=1024,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = model_class(config).to(torch.bfloat16).cuda().eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.05 if parameter.ndim == 2 else 0.2)
    return pack(model)


def trained_backend(folder, **options):
    """Two models, of rank 8 and 4, after two steps each."""
    made = tiny_backend(
        folder,
        base_model(),
        resident=1,
        make_engine=lambda model: PagedEngine(model, pad_token_id=0),
        **options,
    )
    for name, rank in RANKS.items():
        made.create_model(name, lora(rank=rank, seed=rank))
        train(made, name)
    return made


@pytest.fixture
def backend(tmp_path):
    return trained_backend(tmp_path)


def train(backend, name, steps=2):
    data = [datum(list(range(9 * rank, 9 * rank + 50))) for rank in (1, 5, RANKS[name])]
    for _ in range(steps):
        backend.forward_backward(name, data, "cross_entropy", {}, False)
        metrics = backend.optim_step(name, AdamParams(learning_rate=3e-2))
        assert metrics["grad_norm"] > 0


def ask(backend, key, **options):
    asked = [request(key, prompt, seed, 50, **options) for prompt in PROMPTS for seed in range(3)]
    return sampled(backend, asked)


def drawn(results):
    return {number: list(result.sequences[0].tokens) for number, result in results.items()}


def test_adapters_of_different_rank_take_turns_in_the_same_buffers(tmp_path):
    # Behind kept keys and values samples are the same up to rounding, and here they are asked for to the bit.
    backend = trained_backend(tmp_path, enable_prefix_caching=False)
    keys = {name: backend.save_for_sampler(name, None) for name in RANKS} | {"base": backend.sampler("tiny")}
    first = {name: drawn(ask(backend, key)) for name, key in keys.items()}
    decoder = backend._base.engine.decoder
    held = [
        lora.a_RK.data_ptr()
        for layer in decoder.layers
        for lora in (layer.mixer.qkv.lora, layer.mlp.down.lora)
    ]
    for name in ("b", "base", "a", "b"):
        assert drawn(ask(backend, keys[name])) == first[name]
    assert first["a"] != first["b"] and first["b"] != first["base"]
    now = [
        lora.a_RK.data_ptr()
        for layer in decoder.layers
        for lora in (layer.mixer.qkv.lora, layer.mlp.down.lora)
    ]
    assert now == held
    for name in RANKS:
        train(backend, name)
        assert drawn(ask(backend, keys[name])) == first[name]  # the snapshot, while its model went on
        assert drawn(ask(backend, backend.save_for_sampler(name, None))) != first[name]


@torch.no_grad()
@pytest.mark.parametrize("name", RANKS)
def test_the_sampler_is_what_the_update_scores(backend, name):
    key = backend.save_for_sampler(name, None)
    results = ask(backend, key)
    rows = [(PROMPTS[number // 3], result.sequences[0]) for number, result in results.items()]
    asked = [request(key, (*p, *s.tokens), max_tokens=1, prompt_logprobs=True) for p, s in rows]
    scored = sampled(backend, asked)
    backend.save_for_sampler(name, "now")
    exact = load_adapter(base_model(), backend.checkpoints()[0].folder).float().eval()
    engine, update, truth = [], [], []
    for number, (prompt, sequence) in enumerate(rows):
        ids = torch.tensor([[*prompt, *sequence.tokens]], device="cuda")
        logps_T = exact(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        truth += logps_T[len(prompt) - 1 :].tolist()
        engine += sequence.logprobs
        update += scored[number].prompt_logprobs[len(prompt) :]

    def gap(one, other):
        return float((torch.tensor(one) - torch.tensor(other)).abs().mean())

    print(f"rank {RANKS[name]}: engine {gap(engine, truth):.1e}, update {gap(update, truth):.1e} from fp32")
    assert gap(engine, truth) < 1.2 * gap(update, truth)
    assert gap(engine, update) < 2 * gap(update, truth)


def test_a_teacher_takes_turns_with_the_model_that_trains(tmp_path):
    """Each engine gets back what the other took, with the steps that it had captured."""

    def engine(model):
        return PagedEngine(model, pad_token_id=0)

    def teacher():
        return tiny_base("teacher", base_model(384, 1), engine, "t", trainable=False)

    alone = tiny_backend(tmp_path / "alone", base_model(384, 1), make_engine=engine)
    expected = ask(alone, alone.sampler("tiny"))
    backend = tiny_backend(tmp_path / "both", base_model(), make_engine=engine, teachers=[teacher()])
    backend.create_model("a", lora())
    train(backend, "a")
    own, theirs = backend.save_for_sampler("a", None), backend.sampler("teacher")
    mine = drawn(ask(backend, own))
    for _ in range(2):
        assert drawn(ask(backend, theirs)) == drawn(expected)
        train(backend, "a")
        assert drawn(ask(backend, own)) == mine
    rows = [(PROMPTS[number // 3], result.sequences[0]) for number, result in expected.items()]
    asked = [request(theirs, (*p, *s.tokens), max_tokens=1, prompt_logprobs=True) for p, s in rows]
    scored = sampled(backend, asked)
    gaps = [
        abs(one - other)
        for number, (prompt, sequence) in enumerate(rows)
        for one, other in zip(scored[number].prompt_logprobs[len(prompt) :], sequence.logprobs, strict=True)
    ]
    print(f"log-probabilities of engine and update: {sum(gaps) / len(gaps):.1e} apart in the mean")
    assert sum(gaps) / len(gaps) < 0.05


def test_idle_adapters_wait_on_the_host_and_come_back_as_they_were(backend):
    a, b = (backend._adapters.get(name) for name in RANKS)
    assert next(iter(b.matrices.values())).is_cuda and not next(iter(a.matrices.values())).is_cuda
    before = {name: m.detach().clone() for name, m in a.matrices.items()}
    moments = {name: value.clone() for name, value in a.moments().items()}
    matrices = backend._adapters.use("a").matrices
    assert all(torch.equal(matrix.cpu(), before[name]) for name, matrix in matrices.items())
    assert all(torch.equal(value.cpu(), moments[name].cpu()) for name, value in a.moments().items())
    assert next(iter(a.matrices.values())).is_cuda
    assert not any(value.is_cuda for name, value in b.moments().items() if not name.endswith("/step"))
    train(backend, "a")
    assert backend.gauges()["adapters_on_device"] == 1


FAULT = """
import torch
from qerl_serve.worker import _gpu_is_lost

said = [_gpu_is_lost()]
place = torch.tensor([1 << 20], device="cuda")
said.append(_gpu_is_lost())
full = lambda: torch.empty(1 << 50, device="cuda")
beyond = lambda: torch.zeros(4, device="cuda")[place].tolist()
for ask in (full, beyond):
    try:
        ask()
    except RuntimeError:
        said.append(_gpu_is_lost())
print(said, flush=True)
"""


def test_a_fault_of_the_gpu_is_told_from_an_error_after_which_it_goes_on():
    """Before the GPU is used, where it works, where memory runs out, and behind an index out of range; in
    a process of its own, which can compute nothing more then."""
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n")[-2] == "[False, False, False, True]", done.stderr[-2000:]
