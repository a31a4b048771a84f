"""The commands for results of a run: eval, generate, report, compare, watch, export; and bench, for a GPU.

As in `qerl.cli`, each command has a function that adds its arguments to the parser and one that runs it; the
latter finds the console in its arguments.
"""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl.errors import QeRLError
from qerl.export.gguf import OUTTYPES
from qerl.settings.words import add_command, number_from
from qerl.weight_formats import DEFAULT_FORMAT, DEFAULT_ROUNDING, FORMATS, ROUNDINGS

if TYPE_CHECKING:
    from qerl.models.decide import Source


_BOOLEAN = ("true", "false")


def add_bench(commands: Any) -> None:
    sub = add_command(
        commands, "bench", _bench, "Measure this machine's GPU and write a file that can be sent in."
    )
    sub.add_argument(
        "what", choices=("card",), help="card: decoding and whole training steps with random weights"
    )
    sub.add_argument("--out", type=Path, default=Path("card.json"), help="JSON file; default: %(default)s")
    sub.add_argument("--shape", help="1.5b, 3b, 7b, 14b or 32b; default: the largest that fits")


def _bench(args: argparse.Namespace) -> None:
    from qerl.measure.card import measure_card

    measure_card(args.out, args.console, args.shape)


def option(sub: Any, flag: str, metavar: str, text: str, kind: Any = str, **more: Any) -> None:
    """Add an option with a value of this kind to a command; ``text`` is its help."""
    sub.add_argument(flag, metavar=metavar, help=text, type=kind, **more)


def add_eval(commands: Any) -> None:
    sub = add_command(commands, "eval", _eval, "Score a model, with or without an adapter.")
    add, count, own = partial(option, sub), number_from(1), "default: the run's, if its task is scored"
    _add_model(sub)
    text = "folders of PEFT adapters; each is scored, and the best one is named"
    add("--adapter", "DIR", text, Path, nargs="+")
    add("--suite", "SUITE", "several tasks, scored with their average: math, arithmetic, or a .yaml file")
    add("--task", "TASK", "gsm8k, math500, arithmetic, jsonl:PATH, ...; default: the run's")
    add("--task_options", "YAML", f"mapping, for example '{{level: wp1}}'; {own}")
    add("--environment", "NAME", f"environment that answers the model: a name or PATH.py:Class; {own}")
    text = "maximum turns that are answered; default: the run's, else as many as --max_tokens allows"
    add("--max_tool_calling_iterations", "N", text, count)
    add("--environment_options", "YAML", f"mapping; {own}")
    add("--tools", "TOOL", f"functions that the model may call; {own}", nargs="+")
    add("--samples", "N", "samples per problem; default: 1, which decodes greedily", count)
    add("--temperature", "T", "default: 0 for one sample, else 0.6", number_from(0, float))
    add("--top_p", "P", "default: 0.95", number_from(1e-6, float, 1))
    add("--max_tokens", "N", "default: the run's max_completion_length, else 4096", count)
    _add_stops(sub)
    add("--limit", "N", "number of problems to score; default: all", count)
    add("--seed", "N", "default: 0", number_from(0))
    add("--out", "DIR", "folder for result and completions; an interrupted evaluation in it is resumed", Path)


def add_generate(commands: Any) -> None:
    sub = add_command(commands, "generate", _generate, "Answer one prompt.")
    add = partial(option, sub)
    _add_model(sub)
    add("--adapter", "DIR", "folder of a PEFT adapter", Path)
    sub.add_argument("prompt", metavar="PROMPT", help="the user's message")
    add("--system", "TEXT", 'system message; default: that of the run\'s task, else none; "" for none')
    add("--max_tokens", "N", "default: the run's max_completion_length, else 256", number_from(1))
    _add_stops(sub)
    add("--temperature", "T", "default: 0, greedy", number_from(0, float))
    add("--seed", "N", "default: %(default)s", number_from(0), default=0)


def add_report(commands: Any) -> None:
    text = "Write an HTML page with curves and completions of one or more runs."
    sub = add_command(commands, "report", _report, text)
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    text = "folders of evaluations (their --out) that lie outside the runs"
    option(sub, "--scores", "DIR", text, Path, nargs="+", default=[])
    text = "number of steps whose completions are shown, with log_completions; default: 6, 0 for none"
    option(sub, "--completions", "N", text, number_from(0))
    option(
        sub, "--out", "FILE", "HTML file to write; default: %(default)s", Path, default=Path("report.html")
    )


def add_compare(commands: Any) -> None:
    sub = add_command(
        commands, "compare", _compare, "Print settings and results of several runs side by side."
    )
    sub.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output_dir of a run")
    text = "folders of evaluations (their --out) that lie outside the runs"
    option(sub, "--scores", "DIR", text, Path, nargs="+", default=[])


