"""What the code of a cell names besides z, x and its parameters: random numbers, clocks, the state
of autograd.

Evaluations cannot show that a cell draws seldom, so its code is read: `forward` of its modules, and
the Python functions and methods that it names. That is a search for mistakes and not a proof: what
is reached by other ways (a list that is changed, a name that is computed) is not found.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from wellposed.certify._tape import TapeRefused

#: Modules from which a number is another one each time.
_MODULES = ("random", "numpy.random", "secrets", "time", "uuid")
#: Names of functions and attributes that answer other things at other times.
_NAMES = ("urandom", "getrandom", "is_grad_enabled", "is_inference_mode_enabled", "requires_grad", "grad_fn", "is_leaf")
#: Packages whose functions are not read: the tape follows what they compute.
_KNOWN = {"torch", "numpy", "wellposed", *sys.stdlib_module_names} - {"__main__"}


def check_code(cell: Any) -> None:
    """Raises `Refused` if the code of a cell names something that is not a function of z and x."""
    waiting: list[tuple[Any, Any]] = [(cell, None)]
    seen: set[int] = set()
    while waiting:
        value, owner = waiting.pop()
        while isinstance(value, functools.partial):
            waiting += [(given, owner) for given in (*value.args, *value.keywords.values())]
            value = value.func
        if found := _source(value):
            raise TapeRefused(f"Its code names {found}, so it may give two values for the same z and x. Leave that out.")
        for function, itself in _functions(value, owner):
            if id(function.__code__) in seen or (function.__module__ or "").partition(".")[0] in _KNOWN:
                continue
            seen.add(id(function.__code__))
            if named := next((name for name in _NAMES if name in _names(function.__code__)), ""):
                raise TapeRefused(f"Its code names {named}, so it may give two values for the same z and x. Leave that out.")
            waiting += [(inner, itself) for inner in _named(function, itself)]


def _source(value: Any) -> str:
    """The name of a source of random numbers or of the time; empty if it is none."""
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType) and name in _MODULES:
        return str(name)
    holder = getattr(value, "__self__", value)  # of a method
    if isinstance(holder, random.Random) or type(holder).__module__.startswith("numpy.random"):
        return f"a generator of random numbers ({type(holder).__name__})"
    return ""


def _functions(value: Any, owner: Any) -> Iterator[tuple[types.FunctionType, Any]]:
    """The Python functions that a call of a value runs, each with the object that it belongs to."""
    if isinstance(value, nn.Module):
        parts = [(type(part).forward, part) for part in value.modules()]
        yield from ((function, part) for function, part in parts if isinstance(function, types.FunctionType))
        return
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, types.MethodType):
        value, owner = value.__func__, value.__self__
    if isinstance(value, types.FunctionType):
        yield value, owner
    elif isinstance(call := inspect.getattr_static(type(value), "__call__", None), types.FunctionType):
        yield call, value


def _names(code: types.CodeType) -> set[str]:
    """All names of globals and attributes in a function and in those inside it."""
    return {*code.co_names}.union(*(_names(part) for part in code.co_consts if isinstance(part, types.CodeType)))


def _named(function: types.FunctionType, owner: Any) -> Iterator[Any]:
    """What a function names: globals, what it closes over, parts of modules, of its object."""
    names = _names(function.__code__)
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for held in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # one that is not filled
            found.append(held.cell_contents)
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for module in [value for value in found if isinstance(value, types.ModuleType)]:
        found += [vars(module)[name] for name in names if name in vars(module)]
    if owner is not None:
        found += [vars(owner)[name] for name in names if name in getattr(owner, "__dict__", {})]
        kinds = [vars(kind) for kind in type(owner).__mro__]
        found += [next(kind[name] for kind in kinds if name in kind) for name in names if any(name in kind for kind in kinds)]
    yield from found
