"""suggest: what change would make a certificate hold, each one tried."""

from __future__ import annotations

import copy
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.certify._gate import DECLARED, KNOWN, changed, check_data
from wellposed.certify.certificate import Certificate
from wellposed.certify.measurement import has_no_bias, measure
from wellposed.certify.radius_certificate import radius, radius_at
from wellposed.errors import InvalidType
from wellposed.nn.families import AbstractNetwork, is_theory_network

_WIDEST = 2000
_MOST = 2.0**40
#: Of the printed table, in characters, and of its last column at least.
_COLUMNS, _NARROWEST = 120, 40


@dataclass(frozen=True)
class Suggestion:
    """A change under which the radius certificate was found to hold.

    Attributes:
        kind: "hidden_rate", "descent", "input_scale", "readout_scale" or "width".
        value: The number to use.
        text: What to do, in a sentence.
        certificate: What certify returned with the change made.
        model, X: The changed copies that were certified, in float64; the caller's are untouched.
            The change itself was made in the dtype of the caller's, so that it can be repeated
            exactly.
    """

    kind: str
    value: float
    text: str
    certificate: Certificate = field(repr=False)
    model: AbstractNetwork = field(repr=False)
    X: Tensor = field(repr=False)

    def __str__(self) -> str:
        return self.text


class Suggestions(list[Suggestion]):
    """A list of suggestions that prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "No change was found under which the radius certificate holds; certify(model, X, y) says what is missing."
        cells = [("change", "value", "dynamics", "|r|/|r_0| <="), *(_cells(suggestion) for suggestion in self)]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        heads = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        room = max(_NARROWEST, _COLUMNS - len(heads[0]) - 2)
        lines = [f"{heads[0]}  what to do", "  ".join("-" * width for width in (*widths, room))]
        for head, suggestion in zip(heads[1:], self, strict=True):
            first, *rest = textwrap.wrap(suggestion.text, room, break_long_words=False)
            lines += [f"{head}  {first}", *(" " * (len(head) + 2) + part for part in rest)]
        return "\n".join(lines)


def _cells(suggestion: Suggestion) -> tuple[str, str, str, str]:
    certificate = suggestion.certificate
    rate = math.nan if certificate.rate is None else certificate.rate
    proved = f"exp(-{rate:.3g} t)" if certificate.dynamics == "flow" else f"(1 - {1 - rate:.2g})^k"
    return suggestion.kind, f"{suggestion.value:.4g}", certificate.dynamics, proved


def suggest(model: AbstractNetwork, X: Tensor, y: Tensor, *, generator: torch.Generator | None = None) -> Suggestions:
    r"""Changes that make the radius certificate hold, each verified by certifying the changed
    model; none is invented.

    `print(suggest(model, X, y))` shows them as a table.

    - "hidden_rate": gradient flow with the hidden parameters at h times the speed of the read-out,
      for the largest h found;
    - "descent": gradient descent with layer-wise steps, or one step where the read-out is fixed;
    - "readout_scale": the read-out multiplied by a factor in [0, 1);
    - "input_scale": inputs multiplied by t and the read-out divided by t: the predictions stay, the
      features grow;
    - "width": the same kind of network, newly drawn, at a width extrapolated from the present
      numbers (up to 2000 units).

    An empty list means that none of these changes was found to help; no reason comes with it. Where
    nothing can help, because two rows of X are equal or one is zero, or there are more samples than
    features, the note of `certify(model, X, y, theorem="radius")` says so.

    Args:
        model: A theory network.
        X: (n, d) inputs.
        y: (n,) targets.
        generator: Of the wider network's initialization.

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=2, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> suggestions = wp.suggest(model, X, y)
        >>> "hidden_rate" in [suggestion.kind for suggestion in suggestions]
        True
    """
    if not is_theory_network(model):
        raise InvalidType(
            f"suggest knows {KNOWN} and their relatives; got {type(model).__name__}. The note of certify(model, X, y) says "
            "what is missing."
        )
    X64, y64 = check_data(model, X, y)
    if changed(model, declared=DECLARED):
        return Suggestions()  # no change of numbers helps; the note of certify says why
    found = Suggestions(_speeds(model, X64, y64))
    readout = model.theory.trained_readout
    if readout:
        found += _readout_scale(model, X64, y64, readout)
        if has_no_bias(model):
            found += _input_scale(model, X, y64, readout)
        if model.theory.options is not None:
            found += _width(model, X64, y64, generator)
    return found


def _double(model: AbstractNetwork) -> AbstractNetwork:
    return copy.deepcopy(model).double().cpu()


def _speeds(model: AbstractNetwork, X: Tensor, y: Tensor) -> Iterator[Suggestion]:
    point = measure(model, X, y)
    flow = radius_at(point, "flow", "largest")
    if flow.certified and flow.rates is not None:
        h = min(flow.rates.values())
        text = (
            "The plain gradient flow is certified."
            if h == 1
            else (
                f"Let the hidden parameters follow the flow at {h:.3g} times the speed of the read-out: "
                "flow(..., rates=suggestion.certificate.rates)."
            )
        )
        yield Suggestion("hidden_rate", h, text, flow, _double(model), X)
    descent = radius_at(point, "descent", "largest")
    if descent.certified and isinstance(descent.step_size, dict):
        h = min(descent.step_size.values()) / max(descent.step_size.values())
        kind = f"layer-wise steps, hidden ones {h:.3g} times that of the read-out" if h < 1 else "the certified step"
        text = f"Descend with {kind}: descend(..., step_size='certified')."
        yield Suggestion("descent", h, text, descent, _double(model), X)


def _scaled_readout(
    model: AbstractNetwork, names: tuple[str, ...], *, times: float = 1.0, over: float = 1.0
) -> AbstractNetwork:
    """Scaled in the model's own dtype, as its owner will do it, and only then in float64."""
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            getattr(changed, name).mul_(times).div_(over)
    return _double(changed)


