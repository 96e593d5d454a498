"""The loss |y_hat - y|^2/2 of a model on a data set, with its gradient."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsFloat

import torch
from torch import Tensor, nn

from wellposed._tree import leaves
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.implicit import ImplicitGradient
from wellposed.kernel._method import trained_parameters
from wellposed.nn import AbstractNetwork, EquilibriumLayer
from wellposed.nn.families import is_theory_network
from wellposed.nn.families.theory import formulas_hold
from wellposed.nn.layer import Linearised
from wellposed.solve import Solution
from wellposed.status import Status


class NextStart:
    r"""Where the next solve starts: at the last solution, or on the line through the last two.

    Equal steps of descent move an equilibrium along a smooth curve except where a ReLU switches on
    or off, so z_k + (z_k - z_(k-1)) is a better guess than z_k. The tolerance of the solve does not
    depend on its start. For GaussianDEQ with n = m = 1000, d = 784 in float32 to 1e-6 a sample
    needs, from zero / the last point / the line, 12.2 / 6.1 / 3.8 evaluations a step for its
    equilibrium and 12.3 / 8.2 / 6.0 for its adjoint. (The present mask on the start of the adjoint
    saves another 3 %, a parabola through three points nothing; neither is used.)

    Args:
        extrapolate: Whether to follow the line; wrong for steps of different lengths.
    """

    def __init__(self, *, extrapolate: bool) -> None:
        self._extrapolate = extrapolate
        self._last: Tensor | None = None
        self._before: Tensor | None = None

    def start(self) -> Tensor | None:
        """(n, m) the start; None for zeros."""
        if self._last is None or self._before is None:
            return self._last
        return torch.lerp(self._before, self._last, 2.0)

    def keep(self, value: Tensor, solution: Solution) -> None:
        """Keeps (n, m) a solution; after one that failed the next solve starts at zero."""
        good = bool(solution.converged.all())
        self._before = self._last if self._extrapolate and good else None
        self._last = value if good else None


@dataclass(frozen=True)
class Evaluation:
    """The loss with its gradients.

    Attributes:
        loss: |r|^2/2, summed in float64; NaN if an equilibrium or adjoint is not finite.
        r: y_hat - y, of the shape of y.
        gradients: By parameter; empty where the loss is not finite.
        point: Equilibria and masked adjoints, for the closed form.
        equilibrium_steps, adjoint_steps: Evaluations a sample on average; None without a solve.
    """

    loss: float
    r: Tensor
    gradients: dict[str, Tensor]
    point: Linearised | None
    equilibrium_steps: float | None
    adjoint_steps: float | None


class AbstractObjective(abc.ABC):
    """theta -> |y_hat - y|^2/2 at the present parameters of the model."""

    def __init__(self, model: nn.Module, X: Any, y: Tensor) -> None:
        self.model, self.X, self.y = model, X, y

    @abc.abstractmethod
    def evaluate(self) -> Evaluation:
        """Loss and gradients at the present parameters; applies the policies of the model."""

    def _residual(self, prediction: Tensor) -> tuple[Tensor, float]:
        """y_hat - y and the loss."""
        y = self.y
        if prediction.shape != y.shape or prediction.dtype != y.dtype or prediction.device != y.device:
            if prediction.numel() == y.numel():
                advice = f"Reshape or convert it, e.g. y.reshape({tuple(prediction.shape)}).to({prediction.dtype})."
            else:
                advice = f"It has {y.numel()} numbers for {prediction.numel()} predictions: give one target for each."
            raise InvalidArgument(
                f"y must be like the predictions of the model, {tuple(prediction.shape)} of {prediction.dtype} on "
                f"{prediction.device}; got {tuple(y.shape)} of {y.dtype} on {y.device}. {advice}"
            )
        r = prediction.detach() - y
        return r, float(torch.linalg.vector_norm(r, dtype=torch.float64)) ** 2 / 2


class ClosedForm(AbstractObjective):
    """A theory network: one equilibrium and one masked adjoint per sample, and products."""

    model: AbstractNetwork

    def __init__(self, model: AbstractNetwork, X: Tensor, y: Tensor, *, warm_start: bool, extrapolate: bool) -> None:
        super().__init__(model, X, y)
        self._warm, self._checked = warm_start, False
        self._z, self._p = NextStart(extrapolate=extrapolate), NextStart(extrapolate=extrapolate)

    def evaluate(self) -> Evaluation:
        C = None
        if self._checked:  # at first `linearise` checks X before it is multiplied with
            with torch.enable_grad():
                C = self.model.injection(self.X)
        point = self.model.linearise(self.X, z0=self._z.start(), p0=self._p.start(), injection=C)
        self._checked = True
        if self._warm:
            self._z.keep(point.value, point.solution)
            self._p.keep(point.adjoint, point.adjoint_solution)
        with torch.no_grad():
            r, loss = self._residual(self.model.readout(point.value, point.f.inputs()[1]))
        if _lost([point.solution, point.adjoint_solution]):
            loss = math.nan
        gradients = self.model.gradients(self.X, point, r, injection=C) if math.isfinite(loss) else {}
        return Evaluation(loss, r, gradients, point, _mean_steps([point.solution]), _mean_steps([point.adjoint_solution]))


class Autograd(AbstractObjective):
    """Any other module, by autograd. Its equilibrium layers start at zero."""

    def evaluate(self) -> Evaluation:
        layers = [module for module in self.model.modules() if isinstance(module, EquilibriumLayer)]
        old = [(layer.last_solution, layer.last_adjoint) for layer in layers]
        with torch.enable_grad():
            prediction = self.model(self.X)
            if not isinstance(prediction, Tensor):
                raise InvalidType(f"The model must return a tensor of predictions; got {type(prediction).__name__}.")
            r, loss = self._residual(prediction)
            # a layer that was not called still has an old solution, which does not count
            if _lost([layer.last_solution for layer, (z, _) in zip(layers, old, strict=True) if layer.last_solution is not z]):
                loss = math.nan
            parameters = trained_parameters(self.model)
            gradients: dict[str, Tensor] = {}
            if math.isfinite(loss):
                if not prediction.requires_grad:
                    raise InvalidArgument("The predictions of the model depend on none of its parameters by autograd.")
                grads = torch.autograd.grad(prediction, list(parameters.values()), r, allow_unused=True)
                gradients = {
                    name: torch.zeros_like(parameter) if grad is None else grad
                    for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
                }
        if _lost([layer.last_adjoint for layer, (_, p) in zip(layers, old, strict=True) if layer.last_adjoint is not p]):
            loss, gradients = math.nan, {}
        solutions = [layer.last_solution for layer in layers], [layer.last_adjoint for layer in layers]
        return Evaluation(loss, r, gradients, None, *(_mean_steps(found) for found in solutions))


def objective_of(model: Any, X: Any, y: Any, *, warm_start: bool, extrapolate: bool) -> AbstractObjective:
    """The closed form for a theory network with its exact gradient, autograd for other models."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module such as wp.GaussianDEQ(d, m); got {type(model).__name__}.")
    if not isinstance(y, Tensor):
        raise InvalidType(f"y must be a tensor of targets; got {type(y).__name__}.")
    if not trained_parameters(model):
        raise InvalidArgument(f"{type(model).__name__} has no parameter with requires_grad=True, so there is nothing to train.")
    _check_data(X, y)
    if is_theory_network(model):
        exact = isinstance(getattr(model.layer, "gradient", None), ImplicitGradient)
        if exact and formulas_hold(model):
            if y.dtype not in (torch.float32, torch.float64):
                raise InvalidType(f"y must be float32 or float64, as the parameters; got {y.dtype}.")
            return ClosedForm(model, X, y, warm_start=warm_start, extrapolate=extrapolate)
    return Autograd(model, X, y)


