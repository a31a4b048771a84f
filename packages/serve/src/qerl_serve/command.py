"""`qerl serve`: start a server from the command line, or print the status of a running one.

torch and HTTP are imported inside the functions, as in the rest of the command line.
"""

import argparse
import contextlib
import ipaddress
import os
import secrets
import shlex
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QeRLError
from qerl.settings.words import add_command, number_from
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, ROUNDINGS
from qerl_serve.owners import KEY_IS, KEY_LENGTH, KEY_START, Keys, may_be_key, read_keys

if TYPE_CHECKING:
    from qerl.noise.schedule import NoiseSchedule
    from qerl_serve.types import Backend

KEY_FILE = "api_key"
KEY_VARIABLE = "QERL_API_KEY"

_TEXT = """\
Serve MODEL to clients of the Tinker API: they sample, compute losses and train LoRA adapters, many at once,
on one packed copy of the weights. Prints what to export so that recipes find the server.
"""


def add_serve(commands: Any) -> None:
    """Add the `serve` command and its options."""
    sub = add_command(commands, "serve", _serve, "Serve a model to clients of the Tinker API.")
    sub.description = _TEXT
    sub.add_argument("model", nargs="?", metavar="MODEL", help="Hub id, local folder or .gguf file")
    sub.add_argument(
        "--served_name", metavar="NAME",
        help="name under which clients find the model; default: MODEL, and its folder",
    )  # fmt: skip
    sub.add_argument(
        "--adapter", action="append", default=[], metavar="[NAME=]DIR",
        help="folder of a LoRA adapter of the model, which clients sample from and train further as "
        "tinker://imported/weights/NAME; may be repeated; default NAME: that of the folder",
    )  # fmt: skip
    sub.add_argument(
        "--teacher", action="append", default=[], metavar="MODEL",
        help="another model, which samples and scores for distillation recipes and is not trained; may be "
        "repeated",
    )  # fmt: skip
    sub.add_argument(
        "--teacher_weights", choices=FORMATS, help="weight format of teachers; default: as for --weights"
    )
    sub.add_argument(
        "--status", action="store_true", help="print the status of the server at --host and --port"
    )
    sub.add_argument(
        "--port",
        type=number_from(0, int, 65535),
        default=8000,
        help="port to listen on, 0 for a free one; default: 8000",
    )
    sub.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1, this machine alone"
    )
    sub.add_argument(
        "--api_key", metavar="KEY",
        help=f"the server's key, which begins with {KEY_START} and has {KEY_LENGTH} characters or more; "
        f"default: the environment variable {KEY_VARIABLE}, which other users of this machine cannot read, "
        f"else a generated key, kept in DIR/{KEY_FILE}",
    )  # fmt: skip
    sub.add_argument(
        "--keys", type=Path, metavar="FILE",
        help="file of further keys, each with its owner and a share of the limits (docs/serve.md); default: "
        "only the server's key",
    )  # fmt: skip
    sub.add_argument(
        "--output_dir", type=Path, default=Path("runs/serve"), metavar="DIR",
        help="folder of saved weights; default: runs/serve",
    )  # fmt: skip
    sub.add_argument(
        "--weights", choices=FORMATS, help=f"weight format; default: the checkpoint's, else {DEFAULT_FORMAT}"
    )
    sub.add_argument(
        "--rounding",
        choices=ROUNDINGS,
        help=f"how an unquantised checkpoint is rounded while loading; default: {DEFAULT_ROUNDING}",
    )
    sub.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"),
        help="precision of everything that is not quantised; default: bfloat16 on a GPU and float32 on a CPU",
    )  # fmt: skip
    sub.add_argument(
        "--max_rank", type=number_from(1), default=32, help="maximum rank of adapters; default: 32"
    )
    sub.add_argument(
        "--max_models",
        type=number_from(1),
        default=8,
        help="maximum number of models that clients train at once; default: 8",
    )
    sub.add_argument(
        "--resident", type=number_from(1), default=2, metavar="N",
        help="maximum number of these models kept on the GPU, those used last; default: 2",
    )  # fmt: skip
    sub.add_argument(
        "--held_gb", type=number_from(0.1, float), default=1.0, metavar="GB",
        help="maximum host memory for pending requests and stored results; default: 1",
    )  # fmt: skip
    sub.add_argument(
        "--max_sequences", type=number_from(1), help="maximum number of sequences decoded at once"
    )
    sub.add_argument(
        "--kv_cache_dtype", choices=("auto", "fp8"), default="auto",
        help="format of the KV cache, as for kv_cache_dtype of `qerl train`; default: auto",
    )  # fmt: skip
    sub.add_argument(
        "--enable_prefix_caching", choices=("true", "false"), default="true",
        help="whether samples reuse the KV cache of earlier samples of the same policy that begin with the "
        "same tokens; default: true",
    )  # fmt: skip
    sub.add_argument(
        "--pause_after", type=number_from(0.0, float), default=10.0, metavar="SECONDS",
        help="how long an update waits for samples that are being decoded before it pauses them; default: 10",
    )  # fmt: skip
    sub.add_argument(
        "--tokens_per_forward",
        type=number_from(1),
        help="maximum number of tokens in a forward and backward pass; default: what fits the GPU's memory, "
        "on a CPU few",
    )
    sub.add_argument(
        "--every_n_layers", type=number_from(1), default=1, metavar="N",
        help="recompute every N-th layer for the backward pass and keep the activations of the others; "
        "default: 1, the least memory; on a CPU all activations are kept, whatever N is",
    )  # fmt: skip
    _add_noise(sub)
    sub.add_argument(
        "--trust_remote_code", choices=("true", "false"), default="false",
        help="whether Python code that comes with the model may run",
    )  # fmt: skip


