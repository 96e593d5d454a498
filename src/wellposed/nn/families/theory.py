"""What the theorems know of a family of networks: declared by the family, read by kernels,
certificates and training; and why they may not apply to one object of it."""

from __future__ import annotations

import functools
import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from wellposed.nn.families._contraction import AbstractContraction
    from wellposed.nn.families._network import AbstractNetwork

#: What Python, `abc` and `copy` write into a class.
_NOTES = {*"__module__ __doc__ __qualname__ __dict__ __weakref__ __abstractmethods__ _abc_impl __slotnames__".split()}


@dataclass(frozen=True)
class Theory:
    r"""The letters and constants of z = relu(R z + c), y = w . z (+ w' . c) for one network.

    R = k Q A Q' with orthogonal Q, Q' (or none), so |dR|_F = k |dA|_F, and c = l U x or l relu(U
    x). A family whose R depends on its parameters in another way leaves `recurrent` empty and has a
    method `sensitivity(measurement)`, see `AbstractSensitivity`.

    Attributes:
        recurrent: Name of A. injected: Name of the parameter or buffer behind U.
        readout: Names of w and, if c is read out too, of w'.
        fixed: Those of the names above that are buffers, which are never trained.
        recurrent_scale, injection_scale, readout_scale: k, l, and what multiplies w and w'.
        transposed: Whether R is k A^T.
        rectified: Whether c = l relu(U x).
        margin: m with sym(I - R) >= m by construction (well-posed by monotonicity); None if
            well-posed while |R| < 1.
        homogeneous: Whether there are no biases: c and y are positively homogeneous in x.
        closed_form: Whether the network has `linearise` and `gradients`. One without measures
            itself, with a method `sensitivity_at(X, y)`.
        theorem: Key of the theorem of its paper, a file of `wellposed.certify.theorems`; empty if
            there is none.
        options: Attributes with which a network of another width is drawn,
            `type(network)(in_features, width, **options)`; None if it cannot be.
        limit: Key and number of its tangent kernel at infinite width, where that is known.
    """

    recurrent: str = ""
    injected: str = ""
    readout: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    recurrent_scale: float = 1.0
    injection_scale: float = 1.0
    readout_scale: float = 1.0
    transposed: bool = False
    rectified: bool = False
    margin: float | None = None
    homogeneous: bool = False
    closed_form: bool = True
    theorem: str = ""
    options: tuple[str, ...] | None = None
    limit: tuple[str, float] | None = None

    @property
    def skip(self) -> bool:
        """Whether c is read out too."""
        return len(self.readout) == 2

    @property
    def trained_readout(self) -> tuple[str, ...]:
        """Names of the parameters that read out."""
        return tuple(name for name in self.readout if name not in self.fixed)


def theory_of(model: object) -> Theory | None:
    """What a network declares, or None for any other object."""
    found = getattr(model, "theory", None)
    return found if isinstance(found, Theory) else None


def shared_memory(model: nn.Module) -> str:
    """Which tensors of a model, or entries of one, share memory, in a sentence; empty if none do:
    all theorems about training assume that.

    A copy of a model does not share what the model did: ask the model itself.
    """
    places: list[tuple[str, int, int, str]] = []
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if _overlaps(tensor, extent):
            return _sentence(f"Entries of {name}")
        start = tensor.data_ptr()
        places.append((str(tensor.device), start, start + extent * tensor.element_size(), name))
    for (device, _, end, first), (other, start, _, second) in itertools.pairwise(sorted(places)):
        if device == other and start < end:
            return _sentence(f"{first} and {second}")
    return ""


def _overlaps(tensor: Tensor, extent: int) -> bool:
    """Whether two of its entries are one place, as in an expanded tensor."""
    if tensor.is_contiguous():
        return False
    return len(torch.arange(extent).as_strided(tensor.shape, tensor.stride()).unique()) < tensor.numel()


def _sentence(who: str) -> str:
    return (
        f"{who} share memory, so a step of one moves the other, which no theorem covers; give each its own, e.g. by .clone()."
    )


def is_theory_network(model: object) -> TypeGuard[AbstractNetwork]:
    """Whether a model declares a theory and has `linearise` and `gradients`."""
    theory = theory_of(model)
    return theory is not None and theory.closed_form


def may_be_ill_posed(model: object) -> TypeGuard[AbstractContraction]:
    """Whether a model is a theory network that is well-posed while |R| < 1, and bounds |R|."""
    return is_theory_network(model) and model.theory.margin is None and hasattr(model, "contraction_upper")


def formulas_hold(model: object) -> bool:
    """Whether the formulas of a network are about its own `forward`, not one that a class derived
    from it, or the object, has in its place."""
    owner: Any = next((kind for kind in type(model).__mro__ if "forward" in vars(kind)), object)
    stated = any(name in vars(owner) for name in ("theory", "_tangent", "tangent_features"))
    return "forward" not in vars(model) and (stated or of_library(owner))


def of_library(kind: type) -> bool:
    """Whether the library or torch wrote a class, or `torch.nn.utils.parametrize` made it of one.

    What `__module__` says need not be true of a class that `type(...)` made.
    """
    if _is_named(kind):
        return kind.__module__.partition(".")[0] in ("wellposed", "torch")
    members = (getattr(member, "fget", member) for name, member in vars(kind).items() if name not in _NOTES)
    return all(str(getattr(member, "__module__", "")).partition(".")[0] == "torch" for member in members)


def of_python(kind: type) -> bool:
    """Whether a class is a base without methods that compute, as `object` and `abc.ABC`."""
    return kind.__module__ in ("builtins", "abc") and _is_named(kind)


def _is_named(kind: type) -> bool:
    """Whether a class is what its module has under its name."""
    found: Any = sys.modules.get(kind.__module__)
    return functools.reduce(lambda part, name: getattr(part, name, None), kind.__qualname__.split("."), found) is kind
