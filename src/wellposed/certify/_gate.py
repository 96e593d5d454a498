"""Whether a proof about a class of the library applies to one object of it.

A proof reads parameters and reasons about the methods that the library wrote. A subclass that overrides one of them, a method
that was replaced on the instance, or a hook makes the object compute something else, so nothing is proved about it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import AbstractNetwork, DenseCell, Monotone, MonotoneClassifier, MonotoneDEQ

__all__ = ["changed", "check_finite", "check_model", "check_tensors", "check_unchanged", "is_ours", "trained_otherwise"]

#: Names that a subclass may redefine: they do not touch what is computed.
_FREE = {
    "__init__",
    "__repr__",
    "__str__",
    "__dir__",
    "extra_repr",
    "train",
    "eval",
    "state_dict",
    "load_state_dict",
    "_remedy",
}
#: What `object` has, or nothing, and what changes how the others are found or copied.
_LOOKUP = {"__getattribute__", "__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__class__"}
#: What defines a family: a network with `sensitivity` has its own proof about them.
_FAMILY = {"recurrent", "injection", "readout", "readout_weight", "bind", "_tangent"}
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def changed(model: nn.Module, *, families: bool = False) -> str:
    """Why what is proved about the library's class does not apply to this object, in a sentence; empty if it does.

    Hooks of the library itself only look, and are not counted.

    Args:
        model: A network, a classifier or a layer.
        families: Whether a class with its own `sensitivity(measurement)` may define its own map and read-out.
    """
    own = families and callable(getattr(type(model), "sensitivity", None))
    found = next(_changes(model, own), "")
    if not found:
        return ""
    name, advice = type(model).__name__, _advice(model, families)
    return f"The proof is about the library's own class, but {found}, so nothing is proved about this {name}. {advice}"


def check_unchanged(who: str, model: nn.Module, *, families: bool = False) -> None:
    """Raises `InvalidArgument` if `changed` has something to say.

    Args:
        who: The function that was called, for the message.
        model, families: As in `changed`.
    """
    if reason := changed(model, families=families):
        raise InvalidArgument(f"{who}: {reason}")


def check_tensors(who: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises `InvalidType` unless all of them are dense, real and stored, so that float64 holds their values.

    Args:
        who: The function that was called, for the message.
        named: Parameters, buffers or data, with their names.
    """
    for name, tensor in named:
        if tensor.is_meta:
            seen, cure = "on the meta device, where there are no values", "Move it to the CPU with its values"
        elif tensor.layout is not torch.strided:
            seen, cure = f"{tensor.layout}", "Make it dense, e.g. with .to_dense()"
        elif tensor.is_floating_point() and tensor.dtype not in _FLOATS:
            seen, cure = f"{tensor.dtype}", "Convert it, e.g. with .to(torch.float32)"
        elif tensor.is_complex():
            seen, cure = f"{tensor.dtype}, but the theory is about real numbers", "Take its real part"
        else:
            continue
        raise InvalidType(f"{who}: {name} is {seen}; a dense tensor of real floating point is needed. {cure}.")


def check_model(who: str, model: nn.Module) -> None:
    """`check_tensors` of the parameters and buffers; whether they are finite is for `check_finite`."""
    check_tensors(who, ((f"parameter {name}", tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())))


def check_finite(who: str, model: nn.Module) -> None:
    """Raises `InvalidArgument` if a parameter or buffer is not finite, where a number is asked for."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*model.parameters(), *model.buffers())):
        raise InvalidArgument(f"{who}: a parameter has NaN or infinite entries; look for the step that made them.")


def trained_otherwise(model: nn.Module, meant: Iterable[str]) -> str:
    """Why a proof that moves these parameters and no others is about another training; empty if it is not.

    Frozen, additional and re-parametrized parameters make another flow.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    meant = set(meant)
    if trained == meant:
        return ""
    return (
        f"The theorem trains {', '.join(sorted(meant))}; of this {type(model).__name__} "
        f"{', '.join(sorted(trained)) or 'nothing'} would be trained (requires_grad), which it does not cover."
    )


