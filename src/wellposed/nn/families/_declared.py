"""Whether what a family declares fits what it computes, at random parameters and states."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

#: Two computations of one number in float64 may differ by this part of it.
CLOSE = 1e-8
#: The most samples at which injections are compared.
SAMPLES = 4


def contradiction(network: Any, X: Tensor) -> str:
    """Where a declared `Theory` does not fit what a network computes, in a sentence; empty if it
    does.

    R must be linear in A with |R(B)| = k |B|, injections l B x at the probes (plus something fixed,
    if the family is not homogeneous), v linear in w, and the read-out v . z (+ w' . c), for random
    B and z. It finds mistakes and proves nothing. A family with a `sensitivity` does not use the
    scales.

    Args:
        network: Of any dtype and device; not changed.
        X: (n, d) the samples.
    """
    if hasattr(network, "sensitivity"):
        return ""
    declared, twin = network.theory, copy.deepcopy(network).double().cpu()
    probes = torch.cat([_random(3, X.shape[1]), X[:SAMPLES].detach().double().cpu()])
    with torch.no_grad():
        for fault in (
            *_linear(twin, declared.recurrent, "recurrent_scale", declared.recurrent_scale, twin.recurrent),
            *_injection(twin, declared, probes),
            *_linear(twin, declared.readout[0], "readout_scale", declared.readout_scale, twin.readout_weight),
            *_readout(twin, declared),
        ):
            return f"The theory that {type(network).__name__} declares does not fit what it computes: {fault}."
    if declared.trained_readout and declared.readout_scale != 1:
        return (
            f"{type(network).__name__} trains a read-out that is multiplied by readout_scale={declared.readout_scale:g}; the "
            "theorems are about a read-out without a scale. Put the scale into the parameter."
        )
    return ""


def _linear(twin: Any, name: str, scale_name: str, scale: float, compute: Callable[[], Tensor]) -> Iterator[str]:
    """Faults of L with L(B) linear in the parameter B of this name and |L(B)| = |scale| |B|."""
    if not name:
        return
    tensor = getattr(twin, name)
    kept, first, second = tensor.clone(), *_random(2, *tensor.shape)
    images = [_at(tensor, B, compute) for B in (first, second, first + second)]
    around = _at(tensor, kept + first, compute), _at(tensor, kept, compute) + images[0]  # the parameter is as before again
    for B, image in zip((first, second, first + second), images, strict=True):
        seen, wanted = float(image.norm()), abs(scale) * float(B.norm())
        if not math.isclose(seen, wanted, rel_tol=CLOSE):
            yield f"by {scale_name} a norm is {wanted:.6g}, and it is {seen:.6g}, with random entries of {name}"
    if _differ(images[2], images[0] + images[1]):
        yield f"{scale_name} is declared, but what it multiplies is not linear in {name}"
    if _differ(*around):
        yield f"{scale_name} is declared, but what it multiplies is not linear in {name} near its present value"


def _injection(twin: Any, declared: Any, probes: Tensor) -> Iterator[str]:
    """Faults of c = l U x, or l relu(U x), plus something fixed if there are biases."""
    tensor, name = getattr(twin, declared.injected), declared.injected
    kept, first = tensor.clone(), _random(1, *tensor.shape)[0]

    def expected() -> Tensor:
        U = twin.input_matrix()
        V = probes @ U.t()
        return declared.injection_scale * (V.relu() if declared.rectified else V)

    fixed = _at(tensor, torch.zeros_like(kept), lambda: twin.injection(probes))
    if declared.homogeneous and bool(fixed.any()):
        yield f"it is declared homogeneous, and its injection does not vanish with {name}"
    for B in (kept, first):
        seen, wanted = _at(tensor, B, lambda: twin.injection(probes) - fixed), _at(tensor, B, expected)
        if declared.rectified and not declared.homogeneous:  # a bias inside the relu moves the kink
            if bool((seen.abs() > _reach(twin, declared, probes, tensor, B) * (1 + CLOSE)).any()):
                yield f"by injection_scale the injection moves less with {name} than it does"
        elif _differ(seen, wanted):
            sizes = f"a norm is {float(wanted.norm()):.6g}, and it is {float(seen.norm()):.6g}"
            yield f"by injection_scale {sizes}, or its direction is another, with the {name} and inputs that were tried"
    size = float(_at(tensor, first, lambda: twin.input_matrix().norm()))
    if not math.isclose(size, float(first.norm()), rel_tol=CLOSE):
        yield f"input_matrix() has the norm {size:.6g}, and {name} has {float(first.norm()):.6g}"
    tensor.copy_(kept)


def _reach(twin: Any, declared: Any, probes: Tensor, tensor: Tensor, B: Tensor) -> Tensor:
    """|l U x| for the parameter B: how far an injection with a relu is from that of 0 at most."""
    return abs(declared.injection_scale) * _at(tensor, B, lambda: (probes @ twin.input_matrix().t()).abs())


def _readout(twin: Any, declared: Any) -> Iterator[str]:
    """Faults of y = v . z + w' . c, plus something fixed if there are biases."""
    Z, C = _random(2, 3, twin.width)
    seen = twin.readout(Z, C) - (0 if declared.homogeneous else twin.readout(torch.zeros_like(Z), torch.zeros_like(C)))
    wanted = Z @ twin.readout_weight()
    if declared.skip:
        wanted = wanted + C @ (declared.readout_scale * getattr(twin, declared.readout[1]))
    if _differ(seen, wanted):
        yield "readout(Z, C) is not Z @ readout_weight(), plus C @ the second read-out if there is one"


def _at(tensor: Tensor, value: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What a function gives while a parameter has another value."""
    tensor.copy_(value)
    return compute().clone()


def _differ(seen: Tensor, wanted: Tensor) -> bool:
    """Whether rows differ by more than rounding, where both are finite."""
    rows, others = (t.reshape(-1, t.shape[-1]) if t.dim() > 1 else t.reshape(1, -1) for t in (seen, wanted))
    error, size = (rows - others).norm(dim=1), rows.norm(dim=1) + others.norm(dim=1)
    return bool((error > CLOSE * size).any())


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