def _check_data(X: Any, y: Tensor) -> None:
    """Raises unless there are samples and all their numbers are finite."""
    inputs = [leaf for leaf in leaves(X) if isinstance(leaf, Tensor)]
    if y.numel() == 0 or any(tensor.dim() > 0 and tensor.shape[0] == 0 for tensor in inputs):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        raise InvalidArgument(f"X or y has no samples (X: {shapes}; y: {tuple(y.shape)}); training needs at least one.")
    for name, tensors in (("X", inputs), ("y", [y])):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise InvalidArgument(f"{name} has NaN or infinite entries; clean the data first.")


def _lost(solutions: list[Solution | None]) -> bool:
    """Whether a sample ended in NaN or infinity; its value is then that of its start."""
    return any(bool((found.status == Status.NOT_FINITE).any()) for found in solutions if found is not None)


def _mean_steps(solutions: list[Solution | None]) -> float | None:
    """Evaluations a sample, on average, summed over the layers."""
    steps = [float(solution.num_steps.double().mean()) for solution in solutions if solution is not None]
    return sum(steps) if steps else None


def speeds(name: str, given: Any, model: nn.Module, *, default: float) -> dict[str, float]:
    """The step size or rate of every trained parameter; at least one is positive.

    Args:
        name: Of the argument, for messages.
        given: A number at least 0, or a mapping from names to numbers.
        model: The model.
        default: For parameters that the mapping does not name.
    """
    known = trained_parameters(model)
    if isinstance(given, Mapping):
        found = _by_name(name, given, model, known, default)
    else:
        found = dict.fromkeys(known, _checked(name, given))
    if not any(found.values()):
        raise InvalidArgument(
            f"{name}={given!r} holds every parameter fixed, so nothing would move; give at least one of {', '.join(known)} a "
            "positive number."
        )
    return found


def _by_name(
    name: str, given: Mapping[str, Any], model: nn.Module, known: Mapping[str, nn.Parameter], default: float
) -> dict[str, float]:
    for key in given:
        if key not in known:
            frozen = key in dict(model.named_parameters())
            reason = "is held fixed (requires_grad=False) in" if frozen else "is not a parameter of"
            hint = "" if frozen else did_you_mean(str(key), known)
            raise InvalidArgument(
                f"{name} names {key!r}, which {reason} {type(model).__name__}; trained are {', '.join(known)}.{hint}"
            )
    return {key: _checked(f"{name}[{key!r}]", given[key]) if key in given else default for key in known}


def _checked(name: str, value: Any) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise InvalidType(f"{name} must be a number at least 0, or a number for each parameter by name; got {value!r}.")
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise InvalidArgument(f"{name} must be a finite number at least 0; got {value!r}.")
    return number
