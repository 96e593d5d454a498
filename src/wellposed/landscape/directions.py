"""Directions in the space of a model's parameters, seeded and normalized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._tree import scaled_norm
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.landscape._model import trained

#: One tensor for each trained parameter, of its shape.
Direction = Mapping[str, Tensor]


def random_direction(model: nn.Module, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """A standard normal direction; not of unit length, see `filter_normalized`.

    Args:
        model: Any module.
        generator: By default a new one with seed 0.

    Examples:
        >>> import torch, wellposed as wp
        >>> direction = wp.landscape.random_direction(torch.nn.Linear(3, 2))
        >>> {name: tuple(tensor.shape) for name, tensor in direction.items()}
        {'weight': (2, 3), 'bias': (2,)}
    """
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    made = {}
    for name, parameter in trained(model).items():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype, device=generator.device)
        made[name] = noise.to(parameter.device)
    return made


def filter_normalized(model: nn.Module, direction: Direction, *, vectors: bool = False) -> dict[str, Tensor]:
    r"""d_ij <- |theta_ij| d_ij / |d_ij| for every filter j of every layer i [li2018, Section 4].

    A filter is the slice of one output: a row of a matrix, a (C, h, w) kernel of a convolution.
    ReLU networks do not change when one layer is scaled up and the next one down; unit steps along
    a normalized direction do not depend on that scale either. Parameters with one dimension
    (biases, norms) do not move unless `vectors`, as in the paper; where nothing else is trained
    they move, normalized as one filter.

    Args:
        model: Any module, at the point around which the landscape is drawn.
        direction: Which to normalize; it is not changed.
        vectors: Whether parameters with fewer than two dimensions move too, each normalized as one
            filter.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = torch.nn.Linear(3, 2)
        >>> direction = wp.landscape.filter_normalized(model, wp.landscape.random_direction(model))
        >>> torch.allclose(direction["weight"].norm(dim=1), model.weight.norm(dim=1))
        True
    """
    check_direction(model, direction)
    parameters = trained(model)
    only_vectors = all(parameter.dim() < 2 for parameter in parameters.values())
    made = {}
    for name, parameter in parameters.items():
        d, theta = direction[name].detach(), parameter.detach()
        if theta.dim() >= 2:
            made[name] = _normalized(theta.flatten(1), d.flatten(1)).reshape(theta.shape)
        elif vectors or only_vectors:
            made[name] = _normalized(theta.reshape(1, -1), d.reshape(1, -1)).reshape(theta.shape)
        else:
            made[name] = torch.zeros_like(theta)
    return made


def _normalized(theta: Tensor, d: Tensor) -> Tensor:
    """(filters, n) |theta| d/|d|, 0 where d is 0."""
    unit = d / torch.where(d.any(dim=1), scaled_norm(d), 1.0).unsqueeze(1)
    return unit * scaled_norm(theta).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class PathDirections:
    """The principal directions of a training path.

    Attributes:
        directions: Orthonormal, the one along which the path varies most first.
        coordinates: (points, k) the path in these directions, with its last point at the origin.
        explained: (k,) part of the path's variation (about its last point) that each direction
            holds.
    """

    directions: list[dict[str, Tensor]]
    coordinates: Tensor
    explained: Tensor


def path_directions(path: Sequence[Direction], *, num: int = 2) -> PathDirections:
    r"""PCA of a training path about its end: right singular vectors of the rows theta_t - theta_T
    [li2018, Section 7].

    Args:
        path: The parameters at some moments, in order, e.g. `{name: p.detach().clone() for name, p
            in model.named_parameters()}` after every epoch; the last is where the landscape has its
            centre.
        num: How many directions; fewer than there are points.

    Examples:
        >>> import torch, wellposed as wp
        >>> path = [{"w": torch.tensor([1.0, 1.0]) * t} for t in (4.0, 2.0, 1.0)]
        >>> directions = wp.landscape.path_directions(path, num=1)
        >>> directions.coordinates.shape
        torch.Size([3, 1])
    """
    check_positive_integer("path_directions", "num", num)
    points = list(path)
    if len(points) <= num:
        raise InvalidArgument(f"path_directions needs more points than directions; got {len(points)} points for num={num}.")
    template = points[-1]
    rows = torch.stack([flatten(point) for point in points]).double()
    M = rows - rows[-1]
    _, S, Vh = torch.linalg.svd(M, full_matrices=False)
    if float(S[num - 1]) <= len(points) * torch.finfo(torch.float64).eps * float(S[0]) or float(S[0]) == 0.0:
        raise InvalidArgument(f"The path spans fewer than num={num} directions; give more points or a smaller num.")
    V = Vh[:num]
    # The sign of a singular vector is free; the same path gives the same picture if its largest
    # entry is positive.
    V = V * V.gather(1, V.abs().argmax(dim=1, keepdim=True)).sign()
    made = [unflatten(v, template) for v in V]
    return PathDirections(made, M @ V.mT, S[:num] ** 2 / (S**2).sum())


def flatten(direction: Direction) -> Tensor:
    """(p,) all entries in the order of the names given."""
    return torch.cat([part.detach().reshape(-1) for part in direction.values()])


def unflatten(vector: Tensor, template: Direction) -> dict[str, Tensor]:
    """The direction with these entries and the names, shapes, dtypes, devices of the template."""
    parts = vector.split([part.numel() for part in template.values()])
    return {
        name: part.reshape(like.shape).to(dtype=like.dtype, device=like.device)
        for (name, like), part in zip(template.items(), parts, strict=True)
    }


def check_direction(model: nn.Module, direction: Any) -> None:
    """Raises unless there is a finite tensor of the right shape for every trained parameter."""
    if not isinstance(direction, Mapping):
        raise InvalidType(f"A direction is a dictionary of tensors by parameter name; got {type(direction).__name__}.")
    parameters = trained(model)
    if set(direction) < set(parameters) or not set(parameters) <= set(direction):
        missing = sorted(set(parameters) - set(direction))
        raise InvalidArgument(f"The direction has no entry for {', '.join(missing)}; give zeros for what should not move.")
    for name, parameter in parameters.items():
        if tuple(direction[name].shape) != tuple(parameter.shape):
            raise InvalidArgument(
                f"The direction's {name} must have the shape of the parameter, {tuple(parameter.shape)}; got "
                f"{tuple(direction[name].shape)}."
            )
        if not bool(torch.isfinite(direction[name]).all()):
            raise InvalidArgument(f"The direction's {name} has entries that are NaN or infinite.")
