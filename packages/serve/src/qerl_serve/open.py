"""Builds a server's backend from its options: loaded models with seats and engines, and a folder.

Names that two models would share are refused before any is loaded. Memory is not estimated here, which is the
task of `qerl plan`: a teacher that does not fit ends the start. Beyond the weights nothing is reserved, since
the engines use the remaining memory for their KV caches in turn.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.families.experts import experts_of
from qerl.families.parts import base_model
from qerl.families.sizes import positions_of
from qerl.kernels.limits import MAX_RANK
from qerl.models.decide import Choices, ComputeDtype, Loading, Source, decide
from qerl.models.fingerprint import fingerprint
from qerl.models.hub import LocalModel
from qerl.models.load import end_token_ids, load_tokenizer
from qerl.noise.draw import NoiseScale
from qerl.noise.schedule import NoiseSchedule
from qerl.rollout.engine import KvCacheDtype
from qerl.rollout.select import make_engine
from qerl.update.driver import LossDriver
from qerl.weight_formats import Rounding, WeightFormatName
from qerl_serve.adapters import Adapters
from qerl_serve.backend import ModelBackend
from qerl_serve.bases import Base
from qerl_serve.checkpoints import Store
from qerl_serve.imported import read_imported, save_imported
from qerl_serve.seats import Seats
from qerl_serve.types import ModelInfo

_SERVED = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_ADVICE = "send shorter sequences, or train an adapter of a smaller rank"
"""Advice to a client whose sequence does not fit in memory; a client cannot change the model."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a server's backend.

    Attributes:
        model: Hub id, local folder or .gguf file.
        folder: Where weights are saved.
        served_name: Name by which clients ask for the model; None for its own names.
        adapters: Folders of adapters to import at the start, each as DIR or NAME=DIR.
        teachers: Models that sample and score but do not train, each under its own names.
        teacher_weights: Weight format of the teachers; None as for `weights`.
        weights, rounding, dtype: As for `qerl eval`; None takes those of a packed checkpoint, else nvfp4.
        max_rank: Maximum rank of an adapter, which sizes the paged engine's buffers.
        max_models: Maximum number of adapters.
        resident: Number of adapters that stay on the GPU between uses.
        max_sequences: Maximum number of sequences that decode at the same time; None leaves it to the engine.
        kv_cache_dtype: Dtype of the paged engine's KV cache.
        tokens_per_forward: Maximum tokens per forward and backward pass; None as for `LossDriver`.
        every_n_layers: On a GPU every n-th layer is recomputed in the backward pass; the others keep their
            activations until memory runs out. Above the number of layers all keep theirs.
        noise: Noise schedule over a model's optimizer steps; None samples without noise.
        noise_scale: Unit of the schedule's sigma.
        enable_prefix_caching: As for `ModelBackend`.
        trust_remote_code: True if Python code that comes with the model may run.
    """

    model: str
    folder: Path
    served_name: str | None = None
    adapters: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    teacher_weights: WeightFormatName | None = None
    weights: WeightFormatName | None = None
    rounding: Rounding | None = None
    dtype: ComputeDtype | None = None
    max_rank: int = 32
    max_models: int = 8
    resident: int = 2
    max_sequences: int | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    tokens_per_forward: int | None = None
    every_n_layers: int = 1
    noise: NoiseSchedule | None = None
    noise_scale: NoiseScale = "absolute"
    enable_prefix_caching: bool = True
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_rank <= MAX_RANK:
            raise QeRLError(f"--max_rank is {self.max_rank}; it must be from 1 to {MAX_RANK}.")
        if self.served_name is not None and not _SERVED.fullmatch(self.served_name):
            raise QeRLError(
                f"--served_name is {self.served_name!r}; it must be of letters, digits and _ - . /, as in "
                "Qwen/Qwen3-8B."
            )
        for name in ("max_models", "resident", "every_n_layers"):
            if getattr(self, name) < 1:
                raise QeRLError(f"--{name} is {getattr(self, name)}; it must be at least 1.")


def open_backend(options: BackendOptions) -> ModelBackend:
    """Load the models and return the backend, ready for requests.

    Raises:
        QeRLError: A model cannot be loaded, or an option is impossible on this machine.
    """
    imported = [read_imported(word, options.max_rank) for word in options.adapters]
    if twice := [name for name, count in Counter(each.name for each in imported).items() if count > 1]:
        raise QeRLError(f"Two adapters have the name {twice[0]}; give names with --adapter NAME=DIR.")
    student = _loading(options, options.model, options.weights)
    teachers = [_loading(options, name, options.teacher_weights) for name in options.teachers]
    _check_names(student, teachers, options.served_name)
    base = _open_base(options, student, options.served_name)
    beside = [_open_teacher(options, each) for each in teachers]
    facts = {
        "dtype": str(student.dtype).removeprefix("torch."),
        "base": options.model,
        "fingerprint": base.fingerprint,
    }
    settings = {"model": options.model, "weights": student.weights, "tuning": "lora"}
    if student.rounding is not None:
        facts["rounding"] = settings["rounding"] = student.rounding
    store = Store(options.folder, facts, settings)
    for each in imported:
        save_imported(each, base, store)
    return make_backend(options, base, store, beside)


def make_base(
    options: BackendOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    names: Sequence[ModelInfo],
    end_token_ids: tuple[int, ...],
) -> Base:
    """Return a loaded model as a `Base`, with seats, engine and loss driver.

    Args:
        options: Options of the server; those for loading are not read.
        model: Model without adapters; frozen and wrapped in place.
        tokenizer: Its tokenizer.
        names: The model under each of its names.
        end_token_ids: Default end tokens of a completion.

    Raises:
        QeRLError: The model cannot run on packed rows, or cannot be sampled from with these options.
    """
    known = fingerprint(model.named_parameters())
    seats = Seats(model, options.max_rank)
    if seats.device.type == "cuda" and names[0].trainable:
        seats.recompute_layers(options.every_n_layers)
    return Base(
        names=names,
        seats=seats,
        engine=make_engine(
            seats.model, tokenizer.pad_token_id, options.max_sequences, options.kv_cache_dtype
        ),
        driver=LossDriver(
            seats.model,
            tokens_per_forward=options.tokens_per_forward,
            advice=_ADVICE,
            recompute_every_layer=seats.recompute_every_layer,
        ),
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        fingerprint=known,
    )


def make_backend(
    options: BackendOptions, base: Base, store: Store, teachers: Sequence[Base] = ()
) -> ModelBackend:
    """Return the backend of loaded models.

    Args:
        options: Options of the server; those for loading are not read.
        base: The model that clients train.
        store: The server's folder.
        teachers: Models that sample and score only.
    """
    adapters = Adapters(base.seats, options.max_models, options.resident)
    return ModelBackend(
        base,
        adapters,
        store,
        teachers,
        options.noise,
        options.noise_scale,
        options.enable_prefix_caching,
    )


def names_of(found: LocalModel, served_name: str | None = None) -> tuple[str, ...]:
    """Return the names of a model: `served_name`, or if None its own name and its folder."""
    if served_name is not None:
        return (served_name,)
    return tuple(dict.fromkeys((found.name, str(found.folder.resolve()))))


def model_names(
    found: LocalModel, positions: int | None, served_name: str | None = None, trainable: bool = True
) -> list[ModelInfo]:
    """Return a `ModelInfo` for each name of a model.

    The tokenizer is given as clients find it: by Hub id if the model came from the Hub, else by folder.

    Raises:
        QeRLError: The model's config has no maximum number of positions, which clients need.
    """
    if positions is None:
        raise QeRLError(f"The config of {found} lacks its maximum number of positions; add it there.")
    folder = str(found.folder.resolve())
    cached = Path(constants.HF_HUB_CACHE).resolve() in Path(folder).parents
    tokenizer = found.name if cached else folder
    return [ModelInfo(name, positions, tokenizer, trainable) for name in names_of(found, served_name)]


def _loading(options: BackendOptions, model: str, weights: WeightFormatName | None) -> Loading:
    return decide(
        Source(
            model,
            weights=weights,
            rounding=options.rounding,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        ),
        Choices(),
    )


def _open_base(
    options: BackendOptions, loading: Loading, served_name: str | None, trainable: bool = True
) -> Base:
    """Load a model as a `Base`."""
    tokenizer = load_tokenizer(loading.model, chat=False, trust_remote_code=options.trust_remote_code)
    model = loading.load()
    if trainable and any(experts_of(model)):
        raise QeRLError(
            f"{loading.model.name} is a mixture of experts, which clients cannot train; serve a dense "
            "model, with this one as a --teacher if needed."
        )
    positions = positions_of(base_model(model).config.get_text_config(decoder=True))
    return make_base(
        options,
        model,
        tokenizer,
        names=model_names(loading.model, positions, served_name, trainable),
        end_token_ids=end_token_ids(model, tokenizer),
    )


def _open_teacher(options: BackendOptions, loading: Loading) -> Base:
    try:
        return _open_base(options, loading, None, trainable=False)
    except torch.OutOfMemoryError as error:
        name = loading.model.name
        raise QeRLError(
            f"The teacher {name} does not fit on this GPU beside {options.model}; use a smaller one or "
            f"fewer bits (--teacher_weights), and check the memory with `qerl plan {options.model} "
            f"--adapters {options.resident} --algorithm distill --teacher {name}`."
        ) from error


def _check_names(student: Loading, teachers: Sequence[Loading], served_name: str | None) -> None:
    """Raise if clients could not tell two models apart.

    Raises:
        QeRLError: Two models have a name in common.
    """
    taken = set(names_of(student.model, served_name))
    for teacher in teachers:
        names = names_of(teacher.model)
        if not taken.isdisjoint(names):
            raise QeRLError(
                f"--teacher {teacher.model.name} has the name of another served model, and clients choose "
                "models by name; leave it out to score with the same weights, or give the model another "
                "--served_name."
            )
        taken.update(names)
