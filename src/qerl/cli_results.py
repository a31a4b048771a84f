"""The commands that measure and show: bench a GPU; eval, generate, report and watch what a run has trained.

As in `qerl.cli`, each command is a function that describes its words beside one that runs it, which finds the
console in its arguments.
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QeRLError
from qerl.settings.words import add_command, number_from
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, ROUNDINGS

if TYPE_CHECKING:
    from qerl.models.decide import Source


def add_bench(commands: Any) -> None:
    sub = add_command(commands, "bench", _bench, "Measure this machine's GPU, for a file that can be sent.")
    sub.add_argument("what", choices=("card",), help="card: decoding and whole steps of random models")
    sub.add_argument("--out", type=Path, default=Path("card.json"), help="JSON file; default: %(default)s")
    sub.add_argument("--shape", help="1.5b, 3b, 7b, 14b or 32b; default: the largest that fits")


def _bench(args: argparse.Namespace) -> None:
    from qerl.measure.card import measure_card

    measure_card(args.out, args.console, args.shape)


def add_eval(commands: Any) -> None:
    sub = add_command(commands, "eval", _eval, "Score a model, with or without an adapter.")
    _add_model(sub)
    sub.add_argument(
        "--adapter", nargs="+", type=Path, metavar="DIR",
        help="folder of a PEFT adapter; of several, each is scored and the best one named",
    )  # fmt: skip
    sub.add_argument(
        "--suite", metavar="SUITE", help="several tasks with their average: math, arithmetic, or a .yaml file"
    )
    sub.add_argument("--task", help="gsm8k, math500, arithmetic, jsonl:PATH, ...; default: the run's")
    sub.add_argument(
        "--task_options",
        metavar="YAML",
        help="mapping, for example '{level: wp1}'; default: the run's, for its own task",
    )
    sub.add_argument(
        "--environment",
        metavar="NAME",
        help="who answers the model: a name or PATH.py:Class; default: the run's, for its own task",
    )
    sub.add_argument(
        "--max_tool_calling_iterations", type=number_from(1), metavar="N",
        help="turns of the model that are answered; default: the run's, else as many as its tokens allow",
    )  # fmt: skip
    sub.add_argument(
        "--environment_options", metavar="YAML", help="mapping; default: the run's, for its own task"
    )
    sub.add_argument(
        "--tools", nargs="+", metavar="TOOL",
        help="functions that the model may call; default: the run's, for its own task",
    )  # fmt: skip
    sub.add_argument(
        "--samples",
        type=number_from(1),
        metavar="N",
        help="samples per problem; default: 1, which decodes greedily",
    )
    sub.add_argument(
        "--temperature", type=number_from(0, float), metavar="T", help="default: 0 for one sample, else 0.6"
    )
    sub.add_argument("--top_p", type=number_from(1e-6, float, 1), metavar="P", help="default: 0.95")
    sub.add_argument(
        "--max_tokens",
        type=number_from(1),
        metavar="N",
        help="default: the run's max_completion_length, else 4096",
    )
    _add_stops(sub)
    sub.add_argument("--limit", type=number_from(1), metavar="N", help="problems to score; default: all")
    sub.add_argument("--seed", type=number_from(0), metavar="N", help="default: 0")
    sub.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for the result and the completions; one that was cut off goes on",
    )


def add_generate(commands: Any) -> None:
    sub = add_command(commands, "generate", _generate, "Answer one prompt.")
    _add_model(sub)
    sub.add_argument("--adapter", type=Path, metavar="DIR", help="folder of a PEFT adapter")
    sub.add_argument("prompt", metavar="PROMPT", help="the user's message")
    sub.add_argument(
        "--system", help='system message; default: the one of the run\'s task, else none; "" for none'
    )
    sub.add_argument(
        "--max_tokens",
        type=number_from(1),
        metavar="N",
        help="default: the run's max_completion_length, else 256",
    )
    _add_stops(sub)
    sub.add_argument(
        "--temperature", type=number_from(0, float), default=0.0, metavar="T", help="default: 0, greedy"
    )
    sub.add_argument("--seed", type=number_from(0), default=0, metavar="N", help="default: %(default)s")


def add_report(commands: Any) -> None:
    sub = add_command(
        commands, "report", _report, "One HTML page with curves and completions of several runs."
    )
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    sub.add_argument(
        "--scores",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="folders of evaluations (their --out) that lie outside the runs",
    )
    sub.add_argument(
        "--completions", type=number_from(0), metavar="N",
        help="steps of which completions are shown, of runs with log_completions; default: 6, 0 for none",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE", help="page; default: %(default)s"
    )


def _add_stops(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--stop_strings", nargs="+", metavar="TEXT",
        help="texts that end a completion, which keeps them; default: the run's",
    )  # fmt: skip
    sub.add_argument(
        "--thinking_budget", type=number_from(1), metavar="N",
        help="tokens after which thoughts are closed; default: the run's, else none",
    )  # fmt: skip
    sub.add_argument("--thinking_end", metavar="TEXT", help="what closes them; default: the run's")


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="Hub id, local folder or .gguf file")
    sub.add_argument(
        "--weights", choices=FORMATS, help=f"default: what the run trained on, else {DEFAULT_FORMAT}"
    )
    sub.add_argument("--rounding", choices=ROUNDINGS, help=f"default: the run's, else {DEFAULT_ROUNDING}")
    sub.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        help="of what is not quantised; default: the run's, else bfloat16 on a GPU and float32 on a CPU",
    )
    sub.add_argument(
        "--chat_template_kwargs",
        metavar="YAML",
        help="mapping, for example '{enable_thinking: false}'; default: the run's",
    )
    sub.add_argument(
        "--trust_remote_code",
        choices=("true", "false"),
        default="false",
        help="whether Python code that comes with the model may run; never taken from a run",
    )


def _eval(args: argparse.Namespace) -> None:
    from qerl.eval.request import Request, Suite, load_suite
    from qerl.eval.run import evaluate_model
    from qerl.eval.several import evaluate_all
    from qerl.settings.recipe import parse_mapping

    asked = {spec.name: getattr(args, spec.name) for spec in fields(Request)}
    for name in ("task_options", "environment_options"):
        asked[name] = parse_mapping(asked[name], f"--{name}")
    given = {name: value for name, value in asked.items() if value is not None}
    sources = [_source(args, adapter) for adapter in args.adapter or [None]]
    if args.suite is not None:
        if args.task is not None or args.task_options is not None:
            raise QeRLError("--suite has its own tasks; give either --suite, or --task and --task_options.")
        evaluate_all(sources, load_suite(args.suite, given), args.out, args.console)
    elif len(sources) > 1:
        suite = Suite("", "", {args.task or "": Request(**given)})
        evaluate_all(sources, suite, args.out, args.console)
    else:
        evaluate_model(sources[0], Request(**given), args.out, args.console)


def _generate(args: argparse.Namespace) -> None:
    from qerl.eval.request import Request
    from qerl.eval.run import answer

    request = Request(
        temperature=args.temperature,
        top_p=1.0,
        max_tokens=args.max_tokens,
        stop_strings=args.stop_strings,
        thinking_budget=args.thinking_budget,
        thinking_end=args.thinking_end,
        seed=args.seed,
    )
    print(answer(_source(args, args.adapter), args.prompt, request, args.console, args.system))


def _source(args: argparse.Namespace, adapter: Path | None) -> "Source":
    from qerl.models.decide import Source
    from qerl.settings.recipe import parse_mapping

    kwargs = parse_mapping(args.chat_template_kwargs, "--chat_template_kwargs")
    trusts = args.trust_remote_code == "true"
    return Source(args.model, adapter, args.weights, args.rounding, args.dtype, kwargs, trusts)


def _report(args: argparse.Namespace) -> None:
    from qerl.report.page import COMPLETIONS, write_report

    count = COMPLETIONS if args.completions is None else args.completions
    write_report(args.runs, args.out, args.scores, count)
    args.console.print(f"Wrote {args.out}")


def add_watch(commands: Any) -> None:
    text = (
        "Follow a run in the terminal until it ends or Ctrl-C; without a terminal, show once how it stands."
    )
    sub = add_command(commands, "watch", _watch, text)
    sub.add_argument("folder", type=Path, metavar="RUN", help="output_dir of a run")


def _watch(args: argparse.Namespace) -> None:
    from qerl.report.watch import watch

    watch(args.folder, args.console)
