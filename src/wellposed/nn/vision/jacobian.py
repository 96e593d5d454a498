"""The Jacobian of a cell at an equilibrium: penalized, and measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed._tree import Layout, leaves, map_leaves
from wellposed.errors import InvalidArgument
from wellposed.linalg import spectral_radius_estimate
from wellposed.linalg.jacobian import Jacobian


def jacobian_penalty(
    cell: Callable[..., Any], z: Any, x: Any, *, probes: int = 1, generator: torch.Generator | None = None
) -> Tensor:
    r"""An unbiased estimate of the mean of |J|_F^2/features, J = df/dz, with a graph [bai2021].

    For standard normal e, E|J^T e|^2 = |J|_F^2 [hutchinson1989]; the mean over `probes` draws is
    unbiased for any number of them. Differentiable in the parameters of the cell, in x, and in z as
    it is given: detach it to hold the point.

    Args:
        cell: `cell(z, x)`, row-wise.
        z: The point, a state, batch first; an equilibrium usually.
        x: The input.
        probes: Vector-Jacobian products.
        generator: Draws e; torch's global one if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell, x = torch.nn.Linear(6, 6), torch.ones(8, 6)
        >>> layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(0.5 * cell(z) + x))
        >>> z = layer(x)
        >>> penalty = wp.nn.jacobian_penalty(layer.cell, z.detach(), x)
        >>> (z.square().mean() + 0.1 * penalty).backward()
    """
    check_positive_integer("jacobian_penalty", "probes", probes)
    layout = Layout.of(z, "z")
    rows = layout.flatten(z)
    with torch.enable_grad():
        if not rows.requires_grad:
            rows = rows.detach().requires_grad_()
        image = layout.flatten(cell(layout.unflatten(rows), x))
        total = rows.new_zeros(())
        for _ in range(probes if image.requires_grad else 0):  # else f depends on nothing that has a derivative
            device = rows.device if generator is None else generator.device
            e = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device=device).to(rows.device)
            (product,) = torch.autograd.grad(image, rows, e, create_graph=True, allow_unused=True)
            total = total if product is None else total + product.square().sum()
    return total / (probes * rows.numel())


def equilibrium_spectral_radius(
    cell: Callable[..., Any], z: Any, x: Any, *, generator: torch.Generator | None = None
) -> Tensor:
    r"""(batch,) estimates of rho(df/dz) by Arnoldi; see `linalg.spectral_radius_estimate`.

    Below 1 plain iteration converges from near the equilibrium; nothing is proved. Costs some
    dozens of products a sample.

    Args:
        cell: `cell(z, x)`, row-wise.
        z: The equilibria.
        x: The inputs; tensors in it are batch first.
        generator: Of the start vectors; by default new ones with seed 0.
    """
    layout = Layout.of(z, "z")
    rows = layout.flatten(z).detach()
    for leaf in leaves(x):
        if isinstance(leaf, Tensor) and leaf.shape[:1] != rows.shape[:1]:
            raise InvalidArgument(f"x must be batch first with {rows.shape[0]} samples; got shape {tuple(leaf.shape)}.")
    found = []
    for i in range(rows.shape[0]):
        one = map_leaves(lambda leaf, i=i: leaf[i : i + 1] if isinstance(leaf, Tensor) else leaf, x)  # type: ignore[misc]
        jacobian = Jacobian(lambda v, one=one: layout.flatten(cell(layout.unflatten(v), one)), rows[i : i + 1])  # type: ignore[misc]
        found.append(
            spectral_radius_estimate(
                lambda v, jacobian=jacobian: jacobian.mv(v.unsqueeze(0)).squeeze(0),  # type: ignore[misc]
                size=rows.shape[1],
                dtype=rows.dtype,
                device=rows.device,
                generator=generator,
            )
        )
    return torch.tensor(found, dtype=torch.float64)
