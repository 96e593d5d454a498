"""suggest: what change would make a certificate hold, each one tried."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._certificate import Certificate
from wellposed.certify._measure import check_data, measure
from wellposed.certify.radius import radius, radius_at
from wellposed.nn import AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ

__all__ = ["Suggestion", "suggest"]

#: Names of the parameters that read out, and of those that take the input in.
_READOUT = {GaussianDEQ: ("a",), SkipDEQ: ("u", "v"), MonotoneDEQ: ("u",)}
_WIDEST = 2000
_MOST = 2.0**40


@dataclass(frozen=True)
class Suggestion:
    """A change under which the radius certificate was found to hold.

    Attributes:
        kind: "hidden_rate", "descent", "input_scale", "readout_scale" or "width".
        value: The number to use.
        text: What to do, in a sentence.
        certificate: What certify returned with the change made.
        model, X: The changed copies that were certified; the caller's are untouched.
    """

    kind: str
    value: float
    text: str
    certificate: Certificate
    model: AbstractNetwork = field(repr=False)
    X: Tensor = field(repr=False)

    def __str__(self) -> str:
        return self.text


def suggest(model: AbstractNetwork, X: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> list[Suggestion]:
    r"""Changes that make the radius certificate hold, each verified by certifying the changed model; none is invented.

    - "hidden_rate": gradient flow with the hidden parameters at h times the speed of the read-out, for the largest h found;
    - "descent": gradient descent with layer-wise steps, or one step where the read-out is fixed;
    - "readout_scale": the read-out multiplied by a factor in [0, 1);
    - "input_scale": inputs multiplied by t and the read-out divided by t: the predictions stay, the features grow;
    - "width": the same kind of network, newly drawn, at a width extrapolated from the present numbers (up to 2000 units).

    An empty list means that none of these changes was found to help; no reason comes with it. Where nothing can help, because
    two rows of X are equal or one is zero, or there are more samples than features, the note of
    `certify(model, X, y, theorem="radius")` says so.

    Args:
        model: A theory network.
        X: (n, d) inputs.
        y: (n,) targets.
        generator: Of the wider network's initialization.
    """
    X64, y64 = check_data(model, X, y)
    found = [*_speeds(model, X64, y64)]
    readout = _READOUT.get(type(model), ())
    if readout:
        found += _readout_scale(model, X64, y64, readout)
        found += _input_scale(model, X64, y64, readout)
    found += _width(model, X64, y64, generator)
    return found


def _double(model: AbstractNetwork) -> AbstractNetwork:
    return copy.deepcopy(model).double().cpu()


def _speeds(model: AbstractNetwork, X: Tensor, y: Tensor) -> Iterator[Suggestion]:
    at = measure(model, X, y)
    flow = radius_at(at, "flow", "largest")
    if flow.certified and flow.rates is not None:
        h = min(flow.rates.values())
        text = (
            "The plain gradient flow is certified as it is."
            if h == 1
            else (
                f"Let the hidden parameters follow the flow at {h:.3g} times the speed of the read-out: "
                "flow(..., rates=certificate.rates)."
            )
        )
        yield Suggestion("hidden_rate", h, text, flow, _double(model), X)
    descent = radius_at(at, "descent", "largest")
    if descent.certified and isinstance(descent.step_size, dict):
        h = min(descent.step_size.values()) / max(descent.step_size.values())
        kind = f"layer-wise steps, hidden ones {h:.3g} times that of the read-out" if h < 1 else "the certified step"
        text = f"Descend with {kind}: descend(..., step_size='certified')."
        yield Suggestion("descent", h, text, descent, _double(model), X)


def _scaled_readout(model: AbstractNetwork, names: tuple[str, ...], factor: float) -> AbstractNetwork:
    changed = _double(model)
    with torch.no_grad():
        for name in names:
            getattr(changed, name).mul_(factor)
    return changed


def _readout_scale(model: AbstractNetwork, X: Tensor, y: Tensor, names: tuple[str, ...]) -> Iterator[Suggestion]:
    for factor in (0.5, 0.1, 0.01, 0.0):
        changed = _scaled_readout(model, names, factor)
        certificate = radius(changed, X, y)
        if certificate.certified:
            text = f"Multiply the read-out ({', '.join(names)}) by {factor:g} before training."
            yield Suggestion("readout_scale", factor, text, certificate, changed, X)
            return


def _input_scale(model: AbstractNetwork, X: Tensor, y: Tensor, names: tuple[str, ...]) -> Iterator[Suggestion]:
    """Powers of two until it holds, then one bisection between the last two."""
    t, last = 2.0, 1.0
    while t <= _MOST and bool(torch.isfinite(X * t).all()):
        changed, scaled = _scaled_readout(model, names, 1 / t), X * t
        certificate = radius(changed, scaled, y, sharpen=())
        if certificate.certified:
            middle = math.sqrt(t * last)
            nearer = _scaled_readout(model, names, 1 / middle)
            better = radius(nearer, X * middle, y, sharpen=())
            if better.certified:
                t, changed, scaled, certificate = middle, nearer, X * middle, better
            text = (
                f"Multiply the inputs by {t:.4g} and divide the read-out ({', '.join(names)}) by it; predictions stay the same."
            )
            yield Suggestion("input_scale", t, text, certificate, changed, scaled)
            return
        t, last = t * 4, t


def _width(model: AbstractNetwork, X: Tensor, y: Tensor, generator: torch.Generator | None) -> Iterator[Suggestion]:
    """The condition is about e <= s^2 (1 - q)/(4 sqrt(B^2 + b^2)), whose right side grows like sqrt(m)."""
    at = measure(model, X, y)
    if isinstance(at, str) or at.F_least <= 0 or isinstance(model, ImplicitOnlyDEQ):
        return
    inverse = 1 / model.margin if isinstance(model, MonotoneDEQ) else 1 / (1 - at.contraction)
    missing = at.residual * 4 * inverse * math.hypot(at.Z_norm, at.X_norm) / at.F_least / at.F_least
    if not missing <= _WIDEST:  # so its square can be rounded
        return
    width = math.ceil(model.width * max(missing, 1.0) ** 2)
    if not model.width < width <= _WIDEST:
        return
    wider = _like(model, width, generator)
    certificate = radius(wider, X, y)
    if certificate.certified:
        text = f"Take width {width}: a {type(model).__name__} drawn at that width was certified at its initialization."
        yield Suggestion("width", width, text, certificate, wider, X)


def _like(model: AbstractNetwork, width: int, generator: torch.Generator | None) -> AbstractNetwork:
    """A fresh network of the same kind."""
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    if isinstance(model, GaussianDEQ):
        options["weight_variance"] = model.weight_variance
    elif isinstance(model, SkipDEQ):
        options["gamma"] = model.gamma
    elif isinstance(model, MonotoneDEQ):
        options["margin"] = model.margin
    return type(model)(model.in_features, width, **options)
