"""The loss driver gives the log-probabilities and gradients of plain forward passes, however data are
divided, and leaves gradients alone where it raises.
"""

import copy
import math

import pytest
import torch

from qerl.errors import QeRLError
from qerl.lora.adapter import add_lora
from qerl.update import head
from qerl.update.chunks import MemoryRetry
from qerl.update.driver import CPU_TOKENS, LossDriver
from qerl.update.losses import LOSSES, Datum
from tests.support.models import make_tiny_model, move_adapter, pack
from tests.update.test_row_check import ATTENTIONS, build

VOCABULARY = 128
ROUNDING = 1e-5
"""Of a gradient in FP32, relative to its norm: a plain forward pass in FP32 is 3e-6 from one in float64;
wrong masks, positions or weights are off by 1e-2 and more."""


def adapted(model):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return move_adapter(add_lora(model, rank=4, alpha=8, dropout=0.0))


@pytest.fixture(scope="module")
def model():
    return adapted(pack(make_tiny_model()))


@pytest.fixture
def driver(model):
    model.zero_grad()
    return LossDriver(model)


def ids(draw, *shape):
    return torch.randint(VOCABULARY, shape, generator=draw)


def samples(loss: str, lengths=((7, (5, 3, 9)), (4, (6, 1)), (1, (8,))), seed: int = 0) -> list[Datum]:
    """Samples of prompts as separate sequences with the inputs of a loss, those of a prompt not together."""
    draw, out = torch.Generator().manual_seed(seed), []
    for prompt_tokens, completions in lengths:
        prompt = ids(draw, prompt_tokens)
        for n in completions:
            tokens = torch.cat([prompt, ids(draw, n)])
            in_completion = (torch.arange(len(tokens) - 1) >= prompt_tokens - 1).float()
            numbers = {
                "weights": torch.rand(len(tokens) - 1, generator=draw) * in_completion,
                "logprobs": -4 - torch.rand(len(tokens) - 1, generator=draw),
                "advantages": torch.randn(1, generator=draw) * in_completion,
                "sequence_ratio_mask": in_completion,
            }
            read = {name: numbers[name] for name in LOSSES[loss].inputs}
            out.append(Datum(tokens[:-1], {"target_tokens": tokens[1:]} | read))
    return out[::2] + out[1::2]


def gradients(model) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]


def distance(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    assert len(found) == len(wanted) > 0
    error = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return math.sqrt(error / sum(float(b.double().square().sum()) for b in wanted))


def plainly(model, data, loss="cross_entropy", config=None):
    """Loss, log-probabilities and gradients from one plain forward pass per datum and autograd."""
    model.zero_grad()
    total, logprobs = 0.0, []
    for datum in data:
        logps_TV = model(input_ids=datum.tokens[None]).logits[0].log_softmax(-1)
        targets = datum.inputs["target_tokens"]
        logps = logps_TV.gather(1, targets.view(len(targets), -1)).view(targets.shape)
        value, pull = LOSSES[loss](logps, datum, config or {})
        logps.backward(pull.to(logps.dtype))
        total += value
        logprobs.append(logps.detach().float())
    found = gradients(model)
    model.zero_grad()
    return total, logprobs, found


def check_against(plain, output, found, bound=ROUNDING):
    total, logprobs, wanted = plain
    assert output.metrics == {"loss:sum": pytest.approx(total, rel=1e-5)}
    for one, other in zip(output.logprobs, logprobs, strict=True):
        assert one.dtype == torch.float32 and one.device.type == "cpu"
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5)
    off = distance(found, wanted)
    print(f"gradients {off:.1e} apart")
    assert off < bound


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_plain_forward_passes_in_float64(loss):
    model = adapted(make_tiny_model())
    data = samples(loss)
    output = LossDriver(model).forward_backward(data, loss)
    found = gradients(model)
    check_against(plainly(copy.deepcopy(model).double(), data, loss), output, found)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "llama4-chunks"])
def test_every_kind_of_attention_and_head_in_full_tuning(name):
    """Windows, soft caps, scaled logits, sinks; the head's own weights train too."""
    family, attention, changes = ATTENTIONS[name]
    model = build(family, attention, **changes)
    data = samples("cross_entropy", ((13, (5, 3)), (5, (4,))))
    wanted = plainly(model, data)
    output = LossDriver(model).forward_backward(data, "cross_entropy")
    check_against(wanted, output, gradients(model), 2e-5)


