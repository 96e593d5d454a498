"""Wrong solvers, cells, gradients, linear solvers and families fail the conformance test of their fault."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import wellposed as wp
from wellposed.linalg import AbstractLinearSolver
from wellposed.solve import AbstractSolver, Step
from wellposed.testing import (
    CellConformance,
    FamilyConformance,
    GradientConformance,
    LinearSolverConformance,
    SolverConformance,
)

F64 = torch.float64


def failures(case: object) -> dict[str, str]:
    """The tests that fail, with their messages."""
    found = {}
    for name in dir(case):
        if name.startswith("test_"):
            try:
                getattr(case, name)()
            except AssertionError as error:
                found[name] = str(error)
    return found


# --- solvers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MixesTheBatch(AbstractSolver):
    """Moves every sample by the same damping, chosen from the whole batch."""

    def init(self, f, point):
        return None

    def step(self, state, f, point):
        z = point.z + point.g * (1 - 0.5 * float(point.r.mean() / (1 + point.r.mean())))
        return Step(z, f(z))


@dataclass(frozen=True)
class StandsStill(AbstractSolver):
    def init(self, f, point):
        return None

    def step(self, state, f, point):
        return Step(point.z.clone(), f(point.z))


@dataclass(frozen=True)
class Remembers(AbstractSolver):
    """Keeps a number from one solve to the next."""

    seen = [0]

    def init(self, f, point):
        self.seen[0] += 1
        return None

    def step(self, state, f, point):
        z = point.z + point.g * (0.5 + 0.4 / self.seen[0])
        return Step(z, f(z))


@pytest.mark.parametrize(
    ("wrong", "test", "message"),
    [
        (MixesTheBatch(), "test_a_sample_does_not_depend_on_its_neighbours", "differ"),
        (StandsStill(), "test_solves_its_problems", "must converge"),
        (Remembers(), "test_a_solver_is_a_value", "keeps something"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AbstractSolver) else None,
)
def test_a_wrong_solver_fails(wrong: AbstractSolver, test: str, message: str) -> None:
    class Case(SolverConformance):
        def solver(self):
            return wrong

    with pytest.raises(AssertionError, match=message):
        getattr(Case(), test)()


# --- linear solvers --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claims(AbstractLinearSolver):
    """Reports residuals that are half of the true ones."""

    def __call__(self, matvec, b, x0=None, **options):
        found = wp.GMRES()(matvec, b, x0, **options)
        return replace(found, residual=found.residual / 2)


def test_a_wrong_linear_solver_fails() -> None:
    class Case(LinearSolverConformance):
        def linear_solver(self):
            return Claims()

    assert set(failures(Case())) == {"test_reports_are_true"}


@dataclass(frozen=True)
class AddsItsStart(AbstractLinearSolver):
    """Right from zero and from the solution, wrong from anywhere else."""

    def __call__(self, matvec, b, x0=None, **options):
        found = wp.GMRES()(matvec, b, x0, **options)
        if x0 is None or bool((matvec(x0) - b).norm() <= 1e-6 * b.norm()):
            return found
        return replace(found, value=found.value + 0.1 * x0)


@dataclass(frozen=True)
class DropsSmall(AbstractLinearSolver):
    """Returns 0 for a small right-hand side."""

    def __call__(self, matvec, b, x0=None, **options):
        found = wp.GMRES()(matvec, b, x0, **options)
        return replace(found, value=torch.where(b.norm(dim=1, keepdim=True) < 1e-6, 0.0, found.value))


@pytest.mark.parametrize("wrong", [AddsItsStart(), DropsSmall()])
def test_a_linear_solver_that_is_wrong_at_times_fails(wrong: AbstractLinearSolver) -> None:
    class Case(LinearSolverConformance):
        def linear_solver(self):
            return wrong

    assert "test_every_scale_and_start" in failures(Case())


# --- cells -----------------------------------------------------------------------------------------------------------


class Centred(torch.nn.Module):
    """Subtracts the mean over the batch, as batch normalization does."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.W = torch.nn.Parameter(0.2 * torch.randn(4, 4, generator=generator, dtype=F64))

    def forward(self, z, x):
        return torch.tanh((z - z.mean(dim=0)) @ self.W.T + x)


