"""Conversion of GGUF checkpoints, once per file, to the safetensors folder that everything else reads.

transformers can load a GGUF file, but the result is not a usable checkpoint: it cannot be saved, its
tokenizer has BOS and EOS exchanged and no padding token, and some pre-tokenizers lose a step. The conversion
fixes these from the file's own metadata and keeps the result in a cache folder, because it takes some 20
seconds even for 135 million parameters.

Weights are stored in bfloat16, the type of the checkpoints that GGUF files are made from. The rounding error
of the GGUF's own format stays: the converted model is the dequantised one, not the original.
"""

import hashlib
import logging
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl.errors import QeRLError, first_line
from qerl.models.cache import cache_folder, made_once

logger = logging.getLogger(__name__)


def check_gguf(gguf: Path) -> None:
    """Raise if there is no such file."""
    if not gguf.is_file():
        raise QeRLError(f"There is no file {gguf}; give the path of an existing .gguf file.")


def gguf_to_folder(gguf: Path) -> Path:
    """Return a folder with the model as bfloat16 safetensors, its config and its tokenizer, converted once.

    Args:
        gguf: The file, in any quantisation that transformers can dequantise.

    Raises:
        QeRLError: The file is missing, is no GGUF, transformers cannot read its architecture, or the cache
            cannot be written.
    """
    check_gguf(gguf)
    stat = gguf.stat()
    version = hashlib.blake2b(f"{gguf.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=6)

    def make(folder: Path) -> None:
        logger.warning("Converting %s to safetensors in %s, once.", gguf.name, cache_folder())
        _convert(gguf, folder)

    return made_once(f"{gguf.stem}-{version.hexdigest()}", make)


def _convert(gguf: Path, folder: Path) -> None:
    metadata = _read_metadata(gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),  # newer versions keep formats with kernels
        )
    except (ValueError, KeyError, NotImplementedError, OSError) as error:
        raise QeRLError(
            f"transformers cannot load {gguf} ({first_line(error)}); use the model's safetensors."
        ) from error
    _mend_tokenizer(tokenizer, metadata)
    try:
        tokenizer.save_pretrained(folder)
        _save_model(model, tokenizer, folder)
    except (OSError, SafetensorError) as error:
        raise QeRLError(f"Cannot write {folder}: {error}; free space there or set QERL_CACHE.") from error


def _read_metadata(gguf: Path) -> dict[str, object]:
    """Return the ``tokenizer.ggml`` fields that name special tokens and the pre-tokenizer."""
    from gguf import GGUFReader  # slow to import, and needed only for the conversion

    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, IndexError, OSError) as error:
        raise QeRLError(f"{gguf} is not a complete GGUF file ({error}); get it again.") from error
    if any(name.endswith(".expert_count") and field.contents() for name, field in fields.items()):
        raise QeRLError(f"{gguf} is a mixture of experts, which is not read as GGUF; use its safetensors.")
    keys = ("pre", "bos_token_id", "eos_token_id", "padding_token_id", "unknown_token_id")
    return {key: field.contents() for key in keys if (field := fields.get(f"tokenizer.ggml.{key}"))}


def _mend_tokenizer(tokenizer: PreTrainedTokenizerBase, metadata: dict[str, object]) -> None:
    """Correct the errors of the tokenizer conversion in transformers 5.17."""
    tokenizer.clean_up_tokenization_spaces = False  # decoding would drop the space before punctuation
    token = {name: tokenizer.convert_ids_to_tokens(i) for name, i in metadata.items() if isinstance(i, int)}
    if "eos_token_id" in token:
        tokenizer.eos_token = token["eos_token_id"]
    if "bos_token_id" in token:
        tokenizer.bos_token = token["bos_token_id"]
    # A padding token that is also EOS hides the end of a completion; the unknown token does not.
    candidates = [token.get("padding_token_id"), token.get("unknown_token_id")]
    tokenizer.pad_token = next((t for t in candidates if t and t != tokenizer.eos_token), None)
    if metadata.get("pre") == "smollm":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()


def _save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    # model.save_pretrained raises because the config says "quantized with GGUF", which is no longer true.
    save_torch_state_dict(
        model.state_dict(), folder, shared_tensors_to_discard=list(model._tied_weights_keys or ())
    )
    config = model.config
    vars(config).pop("quantization_config", None)  # some versions leave it there
    config.architectures = [type(model).__name__]
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config.update(special)
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
