"""Every linear solver on every problem, and what each promises when it fails."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.sparse.linalg
import torch
from hypothesis import given, settings
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import GMRES, AbstractLinearSolver, BiCGStab, DenseSolve, LinearSolution, Neumann
from wellposed.status import Status

SOLVERS: list[AbstractLinearSolver] = [GMRES(), GMRES(restart=4), BiCGStab(), Neumann(), DenseSolve()]
ITERATIVE = SOLVERS[:-1]
KRYLOV = SOLVERS[:3]
DTYPES = [torch.float32, torch.float64]

every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=repr)
every_iterative = pytest.mark.parametrize("solver", ITERATIVE, ids=repr)
every_krylov = pytest.mark.parametrize("solver", KRYLOV, ids=repr)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def products(A: Tensor):
    return lambda v: torch.einsum("bij,bj->bi", A, v)


def true_residual(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    A, b, x = A.double(), b.double(), x.double()
    return (b - products(A)(x)).norm(dim=1) / b.norm(dim=1)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(batch: int, m: int, seed: int = 0) -> Tensor:
    return torch.stack([torch.linalg.qr(gaussian(m, m, seed=seed + i))[0] for i in range(batch)])


# --- problems with known solutions; on all of them the spectral radius of I - A is below 1 ------------------


def identity() -> Tensor:
    return torch.eye(12, dtype=torch.float64).repeat(4, 1, 1)


def diagonal() -> Tensor:
    return torch.stack([torch.diag(torch.linspace(1 - s, 1 + s, 20, dtype=torch.float64)) for s in (0.1, 0.5, 0.8)])


def positive_definite() -> Tensor:
    Q = orthogonal(3, 15)
    return Q @ torch.diag(torch.linspace(0.2, 1.7, 15, dtype=torch.float64)) @ Q.transpose(1, 2)


def nonsymmetric() -> Tensor:
    """I - J with ||J|| = 0.2 to 0.9: differently hard samples."""
    J = gaussian(4, 25, 25, seed=3)
    J = J / torch.linalg.matrix_norm(J, ord=2)[:, None, None]
    return torch.eye(25, dtype=torch.float64) - J * torch.tensor([0.2, 0.5, 0.7, 0.9])[:, None, None]


def rotation_and_identity() -> Tensor:
    """I + 0.7 times rotations of the plane: every eigenvalue is complex."""
    angles = torch.linspace(0.3, 2.8, 8, dtype=torch.float64)
    blocks = [torch.tensor([[math.cos(a), -math.sin(a)], [math.sin(a), math.cos(a)]]) for a in angles.tolist()]
    R = torch.block_diag(*blocks).double()
    Q = orthogonal(2, 16, seed=5)
    return torch.eye(16, dtype=torch.float64) + 0.7 * Q @ R @ Q.transpose(1, 2)


def nilpotent() -> Tensor:
    """I - N with N strictly triangular: not normal, and Neumann's series is finite."""
    return (torch.eye(10, dtype=torch.float64) - 0.4 * torch.triu(torch.ones(10, 10, dtype=torch.float64), 1))[None]


PROBLEMS = [identity, diagonal, positive_definite, nonsymmetric, rotation_and_identity, nilpotent]


@every_dtype
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.__name__)
@every_solver
def test_every_solver_on_every_problem(solver: AbstractLinearSolver, problem, dtype: torch.dtype) -> None:
    A = problem()
    x = gaussian(*A.shape[:2], seed=9)
    b = products(A)(x).to(dtype)
    A = A.to(dtype)
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    solution = solver(products(A), b, rtol=rtol, max_steps=400)
    assert solution.converged.all(), solution
    assert all(s is Status.CONVERGED for s in solution.status)
    assert solution.value.dtype == solution.residual.dtype == dtype and solution.num_steps.dtype == torch.int64
    assert (true_residual(A, b, solution.value) <= rtol * 1.1).all()
    condition = torch.linalg.cond(A.double())
    assert ((solution.value - x).norm(dim=1) <= 2 * condition * rtol * x.norm(dim=1)).all()
    # Measured, not estimated: it is what a product in this precision gives.
    error = (solution.residual - true_residual(A, b, solution.value)).abs()
    assert (error <= 20 * torch.finfo(dtype).eps).all()