class TransposedCell(wp.nn.DenseCell):
    """Its bound map multiplies by W, its forward by W^T."""

    def forward(self, z, x):
        return self.activation(z @ self.recurrent() + x @ self.U.T + self.b)

    def bind(self, x):  # of its own, so that a layer takes it
        return super().bind(x)


def test_a_cell_that_mixes_samples_fails() -> None:
    class Case(CellConformance):
        options = {"on_failure": "ignore"}

        def make(self, generator):
            return Centred(generator), torch.randn(3, 4, generator=generator, dtype=F64)

        def reference(self, cell, z, x):
            return cell(z, x)

    with pytest.raises(AssertionError, match="depends on the other samples"):
        Case().test_samples_are_independent()


class OneRowIsSpecial(wp.nn.DenseCell):
    def forward(self, z, x):
        return super().forward(z, x) + (0.1 if len(z) == 1 else 0.0)

    def bind(self, x):  # of its own, so that a layer takes it
        return super().bind(x)


class WrongBackward(wp.nn.DenseCell):
    """The values of a cell, and half of its derivative."""

    def forward(self, z, x):
        value = super().forward(z, x)
        return value.detach() / 2 + value / 2

    def bind(self, x):  # of its own, so that a layer takes it
        return super().bind(x)


@pytest.mark.parametrize(
    ("kind", "test"), [(OneRowIsSpecial, "test_samples_are_independent"), (WrongBackward, "test_the_derivative_of_forward")]
)
def test_a_cell_that_is_wrong_at_times_fails(kind: type[wp.nn.DenseCell], test: str) -> None:
    class Case(CellConformance):
        def make(self, generator):
            return kind(2, 4, generator=generator, dtype=F64), torch.randn(3, 2, generator=generator, dtype=F64)

        def reference(self, cell, z, x):
            return torch.relu(z @ cell.W.T + x @ cell.U.T + cell.b)

    assert test in failures(Case())


def test_a_cell_whose_map_is_another_fails() -> None:
    class Case(CellConformance):
        def make(self, generator):
            return TransposedCell(2, 4, generator=generator, dtype=F64), torch.randn(3, 2, generator=generator, dtype=F64)

        def reference(self, cell, z, x):
            return torch.relu(z @ cell.W.T + x @ cell.U.T + cell.b)

    found = failures(Case())
    assert {"test_forward_is_the_definition", "test_samples_are_independent"} <= set(found)
    assert "test_the_bound_map_is_the_cell" not in found  # that one is right


# --- gradients -------------------------------------------------------------------------------------------------------


def test_an_inexact_gradient_fails_unless_it_brings_its_own_formula() -> None:
    class Case(GradientConformance):
        def gradient(self):
            return wp.JacobianFree()

    assert set(failures(Case())) == {"test_gradients_are_those_of_the_reference"}


# --- families --------------------------------------------------------------------------------------------------------


class HalfReadout(wp.GaussianDEQ):
    """Predicts with half of the read-out weights, and derives with all of them."""

    def readout(self, Z, C):
        return super().readout(Z, C) / 2


def test_a_wrong_family_fails() -> None:
    class Case(FamilyConformance):
        def network(self, in_features, width, **options):
            return HalfReadout(in_features, width, weight_variance=0.02, **options)

        def definition(self, t, X, Z):
            return torch.relu(Z @ t["W"].T + X @ t["U"].T), Z @ t["a"] / 2

    found = failures(Case())
    assert "gradients(...)['W'] is not the dense one" in found["test_gradients_are_those_of_the_definition"]
    assert "test_tangent_kernel_is_that_of_the_definition" in found
    assert "test_predictions_are_the_definition" not in found


def test_a_family_that_is_not_its_definition_fails() -> None:
    class Case(FamilyConformance):
        def network(self, in_features, width, **options):
            return wp.GaussianDEQ(in_features, width, weight_variance=0.02, **options)

        def definition(self, t, X, Z):
            return torch.relu(Z @ t["W"] + X @ t["U"].T), Z @ t["a"]  # W is not transposed

    assert "not a fixed point" in failures(Case())["test_predictions_are_the_definition"]
