"""Images from data, and how far from the equilibrium they are at most."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.imaging._claims import check_operator
from wellposed.imaging._inputs import check_range
from wellposed.imaging._reconstruction import ReconstructionCell
from wellposed.nn.cell import AbstractCell
from wellposed.nn.layer import EquilibriumLayer

#: Relative rounding of one evaluation of a cell in float64, generously.
_ROUNDING = 2.0**-40


def _norms(x: Tensor) -> Tensor:
    """(batch,) Euclidean norms of images."""
    return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())))


def _in_float64(cell: ReconstructionCell) -> ReconstructionCell:
    """A copy; also of the tensors of an operator that is not a module."""
    exact = copy.deepcopy(cell).double()
    operator = exact.operator
    for name, value in () if isinstance(operator, nn.Module) else list(getattr(operator, "__dict__", {}).items()):
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            setattr(operator, name, value.to(torch.complex128 if value.is_complex() else torch.float64))
    return exact


class Reconstructor(nn.Module):
    """Images from data: the equilibrium of a cell, as an image.

    Args:
        cell: `DEQGrad`, `DEQProx` or `DEQADMM`.
        options: Of `EquilibriumLayer`.

    Attributes:
        layer: The `EquilibriumLayer`; `layer.last_solution` has the status of every image.
        largest: The most that |A^T y| of a pixel may be; None, the default, for any number. That of
            `tasks.deblurrer` is 10: it refuses images in [0, 255].

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQGrad(blur, wp.imaging.BoundedDnCNN(features=4, bound=0.9))
        >>> model = wp.imaging.Reconstructor(cell, rtol=1e-3)
        >>> model(blur.A(torch.rand(2, 1, 8, 8))).shape, model.layer.last_solution.status
        (torch.Size([2, 1, 8, 8]), StatusArray(CONVERGED: 2))
    """

    def __init__(self, cell: AbstractCell, **options: Any) -> None:
        super().__init__()
        if not isinstance(cell, ReconstructionCell):
            raise InvalidType(f"Reconstructor expects DEQGrad, DEQProx or DEQADMM; got {type(cell).__name__}.")
        self.layer = EquilibriumLayer(cell, **options)
        self.largest: float | None = None

    def forward(self, y: Tensor) -> Tensor:
        """Data -> (batch, channels, height, width)."""
        cell = self.layer.cell
        assert isinstance(cell, ReconstructionCell)
        start = cell.initial(y).detach()
        check_range(type(self).__name__, start, self.largest)
        return cell.image(self.layer(y, z0=start), y)

    @torch.no_grad()
    def error_bound(self, y: Tensor) -> Tensor:
        """(batch,) float64 upper bounds of the distance of the last images from the equilibria.

        |z - z*| <= |f(z) - z| / (1 - contraction), in the norm of all pixels of an image together.
        z* is the equilibrium of the exact map with the parameters as they are stored. f is
        evaluated once in float64, and 2^-40 (|z| + |f(z)|) is added for the rounding of that. So
        the rounding of float32, in which an image may have been computed, is part of the bound. It
        is infinite where nothing is proved: see `cell.contraction`. An operator that is not of this
        package, or whose norm was given, or with a bound or method assigned to the object, is
        tried on random images, and refused if its adjoint is not one, or its norm is larger or its
        least eigenvalue smaller than stated.

        Args:
            y: The data of the last images.
        """
        solution, cell = self.layer.last_solution, self.layer.cell
        if solution is None:
            raise InvalidArgument("This Reconstructor has computed no images yet; call it with y before error_bound(y).")
        assert isinstance(cell, ReconstructionCell)
        exact, z = _in_float64(cell), solution.value.detach().double()
        y64 = y.to(torch.complex128 if y.is_complex() else torch.float64) if isinstance(y, Tensor) else y
        if (shape := exact.state_shape(y64)) != tuple(z.shape):
            raise InvalidArgument(
                f"error_bound takes the data of the last images, {tuple(z.shape)}; got data of images {shape}."
            )
        factor = max(cell.contraction, exact.contraction)
        if not factor < 1:
            return z.new_full((len(z),), math.inf)
        check_operator(exact, z)
        f = exact(z, y64)
        rounding = _ROUNDING * (_norms(z) + _norms(f))
        distance = (_norms(f - z) + rounding) / (1 - factor)
        # the state need not be the image, and the map between them is rounded, too
        image, moved = cell.image(solution.value.detach(), y), exact.image(z, y64)
        distance = distance * cell.reflection + _norms(image.double() - moved) + _ROUNDING * _norms(moved) + rounding
        return distance * (1 + _ROUNDING)
