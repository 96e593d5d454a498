"""What holds for every contraction, every tolerance and every budget."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

import wellposed as wp
from conformance import EVALUATING, SOLVERS, check_honest
from problems import Problem, gaussian, norm, with_norm
from wellposed import Status

solvers = st.sampled_from(SOLVERS)
quick = settings(max_examples=40, deadline=None)


@st.composite
def contractions(draw: st.DrawFn) -> Problem:
    """Affine or ReLU, of any small size, norm and scale, from any start."""
    n, batch = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    q = draw(st.floats(0.0, 0.97))
    seed = draw(st.integers(0, 10**6))
    relu = draw(st.booleans())
    scale = 10.0 ** draw(st.integers(-6, 6))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    W = with_norm(gaussian(n, n, seed=seed), q).to(dtype)
    c = (scale * gaussian(batch, n, seed=seed + 1)).to(dtype)
    z0 = (scale * 10.0 ** draw(st.integers(-3, 3)) * gaussian(batch, n, seed=seed + 2)).to(dtype)
    activation = torch.relu if relu else (lambda v: v)
    exact = norm(W)
    z_star = torch.zeros(batch, n, dtype=torch.float64)
    for _ in range(1500):
        z_star = activation(z_star @ W.double().T + c.double())
    return Problem("random", lambda z, c: activation(z @ W.T + c), (c,), z0, z_star, exact, 1 / (1 - exact))


@quick
@given(contractions(), solvers, st.floats(1e-6, 0.1), st.integers(1, 60))
def test_error_bound_holds(p: Problem, solver: wp.solve.AbstractSolver, rtol: float, max_steps: int) -> None:
    sol = wp.fixed_point(p.f, p.z0, solver, args=p.args, rtol=rtol, max_steps=max_steps, on_failure="ignore")
    distance = p.distance(sol.value)
    assert (distance <= sol.error_bound(p.lipschitz).double() * (1 + 1e-5) + p.conditioning * p.rounding(sol.value)).all()


@quick
@given(contractions(), solvers, st.floats(1e-6, 0.1), st.sampled_from([0.0, 1e-3, 1.0]), st.integers(1, 60))
def test_converged_means_that_the_tolerance_is_met(
    p: Problem, solver: wp.solve.AbstractSolver, rtol: float, atol: float, max_steps: int
) -> None:
    sol = wp.fixed_point(p.f, p.z0, solver, args=p.args, rtol=rtol, atol=atol, max_steps=max_steps, on_failure="ignore")
    met = (sol.residual <= rtol) | (sol.absolute_residual <= atol)
    assert torch.equal(sol.converged, met)
    check_honest(p, sol, rtol=rtol, atol=atol)
    assert (sol.num_steps <= max_steps).all()
    assert (sol.num_steps == max_steps)[sol.status == Status.MAX_STEPS].all()
    assert not ((sol.status == Status.DIVERGED) | (sol.status == Status.NOT_FINITE)).any()


@quick
@given(contractions())
def test_plain_steps_contract(p: Problem) -> None:
    sol = wp.fixed_point(p.f, p.z0, wp.Picard(), args=p.args, max_steps=25, on_failure="ignore", record=True)
    enough = sol.absolute_residual.double() > 100 * p.rounding(sol.value)
    assert (sol.rate.double() <= p.lipschitz * (1 + 1e-3))[enough & (sol.num_steps > 1)].all()


@quick
@given(contractions(), st.sampled_from(EVALUATING), st.integers(0, 10**6))
def test_neighbours_do_not_matter(p: Problem, solver: wp.solve.AbstractSolver, seed: int) -> None:
    """The residual a sample is returned with does not depend on the order of the batch."""
    order = torch.randperm(p.batch, generator=torch.Generator().manual_seed(seed))
    options = {"rtol": 1e-4, "max_steps": 40, "on_failure": "ignore"}
    straight = wp.fixed_point(p.f, p.z0, solver, args=p.args, **options)  # type: ignore[arg-type]
    part = p.take(order)
    mixed = wp.fixed_point(part.f, part.z0, solver, args=part.args, **options)  # type: ignore[arg-type]
    assert (
        torch.equal(mixed.value, straight.value[order])
        or (
            (mixed.value - straight.value[order]).norm(dim=1).double()
            <= p.conditioning * (mixed.absolute_residual + straight.absolute_residual[order]).double()
            + p.conditioning * part.rounding(mixed.value)
        ).all()
    )


@quick
@given(st.integers(0, 10**6), solvers, st.integers(1, 5), st.integers(1, 5))
def test_maps_that_do_not_contract_are_reported_honestly(
    seed: int, solver: wp.solve.AbstractSolver, batch: int, n: int
) -> None:
    """Random expansions of any kind: whatever the status, the residual is that of the value."""
    W = 3 * gaussian(n, n, seed=seed)
    c = gaussian(batch, n, seed=seed + 1)
    p = Problem("wild", lambda z, c: torch.sin(z @ W.T) * 5 + c, (c,), torch.zeros_like(c), None, 5 * norm(W), 1.0)
    sol = wp.fixed_point(p.f, p.z0, solver, args=p.args, rtol=1e-6, max_steps=40, on_failure="ignore")
    check_honest(p, sol, rtol=1e-6)
