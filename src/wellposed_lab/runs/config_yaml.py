"""YAML files of unknown origin, read strictly: a key that is there twice is an error, and an error is one sentence."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from wellposed._reading import read_text
from wellposed.errors import InvalidArgument

__all__ = ["parse", "parse_text", "parse_value"]

#: Bytes of a file; a configuration with every key has 2,000.
BYTES = 1 << 16
#: Values and keys, with every alias written out.
NODES = 10_000
#: Beyond this whole numbers have no use here, and torch and NumPy cannot take them.
LARGEST = 2**63 - 1


class _Strict(yaml.SafeLoader):
    """YAML takes the last of two equal keys and says nothing; one of them is a mistake.

    Aliases may not multiply (nine lines of ten aliases each make 10^9 values), nor hold themselves.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _written_out(node, {}) > NODES:
            raise _Wrong(f"it has more than {NODES:,} values with all aliases written out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in seen:
                where = f"in line {line}" if line == seen[key] else f"in line {seen[key]} and in line {line}"
                raise _Wrong(f"the key {key!r} is there twice, {where}; keep one of them")
            seen[key] = line
        found: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return found


class _Wrong(Exception):
    """What is wrong, in words."""


def parse(path: Path, *, within: Path | None = None) -> Any:
    """What a YAML file holds; raises `InvalidArgument` that names the file, the line and what is wrong there.

    Args:
        path: The file.
        within: The run directory that it belongs to, in which links are refused; None follows links.
    """
    text = read_text(path, limit=BYTES, error=InvalidArgument, within=within)
    if text is None:
        hint = f"`wellposed train --show-config > {path}` makes one."
        raise InvalidArgument(f"The configuration {path} cannot be read: No such file or directory. {hint}")
    return parse_text(text, str(path))


def parse_text(text: str, where: str) -> Any:
    """What YAML text holds; raises `InvalidArgument` that names the line and what is wrong there.

    Args:
        text: The YAML.
        where: Named in the refusal.
    """
    try:
        return _load(text)
    except _Wrong as error:
        raise InvalidArgument(f"{where}: {error}.") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{where} is not a YAML file: {_sentence(error)}.") from None


def parse_value(text: str) -> Any:
    """One value, as after `key:` in a file."""
    try:
        return _load(text)
    except _Wrong as error:
        raise InvalidArgument(f"{text!r} is not a value: {error}.") from None
    except yaml.YAMLError:
        raise InvalidArgument(f"{text!r} is not a value that YAML knows; put text with special characters in quotes.") from None


def _load(text: str) -> Any:
    """What YAML text holds; raises `_Wrong` or `yaml.YAMLError`."""
    try:
        plain = yaml.load(text, Loader=_Strict)  # a SafeLoader: it makes plain Python only
        _check_numbers(plain)
    except (_Wrong, yaml.YAMLError):
        raise
    except RecursionError:
        raise _Wrong("it is nested too deeply") from None
    except Exception as error:  # a date in month 13, a number of 5000 digits, `!!float x`: the constructors raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _Wrong(f"it holds a value that YAML cannot read ({reason.rstrip('.')})") from None
    return plain


def _written_out(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Nodes below and including this one, each alias counted in full.

    Args:
        node: The root.
        known: Counts by identity; None while a node is being counted.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise _Wrong(f"the alias in line {node.start_mark.line + 1} holds itself")
        return count
    known[id(node)] = None
    inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    known[id(node)] = count = 1 + sum(_written_out(part, known) for part in inner)
    return count


def _check_numbers(value: Any) -> None:
    """Refuses whole numbers that nothing can work with; Python cannot even print the largest."""
    if isinstance(value, int) and abs(value) > LARGEST:
        size = f"{value}" if value.bit_length() < 100 else f"one of about {round(value.bit_length() * 0.30103)} digits"
        raise _Wrong(f"whole numbers go up to 2^63 - 1; got {size}")
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for part in inner:
        _check_numbers(part)


def _sentence(error: yaml.YAMLError) -> str:
    """Line, column, and what YAML expected there."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    context = getattr(error, "context", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem}{f' ({context})' if context else ''}"
