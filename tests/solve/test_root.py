"""root: F(z) = 0 by Newton, and what is said about an F that does not fit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize
from torch import Tensor

import wellposed as wp
from problems import gaussian

EPS = torch.finfo(torch.float64).eps


def test_a_linear_system_is_solved_as_by_lu() -> None:
    A, b = gaussian(6, 6, seed=0) + 4 * torch.eye(6, dtype=torch.float64), gaussian(5, 6, seed=1)
    solution = wp.root(lambda z, b: z @ A.T - b, torch.zeros(5, 6, dtype=torch.float64), args=(b,), rtol=1e-12, atol=0.0)
    exact = torch.linalg.solve(A, b.T).T
    condition = float(torch.linalg.cond(A))
    assert solution.converged.all()
    assert ((solution.value - exact).norm(dim=1) <= 1e-12 * condition * 10 * exact.norm(dim=1)).all()
    measured = (solution.value @ A.T - b).norm(dim=1)
    assert (solution.absolute_residual - measured).abs().max() <= 100 * EPS * b.norm()


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_a_nonlinear_system_agrees_with_scipy(seed: int) -> None:
    W, c = 0.3 * gaussian(3, 3, seed=seed), gaussian(1, 3, seed=seed + 1)

    def F(z: Tensor) -> Tensor:
        return z + z**3 / 3 + torch.sin(z @ W) - c

    solution = wp.root(F, torch.zeros(1, 3, dtype=torch.float64), rtol=1e-11, atol=1e-11, on_failure="raise")
    theirs = optimize.root(lambda z: F(torch.tensor(z).unsqueeze(0))[0].numpy(), solution.value[0].numpy(), tol=1e-12)
    assert theirs.success
    assert abs(solution.value[0].numpy() - theirs.x).max() <= 1e-8  # |J^-1| is at most some tens here


def test_a_root_at_zero_and_a_structure() -> None:
    start = {"a": torch.full((2, 2), 0.4), "b": torch.full((2, 1), 0.3)}
    solution = wp.root(lambda z: {"a": torch.tanh(z["a"]) + 0.1 * z["b"], "b": 2 * z["b"]}, start, on_failure="raise")
    assert solution.value["a"].abs().max() <= 1e-5 and solution.value["b"].abs().max() <= 1e-6


@pytest.mark.parametrize("solver", [wp.Picard(), wp.Anderson(), wp.Broyden(), wp.Auto()], ids=repr)
def test_other_solvers(solver: wp.solve.AbstractSolver) -> None:
    solution = wp.root(lambda z: z - torch.cos(z), torch.zeros(2, 1, dtype=torch.float64), solver, on_failure="raise")
    assert (solution.value - 0.7390851332151607).abs().max() <= 1e-5


def test_rows_that_depend_on_each_other() -> None:
    solution = wp.root(lambda z: 3 * z - z.mean(0) - 2, torch.zeros(4, 2), coupled=True, on_failure="raise")
    assert (solution.value - 1).abs().max() <= 1e-5


def test_failures_name_root() -> None:
    with pytest.raises(wp.NotConverged, match=r"^root: 2 of 2 samples did not converge"):
        wp.root(lambda z: z**2 + 1, torch.ones(2, 1), on_failure="raise")


@pytest.mark.parametrize(
    "F",
    [
        pytest.param(lambda z: z**2 + 1, id="no root"),
        pytest.param(lambda z: z + torch.rand_like(z), id="random"),
        pytest.param(lambda z: torch.full_like(z, torch.nan), id="NaN"),
        pytest.param(lambda z: z.flip(0) ** 2 + torch.tensor([[1.0], [2.0], [3.0]]), id="coupled rows"),
        pytest.param(lambda z: 1e4 * z**3 + 1, id="steep"),
    ],
)
def test_failures_speak_of_F(F: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(wp.NotConverged) as caught:
        wp.root(F, torch.ones(3, 1), on_failure="raise", max_steps=4)
    for words in (str(caught.value), wp.root(F, torch.ones(3, 1), on_failure="ignore", max_steps=4).note):
        assert not re.search(r"\bf\b|groups|[Cc]ontract|fixed point", words), words


@pytest.mark.parametrize(
    ("F", "message"),
    [
        (lambda z: z[:, :1], r"as many equations as unknowns.*expected \(3, 2\), got \(3, 1\).*minimise"),
        (lambda z: z.sum(), r"expected \(3, 2\), got \(\)"),
        (lambda z: (z, z), r"expected \(3, 2\), got tuple"),
        (lambda z: z + 1j, r"expected entries of torch.float32, got torch.complex64"),
        ("F", r"F must be callable; got str"),
    ],
)
def test_a_function_that_does_not_fit(F: object, message: str) -> None:
    with pytest.raises(wp.WellposedError, match=message):
        wp.root(F, torch.ones(3, 2))


def test_a_flat_function_is_reported() -> None:
    """|F| = 2e-9 is below every tolerance at the start, and yet the start is not a root."""
    with pytest.warns(
        wp.errors.WellposedWarning, match=r"root: .* changes by only 1.0e-09 times .* Multiply F by about 1e\+09"
    ):
        solution = wp.root(lambda z: 1e-9 * (z - 3), torch.ones(3, 2))
    assert "Multiply F" in solution.note
    again = wp.root(lambda z: z - 3, torch.ones(3, 2))
    assert again.note == "" and (again.value - 3).abs().max() <= 1e-5


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("atol", [1e-12, 1e-6])
def test_the_residual_is_that_of_F_also_where_it_is_below_the_digits_of_z(atol: float, coupled: bool) -> None:
    start = torch.full((2, 1), 1.2999)
    solution = wp.root(lambda z: 0.02 * (z - 1.3), start, rtol=0, atol=atol, coupled=coupled, on_failure="ignore")
    measured = (0.02 * (solution.value - 1.3)).norm(dim=None if coupled else 1).expand(2)
    assert 0 < measured[0] < 1e-7
    torch.testing.assert_close(solution.absolute_residual, measured)
    assert solution.converged.tolist() == [atol > 1e-7] * 2
    assert ("|F(z)| is" in solution.note) == (atol < 1e-7)


def test_a_tolerance_that_z_cannot_show_is_told() -> None:
    with pytest.raises(wp.NotConverged, match=r"root: 1 of 2 samples .* of sample 1 \|F\(z\)\| is .* Multiply F"):
        start = torch.tensor([[1.3], [1.2999]])
        wp.root(lambda z: 0.02 * (z - 1.3), start, rtol=0, atol=1e-12, on_failure="raise")


@pytest.mark.parametrize("rows", [0, 2])
def test_a_function_without_derivatives_is_measured_too(rows: int) -> None:
    def F(z: Tensor) -> Tensor:
        return torch.from_numpy(z.numpy() - 3)

    solution = wp.root(F, torch.ones(rows, 1), wp.Picard(), on_failure="raise")
    assert solution.absolute_residual.tolist() == [0.0] * rows and solution.note == ""


def test_inside_transforms() -> None:
    with pytest.raises(wp.WellposedError, match="root needs concrete values"):
        torch.func.vmap(lambda z: wp.root(lambda y: y - 1, z).value)(torch.zeros(2, 3, 1))


def test_inference_mode_changes_no_root() -> None:
    start = torch.full((1, 1), 1.5, dtype=torch.float64)
    outside = wp.root(lambda z: z**3 - 8, start)
    with torch.inference_mode():
        inside = wp.root(lambda z: z**3 - 8, start)
    assert torch.equal(inside.value, outside.value) and torch.equal(inside.num_steps, outside.num_steps) and not inside.note


def test_advice_about_a_tolerance_of_zero_needs_no_atol() -> None:
    with pytest.raises(wp.errors.NotConverged) as failure:
        wp.root(lambda z: z**2 + 1, torch.ones(1, 1, dtype=torch.float64), rtol=0.0, max_steps=100, on_failure="raise")
    assert "raise rtol" not in str(failure.value)
