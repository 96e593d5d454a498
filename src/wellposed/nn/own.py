"""Modules of the user by object, class or import path, with their arguments checked."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from wellposed.errors import InvalidArgument, InvalidType, did_you_mean

__all__ = ["import_class", "instantiate", "is_cell"]

#: An import path: a package or module, and a class in it.
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
#: Widths that are tried to name the one that a cell has.
MOST_TRIED = 16


def import_class(path: str) -> type[nn.Module]:
    """The class of an import path such as "my_package.MyCell". Importing runs the code there."""
    if not PATH.fullmatch(path):
        raise InvalidArgument(f"An import path has the form package.Class; got {path!r}.")
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise InvalidArgument(
            f"{path!r} cannot be imported: {error}. Install the package, or run in the folder that holds it."
        ) from error
    except AttributeError:
        raise InvalidArgument(f"The module {module!r} has no {name!r}.") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise InvalidType(f"{path!r} must be a class of torch.nn.Module; it is {type(found).__name__}.")
    return found


def instantiate(
    make: Callable[..., Any], arguments: Mapping[str, Any], offered: Mapping[str, Any], *, where: str, shape: tuple[int, int]
) -> nn.Module:
    """The module that a class or function makes, with its arguments checked.

    Args:
        make: The class or function.
        arguments: Keywords that the user gave; an unknown one is refused.
        offered: Keywords that are passed if `make` takes them and the user did not give them.
        where: The place of `arguments`, for messages.
        shape: (in_features, width), for a `make` that takes them under other names, first.
    """
    name = getattr(make, "__name__", type(make).__name__)
    parameters = inspect.signature(make).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in arguments:
        if key not in names and not anything:
            known = ", ".join(names) or "none"
            raise InvalidArgument(f"{name} has no argument {key!r} (in {where}); it takes {known}.{did_you_mean(key, names)}")
    given = {key: value for key, value in offered.items() if key in names or (anything and key in ("generator", "dtype"))}
    given |= arguments
    required = [p for p in parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name not in given]
    positional = [p for p in required if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    first = shape if len(positional) == 2 == len(required) else ()
    if required and not first:
        lacking = ", ".join(repr(p.name) for p in required if p.kind is not p.VAR_POSITIONAL)
        if lacking:
            raise InvalidArgument(f"{name} needs the argument {lacking}; give it in {where}.")
    made = make(*first, **given)
    if not isinstance(made, nn.Module):
        raise InvalidType(f"{name} must make a torch.nn.Module; it made {type(made).__name__}.")
    return made


def is_cell(module: nn.Module) -> bool:
    """Whether a module is a map f(z, x) and not a network of x: whether forward needs two."""
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) == 2


def state_shape(cell: nn.Module, shape: tuple[int, ...], width: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of z without the batch: that of x if the cell accepts it, else with `width` first.

    Args:
        cell: The map.
        shape: Of one input. width: Units or channels.
        dtype: Of the input.
    """
    errors: list[str] = []

    def keeps(tried: tuple[int, ...]) -> bool:
        try:
            with torch.no_grad():
                z = torch.zeros(1, *tried, dtype=dtype)
                return bool(cell(z, torch.zeros(1, *shape, dtype=dtype)).shape == z.shape)
        except Exception as error:
            errors.append(str(error).splitlines()[0])
            return False

    for tried in dict.fromkeys([(width, *shape[1:]), shape]):
        if keeps(tried):
            return tried
    first, sizes = "".join(errors[:1]).rstrip("."), dict.fromkeys(size for p in cell.parameters() for size in p.shape[:2])
    fits = next((size for size in list(sizes)[:MOST_TRIED] if keeps((size, *shape[1:]))), None)
    if fits is None:
        advice = "Give the width that it has, or wrap it: EquilibriumLayer(cell, state_shape=...)."
    else:
        z_shape = (fits, *shape[1:])
        advice = f"It does for z of {z_shape}: give width={fits}, or wrap it: EquilibriumLayer(cell, state_shape={z_shape})."
    raise InvalidArgument(
        f"{type(cell).__name__}(z, x) keeps the shape of z neither for z of {(width, *shape[1:])} (the width) nor for z of the "
        f"shape of x, {shape}. {f'{first}. ' if first else ''}{advice}"
    )
