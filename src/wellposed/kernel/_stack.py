r"""The tangent kernel of dense layers before and after an equilibrium, at infinite width.

Layer l maps the Gram matrix h of its inputs (X X^T/d at first) to that of its outputs and to that
of its slopes, as one equilibrium does (s = 0 for a dense layer):

    T = 2 v h + 2 b,     (K, k) = (E[f f], E[f' f']) at the root of C = 2 s K + T                              (1)

Back from the read-out goes the Gram matrix B of the derivatives by the outputs of a layer,
readout_variance behind the last one. Those by its pre-activations have Pi, and the layer before
gets the next B:

    Pi = k o (B + 2 s Pi) = k o B/(1 - 2 s k),     B := 2 v Pi                                            (2)

because weights act as fresh noise on the way back [feng2023].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import InvalidType
from wellposed.kernel._angle import Angles, equilibrium_angles, sine_defect
from wellposed.kernel._population import Function, Population, population
from wellposed.kernel.wide_limits import check_fraction, check_positive, symmetric
from wellposed.nn.activations import ReLU


@dataclass(frozen=True)
class WideLayer:
    """A dense layer of infinite width, z = f(V h + b), around the equilibrium of `deq_ntk`.

    Args:
        activation: f, as in `deq_ntk`.
        weight_variance: v, above 0: the entries of V have the variance 2 v/(number of inputs).
        bias_variance: The entries of b have twice this variance; with 0 there is no b.

    Examples:
        >>> import torch, wellposed as wp
        >>> before = [wp.kernel.WideLayer(), wp.kernel.WideLayer(weight_variance=0.9)]
        >>> wp.kernel.deq_ntk(torch.eye(3, dtype=torch.float64), weight_variance=0.08, before=before).shape
        torch.Size([3, 3])
    """

    activation: Function = ReLU()
    weight_variance: float = 1.0
    bias_variance: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self.weight_variance, "WideLayer", "weight_variance")
        check_positive(self.bias_variance, "WideLayer", "bias_variance", or_zero=True)


class StackLayer(NamedTuple):
    """A layer with its name in front of those of its parameters, and the variance s of its
    recurrence."""

    name: str
    layer: WideLayer
    recurrence: float = 0.0

    @property
    def letter(self) -> str:
        """Of its weights: an equilibrium has W for the recurrence."""
        return f"{self.name}V" if self.name else "U"


def layers_of(
    before: Sequence[WideLayer], equilibrium: WideLayer, recurrence: float, after: Sequence[WideLayer]
) -> list[StackLayer]:
    """The stack from its first layer to its last."""
    for side in (before, after):
        for layer in side:
            if not isinstance(layer, WideLayer):
                raise InvalidType(f"deq_ntk: before and after must hold WideLayer(...), got {type(layer).__name__}.")
    first = [StackLayer(f"before.{i}.", layer) for i, layer in enumerate(before)]
    last = [StackLayer(f"after.{i}.", layer) for i, layer in enumerate(after)]
    return [*first, StackLayer("", equilibrium, recurrence), *last]


@torch.no_grad()
def stack_parts(
    X: Tensor, X2: Tensor, layers: Sequence[StackLayer], readout_variance: float, *, width: int | None, ntk: bool
) -> dict[str, Tensor]:
    """The part of every parameter, from the read-out "a" back to the first layer.

    Args:
        X, X2: (n, d) and (n2, d), without a gradient.
        layers: From `layers_of`.
        readout_variance, width, ntk: As in `deq_ntk`.
    """
    rows, columns, d = X.double(), X2.double(), X.shape[1]
    h, of_rows = rows @ columns.T / d, (rows * rows).sum(dim=1) / d
    of_columns = of_rows if X2 is X else (columns * columns).sum(dim=1) / d
    seen: list[tuple[Tensor, Population]] = []
    for _, layer, s in layers:
        v, b = 2 * layer.weight_variance, 2 * layer.bias_variance
        T_rows = v * of_rows + b
        T_columns = T_rows if of_columns is of_rows else v * of_columns + b
        layer_population = _relu if isinstance(layer.activation, ReLU) else population
        found = layer_population(layer.activation, s, v * h + b, (T_rows, T_columns))
        seen.append((h, found))
        h, of_rows, of_columns = found.gram, found.of_rows, found.of_columns
    small = 0.0 if width is None else 1 / width
    parts = {"a": (readout_variance if ntk else 1.0) * h}
    B: float | Tensor = readout_variance
    for index in range(len(layers) - 1, -1, -1):
        stack_layer, (h, found) = layers[index], seen[index]
        (_, layer, s), k = stack_layer, found.slope_gram
        Pi = k * B / (1 - 2 * s * k)
        of_weights = 2 * layer.weight_variance if ntk else 1.0 if index else small * d
        parts[stack_layer.letter] = of_weights * Pi * h
        if not stack_layer.name:
            parts["W"] = (2 * s if ntk else 1.0) * Pi * found.gram
        if layer.bias_variance > 0:
            parts[f"{stack_layer.name}b"] = (2 * layer.bias_variance if ntk else small) * Pi
        B = 2 * layer.weight_variance * Pi
    return {name: symmetric(part, X, X2).to(X.dtype) for name, part in parts.items()}


def _relu(activation: Function, s: float, T: Tensor, diagonals: tuple[Tensor, Tensor]) -> Population:
    """(1) for ReLU, closed but for one scalar equation per pair.

    Angles come from covariances here, so those below 1e-8 are not resolved; nor is that part of k.
    """
    check_fraction(s, "deq_ntk", "weight_variance")
    of_rows, of_columns = diagonals
    scale = torch.sqrt(of_rows[:, None] * of_columns)
    c = torch.where(scale > 0, T / torch.where(scale > 0, scale, 1.0), 0.0).clamp(-1.0, 1.0)
    apart, together = (1 - c).sqrt(), (1 + c).sqrt()
    between = Angles(of_rows[:, None], of_columns, 2 * torch.atan2(apart, together), 2 * torch.atan2(together, apart))
    phi = equilibrium_angles(between, s).phi
    gram, slope_gram = scale * sine_defect(phi) / (2 * math.pi * (1 - s)), phi / (2 * math.pi)
    energies = tuple(T_ii / (2 * (1 - s)) for T_ii in diagonals)
    if of_rows is of_columns:
        gram.diagonal().copy_(energies[0])
        slope_gram.diagonal().fill_(0.5)
    return Population(gram, slope_gram, energies[0], energies[0] if of_rows is of_columns else energies[1])
