"""What the theory networks share: one equilibrium of a dense ReLU map, and a linear read-out."""

from __future__ import annotations

import abc
import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import Policy, check_positive_integer, check_rows
from wellposed._torch import eager, transforms_active
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.implicit import AbstractGradient
from wellposed.implicit._lost import without_lost
from wellposed.linalg.directed import ROUNDING, up, vector_norm_upper
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.cell import AbstractCell
from wellposed.nn.families.theory import Theory
from wellposed.nn.layer import EquilibriumLayer, Linearised
from wellposed.nn.maps.affine import DenseMap, OperatorMap
from wellposed.nn.pretrained import Pretrained
from wellposed.nn.tangent import TangentFeatures
from wellposed.solve import AbstractSolver, Solution
from wellposed.status import Status


class AbstractNetwork(Pretrained, abc.ABC):
    r"""z = relu(R z + c(x)), y = v . z + ...: what the networks of the papers have in common.

    R is `recurrent()`, c(x) is `injection(X)`, v is `readout_weight()`. Samples are rows.

    Args:
        in_features: d.
        width: m.
        solver, gradient, on_failure, rtol, max_steps: As in `EquilibriumLayer`.

    Attributes:
        layer: The `EquilibriumLayer` that solves; its input is c. `layer.last_solution` and
            `layer.last_adjoint` describe the last solves.
    """

    #: What happens where nothing proves that there is exactly one equilibrium.
    on_ill_posed: str = "raise"

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        on_failure: Policy = "warn",
        rtol: float | None = None,
        max_steps: int = 200,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            name = next(iter(unknown))
            known = [word for kind in type(self).__mro__ for word in inspect.signature(kind).parameters]
            raise InvalidType(f"{type(self).__name__} has no option {name!r}.{did_you_mean(name, known)}")
        check_positive_integer(type(self).__name__, "in_features", in_features)
        check_positive_integer(type(self).__name__, "width", width)
        self.in_features, self.width = in_features, width
        self.activation: AbstractActivation = ReLU()  # a family may set another one
        self.layer = EquilibriumLayer(_Cell(self), solver, gradient, on_failure=on_failure, rtol=rtol, max_steps=max_steps)

    @abc.abstractmethod
    def recurrent(self) -> Tensor:
        """(m, m) R, the matrix that multiplies z, with a graph."""

    @abc.abstractmethod
    def injection(self, X: Tensor) -> Tensor:
        """(n, d) -> (n, m): c(x), with a graph."""

    @abc.abstractmethod
    def readout_weight(self) -> Tensor:
        """(m,) v = dy/dz, with a graph."""

    @abc.abstractmethod
    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        """The closed form of the kernel, given injections, equilibria and masked adjoints, all in
        rows."""

    @property
    def theory(self) -> Theory:
        """What the theorems may use: declared by each family; by default nothing."""
        return Theory()

    def recurrent_error(self) -> float:
        """Upper bound of the rounding of `recurrent()`, in float64 and in the spectral norm.

        0 for a parameter itself, and enough for a parameter times a few numbers; for a method
        `recurrent` from outside of the library, for sums and one product of parameters. A family
        that computes more than that overrides it.
        """
        R = self.recurrent().detach()
        if any(R.data_ptr() == parameter.data_ptr() for parameter in self.parameters()):
            return 0.0
        size = vector_norm_upper(R)
        if is_ours(type(self).recurrent):
            return up(5 * ROUNDING * size)
        total = sum(vector_norm_upper(tensor) for tensor in (*self.parameters(), *self.buffers()))
        return up(2 * (len(R) + 8) * ROUNDING * (size + total * total + 2 * total + math.sqrt(len(R))))

    def input_matrix(self) -> Tensor:
        """(m, d) the U of `Theory`."""
        U: Tensor = getattr(self, self.theory.injected)
        return U

    def bind(self, C: Tensor) -> OperatorMap:
        """The map z -> relu(R z + c) for injections (n, m), with a graph to them and to the
        parameters."""
        R = self.recurrent()
        s = self.activation
        return DenseMap(R.float(), C.float(), s) if C.dtype in LOW_PRECISION else DenseMap(R, C, s)

    def check_well_posed(self) -> None:
        """Applies `on_ill_posed` if nothing proves that there is exactly one equilibrium."""

    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        """(n, m), (n, m) -> (n,) predictions from equilibria and injections."""
        return Z @ self.readout_weight()

    def forward(self, X: Tensor) -> Tensor:
        """(n, d) -> (n,) predictions."""
        self._check(X)
        with torch.autocast(X.device.type, enabled=False):
            C = self.injection(X)
            return self.readout(self._equilibrium(C, None), C)

    def equilibrium(self, X: Tensor, z0: Tensor | None = None) -> Tensor:
        """(n, d) -> (n, m) the equilibrium features, differentiable.

        Args:
            X: (n, d) inputs.
            z0: (n, m) the start; zeros if not given.
        """
        self._check(X)
        with torch.autocast(X.device.type, enabled=False):
            return self._equilibrium(self.injection(X), z0)

    def solve(self, X: Tensor, z0: Tensor | None = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph, with all that is known about it; see
        `EquilibriumLayer.solve`."""
        self._check(X)
        self._apply_policy()
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            return self.layer.solve(self.injection(X), z0, record=record)

    def linearise(
        self, X: Tensor, *, z0: Tensor | None = None, p0: Tensor | None = None, injection: Tensor | None = None
    ) -> Linearised:
        r"""Equilibria z_i and masked adjoints p_i = D_i (I - R^T D_i)^(-1) v, without a graph.

        Args:
            X: (n, d) inputs.
            z0, p0: (n, m) where the two solves begin; zeros if not given.
            injection: (n, m) `self.injection(X)` at the present parameters, if available.
        """
        self._check(X)
        self._apply_policy()
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C = self.injection(X) if injection is None else injection.detach()
            return self.layer.linearise(C, self.readout_weight(), z0=z0, u0=p0)

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        """What the tangent kernel is made of: see `TangentFeatures`. Parameters that do not require
        a gradient have no part."""
        point = self.linearise(X)
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C = self.injection(X).to(point.value.dtype)  # low precision is lifted, as in the solve
            tangent = self._tangent(X.to(C.dtype), C, point.value, point.adjoint)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return TangentFeatures(tangent.features, {name: part for name, part in tangent.terms.items() if name in trained})

    def gradients(self, X: Tensor, point: Linearised, r: Tensor, *, injection: Tensor | None = None) -> dict[str, Tensor]:
        r"""The gradient of sum_i r_i y_i by the closed form: with r = y_hat - y, that of the loss
        |y_hat - y|^2/2.

        Costs no solve: P diag(r) is the adjoint for the cotangent r_i v of every sample.

        Args:
            X: (n, d) the inputs of `point`.
            point: From `linearise(X)`, at the present parameters.
            r: (n,).
            injection: (n, m) `self.injection(X)` at the present parameters and with its graph, if
                available.
        """
        self._check(X)
        if not isinstance(r, Tensor) or r.shape != point.value.shape[:1] or r.shape != X.shape[:1]:
            seen = tuple(r.shape) if isinstance(r, Tensor) else type(r).__name__
            raise InvalidArgument(
                f"gradients needs one r for each sample, of shape ({X.shape[0]},), and the linearisation of the same X; got r "
                f"of shape {seen} and a linearisation of {point.value.shape[0]} samples."
            )
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        if not trained:
            return {}
        with torch.enable_grad(), torch.autocast(X.device.type, enabled=False):
            R, C = self.recurrent(), self.injection(X) if injection is None else injection
            prediction = self.readout(point.value.to(C.dtype), C)
            r = r.detach()  # a residual usually comes with the graph of its predictions
            adjoint = point.adjoint * r.unsqueeze(1)
            outputs = [(R, adjoint.t() @ point.value), (C, adjoint), (prediction, r)]
            followed = [(output, cotangent.to(output.dtype)) for output, cotangent in outputs if output.requires_grad]
            grads = torch.autograd.grad(
                [output for output, _ in followed],
                list(trained.values()),
                [cotangent for _, cotangent in followed],
                allow_unused=True,
            )
        return {
            name: torch.zeros_like(parameter) if grad is None else grad
            for (name, parameter), grad in zip(trained.items(), grads, strict=True)
        }

    def least_preactivation(self, X: Tensor) -> Tensor:
        """(n,) the least |pre-activation| over the units of each sample: where it is 0 there is no
        derivative."""
        point = self.linearise(X)
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C, R = self.injection(X).to(point.value.dtype), self.recurrent().to(point.value.dtype)
            preactivation = torch.addmm(C, point.value, R.t())
            return preactivation.abs().amin(dim=1)

    def _equilibrium(self, C: Tensor, z0: Tensor | None) -> Tensor:
        self._apply_policy()
        return self._without_lost(self.layer(C, z0))

    @eager
    def _without_lost(self, z: Tensor) -> Tensor:
        """NaN where there is no equilibrium because a number was not finite: the start, 0, would
        pass for a prediction."""
        solution = self.layer.last_solution
        if solution is None:
            return z
        lost = solution.status.codes == Status.NOT_FINITE
        return without_lost(z, lost) if bool(lost.any()) else z

    @eager
    def _apply_policy(self) -> None:
        if not hasattr(self.layer, "linearise"):
            name = type(self).__name__
            raise InvalidType(f"{name}.layer must be an EquilibriumLayer, as {name} made it; got {type(self.layer).__name__}.")
        # the check needs concrete values, which torch.func transforms hide
        if self.on_ill_posed != "ignore" and not transforms_active():
            self.check_well_posed()

    def _check(self, X: Any) -> None:
        check_rows(type(self).__name__, X, self.in_features, self.readout_weight().dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}"


class _Cell(AbstractCell):
    """The map of a network for given injections. It holds no parameters: those have the names of
    the paper, on the network."""

    def __init__(self, network: AbstractNetwork) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, or the network would be a submodule of itself

    def bind(self, x: Tensor) -> OperatorMap:
        return self._network[0].bind(x)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        network = self._network[0]
        return network.activation(torch.addmm(x, z, network.recurrent().t()))


def is_ours(function: Any) -> bool:
    """Whether a function or method was written in the library."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == "wellposed"


def signs(
    size: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(size,) of +1 and -1 with equal probability."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.randint(0, 2, (size,), generator=generator, device=device).to(dtype) * 2 - 1
