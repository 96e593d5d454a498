"""The Jacobian of a row-wise map at a point, as an operator: products only, nothing formed."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import pulled_back, uncompiled

Product = Callable[[Tensor], Tensor]


class AbstractJacobian(abc.ABC):
    """J = df/dz at the rows of z: one (features, features) block per row, known by its products.

    Args:
        point: (batch, features) the point of linearization.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16))
        >>> z = layer(torch.ones(2, 4)).detach()
        >>> jacobian = layer.cell.bind(torch.ones(2, 4)).jacobian(z)
        >>> isinstance(jacobian, wp.linalg.AbstractJacobian), jacobian.rmv(torch.ones_like(z)).shape
        (True, torch.Size([2, 16]))
    """

    #: Evaluations of f that setting up products costs.
    setup: int = 0

    def __init__(self, point: Tensor) -> None:
        self.point = point

    @property
    def value(self) -> Tensor | None:
        """(batch, features) f at the point, if it is known."""
        return None

    @abc.abstractmethod
    def mv(self, u: Tensor) -> Tensor:
        """J u, row by row: (batch, features) -> (batch, features)."""

    @abc.abstractmethod
    def rmv(self, u: Tensor) -> Tensor:
        """J^T u, row by row."""

    def dense(self) -> Tensor:
        """(batch, features, features), by one product per feature. For small problems and tests."""
        batch, features = self.shape
        rows = []
        for j in range(features):
            unit = torch.zeros(batch, features, dtype=self.dtype, device=self.device)
            unit[:, j] = 1
            rows.append(self.rmv(unit))  # e_j^T J, the j-th row of J
        return torch.stack(rows, dim=1) if rows else torch.zeros(batch, 0, 0, dtype=self.dtype, device=self.device)

    @property
    def shape(self) -> torch.Size:
        """(batch, features)."""
        return self.point.shape

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the products."""
        return self.point.dtype

    @property
    def device(self) -> torch.device:
        """Device of the products."""
        return self.point.device


class ProductJacobian(AbstractJacobian):
    """A Jacobian given by its products.

    Args:
        point: (batch, features).
        mv, rmv: The products.
        value: (batch, features) f at the point, if it is known.
        setup: As in `AbstractJacobian`.
    """

    def __init__(self, point: Tensor, mv: Product, rmv: Product, *, value: Tensor | None = None, setup: int = 0) -> None:
        super().__init__(point)
        self._mv, self._rmv, self._value, self.setup = mv, rmv, value, setup

    @property
    def value(self) -> Tensor | None:
        return self._value

    def mv(self, u: Tensor) -> Tensor:
        return self._mv(u)

    def rmv(self, u: Tensor) -> Tensor:
        return self._rmv(u)


class Jacobian(AbstractJacobian):
    """The Jacobian of any differentiable row-wise function, by automatic differentiation.

    `rmv` is a vector-Jacobian product on a graph of f that is recorded once: one backward pass
    through f each. `mv` differentiates the linear function u -> J^T u with respect to u, so that a
    product costs one backward pass too and f is not evaluated again (forward mode would evaluate f
    at each product). At a kink (relu at 0) both use the element of the generalized Jacobian that
    autograd picks. Code made by `torch.compile` is recorded as plain Python: its own graph may
    serve for one product only, and has no second derivative, which `mv` needs.

    Args:
        f: Row-wise function of (batch, features).
        point: (batch, features).

    Examples:
        >>> import torch, wellposed as wp
        >>> z = torch.tensor([[1.0, 2.0]])
        >>> jacobian = wp.linalg.Jacobian(lambda z: z**2, z)
        >>> jacobian.mv(torch.ones(1, 2)).tolist()
        [[2.0, 4.0]]
    """

    setup = 2

    def __init__(self, f: Callable[[Tensor], Tensor], point: Tensor) -> None:
        super().__init__(point.detach())
        self._products: Any = None  # u -> J^T u in inference mode, where nothing is recorded, but transforms are
        self._transposed: Any = None  # u -> J u there, else a graph of it
        if torch.is_inference_mode_enabled():
            self._z, self._f = self.point.clone(), f
            pair: Any = uncompiled(lambda: torch.func.vjp(f, self._z))
            self._fz, self._products = pair
            return
        with torch.enable_grad():
            self._z = self.point.clone().requires_grad_()
            self._fz = uncompiled(lambda: f(self._z))

    @property
    def value(self) -> Tensor:
        """(batch, features) f at the point, which the recording has computed."""
        return self._fz.detach()

    def rmv(self, u: Tensor) -> Tensor:
        if self._products is not None:
            found: Tensor = self._products(u)[0]
            return found
        if not self._fz.requires_grad:  # f does not depend on z
            return torch.zeros_like(u)
        product = pulled_back(self._fz, self._z, u)
        return torch.zeros_like(u) if product is None else product

    def mv(self, u: Tensor) -> Tensor:
        if self._products is not None:
            return self._mv_by_transforms(u)
        if not self._fz.requires_grad:
            return torch.zeros_like(u)
        if self._transposed is None:
            # w -> J^T w is linear, so its value at any w gives a graph whose derivative in w is J.
            with torch.enable_grad():
                w = torch.zeros_like(self._fz).requires_grad_()
                (image,) = torch.autograd.grad(self._fz, self._z, w, create_graph=True, allow_unused=True)
            if image is None or not image.requires_grad:
                return torch.zeros_like(u)
            self._transposed = (w, image)
        w, image = self._transposed
        (product,) = torch.autograd.grad(image, w, u, retain_graph=True, allow_unused=True)
        return torch.zeros_like(u) if product is None else product

    def _mv_by_transforms(self, u: Tensor) -> Tensor:
        if self._transposed is None:

            def transposed(w: Tensor) -> Tensor:
                product: Tensor = torch.func.vjp(self._f, self._z)[1](w)[0]
                return product

            self._transposed = uncompiled(lambda: torch.func.vjp(transposed, torch.zeros_like(self._fz))[1])
        found: Tensor = self._transposed(u)[0]
        return found
