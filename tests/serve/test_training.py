"""Several adapters on one base: each trains as PEFT and torch's AdamW would train it alone."""

import pytest
import torch

from qerl.errors import QeRLError
from qerl.fp4.linear import PackedLinear
from qerl.lora.adapter import add_lora
from qerl.update.driver import LossDriver
from qerl_serve.seats import ALPHA
from qerl_serve.types import AdamParams
from tests.support.models import make_tiny_model, pack
from tests.support.serve import DATA, base_of, datum, lora, request, sampled, tiny_backend, weights

ADAM = AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)


def train(backend, model_id, steps=2, data=DATA, adam=ADAM):
    found = []
    for _ in range(steps):
        output = backend.forward_backward(model_id, data, "cross_entropy", {}, False)
        found.append((output.metrics["loss:sum"], backend.optim_step(model_id, adam)["grad_norm"]))
    return found


def same(one, other):
    assert one.keys() == other.keys()
    for name, matrix in one.items():
        assert torch.equal(matrix, other[name]), name


def reference():
    """The same adapter on the same base by PEFT alone, its parameters, and torch's AdamW of them."""
    model = add_lora(pack(make_tiny_model()), rank=8, alpha=ALPHA, dropout=0.0, seed=3)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )  # fmt: skip
    return model, parameters, optimizer


@pytest.mark.parametrize("exactly", [True, False])
def test_a_model_trains_as_peft_and_torch_do(tmp_path, exactly):
    """Bit for bit where gradients are the driver's, and closely where they are plain autograd's."""
    backend = tiny_backend(tmp_path, pack(make_tiny_model()))
    backend.create_model("a", lora(rank=8, seed=3))
    model, parameters, optimizer = reference()
    data = DATA if exactly else DATA[:1]
    driver = LossDriver(model)
    for loss, norm in train(backend, "a", steps=3, data=data):
        if exactly:
            expected = driver.forward_backward(data, "cross_entropy").metrics["loss:sum"]
        else:
            logits_TV = model(input_ids=data[0].tokens[None]).logits[0]
            targets_T1 = data[0].inputs["target_tokens"][:, None]
            total = -logits_TV.log_softmax(-1).gather(-1, targets_T1).sum()
            total.backward()
            expected = total.item()
        expected_norm = torch.nn.utils.clip_grad_norm_(parameters, ADAM.grad_clip_norm).item()
        optimizer.step()
        optimizer.zero_grad()
        tolerance = 0 if exactly else 1e-6
        assert (loss, norm) == pytest.approx((expected, expected_norm), rel=tolerance, abs=0)
    trained = weights(backend, "a")
    for name, parameter in model.named_parameters():
        if "lora" in name:
            found = trained[name.replace(".default", "")]
            torch.testing.assert_close(found, parameter.data, rtol=0, atol=tolerance)


def test_layers_that_are_computed_again_train_the_same(tmp_path):
    found, passes = [], []
    for folder, again in (("kept", False), ("again", True)):
        backend = tiny_backend(tmp_path / folder)
        if again:
            backend._seats.recompute_layers()
        backend.create_model("a", lora())
        passes.append([])
        mlp = base_of(backend).model.layers[0].mlp
        mlp.register_forward_pre_hook(lambda *_, seen=passes[-1]: seen.append(1))
        found.append((train(backend, "a"), weights(backend, "a")))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])
    assert len(passes[1]) == 2 * len(passes[0])


def test_no_layer_is_computed_again_with_an_n_above_their_number(tmp_path):
    backend = tiny_backend(tmp_path, make_tiny_model(num_hidden_layers=2))
    for n, expected in ((2, [True, False]), (3, [False, False]), (1, [True, True])):
        backend._seats.recompute_layers(n)
        assert [layer.gradient_checkpointing for layer in base_of(backend).model.layers] == expected


