"""Conversion between protobuf messages and the backend's values.

Legend: T tokens of a datum, K targets of a position, P tokens of a prompt, N datums.

Clients' messages are untrusted: sizes are checked before memory is allocated, indices before they are used. A
tensor may arrive as CSR, whose unlisted entries are 0; it is made dense here, where its size is limited.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from qerl.errors import QeRLError
from qerl.update.losses import Datum, LossOutput
from qerl_serve import descriptors as wire
from qerl_serve.limits import Limits
from qerl_serve.types import SampleResult

_DTYPES: dict[int, np.dtype] = {
    wire.FLOAT32: np.dtype("<f4"),
    wire.INT64: np.dtype("<i8"),
    wire.INT32: np.dtype("<i4"),
}
_NO_LOGPROB = -99999.0
"""With token 0, the padding of `TopkLogprobs`."""


@dataclass(frozen=True)
class ForwardBackward:
    """A request for a forward pass, and a backward pass unless `forward_only`; loss settings and datums are
    still in the message, of `size` bytes."""

    model_id: str
    seq_id: int
    loss: str
    forward_only: bool
    message: Any
    size: int

    def config(self) -> dict[str, float]:
        """Return the loss's settings; older clients send them in the first field alone, newer ones in both.

        Raises:
            QeRLError: A setting is a text instead of a number.
        """
        config = {entry.key: entry.value for entry in self.message.loss_fn_config}
        for entry in self.message.loss_fn_config_v2:
            if entry.value.text:
                raise QeRLError(f"loss_fn_config has {entry.key}={entry.value.text!r}; losses take numbers.")
            config[entry.key] = entry.value.number
        return config

    def data(self, limits: Limits) -> list[Datum]:
        """Return the datums.

        Raises:
            QeRLError: A datum is damaged or holds something other than text, or the datums together are too
                large.
        """
        if not 0 < len(self.message.data) <= limits.datums:
            raise QeRLError(
                f"A request for {self.loss} has {len(self.message.data)} datums; send 1 to {limits.datums}."
            )
        found, room = [], _Room(limits.elements)
        for number, datum in enumerate(self.message.data):
            try:
                found.append(_datum(datum, limits, room))
            except QeRLError as error:
                raise QeRLError(f"Datum {number}: {error}") from error
        return found


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Parse the body of a request.

    Raises:
        QeRLError: The body is not a ForwardBackwardRequest.
    """
    message = wire.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise QeRLError(f"The body is not a ForwardBackwardRequest in protobuf: {error}.") from error
    return ForwardBackward(
        message.model_id, message.seq_id, message.loss_fn, message.forward_only, message, len(body)
    )


@dataclass
class _Room:
    """Counts the elements of a request's tensors, at most `max_elements`."""

    max_elements: int
    taken: int = 0

    def take(self, shape: tuple[int, ...], name: str) -> None:
        """Count a tensor before memory for it is allocated.

        Raises:
            QeRLError: With this tensor there are too many elements.
        """
        self.taken += math.prod(shape)
        if self.taken > self.max_elements:
            raise QeRLError(
                f"{name} has the shape {list(shape)}; with it the tensors of this request exceed this "
                f"server's limit of {self.max_elements} elements. Send fewer datums in a request."
            )


def _datum(message: Any, limits: Limits, room: _Room) -> Datum:
    chunks = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise QeRLError("its model_input holds an image or sound; this server takes only text.")
        chunks.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), "tokens"))
    tokens_T = np.concatenate(chunks) if chunks else np.empty(0, np.int32)
    check_tokens(tokens_T, limits, "model_input")
    inputs = {entry.key: _tensor(entry.value, entry.key, room) for entry in message.loss_fn_inputs}
    for name, tensor in inputs.items():
        if not len(tensor.shape) or len(tensor) != len(tokens_T):
            raise QeRLError(
                f"{name} has the shape {list(tensor.shape)}, but model_input has {len(tokens_T)} tokens; "
                "all inputs of a loss have one row for each token."
            )
    return Datum(torch.from_numpy(tokens_T.astype(np.int64)), inputs)


def check_tokens(tokens: np.ndarray, limits: Limits, what: str) -> None:
    """Raise if token ids are invalid for every model.

    Raises:
        QeRLError: There are no tokens, more than the context has, or a negative one.
    """
    if not 0 < len(tokens) <= limits.context:
        raise QeRLError(
            f"{what} has {len(tokens)} tokens; this server takes 1 to {limits.context}, the context length."
        )
    if tokens.min() < 0:
        raise QeRLError(f"{what} holds the token {tokens.min()}; token ids are not negative.")


