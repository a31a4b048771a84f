"""Shell completion: a script for bash, zsh or fish that knows commands, their options, fields and recipes.

The script holds all words, so that TAB answers at once: naming the fields at each TAB would import TRL, which
takes seconds. After an update of the package it has to be written anew. zsh runs the script of bash.

Paths, values of options that take any, and words that the script does not know are completed as file names.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

from qerl.settings.config import FIELDS, refusal
from qerl.settings.library import packaged
from qerl.settings.parents import REPLACED
from qerl.settings.recipe import type_of

_ZSH = """\
(( $+functions[compdef] )) || { autoload -U +X compinit && compinit }
autoload -U +X bashcompinit && bashcompinit
"""
"""Lines with which zsh runs a script of bash: they load its own completion, which a bare ~/.zshrc has not
started, and bash's."""


@dataclass
class Words:
    """Words that may follow a command.

    Attributes:
        options: Its options, each with the values that it takes; an empty list where it takes any.
        flags: Options that take no value.
        positional: Values of positional arguments.
    """

    options: dict[str, list[str]] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)
    positional: list[str] = field(default_factory=list)


def script(shell: str, commands: dict[str, argparse.ArgumentParser], with_fields: set[str]) -> str:
    """The script for a shell.

    Args:
        shell: bash, zsh or fish.
        commands: Parsers of the commands by name.
        with_fields: Names of commands that take fields, and recipes as words.
    """
    fields = {f"--{name}": list(_choices(type_of(name))) for name in sorted(_settable())}
    known = {name: _words_of(parser) for name, parser in commands.items()}
    for name in with_fields:
        known[name].positional += sorted(packaged())
    if shell == "fish":
        return "\n".join(_fish(known, fields, with_fields)) + "\n"
    text = "\n".join(_bash(known, fields, with_fields)) + "\n"
    return f"{_ZSH}{text}" if shell == "zsh" else text


def _settable() -> Iterator[str]:
    for name, spec in FIELDS.items():
        if name not in REPLACED and not refusal(name, spec.default):
            yield name


def _choices(type_: Any) -> Iterator[str]:
    """Yield the values that a field of this type takes, where they can be listed."""
    if type_ is bool:
        yield from ("true", "false")
    origin = get_origin(type_)
    if origin is list or origin is dict:
        return
    for part in get_args(type_):
        if isinstance(part, str) and str(origin) == "typing.Literal":
            yield part
        elif not isinstance(part, str | int):
            yield from _choices(part)


def _words_of(parser: argparse.ArgumentParser) -> Words:
    words = Words()
    for action in parser._actions:
        choices = [str(choice) for choice in action.choices or ()]
        if action.option_strings:
            words.options[action.option_strings[-1]] = choices
            words.flags |= {action.option_strings[-1]} if action.nargs == 0 else set()
        else:
            words.positional += choices
    return words


def _bash(known: dict[str, Words], fields: dict[str, list[str]], with_fields: set[str]) -> Iterator[str]:
    """Yield the lines of a function that looks at the command, the previous word and the start of the current
    one.

    bash splits ``--option=value`` into three words.
    """
    yield "_qerl() {"
    yield '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words=""'
    yield '    local command="${COMP_WORDS[1]}"'
    yield f'    local fields="{" ".join(fields)}"'
    yield '    if [[ "$cur" == "=" ]]; then cur=""; fi'
    yield '    if [[ "$prev" == "=" ]]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield "    COMPREPLY=()"
    yield "    if [[ $COMP_CWORD -eq 1 ]]; then"
    yield f'        COMPREPLY=($(compgen -W "{" ".join([*known, "--version", "--help"])}" -- "$cur"))'
    yield "        return"
    yield "    fi"
    yield '    case "$command $prev" in'
    for name, words in known.items():
        for option, choices in words.options.items():
            if choices:
                yield f'        "{name} {option}") words="{" ".join(choices)}" ;;'
    for option, choices in fields.items():
        if choices:
            every = "|".join(f'"{name} {option}"' for name in sorted(with_fields))
            yield f'        {every}) words="{" ".join(choices)}" ;;'
    flags = (f'"{name} {flag}"' for name, words in known.items() for flag in sorted(words.flags))
    yield f"        {'|'.join(flags)}) ;;"
    yield '        *" -"*) [[ "$cur" == -* ]] || return ;;'
    yield "    esac"
    yield '    if [[ -z "$words" || "$cur" == -* ]]; then'
    yield '        case "$command" in'
    for name, words in known.items():
        more = " $fields" if name in with_fields else ""
        yield f'            {name}) [[ "$cur" == -* ]] && words="{" ".join(words.options)}{more}" \\'
        yield f'                || words="{" ".join(words.positional)}" ;;'
    yield "        esac"
    yield "    fi"
    yield '    COMPREPLY=($(compgen -W "$words" -- "$cur"))'
    yield "}"
    yield "complete -o default -F _qerl qerl"


def _fish(known: dict[str, Words], fields: dict[str, list[str]], with_fields: set[str]) -> Iterator[str]:
    """Yield a line for each command, option and word."""
    first = "__fish_use_subcommand"
    yield f"complete -c qerl -f -n {first} -a '{' '.join(known)}'"
    yield f"complete -c qerl -n {first} -l version"

    def option(where: str, name: str, choices: list[str], valued: bool = True) -> str:
        values = f" -xa '{' '.join(choices)}'" if choices else " -rF" if valued else ""
        return (
            f"complete -c qerl -n '__fish_seen_subcommand_from {where}' -l {name.removeprefix('--')}{values}"
        )

    for command, words in known.items():
        for name, choices in words.options.items():
            yield option(command, name, choices, name not in words.flags)
        if words.positional:
            here = f"'__fish_seen_subcommand_from {command}'"
            yield f"complete -c qerl -n {here} -a '{' '.join(words.positional)}'"
    for name, choices in fields.items():
        yield option(" ".join(sorted(with_fields)), name, choices)
