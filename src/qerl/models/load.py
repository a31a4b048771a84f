"""Loading of a model in a given weight format onto a device, and of its tokenizer.

The weight format is an argument, never guessed from the name; without one the folder decides. Packed layers
of a checkpoint are loaded as they are, in any layout that `qerl.fp4.checkpoint` reads; other layers are
quantised during loading, or have 16 bits. The dense model never exists as a whole.

For a model of images or sound only the text decoder is loaded, as a causal LM (`qerl.families.towers`).

If a checkpoint lacks tensors, transformers warns and initialises them. Here that is an error.
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
"""Names of padding tokens, for tokenizers that have such a token without declaring it."""

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
    """Load a causal LM in eval mode with its linear layers in the given format.

    Args:
        name_or_path: Local folder, Hub id, ``.gguf`` file, or a resolved model.
        weights: Format of the projections in decoder layers; None lets the folder decide
            (`qerl.fp4.published.choose_weights`). Head, embeddings and norms are never quantised.
        dtype: Dtype of everything that is not quantised, and of activations.
        device: Device of the whole model.
        rounding: Rounding of a plain checkpoint to ``nvfp4`` or ``mxfp4``.
        trust_remote_code: Whether Python code that comes with the checkpoint may run.
        lora_targets: Layers that will be adapted, which the model must have.

    Raises:
        QeRLError: The model is not found, damaged, of an unsupported family or not available in this format,
            or lacks the targets; raised before weights are read if config and tensor names suffice to tell.
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
    # An adapter's config and saved folders refer to the name that the user gave.
    model.name_or_path = model.config._name_or_path = str(name_or_path)
    return model


def check_model(
    name_or_path: str | Path | LocalModel,
    weights: WeightFormatName | None,
    trust_remote_code: bool = False,
    lora_targets: Sequence[str] | None = None,
) -> WeightFormatName:
    """Return the weight format in which `load_model` would load a model, without reading weights.

    Arguments and errors are those of `load_model`, except errors that need the weights. A user cannot repair
    such a model by adding files, so it is checked before its tokenizer.
    """
    return _checked(name_or_path, weights, trust_remote_code, lora_targets)[-1]


def _checked(
    name_or_path: str | Path | LocalModel,
    weights: WeightFormatName | None,
    trust_remote_code: bool,
    lora_targets: Sequence[str] | None,
) -> tuple[Checkpoint, PreTrainedConfig, PreTrainedModel, WeightFormatName]:
    """Return the checkpoint, the causal LM's config, the model on the meta device, and the weight format.

    Unsupported layers raise before formats are checked.
    """
    if weights is not None and weights not in FORMATS:
        raise QeRLError(f"There is no weight format {weights}; choose one of {', '.join(FORMATS)}.")
    checkpoint = open_checkpoint(local_checkpoint(name_or_path))
    config = _read_config(checkpoint, trust_remote_code)
    skeleton = _skeleton(copy.deepcopy(config), checkpoint, trust_remote_code)  # some models change configs
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
    """Return the causal LM's memory-mapped tensors and the formats of its modules.

    Tensors that are skipped or converted are logged. A packed head is converted to 16 bits here, because the
    update multiplies by the head's own weight.
    """
    stored, held, said = dict(checkpoint.tensors()), dict(checkpoint.formats), []
    if others := checkpoint.others:
        said.append(f"{others} tensors for images, sound or multi-token prediction are not loaded")
    if held.get(_HEAD) in BLOCK_FORMATS:
        format = BLOCK_FORMATS[held.pop(_HEAD)]
        names = [name for name in stored if name.startswith(f"{_HEAD}.weight")]
        own = {name.rpartition(".")[2]: stored.pop(name) for name in names}
        stored[f"{_HEAD}.weight"] = dequantize(PackedRows.of_tensors(own, format), dtype)
        said.append(f"the {format.name} head is converted to 16 bits")
    packs = FORMATS[weights].packed
    converted = [key for key, format in held.items() if format == "fp8" and not (packs and is_quantized(key))]
    if converted:
        size = 2 * sum(stored[f"{key}.weight"].numel() for key in converted)
        said.append(f"{len(converted)} FP8 layers are converted to 16 bits ({size / 1e6:.1f} MB)")
    if said and is_first_process():
        logger.warning("%s: %s.", name, "; ".join(said))
    return stored, held


def load_tokenizer(
    name_or_path: str | Path | LocalModel, chat: bool = True, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has a padding token and, unless prompts are plain text, a chat template.

    A tokenizer without a padding token gets one from its vocabulary, or EOS, with a warning, if it has none.

    Args:
        name_or_path: As in `load_model`.
        chat: Whether prompts are messages, which need a chat template.
        trust_remote_code: Whether Python code that comes with the tokenizer may run.

    Raises:
        QeRLError: There is no tokenizer, or it lacks EOS or a required chat template.
    """
    folder = local_checkpoint(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the parser of tokenizers raises plain Exception
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
            logger.warning(
                "%s has no padding token; EOS (%s) is used instead.", name_or_path, tokenizer.eos_token
            )
    return tokenizer


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a completion: the tokenizer's EOS, and those of the generation config."""
    own = model.generation_config.eos_token_id
    return tuple(sorted({tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])} - {None}))


def model_positions(model: LocalModel, trust_remote_code: bool = False) -> int | None:
    """Return the maximum number of positions of a model, without reading weights; None for no limit.

    Raises:
        QeRLError: The model is damaged, or of a family that transformers does not know.
    """
    config = _read_config(open_checkpoint(model.folder), trust_remote_code)
    return positions_of(config.get_text_config(decoder=True))


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    """Read the causal LM's config, without its quantisation settings, which the checkpoint provides."""
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code)
        text = text_config(config)
    except Exception as error:  # validators of fields raise classes of their own
        raise _unsupported(checkpoint, error) from error
    check_counts(text.get_text_config(decoder=True))
    vars(text).pop("quantization_config", None)
    return text


def _skeleton(config: PreTrainedConfig, checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedModel:
    """Create the causal LM on the meta device; its class loads, since the Auto class takes no tensors."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # impossible tensor sizes raise torch's own classes
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
    """Return "sdpa", or "eager" if the family lacks SDPA or caps scores softly, which SDPA would ignore."""
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
    """Raise if this machine cannot load a format.

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
    """Return transformers' quantisation config for the checkpoint's layers; None to load them unchanged."""
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
    """Raise if tensors differ in shape from the config, before memory is allocated."""
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
