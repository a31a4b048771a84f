"""The `qerl` command.

Heavy imports happen inside the commands, so that `qerl --help` and mistakes on the command line answer at
once.
"""

import argparse
import logging
import math
import os
import shlex
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from qerl import __version__
from qerl.errors import QeRLError

if TYPE_CHECKING:
    from qerl.eval.run import Source
    from qerl.settings.config import QeRLConfig

# Commands in which `--field value` sets a field of QeRLConfig; the flags and options there that are none.
TAKE_FIELDS = ("train", "demo", "plan")
OWN_FLAGS = ("--help", "--dry_run")
OWN_OPTIONS = ("--gpu", "--processes")

# Of several processes only the first one speaks.
console = Console(quiet=os.environ.get("RANK", "0") != "0")


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 done, 1 what was planned does not fit, 2 a mistake the user can
    mend, 130 interrupted."""
    words = sys.argv[1:] if argv is None else argv
    _quiet_libraries()
    try:
        fields: dict[str, str] = {}
        if words and words[0] in TAKE_FIELDS:
            words, fields = _split_fields(words)
        args = _parser().parse_args(words)
        args.fields = fields
        return args.run(args) or 0
    except QeRLError as error:
        Console(stderr=True).print(
            f"[red]error:[/red] {_escape(str(error))}", highlight=False, soft_wrap=True
        )
        return 2
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return 130


def _quiet_libraries() -> None:
    """Leave out what libraries say that nobody can act on."""
    if not console.is_terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")
    # A warning about a CPU kernel for NF4, which needs a GPU here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # PEFT asks the Hub for the base model's vocabulary size and warns when it gets no answer.
    warnings.filterwarnings("ignore", message="Unable to fetch remote file")
    warnings.filterwarnings("ignore", message="Could not find a config file")
    # What transformers passes on to DistributedDataParallel, by its former name.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


class _Command(argparse.ArgumentParser):
    """Of a command that takes fields, the help ends with the list of them."""

    def format_help(self) -> str:
        text = super().format_help()
        if self.prog.split()[-1] not in TAKE_FIELDS:
            return text
        from qerl.settings.docs import help_text  # imports TRL, which takes seconds

        return f"{text}\n{help_text()}\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="qerl", description="RL of language models on few GPUs, on NVFP4 weights."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Command)

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    sub = command("train", _train, "Train as recipes say; any field can be given as --field value.")
    sub.add_argument("recipes", nargs="+", type=Path, metavar="RECIPE.yaml", help="merged from left to right")
    sub.add_argument("--dry_run", action="store_true", help="check the settings, print them and stop")

    text = (
        "Say what fits on a GPU of --gpu GB (default 80), or on each of --processes N of them; any field can "
        "be given as --field value."
    )
    sub = command("plan", _plan, text)
    sub.add_argument("model", metavar="MODEL", help="Hub id, local folder, or a shape such as 32b")
    sub.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE.yaml", help="as for train")
    sub.add_argument("--gpu", default="80", metavar="GB", help="memory of the GPU; default 80")
    sub.add_argument("--processes", default="1", metavar="N", help="GPUs, each with its process; default 1")

    sub = command("demo", _demo, "Train a small real model here and score it before and after.")
    packaged = Path(__file__).with_name("demo.yaml")
    sub.add_argument(
        "recipe", nargs="?", type=Path, default=packaged, metavar="RECIPE.yaml", help="default: %(default)s"
    )

    sub = command("quantize", _quantize, "Quantise a checkpoint, shard by shard.")
    sub.add_argument("model", metavar="MODEL", help="Hub id or local folder")
    sub.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    sub.add_argument("--format", choices=("nvfp4", "mxfp4"), default="nvfp4")
    sub.add_argument(
        "--method", choices=("rtn", "mse"), default="rtn", help="rounding: nearest, or least error"
    )

    sub = command("eval", _eval, "Score a model, with or without an adapter.")
    _add_model(sub)
    sub.add_argument("--task", help="gsm8k, math500, arithmetic, jsonl:PATH, ...; default: the run's")
    sub.add_argument(
        "--task_options",
        help="YAML mapping, for example '{level: wp1}'; default: the run's, for its own task",
    )
    sub.add_argument("--samples", type=_from(1), default=1, help="samples per problem; 1 decodes greedily")
    sub.add_argument("--temperature", type=_from(0, float), help="default: 0 for one sample, else 0.6")
    sub.add_argument("--top_p", type=_from(1e-6, float, 1), default=0.95)
    sub.add_argument(
        "--max_tokens", type=_from(1), help="default: the run's max_completion_length, else 4096"
    )
    sub.add_argument("--limit", type=_from(1), help="problems to score; default all")
    sub.add_argument("--seed", type=_from(0), default=0)
    sub.add_argument(
        "--out", type=Path, help="folder for the result and the completions; one that was cut off goes on"
    )

    sub = command("generate", _generate, "Answer one prompt.")
    _add_model(sub)
    sub.add_argument("prompt", help="the user's message")
    sub.add_argument(
        "--system", help='system message; default: the one of the run\'s task, else none; "" for none'
    )
    sub.add_argument("--max_tokens", type=_from(1), help="default: the run's max_completion_length, else 256")
    sub.add_argument("--temperature", type=_from(0, float), default=0.0)
    sub.add_argument("--seed", type=_from(0), default=0)

    command("doctor", _doctor, "What this machine can run, and how to get what is missing.")

    sub = command("report", _report, "One HTML page with the curves of several runs.")
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    sub.add_argument(
        "--scores", nargs="+", type=Path, default=[], metavar="FOLDER", help="of evaluations outside the runs"
    )
    sub.add_argument("--out", type=Path, default=Path("report.html"))
    return parser


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="Hub id, local folder or .gguf file")
    sub.add_argument("--adapter", type=Path, help="folder of a PEFT adapter")
    formats = ("nvfp4", "mxfp4", "nf4", "bf16")
    sub.add_argument("--weights", choices=formats, help="default: what the run trained on, else nvfp4")
    sub.add_argument("--rounding", choices=("rtn", "mse"), help="default: the run's, else mse")
    sub.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of what is not quantised; default: the run's, else bfloat16 on a GPU and float32 on a CPU",
    )
    sub.add_argument(
        "--chat_template_kwargs",
        help="YAML mapping, for example '{enable_thinking: false}'; default: the run's",
    )


def _split_fields(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--field value` and `--field=value` out of the command line; flags of the command stay."""
    kept: list[str] = []
    options: list[str] = []
    fields: dict[str, str] = {}
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--") or word in OWN_FLAGS:
            kept.append(word)
            continue
        flag, sign, text = word.partition("=")
        value = text if sign else next(remaining, "")
        if not value or (not sign and value.startswith("--")):
            raise QeRLError(f"{flag} needs a value.")
        if flag in OWN_OPTIONS:
            options += [flag, value]
        elif flag[2:] in fields:
            raise QeRLError(f"{flag} is given twice; which one is meant?")
        else:
            fields[flag[2:]] = value
    # argparse takes positional words together, so options go before all of them.
    return [*kept[:1], *options, *kept[1:]], fields