def _advice(model: nn.Module, families: bool) -> str:
    if families and isinstance(model, AbstractNetwork):
        return "Remove the change, or give a new class a method sensitivity(measurement), as docs/certificates.md shows."
    return "Remove the change, or take an object of the original class."


def _changes(model: nn.Module, own: bool) -> Iterator[str]:
    if any(_foreign(getattr(torch_module, name)) for name in _GLOBAL_HOOKS):
        yield "a global module hook is registered"
    for path, module in model.named_modules():
        where = f"its submodule {path} ({type(module).__name__})" if path else "it"
        allowed = _FREE | _FAMILY if own and module is model else _FREE
        for name in _overridden(type(module), allowed):
            yield f"{where} overrides {name}" if path else f"the class {type(module).__name__} overrides {name}"
        for name in _replaced(module):
            yield f"{name} was replaced on {where if path else 'the instance'}"
        if any(_foreign(getattr(module, name)) for name in _MODULE_HOOKS):
            yield f"{where} has a forward or backward hook"
        activation = getattr(module, "activation", None)
        if activation is not None and not isinstance(activation, nn.Module):
            for name in _overridden(type(activation), _FREE):
                yield f"the activation {type(activation).__name__} overrides {name}"
    for name, parameter in model.named_parameters():
        if any(_foreign(getattr(parameter, hooks, None)) for hooks in _TENSOR_HOOKS):
            yield f"the parameter {name} has a hook"
    yield from _misplaced(model)


def _misplaced(model: nn.Module) -> Iterator[str]:
    """Parts in whose place something else was put."""
    if isinstance(model, AbstractNetwork):
        network = getattr(model.layer.cell, "_network", None)
        if network is None or network[0] is not model:
            yield "its layer solves for another cell"
    if isinstance(model, MonotoneDEQ) and not isinstance(model.parametrization, Monotone):
        yield f"its parametrization is a {type(model.parametrization).__name__}"
    if isinstance(model, MonotoneClassifier):
        if not isinstance(model.head, nn.Linear):
            yield f"its head is a {type(model.head).__name__}"
        if isinstance(model.cell, DenseCell) and not isinstance(model.cell.weight, Monotone):
            yield f"its weight is a {type(model.cell.weight).__name__}"


def _of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("wellposed", "torch")


def _overridden(kind: type, allowed: set[str]) -> list[str]:
    """Methods of the library that classes outside of it define again; to define an abstract one is what it is for."""
    outside = [base for base in kind.__mro__ if not _of_library(base) and base.__module__ not in ("builtins", "abc")]
    library = next((base for base in kind.__mro__ if _of_library(base)), None)
    if not outside or library in (None, nn.Module):
        return []  # of the library, or unrelated to it
    if inspect.isabstract(library) and not issubclass(library, nn.Module):
        return []  # an activation that declares its own bounds
    return [name for base in outside for name in vars(base) if name not in allowed and _is_method(library, name)]


def _is_method(library: type, name: str) -> bool:
    if name in _LOOKUP:
        return True
    if name not in vars(object):
        method = inspect.getattr_static(library, name, None)
        computes = callable(method) or isinstance(method, (property, classmethod, staticmethod))
        return computes and not getattr(method, "__isabstractmethod__", False)
    return False


def _replaced(module: nn.Module) -> list[str]:
    """Names of methods that the instance has its own versions of."""
    return [name for name in vars(module) if name not in _FREE and callable(getattr(type(module), name, None))]


def _foreign(hooks: Any) -> bool:
    """Whether a table of hooks holds one that the library did not register."""
    return any(not is_ours(hook) for hook in (hooks or {}).values())


def is_ours(function: Any) -> bool:
    """Whether a function or method was written in the library."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == "wellposed"
