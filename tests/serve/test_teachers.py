"""Teachers of a server: models beside the one that trains, which are sampled from and score.

Their log-probabilities are compared with transformers in double precision on tokens that each run draws anew.
"""

import secrets

import pytest

pytest.importorskip("google.protobuf", reason="needs the extra serve")
pytest.importorskip("starlette", reason="needs the extra serve")

import torch

from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.models.decide import Loading
from qerl.models.hub import find_model
from qerl.models.load import load_model
from qerl.noise.schedule import NoiseSchedule
from qerl_serve.adapters import Adapters
from qerl_serve.backend import ModelBackend
from qerl_serve.checkpoints import Store
from qerl_serve.open import BackendOptions, open_backend
from qerl_serve.types import AdamParams
from tests.support.families import MIXTURE, tiny
from tests.support.http import connected
from tests.support.models import make_tiny_model, make_tiny_tokenizer, replace_projections
from tests.support.serve import DATA, lora, request, sampled, small_model, tiny_backend, tiny_base

VOCABULARY, POSITIONS = 160, 96
BOUND = 5e-5
"""Of fp32 log-probabilities against those in double; the largest difference that was seen is a fifth."""


def other_model(seed=1):
    """A teacher that has neither the width, the vocabulary nor the positions of the model that trains."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": VOCABULARY}
    return make_tiny_model("qwen3", seed, **sizes, max_position_embeddings=POSITIONS)


def teacher(seed=1, name="teacher", fingerprint="t"):
    return tiny_base(
        name, other_model(seed), fingerprint=fingerprint, max_context_length=POSITIONS, trainable=False
    )


def taught(folder, **options) -> ModelBackend:
    return tiny_backend(folder, teachers=[teacher()], **options)


def train(backend, model_id="a", steps=1):
    for _ in range(steps):
        backend.forward_backward(model_id, DATA, "cross_entropy", {}, False)
        backend.optim_step(model_id, AdamParams(learning_rate=3e-2))


def drawn(*lengths, vocabulary=VOCABULARY):
    """Prompts of these lengths, others in each run; those of one length begin alike."""
    seed = secrets.randbits(32)
    print(f"seed of the prompts: {seed}")
    generator = torch.Generator().manual_seed(seed)
    starts = {n: torch.randint(2, vocabulary, (n // 2,), generator=generator) for n in set(lengths)}
    ends = [torch.randint(2, vocabulary, (n - n // 2,), generator=generator) for n in lengths]
    return [(*starts[n].tolist(), *end.tolist()) for n, end in zip(lengths, ends, strict=True)]


@torch.no_grad()
def rows(model, prompt):
    """Log-probabilities of all tokens behind each token of a prompt but the last, [T - 1, V], in double."""
    ids_1T = torch.tensor([prompt])
    return model.double()(input_ids=ids_1T, use_cache=False).logits[0, :-1].log_softmax(dim=-1)


def scores(prompt, key, k=3):
    return request(key, prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=k)


def check_scores(results, prompts, model):
    for result, prompt in zip(results, prompts, strict=True):
        expected_TV = rows(model, prompt)
        own_T = expected_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert result.prompt_logprobs[1:] == pytest.approx(own_T.tolist(), abs=BOUND)
        best = expected_TV.topk(3, dim=-1)
        assert result.topk_prompt_logprobs[0] == []
        for found, values, tokens in zip(
            result.topk_prompt_logprobs[1:], best.values, best.indices, strict=True
        ):
            assert [token for token, _ in found] == tokens.tolist()
            assert [value for _, value in found] == pytest.approx(values.tolist(), abs=BOUND)


def test_a_teacher_scores_as_transformers_does_whatever_trains_beside_it(tmp_path):
    backend = taught(tmp_path)
    backend.create_model("a", lora())
    train(backend, steps=2)
    key, prompts = backend.sampler("teacher"), drawn(40, 7, 40, 2, POSITIONS - 1)
    found = sampled(backend, [scores(prompt, key) for prompt in prompts])
    check_scores([found[n] for n in range(len(prompts))], prompts, other_model())
    (prompt,) = drawn(12)
    asked = request(key, prompt, seed=secrets.randbits(30), max_tokens=9, num_samples=3)
    for sequence in sampled(backend, [asked])[0].sequences:
        whole = (*prompt, *sequence.tokens)
        own_T = rows(other_model(), whole).gather(1, torch.tensor(whole[1:])[:, None])[:, 0]
        assert list(sequence.logprobs) == pytest.approx(own_T[len(prompt) - 1 :].tolist(), abs=BOUND)


@pytest.mark.parametrize("kept", [True, False])
def test_requests_to_several_models_get_what_each_gets_alone(tmp_path, kept):
    second = teacher(2, "second", "u")
    backend = tiny_backend(tmp_path, teachers=[teacher(), second], enable_prefix_caching=kept)
    backend.create_model("a", lora())
    train(backend)
    keys = [backend.save_for_sampler("a", None), *map(backend.sampler, ("teacher", "tiny", "second"))]
    prompts = [(5, 9, 77), (8,), (64, 7, 8, 9, 30)]
    asked = [scores(prompt, key) for prompt in prompts for key in keys]
    asked += [request(key, prompt, seed) for seed in (1, 2) for prompt in prompts for key in keys]
    alone = [sampled(backend, [each])[0] for each in asked]
    held, opened = [], []
    for base in backend._hosts:
        spy(base, held, opened)
    together = sampled(backend, asked[:5], [(), asked[5:13], asked[13:]])
    for n, expected in enumerate(alone):
        (mine,), (own,) = together[n].sequences, expected.sequences
        assert mine.tokens == own.tokens and mine.logprobs == pytest.approx(own.logprobs, abs=BOUND)
        if n < len(prompts) * len(keys):
            logprobs = together[n].prompt_logprobs[1:], expected.prompt_logprobs[1:]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=BOUND)
            assert together[n].topk_prompt_logprobs == expected.topk_prompt_logprobs
    assert len({sequence.tokens[0] for each in alone for sequence in each.sequences}) > 4
    assert len(set(opened)) == 3
    for key in keys:
        sampled(backend, [request(key, prompts[0])])
        assert held == (opened[-1:] if kept else [])
    train(backend)
    assert held == []


def spy(base, held, opened):
    """Let an engine note its name in ``held`` while it may hold keys and values, and check that no other
    does."""
    session, release = base.engine.session, base.engine.release

    def opens(*args, **kwargs):
        assert set(held) <= {base.name}
        held[:] = [base.name]
        opened.append(base.name)
        return session(*args, **kwargs)

    def releases():
        held.clear()
        release()

    base.engine.session, base.engine.release = opens, releases


def test_an_adapter_of_the_teacher_runs_on_the_teacher(tmp_path):
    base = tiny_base("teacher", other_model(), fingerprint="t", max_context_length=POSITIONS)
    facts = {"base": "teacher", "fingerprint": "t", "dtype": "float32"}
    first = ModelBackend(base, Adapters(base.seats, 4, 2), Store(tmp_path, facts, {"model": "teacher"}))
    first.create_model("s:train:0", lora(rank=4))
    train(first, "s:train:0", 3)
    path = first.save_for_sampler("s:train:0", "able")
    prompts = drawn(9, 20)
    expected = sampled(first, [scores(prompt, first.sampler(path)) for prompt in prompts])
    plain = sampled(first, [scores(prompt, first.sampler("teacher")) for prompt in prompts])
    first.close()
    backend = taught(tmp_path, noise=NoiseSchedule(0.5, 0.1, 2, 4))  # which teachers have none of
    assert backend.weights_info(path).base_model == "teacher"
    for keys in ([path], [path, "teacher"]):
        found = sampled(backend, [scores(prompt, backend.sampler(*keys)) for prompt in prompts])
        for n in range(2):
            assert found[n].prompt_logprobs[1:] == expected[n].prompt_logprobs[1:]
            assert found[n].prompt_logprobs[1:] != plain[n].prompt_logprobs[1:]
    key = backend.sampler(path)
    (sample,) = sampled(backend, [request(key, prompts[0])])[0].sequences
    again = sampled(backend, [scores((*prompts[0], *sample.tokens), key)])[0]
    assert list(sample.logprobs) == pytest.approx(again.prompt_logprobs[len(prompts[0]) :], abs=BOUND)
    for refused in (
        lambda: backend.sampler(path, "tiny"),
        lambda: backend.load_state("s:train:1", path, False),
    ):
        with pytest.raises(QeRLError, match=r"was trained on teacher, whose norms .* not those of tiny;"):
            refused()
    own = backend.sampler("tiny")
    assert sampled(backend, [request(own)])[0].sequences  # and goes on


def test_weights_that_fit_two_models_run_on_the_one_that_is_named(tmp_path):
    """The same model in 16 bits may teach its packed copy; an adapter of it fits both."""
    copy = tiny_base("copy", small_model(), max_context_length=POSITIONS, trainable=False)
    backend = tiny_backend(tmp_path, teachers=[copy])
    backend.create_model("s:train:0", lora(rank=4))
    train(backend, "s:train:0")
    path = backend.save_for_sampler("s:train:0", "x")
    assert backend.weights_info(path).base_model == "tiny"
    bases = [backend._policies[backend.sampler(path, name)][0].name for name in (None, "tiny", "copy")]
    assert bases == ["tiny", "tiny", "copy"]


def test_what_a_teacher_cannot_read_is_refused(tmp_path):
    backend = taught(tmp_path)
    key, own = backend.sampler("teacher"), backend.sampler("tiny")
    asked = [
        scores((5, VOCABULARY - 1), key),
        scores((5, VOCABULARY), key),
        scores((5, 128), own),
        request(key, (5,) * POSITIONS),
        scores((5,) * POSITIONS, own),
    ]
    found = sampled(backend, asked)
    assert f"The prompt has the id {VOCABULARY}, and this model has {VOCABULARY} tokens" in str(found[1])
    assert "The prompt has the id 128, and this model has 128 tokens" in str(found[2])
    assert f"this model has {POSITIONS} positions" in str(found[3])
    assert len(found[0].prompt_logprobs) == 2 and len(found[4].prompt_logprobs) == POSITIONS
    with pytest.raises(QeRLError, match="no model 'unknown', but tiny or teacher"):
        backend.sampler("unknown")


def dense_double(folder, weights):
    """The model of a folder in this format, its linears dequantised and all of it in double."""

    def layer(linear):
        assert isinstance(linear, PackedLinear) and linear.format.name == weights
        dense = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)
        dense.weight.data = linear.dense().double()
        return dense

    model = load_model(find_model(str(folder)), weights, dtype=torch.float32, device="cpu")
    return replace_projections(model, layer).double()


def test_a_packed_teacher_beside_a_packed_student(tmp_path, monkeypatch):
    for name, model in (("student", make_tiny_model()), ("teacher", make_tiny_model(hidden_size=96, seed=3))):
        model.save_pretrained(tmp_path / name)
        make_tiny_tokenizer().save_pretrained(tmp_path / name)
    student, large = str(tmp_path / "student"), str(tmp_path / "teacher")
    backend = open_backend(
        BackendOptions(student, tmp_path / "out", teachers=(large,), teacher_weights="mxfp4", max_rank=8)
    )
    assert [(model.name, model.trainable) for model in backend.models] == [(student, True), (large, False)]
    prompts = drawn(17, 30, vocabulary=100)
    for folder, weights in ((student, "nvfp4"), (large, "mxfp4")):
        found = sampled(backend, [scores(prompt, backend.sampler(folder)) for prompt in prompts])
        check_scores([found[0], found[1]], prompts, dense_double(folder, weights))
    backend.close()
    with pytest.raises(QeRLError, match=r"--teacher .* has the name of another served model"):
        open_backend(BackendOptions(student, tmp_path / "out", teachers=(student,)))
    load = Loading.load

    def loaded(loading):
        if loading.model.name == large:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return load(loading)

    monkeypatch.setattr(Loading, "load", loaded)
    with pytest.raises(QeRLError, match=r"The teacher .* does not fit on this GPU beside .*`qerl plan "):
        open_backend(BackendOptions(student, tmp_path / "out", teachers=(large,)))


@torch.no_grad()
def test_a_mixture_of_experts_teaches(tmp_path):
    (prompt,) = drawn(40, vocabulary=100)
    base = tiny_base("teacher", tiny(MIXTURE), fingerprint="t", trainable=False)
    backend = tiny_backend(tmp_path / "a", teachers=[base])
    check_scores([sampled(backend, [scores(prompt, backend.sampler("teacher"))])[0]], [prompt], tiny(MIXTURE))
    for name, model in (("student", make_tiny_model()), ("mixture", tiny(MIXTURE))):
        model.save_pretrained(tmp_path / name)
        make_tiny_tokenizer().save_pretrained(tmp_path / name)
    mixture = str(tmp_path / "mixture")
    backend = open_backend(BackendOptions(str(tmp_path / "student"), tmp_path / "out", teachers=(mixture,)))
    found = sampled(backend, [scores(prompt, backend.sampler(mixture))])[0]
    packed = load_model(find_model(mixture), "nvfp4", dtype=torch.float32, device="cpu")
    rows_TV = packed(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(dim=-1)
    own_T = rows_TV.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert found.prompt_logprobs[1:] == pytest.approx(own_T.tolist(), abs=BOUND)


def test_clients_ask_for_a_teacher_by_its_name_and_do_not_train_it(tmp_path):
    with connected(tmp_path, taught(tmp_path / "saved"), context=512) as client:
        supported = client.http.get("/api/v1/get_server_capabilities").json()["supported_models"]
        names = [(each["model_name"], each["max_context_length"], each["trainable"]) for each in supported]
        assert names == [("tiny", 512, True), ("teacher", POSITIONS, False)]
        assert all(each["sampleable"] for each in supported)
        model, said = client.model(), "is a teacher on this server"
        new = {"session_id": client.session, "model_seq_id": 1, "base_model": "teacher"}
        assert said in client.ask("create_model", **new, lora_config={"rank": 4})["error"]
        path = client.ask("save_weights_for_sampler", model_id=model, seq_id=1, path="x")["path"]
        assert said in client.ask("load_weights", **new | {"path": path, "model_seq_id": 2})["error"]

        def sampler(number, **of):
            asked = {"session_id": client.session, "sampling_session_seq_id": number, **of}
            return client.raw("create_sampling_session", **asked)

        ids = []
        for number, of in enumerate(
            ({"base_model": "teacher"}, {"base_model": "tiny"}, {"model_path": path})
        ):
            ids.append(sampler(number, **of).json()["sampling_session_id"])
            base = client.http.get(f"/api/v1/samplers/{ids[-1]}").json()["base_model"]
            assert base == of.get("base_model", "tiny")
        refused = sampler(7, base_model="teacher", model_path=path)
        assert refused.status_code == 400 and "are not those of teacher;" in refused.json()["detail"]
        refused = sampler(8, base_model="unknown", model_path=path)
        assert refused.status_code == 400 and "it serves tiny, teacher" in refused.json()["detail"]

        def sample(sampler_id, tokens):
            body = {"prompt": {"chunks": [{"tokens": [5] * tokens}]}, "sampling_params": {"max_tokens": 1}}
            return client.ask("asample", sampling_session_id=sampler_id, **body, prompt_logprobs=True)

        assert f"exceed the {POSITIONS} tokens of the context" in sample(ids[0], POSITIONS)["error"]
        assert all(
            isinstance(sample(*asked), bytes) for asked in [(ids[0], POSITIONS - 1), (ids[1], POSITIONS)]
        )
