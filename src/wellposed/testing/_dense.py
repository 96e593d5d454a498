"""Derivatives of equilibria by dense linear algebra on the whole batch as one vector.

Nothing here uses rows, solvers or products of the library, so it cannot share their mistakes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def polished(f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """The fixed point of f near z, by three Newton steps with the Jacobian of the whole batch."""
    z, shape = z.detach(), z.shape
    identity = torch.eye(z.numel(), dtype=z.dtype)
    for _ in range(3):
        J = torch.autograd.functional.jacobian(lambda v: f(v.reshape(shape)).flatten(), z.flatten())
        z = z + torch.linalg.solve(identity - J, (f(z) - z).detach().flatten()).reshape(shape)
    return z


def adjoint_gradients(
    f: Callable[[Tensor], Tensor], z: Tensor, v: Tensor, leaves: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """v^T dz/d(leaf) at z = f(z): the u of (I - J)^T u = v, pulled back through f.

    Args:
        f: Of tensors of the shape of z; depends on the leaves with a graph.
        z: The equilibrium. v: Of its shape.
        leaves: Tensors that require a gradient.
    """
    z = z.detach()
    J = torch.autograd.functional.jacobian(lambda w: f(w.reshape(z.shape)).flatten(), z.flatten())
    u = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - J.T, v.flatten())
    return torch.autograd.grad(f(z), list(leaves), u.reshape(z.shape), allow_unused=True)


def implicit_jacobian(
    definition: Callable[[Mapping[str, Tensor], Tensor], tuple[Tensor, Tensor]],
    tensors: Mapping[str, Tensor],
    Z: Tensor,
    name: str,
) -> Tensor:
    """(n, number of entries) dy/d(parameter) by the implicit function theorem.

    Args:
        definition: parameters, (n, m) Z -> f(Z) of the shape of Z, and (n,) y.
        tensors: The parameters.
        Z: (n, m) the equilibrium.
        name: Of the parameter.
    """
    jacobian = torch.func.jacrev

    def at_state(flat: Tensor) -> tuple[Tensor, Tensor]:
        image, y = definition(tensors, flat.reshape(Z.shape))
        return image.flatten(), y

    def at_parameter(value: Tensor) -> tuple[Tensor, Tensor]:
        image, y = definition({**tensors, name: value}, Z)
        return image.flatten(), y

    f_z, y_z = jacobian(at_state)(Z.flatten())
    f_t, y_t = (part.flatten(1) for part in jacobian(at_parameter)(tensors[name]))
    return y_z @ torch.linalg.solve(torch.eye(Z.numel(), dtype=Z.dtype) - f_z, f_t) + y_t
