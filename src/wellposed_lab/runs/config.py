"""A configuration from a YAML file of unknown origin and changes "section.key=value"."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any

from wellposed._reading import read_text
from wellposed.errors import InvalidArgument, MissingPackage, did_you_mean, how_to_install

try:
    import yaml
    from pydantic import ValidationError
except ImportError as error:
    raise MissingPackage(
        f"Configurations and runs need PyYAML and pydantic; install them with: {how_to_install('cli')}."
    ) from error

from wellposed_lab.runs.config_sections import RunConfig

__all__ = ["RunConfig", "by_keys", "parse_yaml", "read", "resolve"]

#: Largest size of a file in bytes; a configuration with every key has 2,000.
BYTES = 1 << 16
#: Largest number of values and keys, with every alias expanded.
NODES = 10_000
#: The largest whole number; torch and NumPy cannot take larger ones.
LARGEST = 2**63 - 1
#: Characters of a wrong value that are shown.
SHOWN = 200


def by_keys(message: str) -> str:
    """A message of the library with advice that a configuration can follow."""
    return re.sub("pass on_ill_posed='warn' to [a-z ]*", "take a smaller optimizer.lr", message)


def read(path: Path, changes: Iterable[str] = (), *, within: Path | None = None) -> RunConfig:
    """The configuration in a YAML file, with changes such as "optimizer.lr=1e-3".

    Args:
        path: The file.
        changes: As in `resolve`.
        within: The run directory of the file, in which links are refused; None follows links.
    """
    text = read_text(path, limit=BYTES, error=InvalidArgument, within=within)
    if text is None:
        hint = f"`wellposed train --show-config > {path}` makes one."
        raise InvalidArgument(f"The configuration {path} cannot be read: No such file or directory. {hint}")
    plain = parse_yaml(text, str(path))
    if plain is not None and not isinstance(plain, dict):
        raise InvalidArgument(f"{path} must hold sections such as 'data:' and 'model:'; got {type(plain).__name__}.")
    return resolve(plain or {}, changes, where=str(path))


def resolve(plain: Mapping[str, Any], changes: Iterable[str] = (), *, where: str = "the configuration") -> RunConfig:
    """A checked configuration from nested dictionaries and changes.

    >>> resolve({"model": {"width": 64}}, ["optimizer.lr=1e-3"]).optimizer.lr
    0.001

    Args:
        plain: Sections with keys; what is missing takes its default.
        changes: Each "section.key=value", the value as in YAML.
        where: Named in messages.
    """
    merged: dict[str, Any] = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in plain.items()}
    for change in changes:
        key, equals, text = change.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise InvalidArgument(f"--set needs section.key=value, e.g. optimizer.lr=1e-3; got {change!r}.{_completed(change)}")
        keys = merged.setdefault(section, {})
        if not isinstance(keys, dict):
            raise InvalidArgument(f"'{section}' of {where} must be a section with keys; got {keys!r}.")
        keys[name] = _parse_value(text)
    try:
        return RunConfig.model_validate(_numbers(merged))
    except ValidationError as error:
        raise InvalidArgument(_invalid_key(error, where)) from None


def parse_yaml(text: str, where: str) -> Any:
    """The value of YAML text; an `InvalidArgument` names `where`, the line and the mistake."""
    try:
        return _load(text)
    except _WrongYaml as error:
        raise InvalidArgument(f"{where}: {error}.") from None
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{where} is not a YAML file: {_syntax(error)}.") from None


class _WrongYaml(Exception):
    """The mistake in words."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses repeated keys, of which YAML takes the last, and aliases that contain themselves or
    multiply: nine lines of ten aliases each make 10^9 values.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count_nodes(node, {}) > NODES:
            raise _WrongYaml(f"it has more than {NODES:,} values with all aliases written out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in seen:
                where = f"in line {line}" if line == seen[key] else f"in line {seen[key]} and in line {line}"
                raise _WrongYaml(f"the key {key!r} is there twice, {where}; keep one of them")
            seen[key] = line
        found: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return found


def _parse_value(text: str) -> Any:
    """One value, as after `key:` in a file."""
    try:
        return _load(text)
    except _WrongYaml as error:
        raise InvalidArgument(f"{text!r} is not a value: {error}.") from None
    except yaml.YAMLError:
        raise InvalidArgument(f"{text!r} is not a value that YAML knows; put text with special characters in quotes.") from None


def _load(text: str) -> Any:
    """The value of YAML text; raises `_WrongYaml` or `yaml.YAMLError`."""
    try:
        plain = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader: it makes plain Python only
        _check_numbers(plain)
    except (_WrongYaml, yaml.YAMLError):
        raise
    except RecursionError:
        raise _WrongYaml("it is nested too deeply") from None
    except Exception as error:  # a date in month 13, a number of 5000 digits, `!!float x`: the constructors raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _WrongYaml(f"it holds a value that YAML cannot read ({reason.rstrip('.')})") from None
    return plain


def _count_nodes(node: yaml.Node, known: dict[int, int | None]) -> int:
    """Nodes in this one, aliases expanded; `known` has counts by identity, None while counting."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in known:
        count = known[id(node)]
        if count is None:
            raise _WrongYaml(f"the alias in line {node.start_mark.line + 1} holds itself")
        return count
    known[id(node)] = None
    inner = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    known[id(node)] = count = 1 + sum(_count_nodes(part, known) for part in inner)
    return count


def _check_numbers(value: Any) -> None:
    """Refuses whole numbers beyond `LARGEST`; Python does not even print the largest."""
    if isinstance(value, int) and abs(value) > LARGEST:
        size = f"{value}" if value.bit_length() < 100 else f"one of about {round(value.bit_length() * 0.30103)} digits"
        raise _WrongYaml(f"whole numbers go up to 2^63 - 1; got {size}")
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, (list, tuple, set)) else ()
    for part in inner:
        _check_numbers(part)


def _syntax(error: yaml.YAMLError) -> str:
    """Line, column, and the message of YAML."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    context = getattr(error, "context", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return f"{where}{problem}{f' ({context})' if context else ''}"


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text (it wants 1.0e-3); people mean the number."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    # a digit has one place in the pattern, so that text that is almost a number takes no longer
    if isinstance(value, str) and len(value) <= SHOWN and re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


def _invalid_key(error: ValidationError, where: str) -> str:
    """The mistake, and the nearest known key."""
    problems = error.errors()
    first = problems[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = list(RunConfig.model_fields)
        if len(place) > 1:
            fields = type(getattr(RunConfig(), place[0])).model_fields
            known = [field.alias or name for name, field in fields.items()]
        within = f"'{place[0]}' of {where}" if len(place) > 1 else where
        hint = did_you_mean(place[-1], known) or _whole(place[-1])
        text = f"Unknown key {'.'.join(place)!r}: {within} has {', '.join(known)}.{hint}"
    else:
        seen = repr(first["input"])
        seen = seen if len(seen) <= SHOWN else f"{seen[:SHOWN]}..."
        text = f"{'.'.join(place[:2])} of {where} is {seen}: {first['msg'][0].lower()}{first['msg'][1:]}."
    more = len({problem["loc"][:2] for problem in problems}) - 1  # a value of several allowed kinds is wrong once for each
    return text + (f" ({more} more key{'s are' if more > 1 else ' is'} wrong.)" if more else "")


def _whole(leaf: str) -> str:
    """A hint for a key that was given without, or in the wrong, section."""
    near = next((key for key in _defaults() if key.rpartition(".")[2] == leaf.rpartition(".")[2]), None)
    return f" Did you mean {near!r}?" if near else ""


def _completed(change: str) -> str:
    """A hint for a change that is not section.key=value: its section, or an example of a value."""
    key, equals, text = (part.strip() for part in change.partition("="))
    known = _defaults()
    if not equals and key in known:
        default = json.dumps(known[key]).strip('"')
        return f" It has no value: write for example {f'{key}={default}'!r}, which is its default."
    near = [name for name in known if name.rpartition(".")[2] == key]
    if near:
        return " Did you mean " + " or ".join(repr(f"{name}={text}" if equals else name) for name in near) + "?"
    return did_you_mean(key, known)


def _defaults() -> dict[str, Any]:
    """Every section.key with its default."""
    sections = RunConfig().model_dump()
    return {f"{section}.{name}": value for section, keys in sections.items() for name, value in keys.items()}