def _add_noise(sub: argparse.ArgumentParser) -> None:
    from qerl.noise.schedule import SCHEDULES

    sub.add_argument(
        "--noise_steps", type=number_from(2), metavar="STEPS",
        help="sample with adaptive quantization noise, scheduled over this number of optimizer steps of "
        "each model; default: no noise",
    )  # fmt: skip
    sub.add_argument(
        "--noise_sigma_start",
        type=number_from(1e-12, float),
        help="standard deviation in the first noisy stage; default: 0.01",
    )
    sub.add_argument(
        "--noise_sigma_end",
        type=number_from(1e-12, float),
        help="standard deviation in the last stage; default: 0.0005",
    )
    sub.add_argument(
        "--noise_stages",
        type=number_from(2),
        help="stages of the schedule, the first without noise; default: 10",
    )
    sub.add_argument(
        "--noise_schedule", choices=SCHEDULES, help="shape of the decay over the stages; default: exponential"
    )
    sub.add_argument(
        "--noise_scale",
        choices=("absolute", "relative"),
        help="unit of the standard deviations, as for noise_scale of `qerl train`; default: absolute",
    )


def _serve(args: argparse.Namespace) -> None:
    if args.status:
        from qerl_serve.status import print_status

        print_status(f"http://{_address(args.host)}:{args.port}", _known_key(args), args.console)
        return
    if args.model is None:
        raise QeRLError("MODEL is missing; name the model to serve, or ask for --status.")
    if args.teacher_weights is not None and not args.teacher:
        raise QeRLError("--teacher_weights has no effect without a teacher; give --teacher too.")
    noise = _noise(args)
    with listen(args.host, args.port) as listening:
        api_key = _own_key(args)
        keys = Keys(api_key, {} if args.keys is None else read_keys(args.keys.expanduser()))
        backend = _open(args, noise)
        _run(args, backend, keys, listening)


def _open(args: argparse.Namespace, noise: "NoiseSchedule | None") -> "Backend":
    from qerl_serve.open import BackendOptions, open_backend

    return open_backend(
        BackendOptions(
            model=args.model,
            served_name=args.served_name,
            adapters=tuple(args.adapter),
            teachers=tuple(args.teacher),
            teacher_weights=args.teacher_weights,
            folder=args.output_dir,
            weights=args.weights,
            rounding=args.rounding,
            dtype=args.dtype,
            max_rank=args.max_rank,
            max_models=args.max_models,
            resident=args.resident,
            max_sequences=args.max_sequences,
            kv_cache_dtype=args.kv_cache_dtype,
            tokens_per_forward=args.tokens_per_forward,
            every_n_layers=args.every_n_layers,
            noise=noise,
            noise_scale=args.noise_scale or "absolute",
            enable_prefix_caching=args.enable_prefix_caching == "true",
            trust_remote_code=args.trust_remote_code == "true",
        )
    )


def _noise(args: argparse.Namespace) -> "NoiseSchedule | None":
    from qerl.noise.schedule import NoiseSchedule

    names = ("noise_sigma_start", "noise_sigma_end", "noise_stages", "noise_schedule", "noise_scale")
    given = [name for name in names if getattr(args, name) is not None]
    if args.noise_steps is None:
        if given:
            raise QeRLError(f"--{given[0]} has no effect without noise; give --noise_steps too.")
        return None
    return NoiseSchedule(
        args.noise_sigma_start or 1e-2,
        args.noise_sigma_end or 5e-4,
        args.noise_stages or 10,
        args.noise_steps,
        args.noise_schedule or "exponential",
    )


