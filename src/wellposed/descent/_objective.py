"""The loss |y_hat - y|^2/2 of a model on a data set, with its gradient."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves
from wellposed.descent._warm_start import WarmStart
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit import ImplicitGradient
from wellposed.nn import AbstractNetwork, EquilibriumLayer, Linearised
from wellposed.nn.families import is_theory_network
from wellposed.solve import Solution
from wellposed.status import Status

__all__ = ["AbstractObjective", "Evaluation", "objective_of", "trained_parameters"]


@dataclass(frozen=True)
class Evaluation:
    """The loss and all that was found on the way.

    Attributes:
        loss: |r|^2/2, summed in float64; NaN as well where an equilibrium or adjoint was lost to numbers that are not finite.
        r: y_hat - y, of the shape of y.
        gradients: By parameter; empty where the loss is not finite.
        at: Equilibria and masked adjoints, for the closed form.
        equilibrium_steps, adjoint_steps: Evaluations a sample on average; None where nothing was solved.
    """

    loss: float
    r: Tensor
    gradients: dict[str, Tensor]
    at: Linearised | None
    equilibrium_steps: float | None
    adjoint_steps: float | None


class AbstractObjective(abc.ABC):
    """theta -> |y_hat - y|^2/2 at the present parameters of the model."""

    def __init__(self, model: nn.Module, X: Any, y: Tensor) -> None:
        self.model, self.X, self.y = model, X, y

    @abc.abstractmethod
    def evaluate(self) -> Evaluation:
        """Loss and gradients at the present parameters; obeys the policies of the model for solves that fail."""

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
    """A theory network: one equilibrium and one masked adjoint per sample, and products.

    Args:
        model, X, y: The problem.
        warm_start: Whether a solve begins at what the last one found.
        extrapolate: Whether it begins further along the line of the last two.
    """

    model: AbstractNetwork

    def __init__(self, model: AbstractNetwork, X: Tensor, y: Tensor, *, warm_start: bool, extrapolate: bool) -> None:
        super().__init__(model, X, y)
        self._warm, self._checked = warm_start, False
        self._z, self._p = WarmStart(extrapolate=extrapolate), WarmStart(extrapolate=extrapolate)

    def evaluate(self) -> Evaluation:
        C = None
        if self._checked:  # the first time the model looks at X before anybody multiplies with it
            with torch.enable_grad():
                C = self.model.injection(self.X)
        at = self.model.linearise(self.X, z0=self._z.start(), p0=self._p.start(), injection=C)
        self._checked = True
        if self._warm:
            self._z.keep(at.value, at.solution)
            self._p.keep(at.adjoint, at.adjoint_solution)
        with torch.no_grad():
            r, loss = self._residual(self.model.readout(at.value, at.f.inputs()[1]))
        if _lost([at.solution, at.adjoint_solution]):
            loss = math.nan
        gradients = self.model.gradients(self.X, at, r, injection=C) if math.isfinite(loss) else {}
        return Evaluation(loss, r, gradients, at, _mean_steps([at.solution]), _mean_steps([at.adjoint_solution]))


class Autograd(AbstractObjective):
    """Any other module: forward, and backward by autograd. Its equilibrium layers start cold."""

    def evaluate(self) -> Evaluation:
        layers = [module for module in self.model.modules() if isinstance(module, EquilibriumLayer)]
        old = [(layer.last_solution, layer.last_adjoint) for layer in layers]
        with torch.enable_grad():
            prediction = self.model(self.X)
            if not isinstance(prediction, Tensor):
                raise InvalidType(f"The model must return a tensor of predictions; got {type(prediction).__name__}.")
            r, loss = self._residual(prediction)
            # a layer that had no part this time still shows its last solve, which is no reason to stop
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
    """The objective that fits: by the closed form for a theory network with its exact gradient, else by autograd."""
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module such as wp.GaussianDEQ(d, m); got {type(model).__name__}.")
    if not isinstance(y, Tensor):
        raise InvalidType(f"y must be a tensor of targets; got {type(y).__name__}.")
    if not trained_parameters(model):
        raise InvalidArgument(f"{type(model).__name__} has no parameter with requires_grad=True, so there is nothing to train.")
    _check_data(X, y)
    if is_theory_network(model) and isinstance(model.layer.gradient, ImplicitGradient):
        if y.dtype not in (torch.float32, torch.float64):
            raise InvalidType(f"y must be float32 or float64, as the parameters; got {y.dtype}.")
        return ClosedForm(model, X, y, warm_start=warm_start, extrapolate=extrapolate)
    return Autograd(model, X, y)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _check_data(X: Any, y: Tensor) -> None:
    """There are samples, and all their numbers are finite: a sample that is not would be lost without an error."""
    inputs = [leaf for leaf in leaves(X) if isinstance(leaf, Tensor)]
    if y.numel() == 0 or any(tensor.dim() > 0 and tensor.shape[0] == 0 for tensor in inputs):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in inputs)
        raise InvalidArgument(f"X or y has no samples (X: {shapes}; y: {tuple(y.shape)}); training needs at least one.")
    for name, tensors in (("X", inputs), ("y", [y])):
        if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
            raise InvalidArgument(f"{name} has NaN or infinite entries; clean the data first.")


def _lost(solutions: list[Solution | None]) -> bool:
    """Whether a sample ended in NaN or infinity: its value is then that of its start, which means nothing."""
    return any(bool((found.status == Status.NOT_FINITE).any()) for found in solutions if found is not None)


def _mean_steps(solutions: list[Solution | None]) -> float | None:
    """Evaluations a sample, on average, summed over the layers."""
    steps = [float(solution.num_steps.double().mean()) for solution in solutions if solution is not None]
    return sum(steps) if steps else None
