"""Protobuf messages of the server: what a client may send, and what is refused."""

import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

pytest.importorskip("google.protobuf", reason="needs the extra serve")

from qerl.errors import QeRLError
from qerl.update.losses import LossOutput
from qerl_serve import descriptors as wire
from qerl_serve.limits import Limits
from qerl_serve.messages import loss_output_bytes, read_forward_backward, sample_bytes
from qerl_serve.types import SampledSequence, SampleResult

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")
LIMITS = Limits(context=32, elements=1000, datums=4)


def request(**fields: object) -> wire.ForwardBackwardRequest:
    return wire.ForwardBackwardRequest(model_id="s:train:0", seq_id=3, loss_fn="ppo", **fields)


def add_datum(message, tokens: list[int], **inputs: np.ndarray):
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.asarray(tokens, "<i4").tobytes()
    for name, array in inputs.items():
        tensor = datum.loss_fn_inputs.add(key=name).value
        tensor.dtype = wire.FLOAT32 if array.dtype.kind == "f" else wire.INT64
        tensor.shape.extend(array.shape)
        tensor.dense = array.astype("<f4" if array.dtype.kind == "f" else "<i8").tobytes()
    return datum


def read_data(message) -> list:
    return read_forward_backward(message.SerializeToString()).data(LIMITS)


def test_a_request_is_read_as_it_was_written():
    rng = np.random.default_rng(0)
    message = request(forward_only=True)
    entry = message.loss_fn_config_v2.add(key="beta")
    entry.value.number = 0.25
    message.loss_fn_config.add(key="clip_low_threshold", value=0.8)
    written = []
    for length in (1, 5, 32):
        inputs = {
            "target_tokens": rng.integers(0, 99, (length, 3)),
            "weights": rng.normal(size=(length, 3)).astype(np.float32),
        }
        written.append((rng.integers(0, 99, length), inputs))
        add_datum(message, *[written[-1][0].tolist()], **inputs)
    found = read_forward_backward(message.SerializeToString())
    assert (found.model_id, found.seq_id, found.loss, found.forward_only) == ("s:train:0", 3, "ppo", True)
    assert found.config() == {"clip_low_threshold": 0.8, "beta": 0.25}
    for datum, (tokens, inputs) in zip(found.data(LIMITS), written, strict=True):
        assert datum.tokens.dtype == torch.int64 and datum.tokens.tolist() == tokens.tolist()
        assert {name: tensor.tolist() for name, tensor in datum.inputs.items()} == {
            name: array.tolist() for name, array in inputs.items()
        }


def test_a_prompt_of_several_chunks_is_one_row():
    message = request()
    datum = add_datum(message, [1, 2])
    datum.model_input.add().encoded_text.tokens = np.asarray([3], "<i4").tobytes()
    assert read_data(message)[0].tokens.tolist() == [1, 2, 3]


def test_a_sparse_tensor_becomes_the_dense_one():
    rng = random.Random(0)
    for _ in range(50):
        rows, columns = rng.randint(1, 30), rng.randint(1, 30)
        dense = torch.zeros(rows, columns)
        for _ in range(rng.randint(0, 20)):
            dense[rng.randrange(rows), rng.randrange(columns)] = rng.random() + 1
        csr = dense.to_sparse_csr()
        message = request()
        tensor = add_datum(message, [1] * rows).loss_fn_inputs.add(key="weights").value
        tensor.dtype = wire.FLOAT32
        tensor.shape.extend(dense.shape)
        tensor.sparse_csr.values = csr.values().numpy().tobytes()
        tensor.sparse_csr.crow_indices = csr.crow_indices().numpy().astype("<i8").tobytes()
        tensor.sparse_csr.col_indices = csr.col_indices().numpy().astype("<i8").tobytes()
        assert torch.equal(read_data(message)[0].inputs["weights"], dense)


