"""Image networks with an equilibrium inside: encoder, cell, head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves, map_leaves
from wellposed.errors import InvalidArgument
from wellposed.implicit import AbstractGradient
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.vision.cells import MultiscaleCell, ResidualCell
from wellposed.nn.vision.dropout import VariationalDropout
from wellposed.nn.vision.encoders import ImageEncoder, PyramidEncoder
from wellposed.nn.vision.heads import ClassificationHead, SegmentationHead
from wellposed.nn.vision.jacobian import equilibrium_spectral_radius, jacobian_penalty
from wellposed.nn.vision.weight_tied import WeightTied
from wellposed.solve import AbstractSolver, Solution

__all__ = ["AbstractImageNetwork", "ExplicitTwin", "MultiscaleDEQ", "ResidualDEQ"]


class AbstractImageNetwork(nn.Module):
    """head(body(encoder(X))), where the body takes features, with the masks of dropout if there are any, to a state.

    Attributes:
        encoder: (batch, C, H, W) -> features. head: (state, (H, W)) -> predictions. dropout: Draws the masks.
    """

    encoder: nn.Module
    head: nn.Module
    dropout: VariationalDropout

    @property
    def cell(self) -> Any:
        """The map f(z, x)."""
        raise NotImplementedError

    def inputs(self, X: Tensor) -> Any:
        """What the cell is given: features, or a tuple of features and masks; masks are drawn at every call."""
        _check_images(self, X)
        x = self.encoder(X)
        masks = map_leaves(self.dropout, self.cell.mask_like(x))
        return x if None in leaves(masks) else (x, masks)


class _EquilibriumNetwork(AbstractImageNetwork):
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


class ResidualDEQ(_EquilibriumNetwork):
    r"""Images to classes through the equilibrium of a `ResidualCell` [nguyen2022, Section 2.2].

        >>> import torch, wellposed as wp
        >>> model = wp.nn.ResidualDEQ(1, 8, 10, generator=torch.Generator().manual_seed(0))
        >>> model(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))).shape
        torch.Size([4, 10])

    Args:
        in_channels: Of the images.
        channels: Of the state.
        classes: Number of logits.
        inner, groups, kernel_size, init_std, weight_norm: As in `ResidualCell`.
        stride: Of the encoder, a 3 x 3 convolution and a norm.
        grid: As in `ClassificationHead`.
        dropout: p of `VariationalDropout`.
        solver, gradient, on_failure, rtol, max_steps: As in `EquilibriumLayer`.
        generator: Draws the parameters, and later the masks of dropout.
        device, dtype: Of the parameters.

    Attributes:
        layer: The `EquilibriumLayer`.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        classes: int,
        *,
        inner: int | None = None,
        groups: int = 8,
        kernel_size: int = 3,
        init_std: float = 0.01,
        weight_norm: bool = False,
        stride: int = 1,
        grid: int = 1,
        dropout: float = 0.0,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        on_failure: str = "warn",
        rtol: float | None = None,
        max_steps: int = 200,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        made: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        cell = ResidualCell(
            channels,
            inner,
            groups=groups,
            kernel_size=kernel_size,
            init_std=init_std,
            weight_norm=weight_norm,
            **made,
        )
        super().__init__(
            ImageEncoder(in_channels, channels, stride=stride, groups=groups, **made),
            EquilibriumLayer(cell, solver, gradient, on_failure=on_failure, rtol=rtol, max_steps=max_steps),
            ClassificationHead((channels,), classes, grid=grid, **made),
            VariationalDropout(dropout, generator=generator),
        )


class MultiscaleDEQ(_EquilibriumNetwork):
    r"""Several resolutions of an image as one equilibrium [bai2020], for classes of images or of pixels.

    Made by `classifier` or `segmenter`; `with_head` gives the same body another task.

        >>> import torch, wellposed as wp
        >>> model = wp.nn.MultiscaleDEQ.segmenter(3, (8, 16), 5, generator=torch.Generator().manual_seed(0), rtol=1e-3)
        >>> model(torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))).shape
        torch.Size([2, 5, 12, 16])

    Args:
        in_channels: Of the images.
        channels: Of each resolution, finest first.
        head: (state, (H, W)) -> predictions.
        groups, init_std, weight_norm: As in `MultiscaleCell`.
        stride: Of the encoder.
        dropout, solver, gradient, on_failure, rtol, max_steps, generator, device, dtype: As in `ResidualDEQ`.

    Attributes:
        layer: The `EquilibriumLayer`; its state is a tuple.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        head: nn.Module,
        *,
        groups: int = 8,
        init_std: float = 0.01,
        weight_norm: bool = False,
        stride: int = 1,
        dropout: float = 0.0,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        on_failure: str = "warn",
        rtol: float | None = None,
        max_steps: int = 200,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        made: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        cell = MultiscaleCell(channels, groups=groups, init_std=init_std, weight_norm=weight_norm, **made)
        super().__init__(
            PyramidEncoder(in_channels, cell.channels, stride=stride, groups=groups, **made),
            EquilibriumLayer(cell, solver, gradient, on_failure=on_failure, rtol=rtol, max_steps=max_steps),
            head,
            VariationalDropout(dropout, generator=generator),
        )

    @classmethod
    def classifier(
        cls, in_channels: int, channels: Sequence[int], classes: int, *, grid: int = 1, **options: Any
    ) -> MultiscaleDEQ:
        """With a `ClassificationHead`; options as in the class."""
        made = {name: options[name] for name in ("generator", "device", "dtype") if name in options}
        return cls(in_channels, channels, ClassificationHead(channels, classes, grid=grid, **made), **options)

    @classmethod
    def segmenter(cls, in_channels: int, channels: Sequence[int], classes: int, **options: Any) -> MultiscaleDEQ:
        """With a `SegmentationHead`; options as in the class."""
        made = {name: options[name] for name in ("generator", "device", "dtype") if name in options}
        return cls(in_channels, channels, SegmentationHead(channels, classes, **made), **options)

    def with_head(self, head: nn.Module) -> MultiscaleDEQ:
        """Another task on the same body: encoder and layer are shared, not copied.

        Args:
            head: (state, (H, W)) -> predictions.
        """
        other = copy.copy(self)
        other._modules = {**self._modules, "head": head}
        return other


def _check_images(model: AbstractImageNetwork, X: Any) -> None:
    if not isinstance(X, Tensor) or X.dim() != 4:
        seen = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        raise InvalidArgument(f"{type(model).__name__} expects images of shape (batch, channels, height, width); got {seen}.")
