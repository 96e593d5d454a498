"""Image networks with an equilibrium inside, for classes of images or of pixels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from wellposed.errors import InvalidType
from wellposed.nn.layer import EquilibriumLayer, SolverKwargs, check_solver_kwargs
from wellposed.nn.vision._modules import checked_channels
from wellposed.nn.vision._network import EquilibriumNetwork
from wellposed.nn.vision.cells import MultiscaleCell, ResidualCell
from wellposed.nn.vision.dropout import VariationalDropout
from wellposed.nn.vision.encoders import ImageEncoder, PyramidEncoder
from wellposed.nn.vision.heads import ClassificationHead, SegmentationHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MultiscaleDEQ", "ResidualDEQ"]


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
        stride: Of the encoder, a 3 x 3 convolution and a norm.
        grid: As in `ClassificationHead`.
        dropout: p of `VariationalDropout`.
        solving: solver, gradient, on_failure, rtol, atol, max_steps, as in `EquilibriumLayer`.
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
        weight_norm: bool = False,
        stride: int = 1,
        grid: int = 1,
        dropout: float = 0.0,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **solving: Unpack[SolverKwargs],
    ) -> None:
        check_solver_kwargs("ResidualDEQ", solving)
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
            EquilibriumLayer(cell, **solving),
            ClassificationHead((channels,), classes, grid=grid, **made),
            VariationalDropout(dropout, generator=generator),
        )


class MultiscaleDEQ(EquilibriumNetwork):
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
        dropout, generator, device, dtype, solving: As in `ResidualDEQ`.

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
        **solving: Unpack[SolverKwargs],
    ) -> None:
        channels = checked_channels("MultiscaleDEQ", channels)
        _check_head(head)
        check_solver_kwargs("MultiscaleDEQ", solving)
        made: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        cell = MultiscaleCell(channels, groups=groups, init_std=init_std, weight_norm=weight_norm, **made)
        super().__init__(
            PyramidEncoder(in_channels, cell.channels, stride=stride, groups=groups, **made),
            EquilibriumLayer(cell, **solving),
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
