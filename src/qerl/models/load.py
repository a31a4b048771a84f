"""From a model's name and a weight format to a model on a device, and its tokenizer.

The weight format is an argument, never guessed from the name; without one the folder decides. What is packed
in a checkpoint is loaded as it is, in any layout that `qerl.fp4.checkpoint` reads; the rest is quantised
while it loads, or has 16 bits. The dense model never exists as a whole.

Of a model for images or sound its text decoder is loaded, as a causal LM (`qerl.families.towers`).

transformers warns when a checkpoint lacks tensors, and makes them up. Here that is an error.
"""

import copy
import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from qerl.errors import QeRLError, first_line
from qerl.families import supported as families
from qerl.families.experts import experts_of, separate_experts
from qerl.families.sizes import check_counts, positions_of
from qerl.families.towers import remember_wrapper, text_config
from qerl.fp4.checkpoint import Checkpoint, open_checkpoint
from qerl.fp4.format import BLOCK_FORMATS, PackedRows, dequantize
from qerl.fp4.groups import is_quantized
from qerl.fp4.published import Held, block_shape, choose_weights
from qerl.fp4.quantizer import QeRLQuantizationConfig
from qerl.kernels.needs import how_to_install
from qerl.models.hub import LocalModel, local_checkpoint
from qerl.ranks import is_first_process
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, Rounding, WeightFormatName

logger = logging.getLogger(__name__)

PAD_TOKENS = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>")
"""What families call padding, for tokenizers that have such a token without declaring it."""

_HEAD = "lm_head"
_OWN_CODE = "it brings its own code, which runs only with trust_remote_code"


def load_model(
    name_or_path: str | Path | LocalModel,
    weights: WeightFormatName | None,
    dtype: torch.dtype,
    device: torch.device | str,
    rounding: Rounding = DEFAULT_ROUNDING,
    trust_remote_code: bool = False,
    lora_targets: Sequence[str] | None = None,
) -> PreTrainedModel:
    """Causal LM in eval mode with its linear layers in the given format.

    Args:
        name_or_path: Local folder, Hub id, ``.gguf`` file, or a model that has been found.
        weights: Format of the projections in decoder layers; None lets the folder decide
            (`qerl.fp4.published.choose_weights`). Head, embeddings and norms are never quantised.
        dtype: Of everything that is not quantised, and of activations.
        device: Of the whole model.
        rounding: Rounding of a plain checkpoint to ``nvfp4`` or ``mxfp4``.
        trust_remote_code: True if Python code that comes with the checkpoint may run.
        lora_targets: Layers that will be adapted, which the model must have.

    Raises:
        QeRLError: The model is not found, damaged, of an unsupported family or not to be had in this format,
            or has no such layers; before weights are read wherever config and names tell.
    """
    device = torch.device(device)
    checkpoint, config, skeleton, weights = _checked(name_or_path, weights, trust_remote_code, lora_targets)
    stored, held = _read(checkpoint, name_or_path, weights, dtype)
    block = block_shape(checkpoint.quantization)
    model_class: Any = type(skeleton)
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=stored,
        quantization_config=_quantization_config(
            weights, rounding, held, stored, block, dtype, device, any(experts_of(skeleton))
        ),
        dtype=dtype,
        device_map=None if device.type == "cpu" else {"": device},
        attn_implementation=_attention(skeleton),
        ignore_mismatched_sizes=True,  # reported below, in one sentence
        output_loading_info=True,
    )
    _check_report(report, checkpoint.folder)
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    if checkpoint.is_wrapper:
        remember_wrapper(model)
    # What an adapter's config and saved folders refer to is the name that the user gave.
    model.name_or_path = model.config._name_or_path = str(name_or_path)
    return model


def check_model(
    name_or_path: str | Path | LocalModel,
    weights: WeightFormatName | None,
    trust_remote_code: bool = False,
    lora_targets: Sequence[str] | None = None,
) -> WeightFormatName:
    """The format in which `load_model` loads a model, which is refused where that refuses it before it reads
    weights; arguments and errors as there.

    Nothing that a user adds to such a model helps, so this comes before its tokenizer is looked at.
    """
    return _checked(name_or_path, weights, trust_remote_code, lora_targets)[-1]