def _compare(args: argparse.Namespace) -> None:
    from qerl.report.compare import compare

    compare(args.runs, args.console, args.scores)


def _add_stops(sub: argparse.ArgumentParser) -> None:
    text = "texts that end a completion and stay in it; default: the run's"
    option(sub, "--stop_strings", "TEXT", text, nargs="+")
    text = "number of tokens after which thoughts are closed; default: the run's, else none"
    option(sub, "--thinking_budget", "N", text, number_from(1))
    option(sub, "--thinking_end", "TEXT", "text that closes thoughts; default: the run's")


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help="Hub id, local folder or .gguf file")
    text = f"format of the base weights; default: the run's, else {DEFAULT_FORMAT}"
    sub.add_argument("--weights", choices=FORMATS, help=text)
    sub.add_argument("--rounding", choices=ROUNDINGS, help=f"default: the run's, else {DEFAULT_ROUNDING}")
    text = "dtype of unquantised weights; default: the run's, else bfloat16 on a GPU and float32 on a CPU"
    sub.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help=text)
    text = "mapping, for example '{enable_thinking: false}'; default: the run's"
    option(sub, "--chat_template_kwargs", "YAML", text)
    text = "whether Python code that comes with the model may run; never taken from a run"
    sub.add_argument("--trust_remote_code", choices=_BOOLEAN, default="false", help=text)


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

    names = ("temperature", "max_tokens", "stop_strings", "thinking_budget", "thinking_end", "seed")
    request = Request(top_p=1.0, **{name: getattr(args, name) for name in names})
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
    text = "Follow a run in the terminal until it ends or Ctrl-C; without a terminal, print its state once."
    sub = add_command(commands, "watch", _watch, text)
    sub.add_argument("folder", type=Path, metavar="RUN", help="output_dir of a run")


def _watch(args: argparse.Namespace) -> None:
    from qerl.report.watch import watch

    watch(args.folder, args.console)


def add_export(commands: Any) -> None:
    text = "Export a trained policy for other programs: a merged model, an adapter with its card, or GGUF."
    sub = add_command(commands, "export", _export, text)
    add = partial(option, sub)
    text = "output_dir of a run, a checkpoint, or a LoRA adapter of PEFT"
    sub.add_argument("run_folder", type=Path, metavar="RUN", help=text)
    sub.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist")
    text = "merged (default): a whole model in 16 bits; adapter: a PEFT folder; gguf: one file"
    sub.add_argument("--format", choices=("merged", "adapter", "gguf"), default="merged", help=text)
    add("--model", "MODEL", "base model of the adapter; default: the run's")
    add("--base_model", "ID", "Hub id of the base model, for the card; default: that of the base used")
    text = "weights to merge into; default: the run's, dequantised; bf16: the base's own 16-bit weights"
    sub.add_argument("--weights", choices=FORMATS, help=text)
    sub.add_argument(
        "--rounding", choices=ROUNDINGS, help="rounding of a base quantised on loading; default: the run's"
    )
    text = "dtype of a merged model; float16 keeps more of a small update; default: bfloat16"
    sub.add_argument("--dtype", choices=("bfloat16", "float16"), help=text)
    sub.add_argument("--outtype", choices=OUTTYPES, help="weight type of a GGUF file; default: bf16")
    add("--converter", "PATH", "llama.cpp's convert_hf_to_gguf.py; default: the one on PATH", Path)
    text = "whether Python code that comes with the base may run"
    sub.add_argument("--trust_remote_code", choices=_BOOLEAN, default="false", help=text)
    text = "push the export to the Hub"
    sub.add_argument("--push_to_hub", nargs="?", choices=_BOOLEAN, const="true", default="false", help=text)
    add("--hub_model_id", "ID", "repository, as owner/name; default: the name of OUT, under your account")
    text = "whether a new repository is private; default: the owner's setting"
    sub.add_argument("--hub_private_repo", nargs="?", choices=_BOOLEAN, const="true", help=text)
    add("--hub_token", "TOKEN", "Hub token; default: HF_TOKEN, else that of `hf auth login`")


def _export(args: argparse.Namespace) -> None:
    from qerl.export.hub import Repository
    from qerl.export.run import Export, export

    private = None if args.hub_private_repo is None else args.hub_private_repo == "true"
    repository = Repository(args.hub_model_id, private, args.hub_token)
    pushes = args.push_to_hub == "true"
    if not pushes and repository != Repository():
        raise QeRLError("--hub_... options have no effect without --push_to_hub; add it.")
    export(
        Export(
            args.run_folder, args.out, args.format, args.model, args.base_model, args.weights, args.rounding,
            args.dtype, args.outtype, args.converter, args.trust_remote_code == "true",
            repository if pushes else None,
        ),
        args.console,
    )  # fmt: skip
