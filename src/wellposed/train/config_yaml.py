"""YAML files, read strictly: a key that is there twice is an error, and an error is one sentence with its line."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from wellposed.errors import InvalidArgument

__all__ = ["parse", "parse_value"]


class _Strict(yaml.SafeLoader):
    """YAML takes the last of two equal keys and says nothing; one of them is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in seen:
                where = f"in line {line}" if line == seen[key] else f"in line {seen[key]} and in line {line}"
                raise _Twice(f"the key {key!r} is there twice, {where}; keep one of them")
            seen[key] = line
        found: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return found


class _Twice(Exception):
    """What is there twice, and where."""


def parse(path: Path) -> Any:
    """What a YAML file holds; raises `InvalidArgument` that names the file, the line and what is wrong there."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Strict)  # a SafeLoader: it makes plain Python only
    except OSError as error:
        hint = f" `wellposed train --show-config > {path}` makes one." if isinstance(error, FileNotFoundError) else ""
        raise InvalidArgument(f"The configuration {path} cannot be read: {error.strerror}.{hint}") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not a YAML file: byte {error.start} is not UTF-8 text.") from None
    except _Twice as error:
        raise InvalidArgument(f"{path}: {error}.") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{path} is not a YAML file: {_sentence(error)}.") from None


def parse_value(text: str) -> Any:
    """One value, as after `key:` in a file."""
    try:
        return yaml.load(text, Loader=_Strict)
    except _Twice as error:
        raise InvalidArgument(f"{text!r} is not a value: {error}.") from None
    except yaml.YAMLError:
        raise InvalidArgument(f"{text!r} is not a value that YAML knows; put text with special characters in quotes.") from None


def _sentence(error: yaml.YAMLError) -> str:
    """Line, column, and what YAML expected there."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    context = getattr(error, "context", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem}{f' ({context})' if context else ''}"