# --- each method does what its formula says -----------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_gmres_minimises_over_the_krylov_space(k: int) -> None:
    A, b = 0.3 * gaussian(3, 10, 10) + torch.eye(10), gaussian(3, 10, seed=1)
    solution = GMRES()(products(A), b, rtol=0.0, max_steps=k + 1)
    assert solution.num_steps.tolist() == [k + 1] * 3
    for i in range(3):
        K = [b[i]]
        for _ in range(k):
            K.append(A[i] @ K[-1] / (A[i] @ K[-1]).norm())
        AK = torch.stack(K[1:], dim=1)  # spans A times the Krylov space
        best = torch.linalg.lstsq(AK, b[i][:, None]).solution
        least = (b[i] - AK @ best[:, 0]).norm() / b[i].norm()
        assert solution.residual[i] == pytest.approx(least.item(), rel=1e-8)


def test_gmres_restarts_from_the_residual() -> None:
    # GMRES(3) twice is GMRES(3) applied to A d = r.
    A, b = 0.3 * gaussian(1, 10, 10) + torch.eye(10), gaussian(1, 10, seed=1)
    twice = GMRES(restart=3)(products(A), b, rtol=0.0, max_steps=8)
    once = GMRES(restart=3)(products(A), b, rtol=0.0, max_steps=4)
    r = b - products(A)(once.value)
    again = GMRES(restart=3)(products(A), r, rtol=0.0, max_steps=4)
    assert torch.allclose(twice.value, once.value + again.value, atol=1e-13)
    assert torch.allclose(GMRES(restart=3)(products(A), b, once.value, rtol=0.0, max_steps=5).value, twice.value)


@every_dtype
def test_gmres_ends_when_the_krylov_space_is_exhausted(dtype: torch.dtype) -> None:
    # Two distinct eigenvalues: two steps and the measurement; one distinct: one step.
    A = torch.stack([torch.diag(torch.tensor([1.0, 3.0] * 5)), 2 * torch.eye(10)]).to(dtype)
    solution = GMRES()(products(A), torch.ones(2, 10, dtype=dtype), rtol=10 * torch.finfo(dtype).eps)
    assert solution.converged.all() and solution.num_steps.tolist() == [3, 2]


def test_gmres_makes_no_basis_vector_out_of_rounding() -> None:
    # Three distinct eigenvalues exhaust the Krylov space early, and no rounding error meets the tolerance.
    eigenvalues = torch.tensor([1e3, 3.3] + [1.0] * 8, dtype=torch.float64)
    basis: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        basis.append(v[0])
        return v * eigenvalues

    GMRES()(product, gaussian(1, 10), rtol=0.0, max_steps=11)
    lengths = [abs(v.norm().item() - 1.0) < 1e-6 for v in basis]
    V = torch.stack(basis[: lengths.index(False)])  # up to the first measurement
    assert len(V) >= 3 and torch.allclose(V @ V.T, torch.eye(len(V), dtype=torch.float64), atol=1e-10)


def test_gmres_keeps_its_basis_orthogonal() -> None:
    # Condition 1e10: with a basis that lost orthogonality the estimate falls far below the truth.
    Q, P = orthogonal(1, 40), orthogonal(1, 40, seed=50)
    A = Q @ torch.diag(torch.logspace(0, -10, 40, dtype=torch.float64)) @ P
    b = products(A)(gaussian(1, 40, seed=2))
    solution = GMRES(restart=40)(products(A), b, rtol=1e-12, max_steps=42)
    assert solution.converged.all(), solution


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_bicgstab_follows_the_recurrence(iterations: int) -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    solution = BiCGStab()(products(A), b, rtol=0.0, max_steps=2 * iterations + 1)
    assert solution.num_steps.tolist() == [2 * iterations + 1] * 4
    for i in range(4):
        expected, _ = scipy.sparse.linalg.bicgstab(A[i].numpy(), b[i].numpy(), rtol=0.0, maxiter=iterations)
        assert np.allclose(solution.value[i].numpy(), expected, atol=1e-11)


