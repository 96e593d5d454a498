"""A classifier on a monotone equilibrium: dense, convolutional, or multi-resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import Policy, check_positive_integer
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import AbstractGradient, ImplicitGradient
from wellposed.nn.activations import AbstractActivation
from wellposed.nn.cell import DenseCell
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.monotone.cells import MonotoneConvCell, MonotoneTierCell
from wellposed.nn.parametrizations import Monotone
from wellposed.solve import AbstractSolver, ForwardBackward, PeacemanRachford, Solution, TunedStep


class MonotoneClassifier(nn.Module):
    r"""logits = V P z + v: z a monotone equilibrium, P an average over a grid of regions.

    Made by `dense`, `conv` or `multitier`:

        >>> import torch, wellposed as wp
        >>> model = wp.nn.MonotoneClassifier.conv((1, 8, 8), 6, 10, grid=2)
        >>> model(torch.randn(3, 1, 8, 8)).shape
        torch.Size([3, 10])

    By default `PeacemanRachford(TunedStep())` solves for the equilibrium and its adjoint, with one
    factorization for both; with zero padding, which has no cheap resolvent,
    `ForwardBackward(TunedStep())`.

    Args:
        cell: `DenseCell` with `Monotone` weights, `MonotoneConvCell` or `MonotoneTierCell`.
        image: (C, H, W) of the inputs, or None for a dense cell.
        classes: Number of logits.
        grid: Regions per side that P averages over; 1 for a dense cell.
        solver, gradient, on_failure, rtol, max_steps: As in `EquilibriumLayer`.
        generator: Of the initialization of the head.
        device, dtype: Of the head.

    Attributes:
        layer: The `EquilibriumLayer`. head: The linear read-out.
    """

    def __init__(
        self,
        cell: DenseCell | MonotoneConvCell | MonotoneTierCell,
        image: tuple[int, int, int] | None,
        classes: int,
        *,
        grid: int = 1,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        on_failure: Policy = "warn",
        rtol: float | None = None,
        max_steps: int = 500,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("MonotoneClassifier", "classes", classes)
        check_positive_integer("MonotoneClassifier", "grid", grid)
        if not isinstance(cell, (DenseCell, MonotoneConvCell, MonotoneTierCell)):
            raise InvalidType(
                f"MonotoneClassifier needs a DenseCell, a MonotoneConvCell or a MonotoneTierCell; got {type(cell).__name__}. "
                "MonotoneClassifier.dense(in_features, width, classes) makes one with its cell, and so do .conv and .multitier."
            )
        if isinstance(cell, DenseCell) and not isinstance(cell.weight, Monotone):
            raise InvalidType(f"MonotoneClassifier needs a DenseCell with weight=Monotone(margin); got weight={cell.weight!r}.")
        zeros = not isinstance(cell, DenseCell) and cell.weights.padding == "zeros"
        default: AbstractSolver = ForwardBackward(TunedStep()) if zeros else PeacemanRachford(TunedStep())
        solver = default if solver is None else solver
        gradient = ImplicitGradient(default) if gradient is None else gradient
        self.image, self.classes, self.grid = image, classes, grid
        self.layer = EquilibriumLayer(cell, solver, gradient, on_failure=on_failure, rtol=rtol, max_steps=max_steps)
        self._pools = self.region_shapes()
        width = cell.width if isinstance(cell, DenseCell) else grid**2 * sum(cell.weights.channels)
        self.head = nn.Linear(width, classes, device=device, dtype=dtype)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(classes, width, generator=generator, dtype=dtype) / math.sqrt(width))
            self.head.bias.zero_()

    @classmethod
    def dense(
        cls,
        in_features: int,
        width: int,
        classes: int,
        *,
        margin: float = 0.1,
        activation: AbstractActivation | None = None,
        **options: Any,
    ) -> MonotoneClassifier:
        """z = s(W z + U x + b) with a matrix W; inputs flatten to (batch, in_features).

        Args:
            in_features, width, classes: d, m, k.
            margin: Of I - W.
            activation: s; `ReLU()` if not given.
            options: As in the class; generator, device and dtype are for all parameters.
        """
        cell = DenseCell(in_features, width, activation, weight=Monotone(margin), **_factory_kwargs(options))
        return cls(cell, None, classes, **options)

    @classmethod
    def conv(
        cls,
        image: tuple[int, int, int],
        channels: int,
        classes: int,
        *,
        margin: float = 0.1,
        activation: AbstractActivation | None = None,
        kernel_size: int = 3,
        padding: str = "circular",
        **options: Any,
    ) -> MonotoneClassifier:
        """One convolution; inputs (batch, C, H, W).

        Args:
            image: (C, H, W).
            channels, classes: Of the state, and k.
            margin, activation, kernel_size, padding: As in `MonotoneConvCell`.
            options: As in the class; generator, device and dtype are for all parameters. `grid`
                must divide H and W.
        """
        structure: dict[str, Any] = {"kernel_size": kernel_size, "margin": margin, "padding": padding}
        cell = MonotoneConvCell(_checked_image(image)[0], channels, activation, **structure, **_factory_kwargs(options))
        return cls(cell, image, classes, **options)

    @classmethod
    def multitier(
        cls,
        image: tuple[int, int, int],
        channels: Sequence[int],
        classes: int,
        *,
        margin: float = 0.1,
        activation: AbstractActivation | None = None,
        kernel_size: int = 3,
        padding: str = "circular",
        **options: Any,
    ) -> MonotoneClassifier:
        """Several resolutions; arguments as in `conv`, with the channels of each tier."""
        structure: dict[str, Any] = {"kernel_size": kernel_size, "margin": margin, "padding": padding}
        cell = MonotoneTierCell(_checked_image(image)[0], channels, activation, **structure, **_factory_kwargs(options))
        return cls(cell, image, classes, **options)

    @property
    def cell(self) -> DenseCell | MonotoneConvCell | MonotoneTierCell:
        """That of the layer."""
        cell: DenseCell | MonotoneConvCell | MonotoneTierCell = self.layer.cell  # type: ignore[assignment]
        return cell

    def forward(self, x: Tensor) -> Tensor:
        """(batch, ...) -> (batch, classes) logits."""
        logits: Tensor = self.head(self.readout(self.equilibrium(x).flatten(1)))
        return logits

    def equilibrium(self, x: Tensor) -> Tensor:
        """z, differentiable, in the shape of the cell's state."""
        z: Tensor = self.layer(self.prepared(x))
        return z

    def solve(self, x: Tensor) -> Solution:
        """The equilibrium without a graph, with all that is known about it."""
        return self.layer.solve(self.prepared(x))

    def prepared(self, x: Tensor) -> Tensor:
        """x as the cell needs it: flat for a dense cell, else checked to be an image."""
        shape = self.cell.in_features if self.image is None else ", ".join(map(str, self.image))
        if not isinstance(x, Tensor):
            raise InvalidType(
                f"MonotoneClassifier expects a tensor x of shape (batch, {shape}); got {type(x).__name__}. Convert it, e.g. "
                f"torch.as_tensor(x, dtype={self.head.weight.dtype})."
            )
        rows = x.flatten(1) if self.image is None and x.dim() > 1 else x
        if tuple(rows.shape[1:]) != ((self.cell.in_features,) if self.image is None else self.image):
            hint = " For one sample give x.unsqueeze(0)." if x.dim() == 1 or tuple(x.shape) == self.image else ""
            raise InvalidArgument(f"MonotoneClassifier expects x of shape (batch, {shape}); got {tuple(x.shape)}.{hint}")
        return rows

    def readout(self, z: Tensor) -> Tensor:
        """(batch, n) -> (batch, features of the head): P z."""
        if self.image is None:
            return z
        parts = z.split([c * h * w for c, h, w in self._pools], dim=1)
        pooled = []
        for part, (c, h, w) in zip(parts, self._pools, strict=True):
            field = part.reshape(-1, c, h, w)
            pooled.append(nn.functional.avg_pool2d(field, (h // self.grid, w // self.grid)).flatten(1))
        return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)

    def directions(self) -> Tensor:
        """(classes, n) V P: how every logit depends on z, without a graph."""
        V = self.head.weight.detach()
        features = self.head.in_features if self.image is None else sum(c * h * w for c, h, w in self._pools)
        with torch.enable_grad():
            z = V.new_zeros(self.classes, features).requires_grad_()
            (rows,) = torch.autograd.grad((self.readout(z) * V).sum(), z)
        return rows

    def region_shapes(self) -> list[tuple[int, int, int]]:
        """(C, H, W) of the tiers, empty for a dense cell; raises if `grid` does not fit."""
        cell = self.cell
        if self.image is None or isinstance(cell, DenseCell):
            return []
        _, height, width = _checked_image(self.image)
        shapes = [(t.channels, t.height, t.width) for t in cell.weights.lattices(height, width)]
        for _, h, w in shapes:
            if h % self.grid or w % self.grid:
                raise InvalidArgument(f"grid={self.grid} must divide the height and width of every tier; got {h} x {w}.")
        return shapes

    def extra_repr(self) -> str:
        return f"image={self.image}, classes={self.classes}, grid={self.grid}"


def _factory_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    """generator, device and dtype, if given."""
    return {name: options[name] for name in ("generator", "device", "dtype") if name in options}


def _checked_image(image: Any) -> tuple[int, int, int]:
    if not isinstance(image, tuple) or len(image) != 3 or not all(isinstance(size, int) and size > 0 for size in image):
        raise InvalidArgument(f"image must be a tuple (channels, height, width) of positive integers; got {image!r}.")
    return image
