"""Every parametrization x activation x splitting: gradcheck, and the adjoint against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.nn import AbstractCell, DenseCell, LeakyReLU, Monotone, MonotoneConvCell, MonotoneTierCell, SoftThreshold
from wellposed.nn.activations import ACTIVATIONS
from wellposed.solve import AbstractSolver, TunedStep

F64 = torch.float64
SOLVERS = [
    wp.ForwardBackward(TunedStep()),
    wp.PeacemanRachford(TunedStep()),
    wp.DouglasRachford(0.7),
]
PARAMETRIZATIONS = ["dense", "conv-circular", "conv-zeros", "tiers-circular", "tiers-zeros"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str, activation) -> tuple[AbstractCell, Tensor]:
    """A small cell with a bias, and an input."""
    options = {"dtype": F64, "generator": generator(0)}
    if name == "dense":
        cell: AbstractCell = DenseCell(2, 4, activation, weight=Monotone(0.8), **options)
        x = torch.randn(2, 2, dtype=F64, generator=generator(1))
    elif name.startswith("conv"):
        cell = MonotoneConvCell(1, 1, activation, margin=0.8, padding=name.split("-")[1], kernel_size=3, **options)
        x = torch.randn(2, 1, 3, 2, dtype=F64, generator=generator(1))
    else:
        cell = MonotoneTierCell(1, (1, 2), activation, margin=0.8, padding=name.split("-")[1], kernel_size=3, **options)
        x = torch.randn(2, 1, 4, 2, dtype=F64, generator=generator(1))
    biases = [cell.b] if isinstance(cell, DenseCell) else list(cell.b)
    with torch.no_grad():
        for b in biases:
            b.copy_(0.3 * torch.randn(b.shape, dtype=F64, generator=generator(2)))
    return cell, x


def _combinations() -> list:
    """All of them. Quick are every activation and splitting with dense matrices, and the others with one activation.

    `test_adjoints_against_dense_matrices` compares the adjoints; here it is parameters that join in, and those of a
    parametrization do not know the activation. Where the resolvent is a conjugate-gradient solve of its own, one is quick.
    """
    cases = []
    for name in PARAMETRIZATIONS:
        for activation in ACTIVATIONS:
            for solver in SOLVERS:
                one = isinstance(activation, wp.nn.Sigmoid)
                if name.endswith("zeros"):
                    one &= isinstance(solver, wp.ForwardBackward) or (name, type(solver)) == ("conv-zeros", wp.PeacemanRachford)
                cases.append(
                    pytest.param(
                        name,
                        activation,
                        solver,
                        id=f"{name}-{type(activation).__name__}-{type(solver).__name__}",
                        marks=[] if name == "dense" or one else [pytest.mark.slow],
                    )
                )
    return cases


@pytest.mark.parametrize(("name", "activation", "solver"), _combinations())
def test_gradcheck(name: str, activation, solver: AbstractSolver) -> None:
    cell, x = make(name, activation)
    layer = wp.EquilibriumLayer(cell, solver, wp.ImplicitGradient(solver), rtol=1e-12, max_steps=3000, on_failure="raise")
    parameters = tuple(cell.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *_: layer(x), (x.requires_grad_(), *parameters), eps=1e-5, atol=1e-6, rtol=1e-5, fast_mode=True
    )
    assert bool(layer.last_adjoint.converged.all())


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        # a smooth and a kinked one with every matrix, the others with dense ones
        pytest.param(name, a, marks=[] if name == "dense" or a in (wp.nn.ReLU(), wp.nn.Tanh()) else [pytest.mark.slow])
        for name in PARAMETRIZATIONS
        for a in (*ACTIVATIONS, LeakyReLU(0.4), SoftThreshold(0.4))
    ],
    ids=str,
)
def test_adjoints_against_dense_matrices(name: str, activation) -> None:
    """dL/dc = D (I - W^T D)^(-1) v with the dense W, for every splitting; and z* against a fourth solver."""
    cell, x = make(name, activation)
    f = cell.bind(x)
    operator = f.operator
    n = f.inputs()[-1].shape[1]
    W = operator.dense(n)
    reference = wp.EquilibriumLayer(cell, wp.NewtonKrylov(), rtol=1e-13, max_steps=3000, on_failure="raise")(x).flatten(1)
    v = torch.randn(2, n, dtype=F64, generator=generator(3))
    slope = activation.derivative(reference.detach() @ W.T + f.inputs()[-1].detach())
    identity = torch.eye(n, dtype=F64)
    expected = torch.stack([d * torch.linalg.solve(identity - W.T * d, row) for d, row in zip(slope, v, strict=True)])
    for solver in SOLVERS[:2] if name.endswith("zeros") else SOLVERS:
        injected = torch.zeros_like(v).requires_grad_()
        layer = wp.EquilibriumLayer(_Shifted(cell, injected), solver, wp.ImplicitGradient(solver), rtol=1e-13, max_steps=3000)
        z = layer(x).flatten(1)
        torch.testing.assert_close(z, reference, rtol=0, atol=1e-10)
        (p,) = torch.autograd.grad((z * v).sum(), injected)
        torch.testing.assert_close(p, expected, rtol=0, atol=1e-10)


class _Shifted(AbstractCell):
    """A cell whose constants are shifted by a tensor of ours, so that dL/dc can be read off."""

    def __init__(self, cell: AbstractCell, shift: Tensor) -> None:
        super().__init__()
        self._cell, self._shift = (cell,), shift

    def bind(self, x: Tensor):
        f = self._cell[0].bind(x)
        *tensors, c = f.inputs()
        return f.with_inputs(*tensors, c + self._shift)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return self._cell[0].state_shape(x)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.bind(x).tracked(z.flatten(1)).reshape(z.shape)


@pytest.mark.parametrize(
    "name", [*PARAMETRIZATIONS[:3], *(pytest.param(n, marks=pytest.mark.slow) for n in PARAMETRIZATIONS[3:])]
)
def test_second_derivatives(name: str) -> None:
    """They go the general way, whatever splitting solved the first."""
    cell, x = make(name, wp.nn.Tanh())
    solver = wp.PeacemanRachford()
    layer = wp.EquilibriumLayer(cell, solver, wp.ImplicitGradient(solver), rtol=1e-13, max_steps=3000, on_failure="raise")
    parameters = tuple(cell.parameters())
    assert torch.autograd.gradgradcheck(
        lambda x, *_: layer(x), (x.requires_grad_(), *parameters), atol=1e-6, rtol=1e-5, fast_mode=True
    )


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        pytest.param(name, solver, id=f"{name}-{type(solver).__name__}")
        for name in PARAMETRIZATIONS
        for solver in (SOLVERS[:2] if name.endswith("zeros") else SOLVERS)
    ],
)
def test_float32_and_lower(name: str, solver: AbstractSolver) -> None:
    """float32 works as it is, bfloat16 is solved in float32; both agree with float64 as well as they can."""
    cell, x = make(name, wp.nn.ReLU())
    exact = wp.EquilibriumLayer(cell, solver, on_failure="raise", rtol=1e-10, max_steps=3000)(x)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        other = make(name, wp.nn.ReLU())[0].to(dtype)
        layer = wp.EquilibriumLayer(other, solver, wp.ImplicitGradient(solver), on_failure="raise", rtol=1e-5)
        z = layer(x.to(dtype))
        assert z.dtype == dtype
        torch.testing.assert_close(z.double(), exact, rtol=tolerance, atol=tolerance)
        z.sum().backward()
        assert all(bool(p.grad.isfinite().all()) and p.grad.dtype == dtype for p in other.parameters())


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_failures_are_told(name: str) -> None:
    cell, x = make(name, wp.nn.ReLU())
    layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(), max_steps=2, on_failure="raise")
    with pytest.raises(wp.NotConverged, match="max_steps=2"):
        layer(x)
    backward = wp.ImplicitGradient(wp.PeacemanRachford(1e-3), max_steps=2)
    layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(), backward, max_steps=3000, on_failure="raise")
    z = layer(x)
    with pytest.raises(wp.errors.AdjointNotConverged, match="max_steps=2"):
        z.sum().backward()


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_a_sample_ignores_its_neighbours(name: str) -> None:
    cell, x = make(name, wp.nn.ReLU())
    x = torch.cat([x, 10 * x, 0 * x])
    for solver in SOLVERS[:1] if name.endswith("zeros") else SOLVERS:
        layer = wp.EquilibriumLayer(cell, solver, rtol=1e-9, max_steps=3000, on_failure="raise")
        together = layer.solve(x)
        for i in range(len(x)):
            alone = layer.solve(x[i : i + 1])
            assert alone.num_steps[0] == together.num_steps[i]
            torch.testing.assert_close(alone.value[0], together.value[i], rtol=0, atol=1e-12)
