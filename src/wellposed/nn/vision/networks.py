"""Image networks with an equilibrium, for classes of images or pixels, and explicit twins."""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._solver_kwargs import SolverKwargs, check_solver_kwargs
from wellposed.nn._truncated import truncated
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.pretrained import Pretrained
from wellposed.nn.vision.cells import MultiscaleCell, ResidualCell
from wellposed.nn.vision.jacobian import equilibrium_spectral_radius, jacobian_penalty
from wellposed.nn.vision.modules import (
    ClassificationHead,
    ImageEncoder,
    PyramidEncoder,
    SegmentationHead,
    VariationalDropout,
    WeightTied,
    checked_channels,
)
from wellposed.solve import Solution


class AbstractImageNetwork(Pretrained, abc.ABC):
    """head(body(encoder(X))): the body maps features, and masks of dropout, to a state.

    Attributes:
        encoder: (batch, C, H, W) -> features. head: (state, (H, W)) -> predictions. dropout: Draws
            the masks.
    """

    encoder: nn.Module
    head: nn.Module
    dropout: VariationalDropout

    @property
    @abc.abstractmethod
    def cell(self) -> Any:
        """The map f(z, x)."""

    def inputs(self, X: Tensor) -> Any:
        """The input of the cell: features, or features and masks, which are drawn at every call."""
        _check_images(self, X)
        x = self.encoder(X)
        masks = map_leaves(self.dropout, self.cell.mask_like(x))
        return x if None in leaves(masks) else (x, masks)