def test_bicgstab_restarts_after_a_breakdown() -> None:
    # After one iteration from b = e_1, by hand: s = -e_2, A s = -2 e_2 - e_3, so (r~, r) = 0 while r is not
    # zero.
    A = torch.tensor([[[1.0, 0.0, 0.0], [1.0, 2.0, 0.0], [0.0, 1.0, 1.0]]], dtype=torch.float64)
    b = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    _, textbook = scipy.sparse.linalg.bicgstab(A[0].numpy(), b[0].numpy(), rtol=1e-12)
    assert textbook < 0  # breaks down
    solution = BiCGStab()(products(A), b, rtol=1e-12)
    assert solution.converged.all()
    assert torch.allclose(solution.value, torch.tensor([[1.0, -0.5, 0.5]], dtype=torch.float64))
    assert solution.num_steps.item() <= 7  # one iteration, at most two from the restart, the measurement


def test_bicgstab_returns_the_best_of_an_erratic_run() -> None:
    A, b = gaussian(1, 20, 20, seed=3) + 2 * torch.eye(20), gaussian(1, 20, seed=1)
    residuals = [BiCGStab()(products(A), b, rtol=0.0, max_steps=n).residual.item() for n in range(3, 40, 2)]
    norms: list[float] = []
    scipy.sparse.linalg.bicgstab(
        A[0].numpy(),
        b[0].numpy(),
        rtol=0.0,
        maxiter=19,
        callback=lambda x: norms.append(true_residual(A, b, torch.from_numpy(x)[None]).item()),
    )
    assert any(later > sooner for sooner, later in zip(norms, norms[1:], strict=False))  # erratic indeed
    assert all(later <= sooner for sooner, later in zip(residuals, residuals[1:], strict=False))
    assert residuals[5] < 1.0


def test_bicgstab_stagnates_without_dividing_by_zero() -> None:
    # Skew: (r, A r) = 0, so that alpha and omega have nothing to offer.
    A = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]])
    solution = BiCGStab()(products(A), torch.ones(1, 2), max_steps=21)
    assert list(solution.status) == [Status.MAX_STEPS] and solution.residual.item() == 1.0


@pytest.mark.parametrize("k", [1, 2, 7])
def test_neumann_sums_the_series(k: int) -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    J = torch.eye(25, dtype=torch.float64) - A
    term, total = b, torch.zeros_like(b)
    for _ in range(k):
        total, term = total + term, products(J)(term)
    solution = Neumann()(products(A), b, rtol=0.0, max_steps=k)
    assert torch.allclose(solution.value, total, atol=1e-13)
    assert torch.allclose(solution.residual, term.norm(dim=1) / b.norm(dim=1), atol=1e-14)
    assert solution.num_steps.tolist() == [k] * 4


def test_dense_counts_its_columns() -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    solution = DenseSolve()(products(A), b, rtol=1e-13, max_steps=26)
    assert solution.converged.all() and solution.num_steps.tolist() == [26] * 4
    assert torch.allclose(solution.value, torch.stack([torch.linalg.solve(a, c) for a, c in zip(A, b, strict=True)]))


def test_dense_takes_all_columns_or_none() -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    A[2] = 0.0
    solution = DenseSolve()(products(A), b, rtol=1e-13, max_steps=torch.tensor([26, 25, 26, 1]))
    assert list(solution.status) == [Status.CONVERGED, Status.MAX_STEPS, Status.DIVERGED, Status.MAX_STEPS]
    assert solution.num_steps.tolist() == [26, 0, 26, 0]
    assert "one product per feature" in DenseSolve().advice(Status.MAX_STEPS, math.nan)
    assert "one product per feature" not in DenseSolve().advice(Status.DIVERGED, math.nan)


# --- budgets, first guesses, tolerances ---------------------------------------------------------------------


