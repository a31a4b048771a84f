"""The `qerl` command.

Flags are written with underscores, as TRL's are; a dash in a flag means the same. Heavy imports happen inside
the commands, so that `qerl --help` and mistakes on the command line answer at once. Each command has a
function that adds its arguments to the parser (`_add_train`) and one that runs it (`_train`). Other
distributions add commands through an entry point group (`COMMANDS`); each entry point is a function like
`_add_train`.
"""

import argparse
import contextlib
import errno
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from qerl import __version__
from qerl.cli_results import (
    add_bench,
    add_compare,
    add_eval,
    add_export,
    add_generate,
    add_report,
    add_watch,
    option,
)
from qerl.errors import QeRLError, did_you_mean
from qerl.ranks import is_first_process
from qerl.settings.words import add_command, positionals_first, split_fields, with_underscores
from qerl.user_code import named_again
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, PACKED_FORMATS, ROUNDINGS

# Commands in which `--field value` sets a field of QeRLConfig, with the flags and options that are no fields.
TAKE_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (("--help", "--dry_run"), ()),
    "demo": (("--help", "--tools"), ()),
    "plan": (("--help", "--max_context"), ("--gpu", "--processes", "--adapters", "--price")),
}

COMMANDS = "qerl.commands"
"""Entry point group through which other distributions add commands."""

console = Console(quiet=not is_first_process(), emoji=False)  # a path may have ":train:" in it


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 a plan that does not fit, 2 a mistake the user
    can fix, 130 interrupted."""
    return status_of(lambda: _run(with_underscores(sys.argv[1:] if argv is None else argv)))


def status_of(command: Callable[[], int | None]) -> int:
    """Run a command; return its exit status. Mistakes the user can fix, and Ctrl-C, become a sentence on
    stderr."""
    _quiet_libraries()
    try:
        status = command() or 0
        sys.stdout.flush()
        return status
    except QeRLError as error:
        return _say(str(error))
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        _forget_output()
        return _say(f"{_shortened(error.filename or 'The output')}: {error.strerror}; {remedy}.")
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return 130


def _run(words: list[str]) -> int | None:
    if nul := next((word for word in words if "\0" in word), None):
        raise QeRLError(
            f"{_shortened(repr(nul))} holds a NUL character, which no name or path can have; remove it."
        )
    if words[:1] == ["study"]:
        raise QeRLError(
            "Studies are in QeRL's repository, not in the package; in a clone, run `python -m lab study`."
        )
    if words[:1] == ["serve"] and not entry_points(group=COMMANDS, name="serve"):
        raise QeRLError(
            "`qerl serve` is in a separate package; run `pip install 'qerl[serve]'`, or in a clone "
            "`pip install -e . -e packages/serve`."
        )
    fields: dict[str, str] = {}
    if words and words[0] in TAKE_FIELDS:
        words, fields = split_fields(words, *TAKE_FIELDS[words[0]])
    parser = _parser(*words[:1])
    commands = _commands(parser)
    if words and not words[0].startswith("-") and words[0] not in commands:
        raise QeRLError(
            f"There is no command {_shortened(words[0])!r}{did_you_mean(words[0], commands)}; "
            "`qerl --help` lists the commands."
        )
    args, unknown = parser.parse_known_args(words)
    if unknown:
        known = commands.get(words[0], parser)._option_string_actions
        hint = did_you_mean(unknown[0].partition("=")[0], known, cutoff=0.75)  # all begin with two dashes
        raise QeRLError(
            f"`qerl {words[0]}` does not take {' '.join(unknown)}{hint}; `qerl {words[0]} --help` says what "
            "it takes."
        )
    args.fields, args.console = fields, console
    status: int | None = args.run(args)
    return status


# Advice for files that cannot be opened or written because of their name or disk, in any command.
_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give another path",
    errno.EACCES: "give another path, or permission for this one",
    errno.EROFS: "give a writable path",
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
}


def _say(message: str) -> int:
    escaped = message.replace("[", r"\[")
    Console(stderr=True).print(f"[red]error:[/red] {escaped}", highlight=False, soft_wrap=True)
    return 2


def _shortened(name: Any) -> str:
    text = str(name)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-50:]}"


def _forget_output() -> None:
    """Drop the output that could not be printed; flushing it at exit would raise a second error."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        return
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _quiet_libraries() -> None:
    """Silence messages of libraries that no user can act on."""
    if not console.is_terminal:
        os.environ.setdefault("TQDM_DISABLE", "1")
    # A warning about a CPU kernel for NF4, which needs a GPU here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # PEFT asks the Hub for the base model's vocabulary size and warns when it gets no answer.
    warnings.filterwarnings("ignore", message="Unable to fetch remote file")
    warnings.filterwarnings("ignore", message="Could not find a config file")
    # An argument that transformers passes on to DistributedDataParallel by its former name.
    warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
    # TRL and PEFT call transformers' activation checkpointing by its former name, some at every rollout.
    warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated")