def test_a_pass_on_a_cpu_is_bounded_unless_asked_otherwise(model, driver, monkeypatch):
    passes = []
    monkeypatch.setattr(
        MemoryRetry, "note_forward", lambda _, rows, lengths: passes.append(lengths.tokens(rows))
    )
    data = samples("cross_entropy", [(2, (90,) * 12)])  # 2 + 12 * 89 tokens, joined
    driver.forward(data, "cross_entropy")
    assert len(passes) == 3 and max(passes) <= CPU_TOKENS
    passes.clear()
    LossDriver(model, tokens_per_forward=2000).forward(data, "cross_entropy")
    assert len(passes) == 1


def test_any_division_of_the_data_gives_the_same_gradient(model, driver):
    data = samples("importance_sampling")
    whole = driver.forward_backward(data, "importance_sampling")
    one = gradients(model)
    check_against(plainly(model, data, "importance_sampling"), whole, one)

    def divided(tokens_per_forward, *calls):
        divider = LossDriver(model, tokens_per_forward=tokens_per_forward)
        model.zero_grad()
        outputs = [divider.forward_backward(call, "importance_sampling") for call in calls]
        total = sum(output.metrics["loss:sum"] for output in outputs)
        assert total == pytest.approx(whole.metrics["loss:sum"], rel=1e-5)
        off = distance(gradients(model), one)
        print(f"gradients {off:.1e} apart")
        assert off < ROUNDING

    divided(20, data)
    divided(1, data)
    divided(None, data[::-1])
    divided(None, data[:3], data[3:])
    divided(None, *([datum] for datum in data))


def test_the_same_call_gives_the_same_bits(model, driver):
    data = samples("ppo")
    first = driver.forward_backward(data, "ppo")
    one = gradients(model)
    model.zero_grad()
    again = driver.forward_backward(data, "ppo")
    assert first.metrics == again.metrics
    assert all(map(torch.equal, one, gradients(model)))
    assert all(map(torch.equal, first.logprobs, again.logprobs))


def rows_of(model, lengths, graphs=None):
    def watch(_module, inputs):
        lengths.append(inputs[0].size(1))
        if graphs is not None:
            graphs.append(torch.is_grad_enabled())

    return model.get_input_embeddings().register_forward_pre_hook(watch)


def test_a_shared_beginning_is_computed_once(model, driver):
    data, lengths = samples("cross_entropy"), []
    handle = rows_of(model, lengths)
    driver.forward_backward(data, "cross_entropy")
    LossDriver(model, tokens_per_forward=25).forward(data, "cross_entropy")
    handle.remove()
    alone = sum(len(datum.tokens) for datum in data)
    # Prompts of 7, 4 and 1 tokens with 3, 2 and 1 samples. One sample has a completion of one token, which is
    # no input: it is its prompt, and keeps the last token of it.
    assert lengths[0] == alone - 2 * 7 - 1 * (4 - 1)
    assert max(lengths[-2:]) <= 25, "chunks"


def test_data_that_pull_at_nothing_run_without_a_graph(model, driver):
    data = samples("ppo")
    for datum in data[:4]:
        datum.inputs["advantages"].zero_()
    lengths, graphs = [], []
    handle = rows_of(model, lengths, graphs)
    output = driver.forward_backward(data, "ppo")
    handle.remove()
    assert graphs == [True, False]
    found = gradients(model)
    check_against(plainly(model, data, "ppo"), output, found)


def test_without_any_pull_gradients_are_zero_and_there(model, driver):
    data = samples("ppo")
    for datum in data:
        datum.inputs["advantages"].zero_()
    driver.forward_backward(data, "ppo")
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters() if p.requires_grad)


def test_soft_targets_of_any_number_beside_hard_ones(model, driver):
    draw, data = torch.Generator().manual_seed(0), samples("cross_entropy")
    for at, k in ((1, 3), (4, 1)):
        n = len(data[at].tokens)
        inputs = {"target_tokens": ids(draw, n, k), "weights": torch.rand(n, k, generator=draw)}
        data[at] = Datum(data[at].tokens, inputs)
    output = driver.forward_backward(data, "cross_entropy")
    assert [tuple(logps.shape) for logps in output.logprobs] == [
        tuple(datum.inputs["target_tokens"].shape) for datum in data
    ]
    found = gradients(model)
    check_against(plainly(model, data), output, found)