@pytest.mark.parametrize("guess", [False, True])
@pytest.mark.parametrize("max_steps", [1, 2, 3, 4, 7, 12, 20])
@every_iterative
def test_max_steps_is_a_hard_bound(solver: AbstractLinearSolver, max_steps: int, guess: bool) -> None:
    A, b = nonsymmetric()[-1:], gaussian(1, 25, seed=1)
    calls = 0

    def counted(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return products(A)(v)

    solution = solver(counted, b, 0.1 * b if guess else None, rtol=1e-14, max_steps=max_steps)
    assert list(solution.status) == [Status.MAX_STEPS]
    assert solution.num_steps.item() == calls <= max_steps
    assert calls >= max_steps - 1
    assert solution.residual.item() == pytest.approx(true_residual(A, b, solution.value).item(), rel=1e-10)
    assert solution.residual.item() <= 1.0


@every_solver
def test_steps_are_those_of_the_samples_alone(solver: AbstractLinearSolver) -> None:
    # Differently hard samples, stopped early: the very iterate must be the one found without neighbours.
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    together = solver(products(A), b, rtol=1e-3)
    assert together.converged.all()
    for i in range(4):
        alone = solver(products(A[i : i + 1]), b[i : i + 1], rtol=1e-3)
        assert torch.allclose(together.value[i], alone.value[0], rtol=0, atol=1e-12)
        assert together.num_steps[i] == alone.num_steps[0]
    if solver != DenseSolve():
        assert together.num_steps[0] < together.num_steps[3]


@every_solver
def test_first_guess(solver: AbstractLinearSolver) -> None:
    A, x = nonsymmetric(), gaussian(4, 25, seed=1)
    b = products(A)(x)
    exact = solver(products(A), b, x, rtol=1e-10)
    assert exact.converged.all() and exact.num_steps.tolist() == [1] * 4
    near = solver(products(A), b, x + 1e-6 * b, rtol=1e-10)
    assert near.converged.all()
    if solver != DenseSolve():
        assert (near.num_steps < solver(products(A), b, rtol=1e-10).num_steps).all()
    # A guess worse than zero is dropped: also the value of a failed solve is never worse than zero.
    poor = solver(products(A), b, -1e9 * x, rtol=0.0, max_steps=1)
    assert poor.residual.tolist() == [1.0] * 4 and not poor.value.any()
    unusable = solver(products(A), b, x * math.nan, rtol=1e-10)
    assert unusable.converged.all()


@every_krylov
def test_failure_never_worsens_the_guess(solver: AbstractLinearSolver) -> None:
    # The cyclic shift: no progress is possible within a short Krylov space.
    A = torch.eye(64, dtype=torch.float64).roll(1, 0)[None]
    x = gaussian(1, 64)
    b = products(A)(x)
    guess = x + 0.01 * torch.eye(64, dtype=torch.float64)[:1]
    solution = solver(products(A), b, guess, rtol=1e-12, max_steps=20)
    assert list(solution.status) == [Status.MAX_STEPS]
    assert (true_residual(A, b, solution.value) <= true_residual(A, b, guess) * (1 + 1e-12)).all()


@pytest.mark.parametrize("max_steps", [30, 100])
def test_stagnation_of_restarts_ends_in_max_steps(max_steps: int) -> None:
    A = torch.eye(64, dtype=torch.float64).roll(1, 0)[None]
    b = torch.eye(64, dtype=torch.float64)[:1]
    solution = GMRES(restart=10)(products(A), b, max_steps=max_steps)
    assert list(solution.status) == [Status.MAX_STEPS] and solution.residual.item() == 1.0
    assert max_steps - 1 <= solution.num_steps.item() <= max_steps
    assert GMRES(restart=64)(products(A), b).converged.all()


@every_dtype
@every_solver
def test_tolerances(solver: AbstractLinearSolver, dtype: torch.dtype) -> None:
    A, b = nonsymmetric().to(dtype), (1e3 * gaussian(4, 25, seed=1)).to(dtype)
    loose = solver(products(A), b, rtol=0.0, atol=1.0)
    assert loose.converged.all()
    assert (true_residual(A, b, loose.value) * b.norm(dim=1) <= 1.001).all()
    assert (solver(products(A), b, rtol=0.0, atol=1e9).value == 0).all()
    # Not reachable: reported, with what was reached.
    strict = solver(products(A), b, rtol=1e-30, max_steps=300)
    reached = true_residual(A, b, strict.value)
    assert not strict.converged.any() or (reached[strict.converged] == 0).all()
    assert (reached <= 100 * torch.finfo(dtype).eps).all()
    assert all(s in (Status.MAX_STEPS, Status.CONVERGED) for s in strict.status)


@every_solver
def test_options_may_differ_between_samples(solver: AbstractLinearSolver) -> None:
    A, b = nonsymmetric()[-1:].repeat(3, 1, 1), gaussian(1, 25, seed=1).repeat(3, 1)
    rtol = torch.tensor([1e-2, 1e-5, 1e-8], dtype=torch.float64)
    solution = solver(products(A), b, rtol=rtol, max_steps=torch.tensor([300, 300, 300]))
    assert solution.converged.all()
    for i in range(3):
        alone = solver(products(A[:1]), b[:1], rtol=rtol[i].item(), max_steps=300)
        assert solution.num_steps[i] == alone.num_steps.item()
        assert torch.allclose(solution.value[i], alone.value[0], rtol=0, atol=1e-12)
    budgets = torch.tensor([0, 3, 7])
    for x0 in (None, 0.1 * b):
        solution = solver(products(A), b, x0, rtol=1e-12, atol=torch.zeros(3), max_steps=budgets)
        assert list(solution.status) == [Status.MAX_STEPS] * 3
        assert (solution.num_steps <= budgets).all()
        assert solution.residual[0] == 1.0 and not solution.value[0].any()
        assert solver == DenseSolve() or solution.residual[2] < solution.residual[1] < 1.0  # that takes all columns or none
    none = solver(products(A), b, max_steps=torch.tensor([-1, 0, 0]))
    assert none.num_steps.tolist() == [0, 0, 0] and not none.value.any()


# --- trouble ------------------------------------------------------------------------------------------------


@every_dtype
@every_solver
def test_zero_right_hand_side(solver: AbstractLinearSolver, dtype: torch.dtype) -> None:
    A, b = nonsymmetric().to(dtype), gaussian(4, 25, seed=1).to(dtype)
    b[1] = 0.0
    solution = solver(products(A), b, rtol=1e-5)
    assert solution.converged.all()
    assert not solution.value[1].any() and solution.residual[1] == 0 and solution.num_steps[1] == 0
    guessed = solver(products(A), torch.zeros_like(b), torch.ones_like(b))
    assert guessed.converged.all() and not guessed.value.any() and not guessed.residual.any()


@pytest.mark.parametrize("first_bad_product", [1, 2, 3, 4])
@every_dtype
@every_solver
def test_nan_stays_in_its_sample(solver: AbstractLinearSolver, dtype: torch.dtype, first_bad_product: int) -> None:
    A, b = nonsymmetric().to(dtype), gaussian(4, 25, seed=1).to(dtype)
    calls = 0

    def poisoned(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        assert torch.isfinite(v).all()  # what is broken is not passed on
        out = products(A)(v)
        if calls >= first_bad_product:
            out[3, 7] = math.nan if calls % 2 else math.inf
        return out

    solution = solver(poisoned, b, rtol=1e-5)
    assert list(solution.status) == [Status.CONVERGED] * 3 + [Status.NOT_FINITE]
    clean = solver(products(A), b, rtol=1e-5)
    tolerance = 100 * torch.finfo(dtype).eps
    assert torch.allclose(solution.value[:3], clean.value[:3], rtol=0, atol=tolerance)
    assert torch.isfinite(solution.value).all() and torch.isfinite(solution.residual).all()
    assert solution.residual[3] <= 1.0
    if dtype == torch.float64:
        assert torch.equal(solution.num_steps[:3], clean.num_steps[:3])
    reported = true_residual(A, b, solution.value)
    assert torch.allclose(solution.residual.double(), reported, rtol=0, atol=tolerance)


@every_solver
def test_one_nan_is_enough(solver: AbstractLinearSolver) -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    calls = 0

    def poisoned(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        out = products(A)(v)
        if calls == 2:
            out[0, 0] = math.nan
        return out

    assert list(solver(poisoned, b).status) == [Status.NOT_FINITE] + [Status.CONVERGED] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_solver
def test_right_hand_side_that_is_not_finite(solver: AbstractLinearSolver, bad: float) -> None:
    A, b = nonsymmetric(), gaussian(4, 25, seed=1)
    b[2, 3] = bad
    solution = solver(products(A), b)
    assert list(solution.status) == [Status.CONVERGED] * 2 + [Status.NOT_FINITE] + [Status.CONVERGED]
    assert not solution.value[2].any() and solution.residual[2] == math.inf and solution.num_steps[2] == 0


@every_dtype
@every_solver
def test_singular_matrix_in_one_sample(solver: AbstractLinearSolver, dtype: torch.dtype) -> None:
    # Sample 1: diag(1, ..., 1, 0) and b with a part outside its range; nobody can get below 1 / sqrt(10).
    A = torch.stack([torch.eye(10)] * 3).to(dtype)
    A[1, 9, 9] = 0.0
    b = torch.ones(3, 10, dtype=dtype)
    solution = solver(products(A), b, rtol=1e-5, max_steps=50)
    assert solution.converged.tolist() == [True, False, True]
    assert torch.isfinite(solution.value).all()
    assert 0.31622 <= solution.residual[1] <= 1.0
    expected = Status.DIVERGED if solver == DenseSolve() else Status.MAX_STEPS
    assert solution.status[1] is expected
    if isinstance(solver, GMRES):
        assert solution.residual[1].item() == pytest.approx(10**-0.5, rel=1e-5)


@every_dtype
def test_gmres_leaves_out_the_column_that_shows_singularity(dtype: torch.dtype) -> None:
    # A = diag(1, N) with N nilpotent. Two steps reach the least residual, e_3; the third column is dependent,
    # and dividing by its pivot (zero, or rounding) would ruin the correction.
    A = torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]], dtype=dtype)
    b = torch.tensor([[1.0, 0.0, 1.0]], dtype=dtype)
    solution = GMRES()(products(A), b, max_steps=20)
    assert list(solution.status) == [Status.MAX_STEPS]
    assert solution.residual.item() == pytest.approx(0.5**0.5, rel=1e-6)