class EquilibriumNetwork(AbstractImageNetwork):
    """What ResidualDEQ and MultiscaleDEQ share."""

    def __init__(self, encoder: nn.Module, layer: EquilibriumLayer, head: nn.Module, dropout: VariationalDropout) -> None:
        super().__init__()
        self.encoder, self.layer, self.head, self.dropout = encoder, layer, head, dropout

    @property
    def cell(self) -> Any:
        return self.layer.cell

    def inputs(self, X: Tensor) -> Any:
        """Contiguous: sums of other strides cost as much as a convolution."""
        return map_leaves(lambda leaf: leaf.contiguous(), super().inputs(X))

    def forward(self, X: Tensor) -> Tensor:
        """(batch, C, H, W) -> predictions."""
        prediction: Tensor = self.head(self.equilibrium(X), tuple(X.shape[2:]))
        return prediction

    def equilibrium(self, X: Tensor, z0: Any = None) -> Any:
        """(batch, C, H, W) -> the equilibrium, differentiable; z0 is the start, by default 0."""
        x = self.inputs(X)
        return self.layer(x, self.cell.initial(x) if z0 is None else z0)

    def solve(self, X: Tensor, z0: Any = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph; see `EquilibriumLayer.solve`."""
        with torch.no_grad():
            x = self.inputs(X)
        return self.layer.solve(x, self.cell.initial(x) if z0 is None else z0, record=record)

    def penalized(self, X: Tensor, *, probes: int = 1, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Predictions, and the `jacobian_penalty` at their equilibria (held fixed)."""
        x = self.inputs(X)
        z = self.layer(x, self.cell.initial(x))
        assert self.layer.last_solution is not None
        held = self.layer.last_solution.value
        penalty = jacobian_penalty(self.cell, held, x, probes=probes, generator=generator)
        return self.head(z, tuple(X.shape[2:])), penalty

    def regularized(
        self, X: Tensor, *, steps: int = 8, recorded: int | None = None, weight: float = 10.0
    ) -> tuple[Tensor, Tensor]:
        """Predictions after few steps, and `weight` times the penalty of `truncated`, to be added
        to the loss: cheap training. The gradient is inexact; that of `model(X)` is exact."""
        x = self.inputs(X)
        z, penalty = truncated(self.layer, x, self.cell.initial(x), steps=steps, recorded=recorded)
        return self.head(z, tuple(X.shape[2:])), weight * penalty

    def spectral_radius(self, X: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """(batch,) spectral radii of df/dz, estimated; see `equilibrium_spectral_radius`."""
        with torch.no_grad():
            x = self.inputs(X)
        z = self.layer.solve(x, self.cell.initial(x)).value
        return equilibrium_spectral_radius(self.cell, z, x, generator=generator)

    def twin(self, repeats: int) -> ExplicitTwin:
        """The explicit network with copied parameters [nguyen2022, Fig. 4.4]."""
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


if TYPE_CHECKING:
    from typing_extensions import Unpack


class ResidualDEQ(EquilibriumNetwork):
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
        input_gain: As there; with 3 training is faster than with 1, that of [nguyen2022].
        stride: Of the encoder, a 3 x 3 convolution and a norm.
        grid: As in `ClassificationHead`.
        dropout: p of `VariationalDropout`.
        solver_kwargs: solver, gradient, on_failure, rtol, atol, max_steps, as in
            `EquilibriumLayer`.
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
        groups: int | None = None,
        kernel_size: int = 3,
        init_std: float = 0.01,
        input_gain: float = 3.0,
        weight_norm: bool = False,
        stride: int = 1,
        grid: int = 1,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **solver_kwargs: Unpack[SolverKwargs],
    ) -> None:
        check_solver_kwargs("ResidualDEQ", solver_kwargs)
        factory_kwargs: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        start: dict[str, Any] = {"init_std": init_std, "input_gain": input_gain, "weight_norm": weight_norm}
        cell = ResidualCell(channels, inner, groups=groups, kernel_size=kernel_size, **start, **factory_kwargs)
        super().__init__(
            ImageEncoder(in_channels, channels, stride=stride, groups=groups, **factory_kwargs),
            EquilibriumLayer(cell, **solver_kwargs),
            ClassificationHead((channels,), classes, grid=grid, **factory_kwargs),
            VariationalDropout(dropout, generator=generator),
        )


class MultiscaleDEQ(EquilibriumNetwork):
    r"""Several resolutions of an image as one equilibrium [bai2020].

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
        dropout, generator, device, dtype, solver_kwargs: As in `ResidualDEQ`.

    Attributes:
        layer: The `EquilibriumLayer`; its state is a tuple.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        head: nn.Module,
        *,
        groups: int | None = None,
        init_std: float = 0.01,
        weight_norm: bool = False,
        stride: int = 1,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **solver_kwargs: Unpack[SolverKwargs],
    ) -> None:
        channels = checked_channels("MultiscaleDEQ", channels)
        _check_head(head)
        check_solver_kwargs("MultiscaleDEQ", solver_kwargs)
        factory_kwargs: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        cell = MultiscaleCell(channels, groups=groups, init_std=init_std, weight_norm=weight_norm, **factory_kwargs)
        super().__init__(
            PyramidEncoder(in_channels, cell.channels, stride=stride, groups=groups, **factory_kwargs),
            EquilibriumLayer(cell, **solver_kwargs),
            head,
            VariationalDropout(dropout, generator=generator),
        )

    @classmethod
    def classifier(
        cls, in_channels: int, channels: Sequence[int], classes: int, *, grid: int = 1, **options: Any
    ) -> MultiscaleDEQ:
        """With a `ClassificationHead`; options as in the class."""
        factory_kwargs = {name: options[name] for name in ("generator", "device", "dtype") if name in options}
        return cls(in_channels, channels, ClassificationHead(channels, classes, grid=grid, **factory_kwargs), **options)

    @classmethod
    def segmenter(cls, in_channels: int, channels: Sequence[int], classes: int, **options: Any) -> MultiscaleDEQ:
        """With a `SegmentationHead`; options as in the class."""
        factory_kwargs = {name: options[name] for name in ("generator", "device", "dtype") if name in options}
        return cls(in_channels, channels, SegmentationHead(channels, classes, **factory_kwargs), **options)

    def with_head(self, head: nn.Module) -> MultiscaleDEQ:
        """Another task: `head` maps (state, (H, W)) to predictions; the body is shared."""
        _check_head(head)
        other = copy.copy(self)
        other._modules = {**self._modules, "head": head}
        return other


def _check_head(head: Any) -> None:
    if not isinstance(head, nn.Module):
        raise InvalidType(
            "The 'head' parameter of MultiscaleDEQ must be a module such as ClassificationHead(channels, classes); got "
            f"{head!r}. For a number of classes use MultiscaleDEQ.classifier or MultiscaleDEQ.segmenter."
        )
