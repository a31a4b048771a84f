"""From a server's options to its backend: loaded, seated, with an engine and a folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl.errors import QeRLError
from qerl.families.experts import experts_of
from qerl.families.parts import base_model
from qerl.families.sizes import positions_of
from qerl.kernels.limits import MAX_RANK
from qerl.models.decide import Choices, ComputeDtype, Source, decide
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
from qerl_serve.checkpoints import Store
from qerl_serve.seats import Seats
from qerl_serve.types import ModelInfo

_SERVED = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_ADVICE = "send shorter sequences, or train an adapter of a smaller rank"
"""What a client is told whose sequence does not fit; it cannot change the model."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of a server's model.

    Attributes:
        model: Hub id, local folder or .gguf file.
        folder: Of saved weights.
        served_name: The clients' name for the model; None stands for its own names.
        weights, rounding, dtype: As for `qerl eval`; None takes those of a packed checkpoint, else nvfp4.
        max_rank: The largest rank of an adapter, which sizes the paged engine's buffers.
        max_models: Largest number of adapters.
        resident: Those of them that stay on the GPU between uses.
        max_sequences: Largest number of sequences that decode at the same time; None leaves it to the engine.
        kv_cache_dtype: Of the paged engine's keys and values.
        tokens_per_forward: Largest number of tokens of a forward and backward pass; None is as for
            `LossDriver`.
        every_n_layers: On a GPU every n-th layer is computed again for backward, the others keep their
            activations until memory runs out. Above the number of layers all do.
        noise: Schedule of the noise by optimizer steps of a model; None samples without noise.
        noise_scale: Unit of its sigma.
        trust_remote_code: True if Python code that comes with the model may run.
    """

    model: str
    folder: Path
    served_name: str | None = None
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
    """The backend with its model loaded, ready for requests.

    Raises:
        QeRLError: The model cannot be loaded, or an option is impossible on this machine.
    """
    source = Source(
        options.model,
        weights=options.weights,
        rounding=options.rounding,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    loading = decide(source, Choices())
    tokenizer = load_tokenizer(loading.model, chat=False, trust_remote_code=options.trust_remote_code)
    model = loading.load()
    if any(experts_of(model)):
        raise QeRLError(f"{options.model} is a mixture of experts, which are not served; use a dense model.")
    facts = {
        "dtype": str(loading.dtype).removeprefix("torch."),
        "base": options.model,
        "fingerprint": fingerprint(model.named_parameters()),
    }
    settings = {"model": options.model, "weights": loading.weights, "tuning": "lora"}
    if loading.rounding is not None:
        facts["rounding"] = settings["rounding"] = loading.rounding
    positions = positions_of(base_model(model).config.get_text_config(decoder=True))
    return make_backend(
        options,
        model,
        tokenizer,
        models=model_names(loading.model, positions, options.served_name),
        end_token_ids=end_token_ids(model, tokenizer),
        store=Store(options.folder, facts, settings),
    )


def make_backend(
    options: BackendOptions,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    models: Sequence[ModelInfo],
    end_token_ids: tuple[int, ...],
    store: Store,
) -> ModelBackend:
    """The backend of a loaded model.

    Args:
        options: Of the server; those for loading are not looked at.
        model: The base, without an adapter; it is frozen and wrapped in place.
        tokenizer: Its tokenizer.
        models: The base under each of its names.
        end_token_ids: Default end tokens of a completion.
        store: The server's folder.

    Raises:
        QeRLError: The model cannot be trained in packed rows, or not sampled from as asked.
    """
    seats = Seats(model, options.max_rank)
    if seats.device.type == "cuda":
        seats.recompute_layers(options.every_n_layers)
    return ModelBackend(
        models=models,
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
        adapters=Adapters(seats, options.max_models, options.resident),
        store=store,
        tokenizer=tokenizer,
        end_token_ids=end_token_ids,
        noise=options.noise,
        noise_scale=options.noise_scale,
    )


def model_names(found: LocalModel, positions: int | None, served_name: str | None = None) -> list[ModelInfo]:
    """The base by the clients' name for it; without one by the server's name for it, and by its folder.

    Its tokenizer is where clients find it: at the Hub if the model came from there, else in the folder.

    Raises:
        QeRLError: The model has no limit of positions, which clients need to know.
    """
    if positions is None:
        raise QeRLError(f"{found} does not say in its config how many positions it has; add them there.")
    folder = str(found.folder.resolve())
    cached = Path(constants.HF_HUB_CACHE).resolve() in Path(folder).parents
    tokenizer = found.name if cached else folder
    names = (found.name, folder) if served_name is None else (served_name,)
    return [ModelInfo(name, positions, tokenizer) for name in dict.fromkeys(names)]
