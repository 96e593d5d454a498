"""What image networks share: encoder, body, head; and the explicit twins of those with an equilibrium."""

from __future__ import annotations

import abc
import copy
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.vision.dropout import VariationalDropout
from wellposed.nn.vision.jacobian import equilibrium_spectral_radius, jacobian_penalty
from wellposed.nn.vision.weight_tied import WeightTied
from wellposed.solve import Solution

__all__ = ["AbstractImageNetwork", "EquilibriumNetwork", "ExplicitTwin"]


class AbstractImageNetwork(nn.Module, abc.ABC):
    """head(body(encoder(X))), where the body takes features, with the masks of dropout if there are any, to a state.

    Attributes:
        encoder: (batch, C, H, W) -> features. head: (state, (H, W)) -> predictions. dropout: Draws the masks.
    """

    encoder: nn.Module
    head: nn.Module
    dropout: VariationalDropout

    @property
    @abc.abstractmethod
    def cell(self) -> Any:
        """The map f(z, x)."""

    def inputs(self, X: Tensor) -> Any:
        """What the cell is given: features, or a tuple of features and masks; masks are drawn at every call."""
        _check_images(self, X)
        x = self.encoder(X)
        masks = map_leaves(self.dropout, self.cell.mask_like(x))
        return x if None in leaves(masks) else (x, masks)


class EquilibriumNetwork(AbstractImageNetwork):
    """What ResidualDEQ and MultiscaleDEQ share."""

    def __init__(
        self,
        encoder: nn.Module,
        layer: EquilibriumLayer,
        head: nn.Module,
        dropout: VariationalDropout,
    ) -> None:
        super().__init__()
        self.encoder, self.layer, self.head, self.dropout = encoder, layer, head, dropout

    @property
    def cell(self) -> Any:
        return self.layer.cell

    def forward(self, X: Tensor) -> Tensor:
        """(batch, C, H, W) -> predictions."""
        prediction: Tensor = self.head(self.equilibrium(X), tuple(X.shape[2:]))
        return prediction

    def equilibrium(self, X: Tensor, z0: Any = None) -> Any:
        """The state at equilibrium, differentiable.

        Args:
            X: (batch, C, H, W).
            z0: The start; zeros if not given.
        """
        x = self.inputs(X)
        return self.layer(x, self.cell.initial(x) if z0 is None else z0)

    def solve(self, X: Tensor, z0: Any = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph, with all that is known about it; see `EquilibriumLayer.solve`."""
        with torch.no_grad():
            x = self.inputs(X)
        return self.layer.solve(x, self.cell.initial(x) if z0 is None else z0, record=record)

    def penalized(self, X: Tensor, *, probes: int = 1, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Predictions and the `jacobian_penalty` at their equilibria (held fixed), from one solve.

        Args:
            X: (batch, C, H, W).
            probes, generator: Of the penalty.
        """
        x = self.inputs(X)
        z = self.layer(x, self.cell.initial(x))
        assert self.layer.last_solution is not None
        held = self.layer.last_solution.value
        penalty = jacobian_penalty(self.cell, held, x, probes=probes, generator=generator)
        return self.head(z, tuple(X.shape[2:])), penalty

    def spectral_radius(self, X: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """(batch,) estimates of the spectral radius of df/dz at the equilibria; see `equilibrium_spectral_radius`."""
        with torch.no_grad():
            x = self.inputs(X)
        z = self.layer.solve(x, self.cell.initial(x)).value
        return equilibrium_spectral_radius(self.cell, z, x, generator=generator)

    def twin(self, repeats: int) -> ExplicitTwin:
        """The explicit network with copies of the same parameters that repeats the cell so many times.

        Args:
            repeats: 6, 11 and 18 in [nguyen2022, Fig. 4.4].
        """
        parts = copy.deepcopy((self.encoder, self.cell, self.head, self.dropout))
        return ExplicitTwin(parts[0], WeightTied(parts[1], repeats), parts[2], parts[3])


class ExplicitTwin(AbstractImageNetwork):
    """An image network whose body is a cell repeated; see `ResidualDEQ.twin`."""

    def __init__(self, encoder: nn.Module, body: WeightTied, head: nn.Module, dropout: VariationalDropout) -> None:
        super().__init__()
        self.encoder, self.body, self.head, self.dropout = encoder, body, head, dropout

    @property
    def cell(self) -> Any:
        return self.body.cell

    def forward(self, X: Tensor) -> Tensor:
        """(batch, C, H, W) -> predictions."""
        prediction: Tensor = self.head(self.body(self.inputs(X)), tuple(X.shape[2:]))
        return prediction


def _check_images(model: AbstractImageNetwork, X: Any) -> None:
    name, dtype = type(model).__name__, next(model.encoder.parameters()).dtype
    channels: Any = model.encoder.in_channels
    shape = f"(batch, {channels}, height, width)"
    if not isinstance(X, Tensor):
        raise InvalidType(
            f"{name} expects a tensor of images of shape {shape}; got {type(X).__name__}. Convert it, e.g. "
            f"torch.as_tensor(X, dtype={dtype})."
        )
    if X.dim() != 4 or X.shape[1] != channels:
        hint = " The first dimension is the batch: for one image give X.unsqueeze(0)." if X.dim() == 3 else ""
        raise InvalidArgument(f"{name} expects images of shape {shape}; got {tuple(X.shape)}.{hint}")
    # autocast converts numbers of at most 32 bits by itself
    cast = torch.is_autocast_enabled(X.device.type) and X.is_floating_point() and torch.float64 not in (X.dtype, dtype)
    if X.dtype != dtype and not cast:
        raise InvalidType(f"{name} has {dtype} parameters and got images of {X.dtype}; convert one, e.g. X.to({dtype}).")
