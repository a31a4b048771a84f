"""The protobuf messages of the Tinker API that this server reads and writes, as classes made at import.

Only these few messages are protobuf, all others are JSON. They are declared here from their field numbers,
with names of our own where the wire format has none, so the server needs neither the client's package nor a
compiler. Fields that are not declared are skipped when a message is read. The tests with the real client
compare the declarations with the client's.

A map is declared as on the wire: repeated entries with a key and a value.

Layouts: tokens are int32, log-probabilities float32, indices and offsets int64, all little-endian bytes.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "qerl.serve"

MESSAGES = {
    "ForwardBackwardRequest": """
        model_id 1 string, seq_id 2 int32, data 3 Datum*, loss_fn 4 string,
        loss_fn_config 5 NumberEntry*, forward_only 6 bool, loss_fn_config_v2 7 ConfigEntry*""",
    "NumberEntry": "key 1 string, value 2 double",
    "ConfigEntry": "key 1 string, value 2 LossConfigValue",
    "LossConfigValue": "number 1 double, text 2 string",
    "Datum": "model_input 1 Chunk*, loss_fn_inputs 2 TensorEntry*",
    "Chunk": "encoded_text 1 EncodedTextChunk, image 2 Opaque, dmel 3 Opaque",
    "EncodedTextChunk": "tokens 1 bytes",
    "Opaque": "",
    "TensorEntry": "key 1 string, value 2 Tensor",
    "Tensor": "dense 1 bytes, sparse_csr 2 SparseCsr, dtype 3 int32, shape 4 int64*",
    "SparseCsr": "values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes",
    "ForwardBackwardOutput": """
        loss_fn_output_type 1 string, loss_fn_outputs 2 ArrayRecord*, metrics 3 NumberEntry*""",
    "ArrayRecord": "type_tag 1 string, fields 2 BatchedTensorEntry*, num_datums 3 int64",
    "BatchedTensorEntry": "key 1 string, value 2 BatchedTensor",
    "BatchedTensor": "data 1 bytes, offsets 2 bytes, dtype 3 int32, trailing_shape 4 int64*",
    "SampleResponse": """
        sequences 1 SampledSequence*, prompt_logprobs 2 bytes, topk_prompt_logprobs 3 TopkLogprobs,
        prompt_cache_hit_tokens 4 int32""",
    "SampledSequence": "stop_reason 1 int32, tokens 2 bytes, logprobs 3 bytes",
    "TopkLogprobs": "token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32",
}
"""Fields of each message: name, number and type; a star marks a repeated field. Enumerations are int32."""

FLOAT32, INT64, INT32 = 1, 2, 3
"""Values of `dtype`."""

STOP_REASONS = {"stop": 0, "length": 1}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="qerl/serve.proto", package=_PACKAGE, syntax="proto3")
    for message, fields in MESSAGES.items():
        declared = file.message_type.add(name=message)
        for text in filter(str.strip, fields.split(",")):
            name, number, kind = text.split()
            field = declared.field.add(name=name, number=int(number))
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in MESSAGES:
                field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = field.Type.Value(f"TYPE_{kind.upper()}")
    return file


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in MESSAGES
    }


_CLASSES = _classes()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]