def _checked(
    name_or_path: str | Path | LocalModel,
    weights: WeightFormatName | None,
    trust_remote_code: bool,
    lora_targets: Sequence[str] | None,
) -> tuple[Checkpoint, PreTrainedConfig, PreTrainedModel, WeightFormatName]:
    """The checkpoint, the causal LM's config, that model without memory, and the format; layers that are not
    supported are refused before formats are looked at."""
    if weights is not None and weights not in FORMATS:
        raise QeRLError(f"There is no weight format {weights}; choose one of {', '.join(FORMATS)}.")
    checkpoint = open_checkpoint(local_checkpoint(name_or_path))
    config = _read_config(checkpoint, trust_remote_code)
    skeleton = _skeleton(copy.deepcopy(config), checkpoint, trust_remote_code)  # some classes change theirs
    separate_experts(skeleton)
    _check_family(config, skeleton, checkpoint, lora_targets)
    weights = choose_weights(name_or_path, checkpoint.held, weights)
    if FORMATS[weights].package is not None and any(experts_of(skeleton)):
        raise QeRLError(f"{weights} does not pack the experts of a mixture; use {DEFAULT_FORMAT} or bf16.")
    _check_shapes(skeleton, checkpoint)
    return checkpoint, config, skeleton, weights


def _read(
    checkpoint: Checkpoint, name: object, weights: WeightFormatName, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Held]]:
    """The causal LM's tensors, mapped into memory, and the formats of its modules; what is not taken as it is
    published is said.

    A packed head becomes 16 bits here, because the update multiplies with the head's own weight.
    """
    stored, held, said = dict(checkpoint.tensors()), dict(checkpoint.formats), []
    if others := checkpoint.others:
        said.append(f"{others} tensors of images, sound or prediction of several tokens are not read")
    if held.get(_HEAD) in BLOCK_FORMATS:
        format = BLOCK_FORMATS[held.pop(_HEAD)]
        names = [name for name in stored if name.startswith(f"{_HEAD}.weight")]
        own = {name.rpartition(".")[2]: stored.pop(name) for name in names}
        stored[f"{_HEAD}.weight"] = dequantize(PackedRows.of_tensors(own, format), dtype)
        said.append(f"the head in {format.name} becomes 16 bits")
    packs = FORMATS[weights].packed
    converted = [key for key, format in held.items() if format == "fp8" and not (packs and is_quantized(key))]
    if converted:
        size = 2 * sum(stored[f"{key}.weight"].numel() for key in converted)
        said.append(f"{len(converted)} layers in FP8 become 16 bits ({size / 1e6:.1f} MB)")
    if said and is_first_process():
        logger.warning("%s: %s.", name, "; ".join(said))
    return stored, held


def load_tokenizer(
    name_or_path: str | Path | LocalModel, chat: bool = True, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Tokenizer with a padding token, and with a chat template unless prompts are plain text.

    A tokenizer without padding token gets one of its vocabulary; EOS, with a warning, if there is no other.

    Args:
        name_or_path: As for `load_model`.
        chat: True if prompts are messages, which need a chat template.
        trust_remote_code: True if Python code that comes with the tokenizer may run.

    Raises:
        QeRLError: There is no tokenizer, or it has no EOS or no chat template that is needed.
    """
    folder = local_checkpoint(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # given files alone; the tokenizers' parser raises Exception itself
        own_code = not trust_remote_code and "trust_remote_code" in str(error)
        advice = _OWN_CODE if own_code else "the model's folder needs its tokenizer files"
        raise QeRLError(
            f"The tokenizer of {name_or_path} cannot be loaded ({first_line(error)}); {advice}."
        ) from error
    if chat and tokenizer.chat_template is None:
        raise QeRLError(
            f"The tokenizer of {name_or_path} has no chat template; use an instruction-tuned model, or put a "
            f"chat_template.jinja into {folder}."
        )
    if tokenizer.eos_token is None:
        raise QeRLError(f"The tokenizer of {name_or_path} has no EOS token; add it to tokenizer_config.json.")
    if tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        candidates = [token for token in (*PAD_TOKENS, tokenizer.unk_token) if token in vocabulary]
        tokenizer.pad_token = next((t for t in candidates if t != tokenizer.eos_token), tokenizer.eos_token)
        if tokenizer.pad_token == tokenizer.eos_token and is_first_process():
            logger.warning("%s has no padding token: EOS (%s) pads.", name_or_path, tokenizer.eos_token)
    return tokenizer


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a completion: the tokenizer's end of text, and those of the model's generation
    settings."""
    own = model.generation_config.eos_token_id
    return tuple(sorted({tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])} - {None}))


