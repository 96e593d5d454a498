"""A multilayer perceptron as the equilibrium of a weight-tied, input-injected network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.activations import AbstractActivation
from wellposed.nn.cell import AbstractCell
from wellposed.nn.maps.affine import DenseMap


def weight_tied(mlp: nn.Sequential | Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> WeightTiedCell:
    r"""Any L-layer perceptron as one layer that is applied L times [nguyen2022, Theorem B.0.1].

        >>> import torch, wellposed as wp
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> cell = wp.nn.weight_tied(mlp)
        >>> layer = wp.EquilibriumLayer(cell, wp.Picard())
        >>> x = torch.randn(5, 3)
        >>> torch.allclose(cell.output(layer(x)), mlp(x), atol=1e-6)
        True

    Args:
        mlp: `nn.Sequential` of `nn.Linear`, each followed by an `nn.ReLU` or not; its parameters
            are shared, not copied. Or the weights, (n_l, n_{l-1}) for l = 1, ..., L, with a ReLU
            after each but the last.
        biases: Only with a list of weights: (n_l,) or None for each; None has no biases at all.
    """
    if isinstance(mlp, nn.Sequential):
        if biases is not None:
            raise InvalidArgument("weight_tied takes biases only with a list of weights; an nn.Sequential has its own.")
        return WeightTiedCell(*_read(mlp))
    if isinstance(mlp, (nn.Module, Tensor)) or not isinstance(mlp, Sequence):
        raise InvalidType(f"weight_tied expects an nn.Sequential or a list of weight matrices; got {type(mlp).__name__}.")
    weights = list(mlp)
    offsets = [None] * len(weights) if biases is None else list(biases)
    return WeightTiedCell(weights, offsets, [True] * (len(weights) - 1) + [False])


class WeightTiedCell(AbstractCell):
    r"""f(z, x) = s(W z + U x + b), z = (h_1, ..., h_L): its equilibrium is a perceptron.

    With h_l = s_l(W_l h_{l-1} + b_l), h_0 = x, the matrix W has W_l in block (l, l-1) and zeros
    elsewhere, U has W_1 in block 1, b stacks the b_l and s applies s_l to block l. W is strictly
    lower triangular in blocks, so W^L = 0: L plain steps from *any* start reach the one
    equilibrium, whatever |W| is, and L steps of the adjoint are exact backpropagation.

    This shows what equilibrium networks can express; it is not a faster perceptron: a step costs
    O((n_1 + ... + n_L)^2) a sample. Plain steps (`Picard`) need max_steps of L + 1, the last to see
    that nothing moves any more; second derivatives, whose systems are known only as functions, one
    more.

    Args:
        weights: (n_l, n_{l-1}) for l = 1, ..., L. Parameters are shared; other tensors become
            buffers.
        biases: (n_l,) or None.
        rectified: Whether layer l has a ReLU.

    Attributes:
        in_features: n_0. widths: (n_1, ..., n_L). depth: L.
        W_1, b_1, ...: The parameters (or buffers) of the perceptron.
    """

    rectified: Tensor

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], rectified: Sequence[bool]) -> None:
        super().__init__()
        _check_layers(weights, biases)
        self.in_features, self.widths = weights[0].shape[1], tuple(weight.shape[0] for weight in weights)
        self.depth = len(weights)
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
            self._hold(f"W_{layer}", weight)
            self._hold(f"b_{layer}", bias)
        flags = [torch.full((width,), flag) for width, flag in zip(self.widths, rectified, strict=True)]
        self.register_buffer("rectified", torch.cat(flags).to(weights[0].device), persistent=False)

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        if isinstance(tensor, nn.Parameter):
            self.register_parameter(name, tensor)
        else:
            self.register_buffer(name, tensor)

    def recurrent(self) -> Tensor:
        """(m, m) W, nilpotent, with a graph; m = n_1 + ... + n_L."""
        first = getattr(self, "W_1")  # noqa: B009
        m, rows, before = sum(self.widths), [], 0
        rows.append(first.new_zeros(self.widths[0], m))
        for layer in range(2, self.depth + 1):
            weight: Tensor = getattr(self, f"W_{layer}")
            rows.append(nn.functional.pad(weight, (before, m - before - weight.shape[1])))
            before += weight.shape[1]
        return torch.cat(rows)

    def injection(self, x: Tensor) -> Tensor:
        """(batch, n_0) -> (batch, m): U x + b, with a graph."""
        first: Tensor = getattr(self, "W_1")  # noqa: B009
        biases = [getattr(self, f"b_{layer}") for layer in range(1, self.depth + 1)]
        stacked = [first.new_zeros(width) if b is None else b for width, b in zip(self.widths, biases, strict=True)]
        return nn.functional.pad(x @ first.t(), (0, sum(self.widths[1:]))) + torch.cat(stacked)

    def output(self, z: Tensor) -> Tensor:
        """(batch, m) -> (batch, n_L): the last block of the state, the perceptron's output."""
        return z[:, -self.widths[-1] :]

    def bind(self, x: Tensor) -> DenseMap:
        W, c, activation = self.recurrent(), self.injection(x), _PartlyReLU(self.rectified)
        return DenseMap(W.float(), c.float(), activation) if c.dtype in LOW_PRECISION else DenseMap(W, c, activation)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.in_features:
            seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"WeightTiedCell expects x of shape (batch, {self.in_features}); got {seen}.")
        dtype = getattr(self, "W_1").dtype  # noqa: B009
        if x.dtype != dtype:
            raise InvalidType(f"WeightTiedCell has {dtype} weights and got x of {x.dtype}; convert one, e.g. x.to({dtype}).")
        return (x.shape[0], sum(self.widths))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return _PartlyReLU(self.rectified)(z @ self.recurrent().t() + self.injection(x))

    def extra_repr(self) -> str:
        return f"{self.in_features}, widths={self.widths}"