def test_a_head_in_tiles_is_the_whole_head(model, driver, monkeypatch):
    data = samples("cispo")
    plain = plainly(model, data, "cispo")
    monkeypatch.setattr(head, "TILE", 3 * VOCABULARY)
    output = driver.forward_backward(data, "cispo")
    check_against(plain, output, gradients(model))


def test_forward_has_no_gradients_and_leaves_the_model_as_it_was(model, driver):
    data = samples("cross_entropy")
    modes = [module.training for module in model.modules()]
    output = driver.forward(data, "cross_entropy")
    assert not gradients(model)
    again = driver.forward_backward(data, "cross_entropy")
    assert output.metrics == again.metrics
    assert all(map(torch.equal, output.logprobs, again.logprobs))
    assert [module.training for module in model.modules()] == modes


def test_gradients_of_calls_add_up_even_within_no_grad(model, driver):
    first, second = samples("dro"), samples("cross_entropy", seed=1)
    with torch.no_grad():
        driver.forward_backward(first, "dro", {"beta": 0.2})
        driver.forward_backward(second, "cross_entropy")
    found = gradients(model)
    one, other = plainly(model, first, "dro", {"beta": 0.2})[2], plainly(model, second)[2]
    assert distance(found, list(map(torch.add, one, other))) < ROUNDING


def test_a_loss_of_ones_own_goes_through_cross_entropy(model, driver):
    """Preference between two answers: a loss of two sequences at once, which no loss by name is."""
    data = [
        Datum(d.tokens, {**d.inputs, "weights": d.inputs["weights"] * 0}) for d in samples("cross_entropy")
    ]
    pair = data[:2]

    def preference(logprobs):
        better, worse = (logps.sum() for logps in logprobs)
        return -torch.nn.functional.logsigmoid(0.1 * (better - worse))

    logprobs = [logps.requires_grad_() for logps in driver.forward(pair, "cross_entropy").logprobs]
    preference(logprobs).backward()
    weighted = [
        Datum(datum.tokens, {**datum.inputs, "weights": -logps.grad})
        for datum, logps in zip(pair, logprobs, strict=True)
    ]
    driver.forward_backward(weighted, "cross_entropy")
    found = gradients(model)
    model.zero_grad()
    plain = []
    for datum in pair:
        logps_TV = model(input_ids=datum.tokens[None]).logits[0].log_softmax(-1)
        plain.append(logps_TV.gather(1, datum.inputs["target_tokens"][:, None])[:, 0])
    preference(plain).backward()
    assert distance(found, gradients(model)) < ROUNDING


# Memory


def test_layers_that_are_computed_again_give_the_same_gradient(model, driver):
    data = samples("ppo")
    driver.forward_backward(data, "ppo")
    wanted, lengths = gradients(model), []
    model.zero_grad()
    handle = (
        model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: lengths.append(1))
    )
    model.gradient_checkpointing_enable()
    driver.forward_backward(data, "ppo")
    model.gradient_checkpointing_disable()
    handle.remove()
    assert len(lengths) == 2, "forward, and again for backward"
    assert all(map(torch.equal, gradients(model), wanted))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_without_memory_is_done_again_in_smaller_chunks(model, driver, phase):
    data, lengths = samples("cross_entropy"), []
    wanted = driver.forward_backward(data, "cross_entropy")
    once = gradients(model)

    def fill(length):
        lengths.append(length)
        if length > 18:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def watch(_module, inputs, output):
        if phase == "forward":
            fill(inputs[0].size(1))
        else:
            output.requires_grad_().register_hook(lambda gradient: fill(gradient.size(1)))

    handle = model.get_input_embeddings().register_forward_hook(watch)
    output = driver.forward_backward(data, "cross_entropy")
    handle.remove()
    assert output.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-6)
    assert distance(gradients(model), [2 * gradient for gradient in once]) < ROUNDING
    assert lengths[0] > 18 >= driver.tokens_per_forward and max(lengths[-2:]) <= 18


