"""What the theory networks share: one equilibrium of a dense ReLU map, and a linear read-out."""

from __future__ import annotations

import abc
import inspect
import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import Policy, check_positive_integer
from wellposed._torch import eager, transforms_active
from wellposed._tree import LOW_PRECISION
from wellposed.errors import IllPosed, IllPosedWarning, InvalidArgument, InvalidType, did_you_mean
from wellposed.implicit import AbstractGradient
from wellposed.nn.activations import ReLU
from wellposed.nn.cell import AbstractCell
from wellposed.nn.families._norm_bound import NormBound
from wellposed.nn.layer import EquilibriumLayer, Linearised
from wellposed.nn.maps.affine import DenseMap, OperatorMap
from wellposed.nn.tangent import GramProduct, TangentFeatures
from wellposed.solve import AbstractSolver, Solution
from wellposed.solve.solution import user_level
from wellposed.status import Status

__all__ = ["AbstractContraction", "AbstractNetwork"]

ILL_POSED_POLICIES = ("raise", "warn", "ignore")


class AbstractNetwork(nn.Module, abc.ABC):
    r"""z = relu(R z + c(x)), y = v . z + ...: what the networks of the papers have in common.

    R is `recurrent()`, c(x) is `injection(X)`, v is `readout_weight()`. Samples are rows.

    Args:
        in_features: d.
        width: m.
        solver, gradient, on_failure, rtol, max_steps: As in `EquilibriumLayer`.

    Attributes:
        layer: The `EquilibriumLayer` that solves; its input is c. `layer.last_solution` and `layer.last_adjoint` tell how
            the last solves went.
    """

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
        """The closed form of the kernel, given injections, equilibria and masked adjoints, all in rows."""

    def bind(self, C: Tensor) -> OperatorMap:
        """The map z -> relu(R z + c) for injections (n, m), with a graph to them and to the parameters."""
        R = self.recurrent()
        return DenseMap(R.float(), C.float(), ReLU()) if C.dtype in LOW_PRECISION else DenseMap(R, C, ReLU())

    def check_well_posed(self) -> None:
        """Applies the network's policy if nothing proves that it has exactly one equilibrium."""

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
        """The equilibrium without a graph, with all that is known about it; see `EquilibriumLayer.solve`."""
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
            injection: (n, m) `self.injection(X)` at the present parameters, if it is at hand.
        """
        self._check(X)
        self._apply_policy()
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C = self.injection(X) if injection is None else injection.detach()
            return self.layer.linearise(C, self.readout_weight(), z0=z0, u0=p0)

    def tangent_features(self, X: Tensor) -> TangentFeatures:
        """What the tangent kernel is made of: see `TangentFeatures`. Parameters that do not require a gradient have no part."""
        at = self.linearise(X)
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C = self.injection(X).to(at.value.dtype)  # low precision is lifted, as in the solve
            tangent = self._tangent(X.to(C.dtype), C, at.value, at.adjoint)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return TangentFeatures(tangent.features, {name: part for name, part in tangent.terms.items() if name in trained})

    def gradients(self, X: Tensor, at: Linearised, r: Tensor, *, injection: Tensor | None = None) -> dict[str, Tensor]:
        r"""The gradient of sum_i r_i y_i by the closed form: with r = y_hat - y, that of the loss |y_hat - y|^2/2.

        Costs no solve: P diag(r) is the adjoint for the cotangent r_i v of every sample.

        Args:
            X: (n, d) the inputs of `at`.
            at: From `linearise(X)`, at the present parameters.
            r: (n,).
            injection: (n, m) `self.injection(X)` at the present parameters and with its graph, if it is at hand.
        """
        self._check(X)
        if not isinstance(r, Tensor) or r.shape != at.value.shape[:1] or r.shape != X.shape[:1]:
            seen = tuple(r.shape) if isinstance(r, Tensor) else type(r).__name__
            raise InvalidArgument(
                f"gradients needs one r for each sample, of shape ({X.shape[0]},), and the linearisation of the same X; got r "
                f"of shape {seen} and a linearisation of {at.value.shape[0]} samples."
            )
        trained = {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}
        if not trained:
            return {}
        with torch.enable_grad(), torch.autocast(X.device.type, enabled=False):
            R, C = self.recurrent(), self.injection(X) if injection is None else injection
            prediction = self.readout(at.value.to(C.dtype), C)
            r = r.detach()  # a residual usually comes with the graph of its predictions
            adjoint = at.adjoint * r.unsqueeze(1)
            outputs = [(R, adjoint.t() @ at.value), (C, adjoint), (prediction, r)]
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
        """(n,) the least |pre-activation| over the units of each sample: where it is 0 there is no derivative."""
        at = self.linearise(X)
        with torch.no_grad(), torch.autocast(X.device.type, enabled=False):
            C, R = self.injection(X).to(at.value.dtype), self.recurrent().to(at.value.dtype)
            preactivation = torch.addmm(C, at.value, R.t())
            return preactivation.abs().amin(dim=1)

    def _equilibrium(self, C: Tensor, z0: Tensor | None) -> Tensor:
        self._apply_policy()
        return self._without_lost(self.layer(C, z0))

    @eager
    def _without_lost(self, z: Tensor) -> Tensor:
        """NaN where there is no equilibrium because a number was not finite: the start, 0, would pass for a prediction."""
        solution = self.layer.last_solution
        if solution is None:
            return z
        lost = solution.status == Status.NOT_FINITE
        return torch.where(lost.unsqueeze(1), torch.nan, z) if bool(lost.any()) else z

    @eager
    def _apply_policy(self) -> None:
        if not transforms_active():  # torch.func transforms hide values, so nothing can be decided by them
            self.check_well_posed()

    def _check(self, X: Any) -> None:
        name = type(self).__name__
        if not isinstance(X, Tensor):
            raise InvalidType(f"{name} expects a tensor X of shape (n, {self.in_features}); got {type(X).__name__}.")
        if X.dim() != 2 or X.shape[1] != self.in_features:
            raise InvalidArgument(f"{name} expects X of shape (n, {self.in_features}); got {tuple(X.shape)}.")
        dtype = self.readout_weight().dtype
        if X.dtype != dtype:
            raise InvalidType(f"{name} has {dtype} parameters and got X of {X.dtype}; convert one, e.g. X.to({dtype}).")

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}"


class AbstractContraction(AbstractNetwork):
    """A network that is well-posed because |R| < 1, and knows a rigorous upper bound of |R|.

    Args:
        in_features, width: d, m.
        on_ill_posed: What happens when the bound reaches 1, where nothing proves any more that an equilibrium exists: "raise"
            (`IllPosed`), "warn" (`IllPosedWarning`) or "ignore".
        options: As in `AbstractNetwork`.
    """

    def __init__(self, in_features: int, width: int, *, on_ill_posed: str = "raise", **options: Any) -> None:
        super().__init__(in_features, width, **options)
        if on_ill_posed not in ILL_POSED_POLICIES:
            hint = did_you_mean(str(on_ill_posed), ILL_POSED_POLICIES)
            raise InvalidArgument(f"on_ill_posed must be 'raise', 'warn' or 'ignore'; got {on_ill_posed!r}.{hint}")
        self.on_ill_posed = on_ill_posed
        self._norm_bound = NormBound()

    @abc.abstractmethod
    def _remedy(self) -> str:
        """What to change when the network is no contraction; completes a message."""

    def contraction_upper(self) -> float:
        """A rigorous upper bound of the contraction factor |R|, sharp to about 1e-11; one singular value decomposition."""
        with torch.no_grad():
            return self._norm_bound(self.recurrent(), below=0.0)

    def check_well_posed(self) -> None:
        if self.on_ill_posed == "ignore":
            return
        with torch.no_grad():
            R = self.recurrent()
            finite = bool(torch.isfinite(R).all())
            bound = self._norm_bound(R, below=1.0) if finite else math.inf
        if bound < 1.0:
            return
        name = type(self).__name__
        if finite:
            text = (
                f"{name}: the contraction factor is only known to be at most {bound:.6g}, not below 1, so nothing proves that "
                f"an equilibrium exists and is unique. {self._remedy()}"
                + (", or pass on_ill_posed='warn' to go on without proof." if self.on_ill_posed == "raise" else ".")
            )
        else:
            text = (
                f"{name}: the recurrent matrix has NaN or infinite entries, so there is no equilibrium. The training has "
                "diverged before: go back to finite parameters and take a smaller step."
            )
        if self.on_ill_posed == "raise":
            raise IllPosed(text)
        warnings.warn(text, IllPosedWarning, stacklevel=user_level())


class _Cell(AbstractCell):
    """The map of a network for given injections. It holds no parameters: those have the names of the paper, on the network."""

    def __init__(self, network: AbstractNetwork) -> None:
        super().__init__()
        self._network = (network,)  # in a tuple, or the network would be a submodule of itself

    def bind(self, x: Tensor) -> OperatorMap:
        return self._network[0].bind(x)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.relu(torch.addmm(x, z, self._network[0].recurrent().t()))


def outer(left: str, right: str, coefficient: float = 1.0) -> tuple[GramProduct, ...]:
    """The kernel part of a matrix whose gradient is l r^T: (L L^T) o (R R^T)."""
    return (GramProduct(((left, left), (right, right)), coefficient),)


def gram(feature: str) -> tuple[GramProduct, ...]:
    """The kernel part of a vector whose gradient is the feature itself."""
    return (GramProduct(((feature, feature),)),)