def _tensor(message: Any, name: str, room: _Room) -> torch.Tensor:
    dtype, shape = _DTYPES.get(message.dtype), tuple(message.shape)
    if dtype is None:
        raise QeRLError(f"{name} has dtype {message.dtype}; float32, int64 and int32 are known.")
    sparse = message.HasField("sparse_csr")
    if not shape and not sparse:
        shape = (len(message.dense) // dtype.itemsize,)
    if min(shape, default=0) < 0 or len(shape) not in (1, 2):
        raise QeRLError(f"{name} has the shape {list(shape)}; it must be [T] or [T, K].")
    room.take(shape, name)
    if sparse:
        array = _dense(message.sparse_csr, dtype, shape, name)
    else:
        array = _array(message.dense, dtype, name)
        if array.size != math.prod(shape):
            raise QeRLError(f"{name} has {array.size} elements, but its shape is {list(shape)}.")
        array = array.reshape(shape)
    return torch.from_numpy(array.astype(np.float32 if dtype.kind == "f" else np.int64))


def _dense(csr: Any, dtype: np.dtype, shape: tuple[int, ...], name: str) -> np.ndarray:
    """Return a CSR tensor as an array [rows, columns], 0 where the tensor lists nothing."""
    values = _array(csr.values, dtype, name)
    crow, columns = (_array(part, np.dtype("<i8"), name) for part in (csr.crow_indices, csr.col_indices))
    counts = np.diff(crow)
    well_formed = (
        len(shape) == 2
        and len(crow) == shape[0] + 1
        and len(values) == len(columns)
        and crow[0] == 0
        and crow[-1] == len(values)
        and (counts >= 0).all()
        and (not len(columns) or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not well_formed:
        raise QeRLError(f"{name} is a sparse tensor whose indices do not fit its shape {list(shape)}.")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return dense


def _array(data: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise QeRLError(f"{name} has {len(data)} bytes, which is no multiple of {dtype.itemsize}.")
    return np.frombuffer(data, dtype)


def loss_output_bytes(output: LossOutput) -> bytes:
    """Serialize the answer to a `ForwardBackward`: log-probabilities of each datum [T] or [T, K], and
    metrics.

    Adjacent datums with the same K share a record.
    """
    message = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for trailing, group in groupby(output.logprobs, key=lambda logprobs: tuple(logprobs.shape[1:])):
        parts = [logprobs.to(torch.float32).contiguous().numpy().tobytes() for logprobs in group]
        offsets_N = np.cumsum([0, *map(len, parts)], dtype="<i8")
        record = message.loss_fn_outputs.add(num_datums=len(parts))
        entry = record.fields.add(key="logprobs")
        entry.value.data, entry.value.offsets = b"".join(parts), offsets_N.tobytes()
        entry.value.dtype = wire.FLOAT32
        entry.value.trailing_shape.extend(trailing)
    for name, value in output.metrics.items():
        message.metrics.add(key=name, value=value)
    return message.SerializeToString()


def sample_bytes(result: SampleResult, last_n: int | None = None) -> bytes:
    """Serialize the answer to a `SampleRequest`; only the last `last_n` prompt tokens (None: all) have
    scores."""
    message = wire.SampleResponse()
    for sequence in result.sequences:
        message.sequences.add(
            stop_reason=wire.STOP_REASONS[sequence.stop_reason],
            tokens=np.asarray(sequence.tokens, "<i4").tobytes(),
            logprobs=np.asarray(sequence.logprobs, "<f4").tobytes(),
        )
    if result.prompt_logprobs is not None:
        logprobs_P = np.array(result.prompt_logprobs, "<f4")
        logprobs_P[: _skipped(len(logprobs_P), last_n)] = np.nan
        message.prompt_logprobs = logprobs_P.tobytes()
    if result.topk_prompt_logprobs is not None:
        skipped = _skipped(len(result.topk_prompt_logprobs), last_n)
        rows: list[Sequence[tuple[int, float]]] = [[]] * skipped + list(result.topk_prompt_logprobs[skipped:])
        _write_topk(message.topk_prompt_logprobs, rows)
    return message.SerializeToString()


def _skipped(tokens: int, last_n: int | None) -> int:
    """Return the number of leading prompt tokens whose scores an answer leaves out."""
    return 0 if last_n is None else max(tokens - last_n, 0)


def _write_topk(message: Any, topk_P: Sequence[Sequence[tuple[int, float]]]) -> None:
    k = max(map(len, topk_P))
    ids_PK = np.zeros((len(topk_P), k), "<i4")
    logprobs_PK = np.full((len(topk_P), k), _NO_LOGPROB, "<f4")
    for row, likely in enumerate(topk_P):
        for place, (token, logprob) in enumerate(likely):
            ids_PK[row, place], logprobs_PK[row, place] = token, logprob
    message.token_ids, message.logprobs = ids_PK.tobytes(), logprobs_PK.tobytes()
    message.k, message.length = k, len(topk_P)