def _run(args: argparse.Namespace, backend: "Backend", keys: Keys, listening: socket.socket) -> None:
    from qerl_serve.connections import room_for_connections
    from qerl_serve.limits import Limits
    from qerl_serve.server import Server

    base = backend.models[0]
    limits = Limits(
        context=base.max_context_length,
        max_rank=args.max_rank,
        max_models=args.max_models,
        connections=room_for_connections(),
        held=int(args.held_gb * 1e9),
        pause_s=args.pause_after,
    )
    # Output that is not a terminal is often a log, which others can read.
    shown = keys.own if args.console.file.isatty() else _where_key_is(args)
    args.console.print(
        greeting(base.name, args.host, listening.getsockname()[1], shown, args.output_dir, args.teacher),
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    Server(backend, limits, keys).run(listening)


def greeting(
    model: str, host: str, port: int, api_key: str, folder: Path, teachers: Sequence[str] = ()
) -> str:
    """Return the message of a started server: variables to export, and a command to try.

    Args:
        model: Name of the base.
        host, port: Address of its socket.
        api_key: Its key, or a shell expression for it.
        folder: Where weights are saved.
        teachers: Names of the teachers.
    """
    url = f"http://{_address(host)}:{port}"
    served = f"{model} with the teachers {', '.join(teachers)}" if teachers else model
    lines = [
        f"Serving {served} at {url}; weights that clients save are written to {folder}. Press Ctrl-C to "
        "stop.",
        "",
        f"  export TINKER_BASE_URL={url} TINKER_API_KEY={api_key}",
        f"  export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={api_key}",
        f'  python -c "import tinker; print(tinker.ServiceClient().create_lora_training_client'
        f"(base_model='{model}', rank=8).get_info())\"",
        "",
    ]
    if not _is_local(host):
        lines.insert(
            1,
            "Anyone who can reach this address and has the key can use this machine's GPU; connections "
            "are not encrypted.",
        )
    return "\n".join(lines)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket at the address; called before the model is loaded.

    Raises:
        QeRLError: The address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the socket names its protocol; without it the second part of every
    # answer waits for the client to acknowledge the first.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        raise QeRLError(
            f"Cannot listen on {host}:{port} ({error.strerror or error}); choose another --port or --host."
        ) from error
    return listening


def _address(host: str) -> str:
    """Return the host in the server's URL, for a client on this machine."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _own_key(args: argparse.Namespace) -> str:
    """Return the server's own key: the one given, else the environment's, else that of its folder, which is
    created once.

    Raises:
        QeRLError: The key is none that clients can send, or the file holds none.
    """
    given = _given_key(args)
    if given is not None:
        where, key = given
        if not may_be_key(key):
            raise QeRLError(
                f"{where} is not a valid key: a key {KEY_IS}. Without it the server generates one."
            )
        return key
    path = args.output_dir / KEY_FILE
    if not path.exists():
        _write_key(path)
    key = path.read_text().strip()
    if not may_be_key(key):
        raise QeRLError(
            f"{path} does not hold a valid key: a key {KEY_IS}. Delete the file, and the server generates a "
            "new key."
        )
    return key


def _where_key_is(args: argparse.Namespace) -> str:
    """Return a shell expression for the server's key, or a placeholder for --api_key."""
    given = _given_key(args)
    if given is None:
        return f"$(cat {shlex.quote(str((args.output_dir / KEY_FILE).absolute()))})"
    return f"${KEY_VARIABLE}" if given[0] == KEY_VARIABLE else "'the KEY of --api_key'"


def _given_key(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return the source of a given key, and the key; None if neither the option nor the variable has one. An
    empty variable counts as unset."""
    if args.api_key is not None:
        return "--api_key", str(args.api_key)
    key = os.environ.get(KEY_VARIABLE, "")
    return (KEY_VARIABLE, key) if key else None


def _write_key(path: Path) -> None:
    """Write a new key to a file, atomically; if two servers start at once, the first one's key stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")  # readable by the user alone
    aside = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(KEY_START + secrets.token_urlsafe(24))
        with contextlib.suppress(FileExistsError):
            os.link(aside, path)
    finally:
        aside.unlink()


def _known_key(args: argparse.Namespace) -> str:
    """The key for requests to a running server."""
    path, given = args.output_dir / KEY_FILE, _given_key(args)
    if given is not None:
        return given[1]
    return path.read_text().strip() if path.exists() else os.environ.get("TINKER_API_KEY", "")
