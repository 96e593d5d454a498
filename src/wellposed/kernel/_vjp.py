"""J^T v and J u for the Jacobian of all predictions, in batches of rows and without the Jacobian."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.kernel._blocks import slices

__all__ = ["jacobian_product", "transposed_jacobian_product"]

#: Samples whose graph is held at once.
ROWS = 512


def transposed_jacobian_product(model: nn.Module, X: Tensor, parameters: list[nn.Parameter], v: Tensor) -> list[Tensor]:
    """J^T v, one tensor per parameter, for v of length n c."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    outputs = v.shape[0] // X.shape[0]
    for rows in slices(X.shape[0], ROWS):
        with torch.enable_grad():
            y = model(X[rows]).reshape(-1)
        cotangent = v[rows.start * outputs : rows.stop * outputs].to(y.dtype)
        if y.requires_grad:
            for sum_, grad in zip(total, torch.autograd.grad(y, parameters, cotangent, allow_unused=True), strict=True):
                if grad is not None:
                    sum_ += grad
    return total


def jacobian_product(model: nn.Module, X: Tensor, parameters: list[nn.Parameter], direction: list[Tensor]) -> Tensor:
    """J u, of length n c, as the derivative of w -> <J^T w, u>, which is linear in w."""
    parts = []
    for rows in slices(X.shape[0], ROWS):
        with torch.enable_grad():
            y = model(X[rows]).reshape(-1)
            product = torch.zeros_like(y)
            if y.requires_grad:
                w = torch.zeros_like(y, requires_grad=True)
                grads = torch.autograd.grad(y, parameters, w, create_graph=True, allow_unused=True)
                used = [(grad, u) for grad, u in zip(grads, direction, strict=True) if grad is not None and grad.requires_grad]
                if used:
                    (product,) = torch.autograd.grad([grad for grad, _ in used], w, [u for _, u in used])
        parts.append(product.detach())
    return torch.cat(parts)