@dataclass(frozen=True, eq=False)
class _PartlyReLU(AbstractActivation):
    """ReLU for some units and the identity for the others: what a stack of layers needs.

    Args:
        rectified: (m,) bool.
    """

    rectified: Tensor

    def __call__(self, v: Tensor) -> Tensor:
        return torch.where(self.rectified, torch.relu(v), v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.masked_fill_(self.rectified & (v < 0), 0.0)

    def slope(self, y: Tensor) -> Tensor:
        return (~self.rectified | (y > 0)).to(y.dtype)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return self(v)  # both are projections


def _read(mlp: nn.Sequential) -> tuple[list[Tensor], list[Tensor | None], list[bool]]:
    """Weights, biases and whether a ReLU follows."""
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    rectified: list[bool] = []
    for position, module in enumerate(mlp):
        if type(module) is nn.Linear:
            weights.append(module.weight)
            biases.append(module.bias)
            rectified.append(False)
        elif type(module) is nn.ReLU and weights:
            rectified[-1] = True
        else:
            raise InvalidType(
                f"weight_tied expects an nn.Sequential of nn.Linear and nn.ReLU that begins with an nn.Linear; module "
                f"{position} is {module!r}."
            )
    return weights, biases, rectified


def _check_layers(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
    if not weights or len(weights) != len(biases):
        raise InvalidArgument(
            f"weight_tied needs at least one weight, and as many biases as weights (None for a layer without); got "
            f"{len(weights)} weights and {len(biases)} biases."
        )
    for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True), start=1):
        if not isinstance(weight, Tensor) or not isinstance(bias, (Tensor, type(None))):
            raise InvalidType(f"weight_tied: W_{layer} and b_{layer} must be tensors (b_{layer} may be None).")
        inputs = weight.shape[1] if layer == 1 and weight.dim() == 2 else weights[layer - 2].shape[0]
        if weight.dim() != 2 or weight.shape[1] != inputs:
            raise InvalidArgument(f"weight_tied: W_{layer} must have shape (n, {inputs}); got {tuple(weight.shape)}.")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise InvalidArgument(f"weight_tied: b_{layer} must have shape ({weight.shape[0]},); got {tuple(bias.shape)}.")
        if weight.dtype != weights[0].dtype or (bias is not None and bias.dtype != weight.dtype):
            raise InvalidType(
                f"weight_tied: all weights and biases must have one dtype; W_1 has {weights[0].dtype}, layer "
                f"{layer} has {weight.dtype if bias is None else (weight.dtype, bias.dtype)}."
            )
