"""YAML as people write it: values of YAML 1.2's core schema, one value per key, no aliases or tags.

PyYAML reads YAML 1.1, in which `no`, `off` and `yes` are booleans, 017 is 15, 12:30:45 is 45045 and 1e-5
is text. A recipe with `save_strategy: no` means the word. YAML 1.2 says so too, so the loader here
resolves plain scalars by its rules (https://yaml.org/spec/1.2.2/#103-core-schema). The dumper quotes what
either version would read as something else, so that other tools read the same values. Refused, although the
standard allows or PyYAML overlooks them: a key that is there twice, of which one would win silently;
aliases, with which a few lines can stand for gigabytes; and tags. Given up: timestamps and merge keys
(`<<`), which are plain text here.
"""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.events import AliasEvent

_CORE_SCHEMA = {
    "null": "~|null|Null|NULL|",
    "bool": "true|True|TRUE|false|False|FALSE",
    "int": "[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


def load(text: str) -> Any:
    """Return the value of a YAML document.

    Raises:
        ValueError: The text is not YAML, has a key twice, an alias, a tag or a number too long to read, or is
            nested too deep; the message says what and where.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        raise ValueError(f"{error.problem}{where}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def dump(value: Any) -> str:
    """Return a YAML document that :func:`load` reads as the same value; mappings keep their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict = {}  # noqa: RUF012 - PyYAML's way to have a schema of one's own

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if self.check_event(AliasEvent):
            raise ConstructorError(None, None, "aliases are not supported", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise ConstructorError(None, None, f"the tag {event.tag} is not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            key: Any = self.construct_object(key_node, deep=True)
            mark: Any = key_node.start_mark
            if isinstance(key, list | dict):
                raise ConstructorError(None, None, "a list or mapping cannot be a key", mark)
            if key in seen:
                raise ConstructorError(None, None, f"the key {key!r} is there twice", mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)

    def flatten_mapping(self, node: Any) -> None:
        """Do nothing: YAML 1.2 has no merge keys."""

    def construct_core_int(self, node: Any) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _CORE_SCHEMA.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_core_int)
