"""Our own solvers, cells, gradients, linear solvers and families inherit the shipped conformance tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.nn import DenseCell, Monotone, MonotoneConvCell, Spectral
from wellposed.solve import AbstractMap, AbstractSolver, Point, Step
from wellposed.testing import (
    CellConformance,
    FamilyConformance,
    GradientConformance,
    LinearSolverConformance,
    SolverConformance,
)


@dataclass(frozen=True)
class _Momentum(AbstractSolver):
    """z <- f(z) + momentum (f(z) - f(the z before))."""

    momentum: float

    def init(self, f: AbstractMap, point: Point) -> dict[str, Tensor]:
        return {"last": point.fz.clone()}

    def step(self, state: dict[str, Tensor], f: AbstractMap, point: Point) -> Step:
        z = point.fz + self.momentum * (point.fz - state["last"])
        state["last"] = point.fz.clone()
        return Step(z, f(z))


class TestPicard(SolverConformance):
    def solver(self):
        return wp.Picard()


class TestSolverOfAUser(SolverConformance):
    """A solver that is not of this package: each solve is confirmed by an evaluation."""

    def solver(self):
        return _Momentum(0.3)


@pytest.mark.slow  # tests/solve runs the same checks for every solver
class TestAnderson(SolverConformance):
    solves = (*SolverConformance.solves, "smoothing", "tuple_state", "dict_state", "image_state")

    def solver(self):
        return wp.Anderson()


@pytest.mark.slow  # tests/solve runs the same checks for every solver
class TestBroyden(SolverConformance):
    def solver(self):
        return wp.Broyden(memory=3)


class TestNewtonKrylov(SolverConformance):
    solves = (*SolverConformance.solves, "slow", "monotone", "nilpotent", "expanding")

    def solver(self):
        return wp.NewtonKrylov()


@pytest.mark.slow  # tests/solve runs the same checks for every solver
class TestAuto(SolverConformance):
    solves = (*SolverConformance.solves, "slow", "nilpotent", "expanding")

    def solver(self):
        return wp.Auto()


class TestPeacemanRachford(SolverConformance):
    solves = ("affine", "relu_by_hand", "relu_random", "monotone")
    dense = True
    max_steps = 20000

    def solver(self):
        return wp.PeacemanRachford()


class TestGMRES(LinearSolverConformance):
    def linear_solver(self):
        return wp.GMRES(restart=4)


class TestBiCGStab(LinearSolverConformance):
    def linear_solver(self):
        return wp.BiCGStab()


class TestNeumann(LinearSolverConformance):
    def linear_solver(self):
        return wp.Neumann()


class TestDenseCell(CellConformance):
    def make(self, generator):
        cell = DenseCell(2, 4, wp.nn.Tanh(), weight=Spectral(0.7), generator=generator, dtype=torch.float64)
        return cell, torch.randn(3, 2, generator=generator, dtype=torch.float64)

    def reference(self, cell, z, x):
        norm = torch.linalg.matrix_norm(cell.W, 2)
        return torch.tanh(z @ (cell.W * (0.7 / norm).clamp(max=1)).T + x @ cell.U.T + cell.b)


class TestMonotoneDenseCell(CellConformance):
    options = {"solver": wp.PeacemanRachford(1.0), "max_steps": 2000}

    def make(self, generator):
        cell = DenseCell(2, 4, weight=Monotone(0.5), generator=generator, dtype=torch.float64)
        return cell, torch.randn(3, 2, generator=generator, dtype=torch.float64)

    def reference(self, cell, z, x):
        W = 0.5 * torch.eye(4, dtype=torch.float64) - cell.A.T @ cell.A + cell.B - cell.B.T
        return torch.relu(z @ W.T + x @ cell.U.T + cell.b)


class TestMonotoneConvCell(CellConformance):
    options = {"solver": wp.PeacemanRachford(1.0), "max_steps": 2000}

    def make(self, generator):
        cell = MonotoneConvCell(2, 3, margin=0.4, generator=generator, dtype=torch.float64)
        return cell, torch.randn(3, 2, 4, 4, generator=generator, dtype=torch.float64)

    def reference(self, cell, z, x):
        (A,), (B,) = cell.weights.A, cell.weights.B

        def conv(z, kernel):
            return torch.nn.functional.conv2d(torch.nn.functional.pad(z, (1, 1, 1, 1), mode="circular"), kernel)

        def transposed(kernel):
            return kernel.flip(2, 3).transpose(0, 1)

        W = 0.6 * z - conv(conv(z, A), transposed(A)) + conv(z, B) - conv(z, transposed(B))
        return torch.relu(W + cell.injection(x).reshape(z.shape))


class TestOwnModule(CellConformance):
    options = {"state_shape": (4,)}

    def make(self, generator):
        class Own(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.R = torch.nn.Parameter(0.2 * torch.randn(4, 4, generator=generator, dtype=torch.float64))

            def forward(self, z, x):
                return torch.sin(z @ self.R.T) + x.sum(dim=1, keepdim=True)

            def __reduce__(self) -> Any:  # a class inside a function cannot be pickled by name
                return (_rebuild, (self.state_dict(),))

        return Own(), torch.randn(3, 2, generator=generator, dtype=torch.float64)

    def reference(self, cell, z, x):
        return torch.sin(z @ cell.R.T) + x.sum(dim=1, keepdim=True)


def _rebuild(state: dict[str, torch.Tensor]) -> torch.nn.Module:
    cell, _ = TestOwnModule().make(torch.Generator())
    cell.load_state_dict(state)
    return cell


class TestImplicitGradient(GradientConformance):
    def gradient(self):
        return wp.ImplicitGradient()


class TestUnrolledGradient(GradientConformance):
    def gradient(self):
        return wp.UnrolledGradient(150)


class TestReversibleGradient(GradientConformance):
    """Its value is that of its steps, and so is its gradient: steps that reach the equilibrium cannot be reversed."""

    rtol = 1e-11
    test_the_value_is_the_equilibrium = None  # type: ignore[assignment]

    def gradient(self):
        return wp.ReversibleGradient(12)

    def reference(self, f, z, v, leaves):
        y = z = torch.zeros_like(z)
        for _ in range(12):
            y = (y + f(z)) / 2
            z = (z + f(y)) / 2
        return torch.autograd.grad(z, list(leaves), v, allow_unused=True)

    def _layer(self, cell):
        layer = super()._layer(cell)
        layer.rtol = 0.1
        return layer


class TestJacobianFree(GradientConformance):
    def gradient(self):
        return wp.JacobianFree()

    def reference(self, f, z, v, leaves):
        return torch.autograd.grad(f(z), list(leaves), v, allow_unused=True)


class TestGaussianDEQ(FamilyConformance):
    def network(self, in_features, width, **options):
        return wp.GaussianDEQ(in_features, width, weight_variance=0.02, **options)

    def definition(self, t, X, Z):
        return torch.relu(Z @ t["W"].T + X @ t["U"].T), Z @ t["a"]


class TestSkipDEQ(FamilyConformance):
    def network(self, in_features, width, **options):
        return wp.SkipDEQ(in_features, width, **options)

    def definition(self, t, X, Z):
        root = len(t["u"]) ** 0.5
        skip = torch.relu(X @ t["W"].T) / root
        return torch.relu(0.2 / root * Z @ t["A"].T + skip), Z @ t["u"] + skip @ t["v"]


class TestImplicitOnlyDEQ(FamilyConformance):
    def network(self, in_features, width, **options):
        return wp.ImplicitOnlyDEQ(in_features, width, gamma0=0.2, **options)

    def definition(self, t, X, Z):
        root = len(t["b"]) ** 0.5
        return torch.relu(0.2 / root * Z @ t["A"] + torch.relu(X @ t["W"])), Z @ t["b"] / root


class TestMonotoneDEQ(FamilyConformance):
    def network(self, in_features, width, **options):
        return wp.MonotoneDEQ(in_features, width, margin=0.5, **options)

    def definition(self, t, X, Z):
        W = 0.5 * torch.eye(len(t["u"]), dtype=Z.dtype) - t["A"].T @ t["A"] + t["B"] - t["B"].T
        return torch.relu(Z @ W.T + X @ t["U"].T), Z @ t["u"]