def test_layers_keep_their_activations_until_memory_runs_out(tmp_path):
    every = tiny_backend(tmp_path / "every", make_tiny_model(num_hidden_layers=2))
    every._seats.recompute_layers()
    every.create_model("a", lora())
    wanted = train(every, "a")
    backend = tiny_backend(tmp_path / "some", make_tiny_model(num_hidden_layers=2))
    backend._seats.recompute_layers(2)
    backend.create_model("a", lora())
    passes, full = ([], []), False

    def count(at):
        passes[at].append(1)
        if full and at == 1 and len(passes[1]) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for at, layer in enumerate(base_of(backend).model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, at=at: count(at))
    found = train(backend, "a", steps=1)
    assert [len(seen) for seen in passes] == [2, 1]
    full = True
    [seen.clear() for seen in passes]
    found += train(backend, "a", steps=1)
    assert [len(seen) for seen in passes] == [1 + 2, 1 + 2]  # cut off, then with both computed again
    assert not backend._seats.recompute_every_layer()
    assert found == wanted
    same(weights(backend, "a"), weights(every, "a"))


def test_models_of_other_ranks_do_not_touch_each_other(tmp_path):
    ids = {"a": lora(rank=8), "b": lora(rank=4, seed=5), "c": lora(rank=4, seed=5, train_mlp=False)}
    alone = {}
    for name, params in ids.items():
        backend = tiny_backend(tmp_path / name)
        backend.create_model(name, params)
        alone[name] = train(backend, name), weights(backend, name)
    together = tiny_backend(tmp_path, resident=1)
    for name, params in ids.items():
        together.create_model(name, params)
    found = {name: [] for name in ids}
    for _ in range(2):
        for name in ids:  # gradients of all gather before any of them steps
            found[name].append(together.forward_backward(name, DATA, "cross_entropy", {}, False))
        for name in ids:
            norm = together.optim_step(name, ADAM)["grad_norm"]
            found[name][-1] = found[name][-1].metrics["loss:sum"], norm
    for name, (metrics, trained) in alone.items():
        assert found[name] == metrics
        same(weights(together, name), trained)
    assert not any("mlp" in name for name in weights(together, "c"))


def test_the_same_seed_begins_with_the_same_weights(tmp_path):
    backend = tiny_backend(tmp_path)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        backend.create_model(name, lora(seed=seed))
    same(weights(backend, "a"), weights(backend, "b"))
    first = next(iter(weights(backend, "a")))
    assert not torch.equal(weights(backend, "a")[first], weights(backend, "c")[first])


def test_between_uses_the_model_is_its_base(tmp_path):
    backend = tiny_backend(tmp_path, pack(make_tiny_model()))
    model, ids = backend._seats.model, torch.tensor([[5, 6, 7]])
    before = model(input_ids=ids).logits
    backend.create_model("a", lora())
    train(backend, "a")
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    held = sum(p.untyped_storage().nbytes() for n, p in model.named_parameters() if "lora" in n)
    assert held < 1000
    assert any(isinstance(module, PackedLinear) for module in model.modules())


def test_gradients_gather_until_a_step_and_a_pass_without_gradients_leaves_them(tmp_path):
    backend = tiny_backend(tmp_path)
    for name in ("a", "b"):
        backend.create_model(name, lora())
    backend.forward_backward("a", DATA[:1], "cross_entropy", {}, False)
    backend.forward_backward("a", DATA, "cross_entropy", {}, True)
    backend.forward_backward("a", DATA[2:], "cross_entropy", {}, False)
    for part in (DATA[:1], DATA[2:]):
        backend.forward_backward("b", part, "cross_entropy", {}, False)
    norms = [backend.optim_step(name, ADAM)["grad_norm"] for name in ("a", "b")]
    assert norms[0] == norms[1]
    with pytest.raises(QeRLError, match=r"no gradients.*forward_backward"):
        backend.optim_step("a", ADAM)
    assert backend._adapters.get("a").steps == 1