@every_solver
def test_zero_matrix(solver: AbstractLinearSolver) -> None:
    solution = solver(torch.zeros_like, torch.ones(2, 3), max_steps=20)
    assert not solution.converged.any() and not solution.value.any() and solution.residual.tolist() == [1.0, 1.0]


@every_krylov
def test_singular_but_consistent(solver: AbstractLinearSolver) -> None:
    A = torch.diag(torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0], dtype=torch.float64))[None]
    b = torch.tensor([[1.0, 1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    solution = solver(products(A), b, rtol=1e-12)
    assert solution.converged.all()
    assert torch.allclose(solution.value, torch.tensor([[1.0, 1 / 2, 1 / 3, 0.0, 0.0]], dtype=torch.float64))


@every_dtype
def test_neumann_detects_divergence(dtype: torch.dtype) -> None:
    # J = 0.5 I, 2 I and -1e20 I; residuals are powers of these.
    J = torch.tensor([0.5, 2.0, -1e20], dtype=dtype)[:, None]
    solution = Neumann()(lambda v: v - J * v, torch.ones(3, 4, dtype=dtype), rtol=1e-5)
    assert list(solution.status)[:2] == [Status.CONVERGED, Status.DIVERGED]
    assert solution.status[2] in (Status.DIVERGED, Status.NOT_FINITE)
    assert solution.num_steps[1] == 14  # 2^14 > 1e4
    assert not solution.value[1:].any() and solution.residual[1:].tolist() == [1.0, 1.0]
    patient = Neumann(growth_limit=1e8)(lambda v: v - J * v, torch.ones(3, 4, dtype=dtype), rtol=1e-5)
    assert patient.num_steps[1] == 27


def test_neumann_survives_transient_growth() -> None:
    # Nilpotent J with norm 5: the residual grows to 5^3 before it vanishes.
    J = 5 * torch.diag(torch.ones(3, dtype=torch.float64), 1)
    b = torch.eye(4, dtype=torch.float64)[3:]
    solution = Neumann()(lambda v: v - v @ J.T, b)
    assert solution.converged.all() and solution.num_steps.item() == 4


@every_dtype
@every_krylov
def test_ill_conditioned_is_solved_or_reported(solver: AbstractLinearSolver, dtype: torch.dtype) -> None:
    Q = orthogonal(2, 30)
    spectrum = torch.logspace(0, -12, 30, dtype=torch.float64)
    A = (Q @ torch.diag(spectrum) @ Q.transpose(1, 2)).to(dtype)
    b = gaussian(2, 30, seed=1).to(dtype)
    solution = solver(products(A), b, rtol=1e-6, max_steps=100)
    reached = true_residual(A, b, solution.value)
    assert torch.isfinite(solution.value).all()
    assert (reached <= 1.0 + 1e-5).all()
    assert torch.equal(solution.converged, solution.residual <= 1e-6)


@every_dtype
@every_solver
def test_every_magnitude(solver: AbstractLinearSolver, dtype: torch.dtype) -> None:
    # Squares of 1e-30 vanish in float32 and those of 1e30 overflow.
    A, x = nonsymmetric().to(dtype), gaussian(4, 25, seed=1).to(dtype)
    scale = torch.tensor([1e-30, 1.0, 1e10, 1e30], dtype=dtype)[:, None]
    if dtype == torch.float64:
        scale = scale**9
    b = products(A)(x)
    solution = solver(products(A), b * scale, rtol=1e-5)
    assert solution.converged.all()
    reference = solver(products(A), b, rtol=1e-5)
    assert torch.allclose(solution.value / scale, reference.value, atol=1e-4)


def test_solution_too_large_for_its_dtype() -> None:
    solution = GMRES()(lambda v: 1e-3 * v, torch.full((2, 3), 1e37).mul_(torch.tensor([[1.0], [1e-10]])))
    assert list(solution.status) == [Status.NOT_FINITE, Status.CONVERGED]
    assert not solution.value[0].any() and solution.residual[0] == 1.0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    m=st.integers(1, 8),
    rank=st.integers(0, 8),
    log_scale=st.sampled_from([-10, -1, 0, 1, 10]),
    shift=st.sampled_from([0.0, 1.0]),
    max_steps=st.integers(1, 40),
    guess=st.booleans(),
)
def test_reports_are_honest(seed: int, m: int, rank: int, log_scale: int, shift: float, max_steps: int, guess: bool) -> None:
    A = gaussian(3, m, rank, seed=seed) @ gaussian(3, rank, m, seed=seed + 1) * 10.0**log_scale
    A = A + shift * torch.eye(m, dtype=torch.float64)
    b = gaussian(3, m, seed=seed + 2)
    x0 = gaussian(3, m, seed=seed + 3) if guess else None
    for solver in SOLVERS:
        solution = solver(products(A), b, x0, rtol=1e-8, max_steps=max_steps)
        reached = true_residual(A, b, solution.value)
        rounding = 1e-14 * (1 + A.norm(dim=(1, 2)) * solution.value.norm(dim=1) / b.norm(dim=1))
        assert ((solution.residual - reached).abs() <= rounding).all(), solver
        assert torch.equal(solution.converged, solution.residual <= 1e-8), solver
        assert (solution.residual <= 1.0).all(), solver
        if x0 is not None:
            assert (reached <= true_residual(A, b, x0) + rounding).all(), solver
        assert (solution.num_steps <= max_steps).all(), solver


# --- the border ---------------------------------------------------------------------------------------------


@every_solver
def test_no_graph_and_no_change_of_arguments(solver: AbstractLinearSolver) -> None:
    A = nonsymmetric().requires_grad_()
    b, x0 = gaussian(4, 25, seed=1).requires_grad_(), gaussian(4, 25, seed=2).requires_grad_()
    before = b.detach().clone(), x0.detach().clone()
    solution = solver(products(A), b, x0, rtol=1e-8)
    assert not solution.value.requires_grad and not solution.residual.requires_grad
    assert torch.equal(b.detach(), before[0]) and torch.equal(x0.detach(), before[1])
    with torch.no_grad():
        assert torch.equal(solver(products(A), b, x0, rtol=1e-8).value, solution.value)


@every_solver
def test_products_may_be_vector_jacobian_products(solver: AbstractLinearSolver) -> None:
    W = 0.5 * orthogonal(1, 6)[0]
    z = gaussian(2, 6).requires_grad_()
    f = torch.tanh(z @ W.T)
    v = gaussian(2, 6, seed=1)
    solution = solver(lambda u: u - torch.autograd.grad(f, z, u, retain_graph=True)[0], v, rtol=1e-12)
    assert solution.converged.all()
    D = 1 - f.detach() ** 2
    I_minus_J = torch.eye(6, dtype=torch.float64) - D[:, :, None] * W
    expected = torch.stack([torch.linalg.solve(a.T, c) for a, c in zip(I_minus_J, v, strict=True)])
    assert torch.allclose(solution.value, expected, atol=1e-10)


@every_solver
def test_product_that_returns_its_argument(solver: AbstractLinearSolver) -> None:
    b = gaussian(2, 5)
    solution = solver(lambda v: v, b, rtol=1e-14)
    assert solution.converged.all() and torch.allclose(solution.value, b, atol=1e-15)


@every_solver
def test_empty_shapes(solver: AbstractLinearSolver) -> None:
    for shape in ((0, 4), (3, 0), (0, 0)):
        for x0 in (None, torch.zeros(shape)):
            solution = solver(lambda v: v, torch.zeros(shape), x0)
            assert solution.value.shape == shape and len(solution.status) == shape[0]
            assert solution.converged.all()
    assert "empty" in repr(solver(lambda v: v, torch.zeros(0, 4)))


def test_repr_tells_the_outcome() -> None:
    J = torch.tensor([[0.5], [2.0]])
    solution = Neumann()(lambda v: v - J * v, torch.ones(2, 4), rtol=1e-5)
    assert isinstance(solution, LinearSolution)
    assert repr(solution) == (
        "LinearSolution(StatusArray(CONVERGED: 1, DIVERGED: 1), largest residual 1.00e+00, most steps 17)"
    )


@every_solver
@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((lambda v: v, torch.ones(3)), {}, r"b must have shape \(batch, m\), got \(3,\)"),
        ((lambda v: v, torch.ones(3, 2, 2)), {}, r"got \(3, 2, 2\).*flatten"),
        ((lambda v: v, torch.ones(3, 2, dtype=torch.float16)), {}, "float32 or float64, got torch.float16"),
        ((lambda v: v, torch.ones(3, 2, dtype=torch.int64)), {}, "float32 or float64, got torch.int64"),
        ((lambda v: v, torch.ones(3, 2), torch.ones(3, 1)), {}, r"x0 must match b.*\(3, 2\).*\(3, 1\)"),
        ((lambda v: v, torch.ones(3, 2), torch.ones(3, 2).double()), {}, "x0 must match b.*float64"),
        ((lambda v: v[:, :1], torch.ones(3, 2)), {}, r"matvec\(v\) must keep.*\(3, 2\).*\(3, 1\)"),
        ((lambda v: v.double(), torch.ones(3, 2)), {}, "must keep the shape and dtype.*float64"),
        ((lambda v: None, torch.ones(3, 2)), {}, "must keep the shape.*NoneType"),
        ((lambda v: v, torch.ones(3, 2)), {"rtol": -1.0}, "rtol must be a finite number >= 0. Got -1.0"),
        ((lambda v: v, torch.ones(3, 2)), {"atol": math.nan}, "atol must be a finite number >= 0. Got nan"),
        ((lambda v: v, torch.ones(3, 2)), {"max_steps": 0}, "max_steps must be an integer >= 1. Got 0"),
        ((lambda v: v, torch.ones(3, 2)), {"max_steps": 2.5}, "max_steps must be an integer >= 1. Got 2.5"),
        ((lambda v: v, torch.ones(3, 2)), {"rtol": torch.ones(2)}, r"rtol .* per sample.*\(3,\).*\(2,\)"),
        ((lambda v: v, torch.ones(3, 2)), {"max_steps": torch.ones(3, 1)}, r"max_steps .* per sample"),
    ],
)
def test_bad_input(solver: AbstractLinearSolver, arguments: tuple, options: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        solver(*arguments, **options)


@every_solver
def test_wrong_kind(solver: AbstractLinearSolver) -> None:
    with pytest.raises(InvalidType, match="matvec must be a function.*got Tensor"):
        solver(torch.eye(2), torch.ones(1, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="b must be a torch.Tensor, got list"):
        solver(lambda v: v, [[1.0]])  # type: ignore[arg-type]


@pytest.mark.parametrize("restart", [0, -1, 2.5])
def test_gmres_parameters(restart: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"'restart' parameter of GMRES.*Got {restart}"):
        GMRES(restart=restart)  # type: ignore[arg-type]


@pytest.mark.parametrize("growth_limit", [1.0, -1.0, math.nan])
def test_neumann_parameters(growth_limit: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"'growth_limit' parameter of Neumann.*Got {growth_limit}"):
        Neumann(growth_limit=growth_limit)


def test_the_interface_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        AbstractLinearSolver()  # type: ignore[abstract]