def model_positions(model: LocalModel, trust_remote_code: bool = False) -> int | None:
    """Number of positions of a model; None where its config sets no limit. No weights are read.

    Raises:
        QeRLError: It is damaged, or of a family that transformers does not know.
    """
    config = _read_config(open_checkpoint(model.folder), trust_remote_code)
    return positions_of(config.get_text_config(decoder=True))


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of the causal LM, which says nothing of quantised layers: the checkpoint does."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
        text = text_config(config)
    except Exception as error:  # given a file alone; the validators of fields have classes of their own
        raise _unsupported(checkpoint, error) from error
    check_counts(text.get_text_config(decoder=True))
    vars(text).pop("quantization_config", None)
    return text


def _skeleton(config: PreTrainedConfig, checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """The causal LM without memory; its class does the loading, since the Auto class takes no tensors."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # sizes that no tensor can have end in torch's own classes
        raise _unsupported(checkpoint, error) from error


def _check_family(
    config: PreTrainedConfig,
    skeleton: PreTrainedModel,
    checkpoint: Checkpoint,
    targets: Sequence[str] | None,
) -> None:
    if reason := families.why_not(config, type(skeleton)):
        raise QeRLError(f"{reason}; use a family of docs/families.md.")
    families.check_experts(type(skeleton).__name__, checkpoint.separate_headers, skeleton)
    if targets is not None:
        families.lora_targets(skeleton, targets)


def _attention(skeleton: PreTrainedModel) -> str:
    """SDPA, except where a family has none or where it would leave out the soft cap of the scores."""
    capped = getattr(skeleton.config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return "sdpa" if skeleton._supports_sdpa and not capped else "eager"


def _unsupported(checkpoint: Checkpoint, error: Exception) -> QeRLError:
    family = checkpoint.config.get("model_type", "unnamed")
    own, known = "auto_map" in checkpoint.config, "use a causal language model that transformers knows"
    advice = _OWN_CODE if own else known
    return QeRLError(
        f"{checkpoint.folder} is of the model family {family}, which cannot be loaded "
        f"({first_line(error)}); {advice}."
    )


def check_format(weights: WeightFormatName, device: torch.device) -> None:
    """Refuse a format that this machine cannot load.

    Raises:
        QeRLError: The format needs a CUDA device or a package that is missing.
    """
    format = FORMATS[weights]
    if format.needs_cuda and device.type != "cuda":
        raise QeRLError(
            f"{weights} weights need a CUDA device, not {device}; use {DEFAULT_FORMAT}, which runs anywhere."
        )
    if format.package is not None and find_spec(format.package) is None:
        raise QeRLError(f"{weights} weights need {format.package}; run `{how_to_install(format.package)}`.")


def _quantization_config(
    weights: WeightFormatName,
    rounding: Rounding,
    held: dict[str, Held],
    stored: dict[str, torch.Tensor],
    block: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    has_experts: bool,
) -> Any:
    """transformers' settings for what becomes of a checkpoint's layers; None leaves them as they are."""
    format = FORMATS[weights]
    if format.package is None:
        ours = format.packed or not set(held.values()) <= {"bf16"} or has_experts
        return QeRLQuantizationConfig(weights, rounding, held, stored.get, block) if ours else None
    check_format(weights, device)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _check_shapes(skeleton: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Refuse tensors that the config wants in another shape, before memory is taken for that."""
    wanted = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    for name, header in checkpoint.separate_headers.items():
        if header.dtype != "U8" and header.shape != wanted.get(name, header.shape):
            raise _mismatch(name, header.shape, wanted[name], checkpoint.folder)


def _mismatch(name: str, stored: Sequence[int], wanted: Sequence[int], folder: Path) -> QeRLError:
    return QeRLError(
        f"{name} has shape {list(stored)} in the checkpoint {folder} but its config asks for {list(wanted)}; "
        "the two do not belong together."
    )


def _check_report(report: dict[str, Any], folder: Path) -> None:
    if report["missing_keys"]:
        names = sorted(report["missing_keys"])
        rest = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        raise QeRLError(f"The checkpoint {folder} lacks {names[0]}{rest}; fetch it again.")
    if report["mismatched_keys"]:
        name, stored, wanted = sorted(report["mismatched_keys"])[0]
        raise _mismatch(name, stored, wanted, folder)