def broken(change: str):
    """A request with one sparse tensor [2, 3] in which something is wrong."""
    message = request()
    datum = add_datum(message, [1, 2])
    tensor = datum.loss_fn_inputs.add(key="weights").value
    tensor.dtype = wire.FLOAT32
    shape, crow, columns, values = [2, 3], [0, 1, 2], [0, 2], [1.0, 2.0]
    if change == "columns":
        columns = [0, 3]
    elif change == "negative column":
        columns = [-1, 0]
    elif change == "rows":
        crow = [0, 2]
    elif change == "falling rows":
        crow = [0, 3, 2]
    elif change == "values":
        values = [1.0]
    elif change == "size":
        shape = [2, 1 << 40]
    tensor.shape.extend(shape)
    tensor.sparse_csr.values = np.asarray(values, "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.asarray(crow, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.asarray(columns, "<i8").tobytes()
    return message


@pytest.mark.parametrize("change", ["columns", "negative column", "rows", "falling rows", "values", "size"])
def test_a_damaged_sparse_tensor_is_refused(change: str):
    with pytest.raises(QeRLError, match="Datum 0: weights"):
        read_data(broken(change))


def test_sparse_tensors_are_bounded_together_before_they_are_made_dense(monkeypatch):
    message, made = request(), []
    for _ in range(4):
        tensor = add_datum(message, [1] * 3).loss_fn_inputs.add(key="weights").value
        tensor.dtype = wire.FLOAT32
        tensor.shape.extend([3, 100])
        tensor.sparse_csr.crow_indices = np.zeros(4, "<i8").tobytes()
    zeros = np.zeros
    monkeypatch.setattr("qerl_serve.messages.np.zeros", lambda *args: made.append(args) or zeros(*args))
    with pytest.raises(QeRLError, match=r"Datum 3: weights .* limit of 1000 elements"):
        read_data(message)
    assert len(made) == 3
    del message.data[3]
    assert len(read_data(message)) == 3


def test_what_does_not_fit_is_refused():
    one = np.ones(2, np.float32)
    cases = []
    for tokens, inputs in (([], {}), ([1] * 33, {}), ([-1], {}), ([1], {"weights": one})):
        message = request()
        add_datum(message, tokens, **inputs)
        cases.append(message)
    image = request()
    image.data.add().model_input.add().image.SetInParent()
    text = request()
    add_datum(text, [1]).loss_fn_inputs.add(key="weights").value.dtype = 4
    many = request()
    for _ in range(5):
        add_datum(many, [1])
    short = request()
    tensor = add_datum(short, [1]).loss_fn_inputs.add(key="weights").value
    tensor.dtype, tensor.dense = wire.FLOAT32, b"123"
    for message in (*cases, image, text, many, short, request()):
        with pytest.raises(QeRLError):
            read_data(message)
    with pytest.raises(QeRLError, match="not a ForwardBackwardRequest"):
        read_forward_backward(b"\xff\xff\xff")
    words = request()
    words.loss_fn_config_v2.add(key="loss_id").value.text = "mine"
    with pytest.raises(QeRLError, match="loss_id='mine'"):
        read_forward_backward(words.SerializeToString()).config()


def test_no_damage_of_a_request_makes_anything_but_a_sentence():
    message = request()
    add_datum(message, [1, 2, 3], weights=np.ones(3, np.float32), target_tokens=np.ones((3, 2), np.int64))
    body, rng = message.SerializeToString(), random.Random(1)
    for _ in range(2000):
        damaged = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(damaged))
            damaged[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        try:
            found = read_forward_backward(bytes(damaged))
            found.config(), found.data(LIMITS)
        except QeRLError:
            pass


def test_log_probabilities_are_written_with_their_shapes():
    shapes = [(3,), (2,), (4, 5), (1, 5), (2, 1), (6,)]
    logprobs = [torch.randn(shape) for shape in shapes]
    message = wire.ForwardBackwardOutput.FromString(
        loss_output_bytes(LossOutput(logprobs, {"loss:sum": 1.5}))
    )
    found = []
    for record in message.loss_fn_outputs:
        tensor = record.fields[0].value
        offsets = np.frombuffer(tensor.offsets, "<i8")
        assert len(offsets) == record.num_datums + 1
        for start, end in pairwise(offsets):
            array = np.frombuffer(tensor.data[start:end], "<f4")
            found.append(array.reshape(-1, *tensor.trailing_shape))
    assert len(message.loss_fn_outputs) == 4  # neighbours of one width share a record
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(found, logprobs, strict=True))
    assert {entry.key: entry.value for entry in message.metrics} == {"loss:sum": 1.5}


def test_samples_are_written_with_what_was_asked_of_the_prompt():
    result = SampleResult(
        [SampledSequence([1, 2], [-0.5, -1.5], "stop"), SampledSequence([3], [-2.0], "length")],
        [math.nan, -1.0, -2.0],
        [[], [(7, -0.5), (8, -1.5)], [(9, -0.25)]],
    )
    message = wire.SampleResponse.FromString(sample_bytes(result))
    assert [sequence.stop_reason for sequence in message.sequences] == [0, 1]
    assert np.frombuffer(message.sequences[0].tokens, "<i4").tolist() == [1, 2]
    assert np.frombuffer(message.prompt_logprobs, "<f4")[1:].tolist() == [-1, -2]
    topk = message.topk_prompt_logprobs
    assert (topk.k, topk.length) == (2, 3)
    assert np.frombuffer(topk.token_ids, "<i4").tolist() == [0, 0, 7, 8, 9, 0]
    last = wire.SampleResponse.FromString(sample_bytes(result, last_n=1))
    assert np.isnan(np.frombuffer(last.prompt_logprobs, "<f4")).tolist() == [True, True, False]
    assert np.frombuffer(last.topk_prompt_logprobs.token_ids, "<i4").tolist() == [0, 0, 9]