def test_gradients_that_are_not_finite_end_in_a_sentence(tmp_path):
    backend = tiny_backend(tmp_path)
    backend.create_model("a", lora())
    before = weights(backend, "a")
    backend.forward_backward("a", DATA, "cross_entropy", {}, False)
    next(iter(backend._adapters.get("a").matrices.values())).grad[0] = float("inf")
    with pytest.raises(QeRLError, match="not finite"):
        backend.optim_step("a", ADAM)
    same(weights(backend, "a"), before)
    train(backend, "a", steps=1)


@pytest.mark.parametrize(
    ("steps", "adam"),
    [
        (0, AdamParams(eps=0.0)),  # B is 0 in the beginning, so A has no gradient: 0 / 0
        (1, AdamParams(1e18, weight_decay=1e18)),
        (0, AdamParams(1e38)),  # which AdamW divides by 1 - beta1, and then it is no float32
        (1, AdamParams(1e38)),
    ],
)
def test_a_step_that_would_destroy_the_weights_is_not_taken(tmp_path, steps, adam):
    """Whatever fails in it, the model goes on as one that was never asked for it."""
    backend = tiny_backend(tmp_path)
    for name in "ab":
        backend.create_model(name, lora())
        train(backend, name, steps)
    backend.forward_backward("a", DATA[:1], "cross_entropy", {}, False)
    with pytest.raises((QeRLError, RuntimeError), match=r"not finite|without overflow"):
        backend.optim_step("a", adam)
    same(weights(backend, "a"), weights(backend, "b"))
    assert train(backend, "a") == train(backend, "b")
    same(weights(backend, "a"), weights(backend, "b"))


BAD = (
    (lambda b: b.create_model("a", lora()), "already"),
    (lambda b: b.create_model("b", lora(rank=17)), "1 to 16"),
    (lambda b: b.create_model("b", lora(rank=0)), "1 to 16"),
    (lambda b: b.create_model("b", lora(train_attn=False, train_mlp=False)), "No layers"),
    (lambda b: b.optim_step("z", ADAM), "no model z"),
    (lambda b: b.forward_backward("z", DATA, "cross_entropy", {}, False), "no model z"),
    (lambda b: b.forward_backward("a", [datum([5] * 514)], "cross_entropy", {}, False), "513 tokens"),
    (lambda b: b.forward_backward("a", [datum([5, 128, 5])], "cross_entropy", {}, False), "id 128"),
    (lambda b: b.forward_backward("a", DATA, "stable_reinforce", {}, False), "stable_reinforce"),
    (lambda b: b.drop("z"), "no model z"),
    (lambda b: [b.create_model(name, lora()) for name in "bcde"], "4 models"),
)


def test_what_cannot_be_done_is_a_sentence_and_changes_nothing(tmp_path):
    backend = tiny_backend(tmp_path)
    backend.create_model("a", lora())
    before = weights(backend, "a")
    for call, sentence in BAD:
        with pytest.raises(QeRLError, match=sentence):
            call(backend)
    same(weights(backend, "a"), before)


def test_a_dropped_model_is_gone_and_its_snapshots_are_not(tmp_path):
    backend = tiny_backend(tmp_path)
    backend.create_model("a", lora())
    train(backend, "a")
    key = backend.save_for_sampler("a", None)
    before = sampled(backend, [request(key)])
    backend.drop("a")
    assert sampled(backend, [request(key)]) == before
    backend.create_model("a", lora())


def test_dropped_gradients_leave_no_trace(tmp_path):
    backend = tiny_backend(tmp_path)
    for model_id in "ab":
        backend.create_model(model_id, lora())
    backend.forward_backward("a", DATA[:2], "cross_entropy", {}, False)
    assert backend.drop_gradients("a")
    assert not backend.drop_gradients("a") and not backend.drop_gradients("nobody")
    assert train(backend, "a") == train(backend, "b")