def _print(text: str) -> None:
    """Print text as it stands; the reader may stop early, as `head` does, since rich handles a closed
    pipe."""
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True, end="")


class Command(argparse.ArgumentParser):
    """Parser of a command, whose help ends with the fields, if it takes any. Positional words may stand
    anywhere."""

    _greedy: Sequence[str] = ()
    """Options on the command line that take several values."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        positional = [action.nargs for action in self._actions if not action.option_strings]
        of = {option: action.nargs for action in self._actions for option in action.option_strings}
        lists = [option for option, nargs in of.items() if nargs == "+"]
        if set(positional) == {None}:
            flags = [option for option, nargs in of.items() if nargs == 0]
            args = positionals_first(args, len(positional), lists, flags)
        self._greedy = [option for option in lists if option in args]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Extend an error about missing words by the options that may have taken them."""
        if self._greedy and message.startswith("the following arguments are required"):
            options = " and ".join(self._greedy)
            take = "takes" if len(self._greedy) == 1 else "take"
            message += f"; {options} {take} all words up to the next flag, so put them first, or after `--`"
        super().error(message)

    def format_help(self) -> str:
        text = super().format_help()
        if self.prog.split()[-1] not in TAKE_FIELDS:
            return text
        from qerl.settings.docs import help_text  # imports TRL, which takes seconds

        return f"{text}\n{help_text()}\n"

    def print_help(self, file: Any = None) -> None:
        _print(self.format_help())