def test_a_forward_pass_without_memory_changes_nothing_of_training(model):
    data, lengths, recomputed = samples("cross_entropy"), [], []

    def fill(_module, inputs, _output):
        lengths.append(inputs[0].size(1))
        if lengths[-1] > 18:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    driver = LossDriver(model, recompute_every_layer=lambda: not recomputed and not recomputed.append(1))
    limit = driver.tokens_per_forward
    wanted = driver.forward(data, "cross_entropy").metrics["loss:sum"]
    handle = model.get_input_embeddings().register_forward_hook(fill)
    found = driver.forward(data, "cross_entropy").metrics["loss:sum"]
    handle.remove()
    assert found == pytest.approx(wanted, rel=1e-6)
    assert lengths[0] > 18 >= max(lengths[-2:])
    assert driver.tokens_per_forward == limit and not recomputed

    def watch(_module, inputs, _output):
        lengths.append(inputs[0].size(1))

    driver.retry.max_tokens = 10
    handle, before = model.get_input_embeddings().register_forward_hook(watch), len(lengths)
    driver.forward(data, "cross_entropy")
    handle.remove()
    longest = max(len(datum.tokens) for datum in data)
    assert max(lengths[before:]) <= max(10, longest)


def test_where_one_sequence_does_not_fit_gradients_are_as_before(model, driver):
    data = samples("cross_entropy")
    driver.forward_backward(data, "cross_entropy")
    kept = [p.grad for p in model.parameters() if p.requires_grad]
    values = gradients(model)

    def fill(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    told = LossDriver(model, advice="ask whoever runs the server")
    handle = model.get_input_embeddings().register_forward_hook(fill)
    for one, advice in ((driver, "send shorter sequences"), (told, "ask whoever runs the server")):
        with pytest.raises(QeRLError, match=advice):
            one.forward_backward(data, "cross_entropy")
    handle.remove()
    now = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(a is b for a, b in zip(kept, now, strict=True)) and all(map(torch.equal, values, now))


# What is refused


def changed(at: int, tokens=None, **inputs) -> list[Datum]:
    data = samples("ppo")
    old = data[at]
    data[at] = Datum(old.tokens if tokens is None else tokens(old.tokens), dict(old.inputs) | inputs)
    return data


def long(_):
    return torch.zeros(513, dtype=torch.long)


LONG = {name: torch.zeros(513) for name in ("logprobs", "advantages")}
BAD = {
    "empty": (lambda: [], "There are no data"),
    "long": (
        lambda: changed(2, long, target_tokens=long(0), **LONG),
        r"Datum 2 of 6: it has 513 tokens and the model takes 512",
    ),
    "nan": (lambda: changed(1, advantages=torch.full((9,), math.nan)), "Datum 1 of 6: advantages"),
    "negative token": (lambda: changed(0, lambda t: t - 999), "Datum 0 of 6: tokens have the id -"),
    "unknown target": (
        lambda: changed(0, target_tokens=torch.full((11,), 128)),
        "target_tokens have the id 128, and the model knows 0 to 127",
    ),
    "infinite ratio": (
        lambda: changed(3, logprobs=torch.full((len(samples("ppo")[3].tokens),), -1e30)),
        "Datum 3 of 6: its loss is",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_refused_and_gradients_are_as_before(model, driver, case):
    make, message = BAD[case]
    driver.forward_backward(samples("ppo"), "ppo")
    before = gradients(model)
    with pytest.raises(QeRLError, match=message):
        driver.forward_backward(make(), "ppo")
    assert all(map(torch.equal, before, gradients(model)))


def test_bad_calls_are_refused(model, driver):
    with pytest.raises(QeRLError, match="no loss 'reinforce'"):
        driver.forward(samples("ppo"), "reinforce")
    with pytest.raises(QeRLError, match="no option 'beta'"):
        driver.forward(samples("ppo"), "ppo", {"beta": 1.0})
    with pytest.raises(QeRLError, match="set at least 1"):
        LossDriver(model, tokens_per_forward=0)
    with pytest.raises(QeRLError, match="No parameter of the model trains"):
        LossDriver(make_tiny_model().requires_grad_(False)).forward_backward(samples("ppo"), "ppo")
