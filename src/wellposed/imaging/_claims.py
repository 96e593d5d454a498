"""Whether a stated bound is about the code that runs.

A subclass that overrides `A` inherits `norm`, and one that overrides `apply_weights` inherits
`lipschitz`: the number was proved of other code. So it does not count until the subclass states its
own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn.families.theory import of_library

#: What a class may override without changing a map.
_HARMLESS = frozenset({"extra_repr", "train", "overridden", "_abc_impl", "_needs"})
#: Special methods that decide what runs.
_CALLS = frozenset({"__call__", "__getattr__", "__getattribute__"})
#: What `nn.Module` keeps on an object although its class has it.
_SET = frozenset(vars(nn.Module()))
#: How much larger than a stated bound a measured number may be: of operators that compute in float32.
_TOLERANCE = 1e-4


def is_stated(thing: Any, claim: str) -> bool:
    """Whether `claim` is stated by the object or by its class, or by a base whose methods the
    object inherits unchanged. Of a module with forward hooks nothing is: they change what runs."""
    whole, thing = thing, getattr(thing, "_orig_mod", thing)  # torch.compile
    if any(getattr(part, hooks, None) for part in (whole, thing) for hooks in ("_forward_hooks", "_forward_pre_hooks")):
        return False
    kind, own = type(thing), getattr(thing, "__dict__", {})
    if any(callable(value) and hasattr(kind, name) for name, value in own.items() if name != claim):
        return False  # a method was replaced on the object
    order = kind.__mro__
    place = next((i for i, part in enumerate(order) if claim in vars(part)), 0)
    if claim in own:
        return True
    inherited = {name for part in order[place:-1] for name in vars(part)}
    below = {name for part in order[:place] for name in vars(part)}
    changed = {name for name in below & inherited if not name.startswith("__") or name in _CALLS}
    return not changed - _HARMLESS


def check_hooks(owner: str, network: Any) -> None:
    """Refuses what would be ignored: a cell evaluates a network of this package by its
    `apply_weights`."""
    if not hasattr(network, "apply_weights"):
        return
    order = type(network).__mro__
    places = {
        name: next((i for i, part in enumerate(order) if name in vars(part)), len(order))
        for name in ("forward", "apply_weights")
    }
    if "forward" in vars(network) or places["forward"] < places["apply_weights"]:
        found = f"the `forward` of {type(network).__name__}"
    elif network._forward_hooks or network._forward_pre_hooks:
        found = f"a forward hook of {type(network).__name__} (also of prune)"
    else:
        return
    raise InvalidArgument(
        f"{owner} evaluates its network by `apply_weights`, so {found} would be ignored. Override `apply_weights`, and "
        "`lipschitz` with its bound; or wrap the network in a module of your own."
    )


def check_prox(owner: str, operator: Any) -> None:
    """Refuses a `prox_l2` of this package, which is that of one A, where a subclass or the object
    replaced A. A base of other code may compute it from the A of its subclass."""
    order, names = type(operator).__mro__, ("A", "A_adjoint", "forward")
    place = next((i for i, part in enumerate(order) if "prox_l2" in vars(part)), 0)
    below = {name for part in order[:place] for name in vars(part)} | set(getattr(operator, "__dict__", {}))
    changed = [name for name in names if name in below]
    if changed and "prox_l2" not in below and of_library(order[place]):
        raise InvalidArgument(
            f"{owner} uses prox_l2 of {order[place].__name__}, but {type(operator).__name__} has another {changed[0]}. Define "
            "prox_l2 for it, or use DEQGrad or DEQProx, which need none."
        )


def reflects(operator: Any) -> bool:
    """Whether `reflection` is about the `prox_l2` that runs: not that of one which was replaced."""
    order, own = type(operator).__mro__, getattr(operator, "__dict__", {})
    places = [i for i, part in enumerate(order) if "prox_l2" in vars(part) and not _is_abstract(vars(part)["prox_l2"])]
    replaced = "prox_l2" in own or (len(places) > 1 and not of_library(order[places[0]]))
    return not replaced or "reflection" in own or any("reflection" in vars(part) for part in order[: places[0] + 1])


def _is_abstract(method: Any) -> bool:
    return bool(getattr(method, "__isabstractmethod__", False))


def check_operator(cell: Any, like: Tensor) -> None:
    """Refuses an operator whose adjoint is not one, or whose stated bounds are exceeded by random
    images. It proves nothing, and is skipped for operators of this package as they were made, if
    their own norm is used.

    Args:
        cell: In float64.
        like: (batch, channels, height, width) float64, an image.
    """
    operator = cell.operator
    name = type(operator).__name__
    own = type(operator).__module__.startswith("wellposed.imaging") and of_library(type(operator))
    assigned = any(hasattr(type(operator), key) for key in set(vars(operator)) - _SET) if own else True
    if len(like) == 0 or (cell._norm is None and not assigned):
        return
    generator = torch.Generator().manual_seed(0)

    def drawn(t: Tensor) -> Tensor:
        return torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)

    u = drawn(like[:1])
    for _ in range(8):  # powers of A^T A
        image = operator.A(u / u.norm())
        u = operator.A_adjoint(image)
    v = drawn(image)
    x = drawn(like[:1])
    left, right = operator.A(x), operator.A_adjoint(v)
    products = (left.conj() * v).real.sum(), (x * right).sum()
    scale = float(left.norm() * v.norm() + x.norm() * right.norm())
    if abs(float(products[0] - products[1])) > _TOLERANCE * scale:
        raise InvalidArgument(
            f"A_adjoint of {name} is not the adjoint of A: of random x and v, <A x, v> is {float(products[0]):.6g} and "
            f"<x, A_adjoint v> is {float(products[1]):.6g}. Nothing is proved then; correct A_adjoint."
        )
    if float(image.norm()) > cell.norm * (1 + _TOLERANCE):
        raise InvalidArgument(
            f"The norm of {name}, {cell.norm:.6g}, is too small: |A x| is {float(image.norm()):.6g} for an x with |x| = 1. "
            "Give a larger norm=..."
        )
    normal = operator.A_adjoint(left)
    if float((cell._normal()(x) - normal).norm()) > _TOLERANCE * float(normal.norm()):
        raise InvalidArgument(f"normal of {name} is not x -> A_adjoint(A(x)). Correct it, or remove it.")
    square, low = cell.norm * cell.norm, x
    for _ in range(8 if cell.least > 0 else 0):  # powers of L - A^T A
        low = square * low - operator.A_adjoint(operator.A(low))
        low = low / low.norm().clamp(min=torch.finfo(low.dtype).tiny)
    seen = float((operator.A(low).norm() / low.norm()).square())
    if seen < cell.least - _TOLERANCE * square:
        raise InvalidArgument(
            f"'least' of {name}, {cell.least:.6g}, is too large: |A x|^2 is {seen:.6g} for an x with |x| = 1. Lower it."
        )
    if hasattr(cell, "log_penalty"):
        penalty, zero = cell.log_penalty.exp(), torch.zeros_like(v)
        moved = [2 * operator.prox_l2(t, zero, penalty) - t for t in (x, x + u / u.norm(), u)]
        steps = ((moved[1] - moved[0]).norm(), (moved[2] - moved[0]).norm() / (u - x).norm())
        if float(max(steps)) > cell.reflection * (1 + _TOLERANCE):
            raise InvalidArgument(
                f"prox_l2 of {name} is not a proximal map: z -> 2 prox_l2(z) - z expands by {float(max(steps)):.6g}, and its "
                f"reflection is {cell.reflection:.6g}. Correct prox_l2, or state `reflection`."
            )