def _parser(word: str = "") -> argparse.ArgumentParser:
    """Return the parser of all commands, without those of other distributions if ``word`` is one of this
    package's."""
    parser = argparse.ArgumentParser(
        prog="qerl", description="RL of language models on few GPUs, on NVFP4 weights."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Command)
    for add in (
        _add_train, _add_plan, _add_demo, _add_recipes, _add_fields, _add_quantize, add_eval,
        add_generate, add_report, add_compare, add_watch, add_export, add_bench, _add_doctor,
        _add_completion,
    ):  # fmt: skip
        add(commands)
    if word not in commands.choices:  # so that others cannot break this package's
        for command in entry_points(group=COMMANDS):
            command.load()(commands)
    return parser


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands by name."""
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return commands


def _add_train(commands: Any) -> None:
    text = "Train with the settings of recipes; any field can be set as --FIELD VALUE."
    sub = add_command(commands, "train", _train, text)
    text = "names (see `qerl recipes`) or paths of .yaml files, merged from left to right"
    sub.add_argument("recipes", nargs="*", metavar="RECIPE", help=text)
    text = "run only the checks that need no model, and print the settings"
    sub.add_argument("--dry_run", action="store_true", help=text)


def _add_plan(commands: Any) -> None:
    text = (
        "Print what fits on a GPU (--gpu: its memory in GB, or its name) and, where measured, how long a "
        "step takes; any field can be set as --FIELD VALUE."
    )
    sub = add_command(commands, "plan", _plan, text)
    text = (
        "recipes, as for train; and the model, unless a recipe or --model sets it: a Hub id, a local folder, "
        "or a shape such as 32b"
    )
    sub.add_argument("words", nargs="*", metavar="[MODEL] RECIPE", help=text)
    option(sub, "--gpu", "GPU", "GB, or a name such as rtx4090; default: 80")
    option(sub, "--processes", "N", "number of GPUs, one process each; default: 1", default="1")
    sub.add_argument("--max_context", action="store_true", help="also print the longest completion that fits")
    option(sub, "--price", "P", "price of one GPU hour, in any currency; adds the cost of the run")
    option(sub, "--adapters", "N", "plan for `qerl serve` with N adapters on the GPU")


def _add_demo(commands: Any) -> None:
    sub = add_command(commands, "demo", _demo, "Train a small real model here and score it before and after.")
    sub.add_argument("recipe", nargs="?", metavar="RECIPE", help="default: demo, or demo-tools with --tools")
    sub.add_argument("--tools", action="store_true", help="the model learns to use a calculator")


def _add_recipes(commands: Any) -> None:
    add_command(commands, "recipes", _recipes, "List the recipes of this package and what each needs.")


def _add_fields(commands: Any) -> None:
    sub = add_command(commands, "fields", _fields, "Explain one field of the settings, or list all of them.")
    sub.add_argument("name", nargs="?", metavar="NAME", help="name of a field of QeRL, TRL or transformers")


def _add_quantize(commands: Any) -> None:
    sub = add_command(commands, "quantize", _quantize, "Quantise a checkpoint, shard by shard.")
    sub.add_argument("model", metavar="MODEL", help="Hub id or local folder")
    sub.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    sub.add_argument("--format", choices=PACKED_FORMATS, default=DEFAULT_FORMAT, help="default: %(default)s")
    text = "default: %(default)s, least error"
    sub.add_argument("--rounding", choices=ROUNDINGS, default=DEFAULT_ROUNDING, help=text)


def _add_doctor(commands: Any) -> None:
    add_command(
        commands, "doctor", _doctor, "Show what this machine can run, and how to install what is missing."
    )


def _add_completion(commands: Any) -> None:
    text = "Print a shell script that completes commands, options and fields."
    sub = add_command(commands, "completion", _completion, text)
    sub.add_argument("shell", choices=("bash", "zsh", "fish"))


def _values(fields: dict[str, str]) -> dict[str, Any]:
    from qerl.settings.recipe import parse_field

    return {name: parse_field(name, text) for name, text in fields.items()}


def _train(args: argparse.Namespace) -> int:
    from qerl.settings.recipe import dump, load_config

    config = load_config(args.recipes, _values(args.fields))
    if args.dry_run:
        from qerl.models.hub import check_if_local
        from qerl.trainer.preflight import preflight
        from qerl.trainer.resume.changes import resume_point

        preflight(config)
        check_if_local(str(config.model))
        resume_point(config, Console(stderr=True))
        _print(dump(config))
        return 0
    from qerl.trainer.run import train

    result = train(config, console)
    if result.interrupted:
        return 130
    if not result.judged:
        console.print(f"Saved to {result.folder}.", markup=False, highlight=False, soft_wrap=True)
        return 0
    again = named_again(vars(config))
    trusts = config.trust_remote_code
    score = eval_command(str(config.model), result.folder, config.tuning, trusts=trusts, again=again)
    console.print(
        f"Saved to {result.folder}. Score it with: {score}", markup=False, highlight=False, soft_wrap=True
    )
    return 0


def eval_command(model: str, run: Path, tuning: str, trusts: bool = False, again: Sequence[str] = ()) -> str:
    """Return the shell command that scores a finished run. It names the run, whose folder has the settings of
    its scoring, and code that is not QeRL's (``trusts``, ``again``)."""
    policy = [str(run)] if tuning == "full" else [model, "--adapter", str(run)]
    trusted = ["--trust_remote_code", "true"] if trusts else []
    return shlex.join(["qerl", "eval", *policy, *trusted, *again, "--out", str(run / "eval")])


def _plan(args: argparse.Namespace) -> int:
    from qerl.plan.command import model_and_recipes, plan_command
    from qerl.plan.propose import fits
    from qerl.settings.recipe import parse_value

    processes = parse_value(args.processes, "--processes")
    gpu, adapters, price = (
        None if given is None else parse_value(given, flag)
        for flag, given in (("--gpu", args.gpu), ("--adapters", args.adapters), ("--price", args.price))
    )
    asked = *model_and_recipes(args.words), _values(args.fields)
    plan = plan_command(*asked, gpu, console, processes, args.max_context, adapters, price)
    return 0 if fits(plan) else 1


def _demo(args: argparse.Namespace) -> int:
    from qerl.demo import run_demo
    from qerl.settings.recipe import load_config

    recipe = args.recipe or ("demo-tools" if args.tools else "demo")
    return 0 if run_demo(load_config([recipe], _values(args.fields)), console) else 130


def _recipes(_: argparse.Namespace) -> None:
    from qerl.settings.library import recipe_list

    console.print(recipe_list(), highlight=False)


def _fields(args: argparse.Namespace) -> None:
    from qerl.settings.docs import all_fields_text, field_text

    _print((all_fields_text() if args.name is None else field_text(args.name)) + "\n")


def _quantize(args: argparse.Namespace) -> None:
    from qerl.fp4.quantize import quantize_checkpoint
    from qerl.models.hub import local_checkpoint

    quantize_checkpoint(local_checkpoint(args.model), args.out, args.format, args.rounding)


def _doctor(_: argparse.Namespace) -> None:
    from qerl.doctor import print_doctor

    print_doctor()


def _completion(args: argparse.Namespace) -> None:
    from qerl.completion import script

    _print(script(args.shell, _commands(_parser()), set(TAKE_FIELDS)))