def _readout_scale(model: AbstractNetwork, X: Tensor, y: Tensor, names: tuple[str, ...]) -> Iterator[Suggestion]:
    for factor in (0.5, 0.1, 0.01, 0.0):
        changed = _scaled_readout(model, names, times=factor)
        certificate = radius(changed, X, y)
        if certificate.certified:
            text = f"Multiply the read-out ({', '.join(names)}) by {factor:g} before training."
            yield Suggestion("readout_scale", factor, text, certificate, changed, X)
            return


def _input_scale(model: AbstractNetwork, X: Tensor, y: Tensor, names: tuple[str, ...]) -> Iterator[Suggestion]:
    """Powers of four, times 2, until it holds; then one bisection. Powers of two leave every digit
    of the predictions."""
    t = 2.0
    while t <= _MOST and bool(torch.isfinite(X * t).all()):
        found = _scaled_inputs(model, X, y, names, t)
        if found is not None:
            nearer = _scaled_inputs(model, X, y, names, t / 2) if t > 2 else None
            yield found if nearer is None else nearer
            return
        t = t * 4


def _scaled_inputs(model: AbstractNetwork, X: Tensor, y: Tensor, names: tuple[str, ...], t: float) -> Suggestion | None:
    changed, scaled = _scaled_readout(model, names, over=t), (X.detach() * t).double().cpu()
    certificate = radius(changed, scaled, y, sharpen=())
    if not certificate.certified:
        return None
    text = f"Multiply the inputs by {t:.0f} and divide the read-out ({', '.join(names)}) by it; predictions stay the same."
    return Suggestion("input_scale", t, text, certificate, changed, scaled)


def _width(model: AbstractNetwork, X: Tensor, y: Tensor, generator: torch.Generator | None) -> Iterator[Suggestion]:
    """The condition is about e <= s^2 (1 - q)/(4 sqrt(B^2 + b^2)), whose right side grows like
    sqrt(m)."""
    point = measure(model, X, y)
    if isinstance(point, str) or point.F_least <= 0:
        return
    inverse = 1 / (1 - point.contraction if model.theory.margin is None else model.theory.margin)
    missing = point.residual * 4 * inverse * math.hypot(point.Z_norm, point.X_norm) / point.F_least / point.F_least
    if not missing <= _WIDEST:  # so its square can be rounded
        return
    width = math.ceil(model.width * max(missing, 1.0) ** 2)
    if not model.width < width <= _WIDEST:
        return
    options = {name: getattr(model, name) for name in model.theory.options or ()}
    wider = type(model)(model.in_features, width, generator=generator, dtype=torch.float64, **options)
    certificate = radius(wider, X, y)
    if certificate.certified:
        text = f"Take width {width}: a {type(model).__name__} drawn at that width in float64 was certified at its start."
        yield Suggestion("width", width, text, certificate, wider, X)
