"""Whether a proof about a class of the library applies to one object of it.

A proof reads parameters and reasons about the methods that the library wrote. A subclass that
overrides one of them, a method that was replaced on the instance, or a hook makes the object
compute something else, so nothing is proved about it. A class that declares a `theory` or a
`sensitivity` of its own states what its methods compute, and is believed; a class derived from it
that overrides them again has to declare again.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import DenseCell, Monotone, MonotoneClassifier, MonotoneDEQ, ReLU
from wellposed.nn.families import FAMILIES, AbstractNetwork, is_theory_network, theory_of
from wellposed.nn.families._network import is_ours
from wellposed.nn.families.theory import of_library, of_python, shared_memory

#: What a class declares of its own methods: its letters and scales, or the bounds of the radius certificate alone.
DECLARED = ("theory", "sensitivity")
#: Of the networks that theorems are about, for messages.
KNOWN = ", ".join(family.__name__ for family in FAMILIES.values())
#: The reason where the parameters are finite and their recurrent matrix is not.
NO_MATRIX = "The recurrent matrix has NaN or infinite entries."
#: Names that a subclass may redefine: they do not touch what is computed.
FREE = {*"__init__ __repr__ __str__ __dir__ extra_repr train eval state_dict load_state_dict _remedy".split()}
#: What `object` has, or nothing, and what changes how the others are found or copied.
_LOOKUP = {"__getattribute__", "__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__", "__class__"}
#: What defines a family: what a class declares is about them.
_FAMILY = {*"theory recurrent recurrent_error injection input_matrix readout readout_weight bind _tangent".split()}
_MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _MODULE_HOOKS)
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def changed(model: nn.Module, *, declared: tuple[str, ...] = ()) -> str:
    """Why what is proved about the library's class does not apply to this object, in a sentence;
    empty if it does.

    Hooks of the library itself only look, and are not counted.

    Args:
        model: A network, a classifier or a layer.
        declared: Which of `DECLARED` the proof reads: a class with its own may define its own map
            and read-out.
    """
    found = next(_changes(model, declared), "")
    if not found:
        return ""
    name, advice = type(model).__name__, _advice(model, declared)
    return f"The proof is about the library's own class, but {found}, so nothing is proved about this {name}. {advice}"


def check_unchanged(who: str, model: nn.Module, *, declared: tuple[str, ...] = ()) -> None:
    """Raises `InvalidArgument` if `changed` has something to say.

    Args:
        who: The function that was called, for the message.
        model, declared: As in `changed`.
    """
    if reason := changed(model, declared=declared):
        raise InvalidArgument(f"{who}: {reason}")


def declared_outside(model: nn.Module) -> bool:
    """Whether a class from outside of the library states what its own methods compute: it is
    believed, and certificates say so."""
    found = (inspect.getattr_static(type(model), name, None) for name in (*_FAMILY, "sensitivity"))
    return any(not is_ours(getattr(member, "fget", member)) for member in found if member is not None)


def check_tensors(who: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises `InvalidType` unless all of them are dense, real and stored, so that float64 holds
    their values.

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


def check_model(who: str, model: nn.Module, *, relu: bool = False) -> None:
    """`check_tensors` of the parameters and buffers; whether they are finite is for
    `check_finite`.

    Args:
        who, model: The function that was called, for the message, and its model.
        relu: Whether a theory network must have the activation of its theorems.
    """
    if relu and is_theory_network(model) and not isinstance(model.activation, ReLU):
        raise InvalidArgument(
            f"{who}: the theorems about {type(model).__name__} are for ReLU; this one has {type(model.activation).__name__}. "
            "wp.prove(model, X, y) has proofs for smooth activations."
        )
    check_tensors(who, ((f"parameter {name}", tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())))


def check_data(model: Any, X: Any, y: Any) -> tuple[Tensor, Tensor]:
    """(n, d) and (n,) in float64 on the CPU, or one sentence about what is wrong."""
    if theory_of(model) is None:
        raise InvalidType(f"certify knows {KNOWN}, OptEq, DeepOptEq and their relatives; got {type(model).__name__}.")
    if not isinstance(X, Tensor) or not isinstance(y, Tensor):
        raise InvalidType(f"X and y must be tensors; got {type(X).__name__} and {type(y).__name__}.")
    if X.dim() != 2 or X.shape[1] != model.in_features:
        raise InvalidArgument(f"X must have shape (n, {model.in_features}); got {tuple(X.shape)}.")
    if X.shape[0] == 0:
        raise InvalidArgument("X has no samples; a certificate needs at least one.")
    if tuple(y.shape) != (X.shape[0],):
        raise InvalidArgument(f"y must have shape ({X.shape[0]},), one number per sample; got {tuple(y.shape)}.")
    check_model("certify", model, relu=True)
    check_tensors("certify", (("X", X), ("y", y)))
    for name, tensor in (("X", X), ("y", y)):
        if not tensor.dtype.is_floating_point:
            raise InvalidType(f"{name} must be floating point; got {tensor.dtype}. Convert it, e.g. {name}.float().")
        if not bool(torch.isfinite(tensor).all()):
            raise InvalidArgument(f"{name} has NaN or infinite entries; clean the data first.")
    dtype = next(model.parameters()).dtype
    if X.dtype != dtype:  # as the model itself refuses it
        who = type(model).__name__
        raise InvalidType(f"{who} has {dtype} parameters and got X of {X.dtype}; convert one, e.g. X.to({dtype}).")
    return X.detach().double().cpu(), y.detach().double().cpu()


def not_finite(model: nn.Module) -> str:
    """Why there is nothing to measure where a parameter is not finite; empty where all are."""
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in (*model.parameters(), *model.buffers()))
    return "" if finite else "A parameter has NaN or infinite entries."


def check_finite(who: str, model: nn.Module) -> None:
    """Raises `InvalidArgument` if a parameter or buffer is not finite, where a number is asked
    for."""
    if not_finite(model):
        raise InvalidArgument(f"{who}: a parameter has NaN or infinite entries; look for the step that made them.")


def margin_of(model: AbstractNetwork) -> float | None:
    """The margin that holds by construction, unless what the class computes is not what declares
    it."""
    margin = model.theory.margin
    return None if margin is None or changed(model, declared=("theory",)) else margin


def trained_otherwise(model: nn.Module, meant: Iterable[str]) -> str:
    """Why a proof that moves these parameters and no others is about another training; empty if it
    is not.

    Frozen, additional and re-parametrized parameters make another flow, and so do tensors that
    share memory: a step of the one moves the other.
    """
    if shared := shared_memory(model):
        return shared
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    meant = set(meant)
    if trained == meant:
        return ""
    return (
        f"The theorem trains {', '.join(sorted(meant))}; of this {type(model).__name__} "
        f"{', '.join(sorted(trained)) or 'nothing'} would be trained (requires_grad), which it does not cover."
    )


def _advice(model: nn.Module, declared: tuple[str, ...]) -> str:
    if not declared or not is_theory_network(model):
        return "Remove the change, or take an object of the original class."
    own = "a theory" if "sensitivity" not in declared else "a theory or a method sensitivity(measurement)"
    return f"Remove the change, or give a new class its own {own}, as docs/howto/family.md shows."


def _changes(model: nn.Module, declared: tuple[str, ...]) -> Iterator[str]:
    if any(_foreign(getattr(torch_module, name)) for name in _GLOBAL_HOOKS):
        yield "a global module hook is registered"
    for path, module in model.named_modules():
        where = f"its submodule {path} ({type(module).__name__})" if path else "it"
        if isinstance(module, torch.jit.ScriptModule):
            yield f"{where} was compiled by torch.jit"
            continue
        for name in (*module._parameters, *module._buffers):
            if name in vars(module) or hasattr(type(module), name):
                yield f"{name} of {type(module).__name__} is not the tensor that is stored under this name"
        for name in overridden(type(module), declared if module is model else ()):
            yield f"{where} overrides {name}" if path else f"the class {type(module).__name__} overrides {name}"
        for name in _replaced(module):
            yield f"{name} was replaced on {where if path else 'the instance'}"
        if any(_foreign(getattr(module, name)) for name in _MODULE_HOOKS):
            yield f"{where} has a forward or backward hook"
        activation = getattr(module, "activation", None)
        if activation is not None and not isinstance(activation, nn.Module):
            for name in overridden(type(activation)):
                yield f"the activation {type(activation).__name__} overrides {name}"
            for name in _replaced(activation):
                yield f"{name} was replaced on the activation {type(activation).__name__}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        replaced = [method for method in vars(tensor) if hasattr(type(tensor), method)]
        for method in (*overridden(type(tensor)), *replaced):
            yield f"{name}, a {type(tensor).__name__}, is not a plain tensor (it overrides {method})"
    for name, parameter in model.named_parameters():
        if any(_foreign(getattr(parameter, hooks, None)) for hooks in _TENSOR_HOOKS):
            yield f"the parameter {name} has a hook"
    yield from _misplaced(model)


def _misplaced(model: nn.Module) -> Iterator[str]:
    """Parts in whose place something else was put."""
    if isinstance(model, AbstractNetwork):  # by type: others have cells of their own
        network = getattr(getattr(model.layer, "cell", None), "_network", None)
        if not hasattr(model.layer, "cell"):
            yield f"its layer is a module {type(model.layer).__name__} without a cell"
        elif network is None or network[0] is not model:
            yield "its layer solves for another cell"
    if isinstance(model, MonotoneDEQ) and not isinstance(model.parametrization, Monotone):  # by type: no other has one
        yield f"its parametrization is a {type(model.parametrization).__name__}"
    if isinstance(model, MonotoneClassifier):  # by type: it declares no theory
        if not isinstance(model.head, nn.Linear):
            yield f"its head is a {type(model.head).__name__}"
        if isinstance(model.cell, DenseCell) and not isinstance(model.cell.weight, Monotone):
            yield f"its weight is a {type(model.cell.weight).__name__}"


def _replaced(module: Any) -> list[str]:
    """Names of methods that the instance has its own versions of."""
    return [
        name
        for name in getattr(module, "__dict__", ())
        if name in DECLARED or (name not in FREE and callable(getattr(type(module), name, None)))
    ]


def _foreign(hooks: Any) -> bool:
    """Whether a table of hooks holds one that the library did not register."""
    return any(not is_ours(hook) for hook in (hooks or {}).values())


def overridden(kind: type, declared: tuple[str, ...] = ()) -> list[str]:
    """Methods of the library that classes outside of it define again, unless a class declares what
    it and its bases compute; to define an abstract one is what it is for."""
    outside = [base for base in kind.__mro__ if not (of_library(base) or of_python(base))]
    library = next((base for base in kind.__mro__ if of_library(base)), None)
    if not outside or library in (None, nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return []  # of the library, unrelated to it, or a container of what its class computes
    if inspect.isabstract(library) and not issubclass(library, nn.Module):
        return []  # an activation that declares its own bounds
    found, allowed = [], {*FREE, "sensitivity"}
    stored = {name for base in kind.__mro__ if of_library(base) and base is not nn.Module for name in _stored(base)}
    for i, base in enumerate(outside):
        if any(name in vars(base) for name in declared):
            allowed |= _FAMILY  # of this class and its bases, not of those derived from it
        again = {name for other in outside[i + 1 :] for name in vars(other)} & _FAMILY if declared else set()
        again |= {name for name in stored if hasattr(vars(base).get(name), "__get__")}
        found += [name for name in vars(base) if name not in allowed and (name in again or _is_method(library, name))]
    return found


@functools.cache
def _stored(library: type) -> set[str]:
    """Names of the attributes that a class of the library stores numbers and parts under: a
    property in their place may give another number each time."""
    methods = [method for method in vars(library).values() if inspect.isfunction(method)]
    functions = [f for f in (*methods, *map(inspect.unwrap, methods)) if inspect.isfunction(f)]
    names = {step.argval for f in functions for step in dis.get_instructions(f) if step.opname == "STORE_ATTR"}
    return names | set(getattr(library, "__dataclass_fields__", ()))


def _is_method(library: type, name: str) -> bool:
    if name in _LOOKUP:
        return True
    if name not in (*vars(object), "__dict__", "__weakref__"):
        method = inspect.getattr_static(library, name, None)
        computes = callable(method) or isinstance(method, (property, classmethod, staticmethod, types.GetSetDescriptorType))
        return computes and not getattr(method, "__isabstractmethod__", False)
    return False