def _from(least: float, kind: Any = int, most: float = math.inf) -> Callable[[str], Any]:
    """What argparse calls to read a number that is in a range."""

    def number(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most or math.isinf(value):
            limits = f"from {least} to {most}" if math.isfinite(most) else f"at least {least}"
            raise argparse.ArgumentTypeError(f"{text} must be {limits}")
        return value

    return number


def _values(fields: dict[str, str]) -> dict[str, Any]:
    from qerl.settings.recipe import parse_field

    return {name: parse_field(name, text) for name, text in fields.items()}


def _load_config(recipes: list[Path], fields: dict[str, str]) -> "QeRLConfig":
    from qerl.settings.recipe import load_config

    return load_config(recipes, _values(fields))


def _train(args: argparse.Namespace) -> int:
    config = _load_config(args.recipes, args.fields)
    if args.dry_run:
        from qerl.settings.recipe import dump
        from qerl.trainer.preflight import preflight

        preflight(config)
        print(dump(config), end="")
        return 0
    from qerl.trainer.run import train

    result = train(config, console)
    if result.interrupted:
        return 130
    score = eval_command(str(config.model), result.folder, config.tuning)
    console.print(
        f"Saved to {result.folder}. Score it with: {score}", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def eval_command(model: str, run: Path, tuning: str) -> str:
    """The shell command that scores a finished run; the run itself says how it is to be scored."""
    policy = [str(run)] if tuning == "full" else [model, "--adapter", str(run)]
    return shlex.join(["qerl", "eval", *policy, "--out", str(run / "eval")])


def _plan(args: argparse.Namespace) -> int:
    from qerl.plan.command import plan_command
    from qerl.plan.propose import fits
    from qerl.settings.recipe import parse_value

    gpu, processes = parse_value(args.gpu, "--gpu"), parse_value(args.processes, "--processes")
    plan = plan_command(args.model, args.recipes, _values(args.fields), gpu, console, processes)
    return 0 if fits(plan) else 1


def _demo(args: argparse.Namespace) -> int:
    config = _load_config([args.recipe], args.fields)
    from qerl.demo import run_demo

    return run_demo(config, console)


def _quantize(args: argparse.Namespace) -> None:
    from qerl.fp4.quantize import quantize_checkpoint
    from qerl.models.hub import local_checkpoint

    quantize_checkpoint(local_checkpoint(args.model), args.out, args.format, args.method)


def _eval(args: argparse.Namespace) -> None:
    from qerl.eval.run import Request, evaluate_model

    request = Request(
        task=args.task,
        task_options=_mapping(args.task_options, "--task_options"),
        samples=args.samples,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        limit=args.limit,
        seed=args.seed,
    )
    evaluate_model(_source(args), request, args.out, console)


def _generate(args: argparse.Namespace) -> None:
    from qerl.eval.run import Request, answer

    request = Request(temperature=args.temperature, top_p=1.0, max_tokens=args.max_tokens, seed=args.seed)
    print(answer(_source(args), args.prompt, request, console, args.system))


def _source(args: argparse.Namespace) -> "Source":
    from qerl.eval.run import Source

    kwargs = _mapping(args.chat_template_kwargs, "--chat_template_kwargs")
    return Source(args.model, args.adapter, args.weights, args.rounding, args.dtype, kwargs)


def _mapping(text: str | None, flag: str) -> dict[str, Any] | None:
    """The YAML mapping that a flag gives, None where the flag is not given."""
    if text is None:
        return None
    from qerl.settings.recipe import parse_value

    value = parse_value(text, flag)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise QeRLError(f"{flag} is {text!r}; it must be a mapping, for example '{{level: wp1}}'.")
    return value


def _doctor(_: argparse.Namespace) -> None:
    from qerl.doctor import print_doctor

    print_doctor()


def _report(args: argparse.Namespace) -> None:
    from qerl.report import write_report

    write_report(args.runs, args.out, args.scores)
    console.print(f"Wrote {args.out}")


if __name__ == "__main__":
    sys.exit(main())
