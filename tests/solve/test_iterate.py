"""The loop by itself: what it counts, keeps and returns."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from conformance import EVALUATING, CountingMap, short
from problems import Problem, flat, gaussian, problem
from wellposed import Status
from wellposed._tree import Layout, relative, scaled_norm
from wellposed.solve.loop import iterate
from wellposed.solve.map import FunctionMap
from wellposed.solve.newton import backtrack
from wellposed.solve.solution import judge
from wellposed.solve.solver import Point, Tolerance

TIGHT = Tolerance(1e-10, 0.0)


def test_a_known_first_value_counts_all_the_same() -> None:
    p = problem("affine")
    f = CountingMap(p)
    given = iterate(f, p.z0, wp.Picard(), tolerance=TIGHT, max_steps=1000, first=p.image(p.z0))
    plain = iterate(CountingMap(p), p.z0, wp.Picard(), tolerance=TIGHT, max_steps=1000)
    assert torch.equal(given.steps, plain.steps) and torch.equal(given.value, plain.value)
    assert torch.equal(f.counts, given.steps - 1)


@pytest.mark.parametrize("solver", [*EVALUATING, wp.NewtonKrylov(), wp.Auto()], ids=short)
@pytest.mark.parametrize("max_steps", [1, 3, 400])
@pytest.mark.parametrize("name", ["spread", "expanding", "monotone"])
def test_the_image_belongs_to_the_value(solver: wp.solve.AbstractSolver, max_steps: int, name: str) -> None:
    p = problem(name)
    for f in (CountingMap(p), *([p.dense_map()] if p.matrix is not None else [])):
        outcome = iterate(f, p.z0, solver, tolerance=TIGHT, max_steps=max_steps, keep_image=True)
        assert outcome.image is not None
        assert torch.allclose(outcome.image, p.image(outcome.value), rtol=1e-12, atol=1e-12)
        assert torch.allclose((outcome.image - outcome.value).norm(dim=1), outcome.g_norm, rtol=1e-4, atol=1e-13)


def test_judge_measures_with_one_evaluation() -> None:
    p = problem("affine")
    f = CountingMap(p)
    z = p.solution.clone()
    z[1] += 1
    outcome = judge(f, z, Tolerance(1e-6, 0.0), steps=17)
    assert f.counts.tolist() == [1] * 4 and outcome.steps.tolist() == [17] * 4
    assert outcome.codes.tolist() == [Status.CONVERGED, Status.MAX_STEPS, Status.CONVERGED, Status.CONVERGED]
    assert torch.equal(outcome.value, z)
    assert torch.allclose(outcome.g_norm, p.residual(z)[0], rtol=1e-9, atol=1e-14)


def test_growth_is_called_divergence() -> None:
    """2 z + 1 from 0: |f(z) - z| = 2^k first exceeds 1e8 at k = 27, the 28th evaluation."""
    p = problem("expanding")
    outcome = iterate(CountingMap(p), p.z0, wp.Picard(), tolerance=TIGHT, max_steps=200)
    assert outcome.codes.tolist() == [Status.DIVERGED] * 4 and outcome.steps.tolist() == [28] * 4
    assert torch.allclose(outcome.rate, torch.tensor(2.0).double())


def test_tolerance() -> None:
    norms = torch.tensor([0.0, 1.0, 100.0])
    assert Tolerance(0.1, 0.0).target(norms).tolist() == pytest.approx([0, 0.1, 10])
    assert Tolerance(0.1, 1.0).target(norms).tolist() == pytest.approx([1, 1, 10])


def test_relative() -> None:
    g, f = torch.tensor([0.0, 0.0, 1.0, 1.0, torch.nan]), torch.tensor([0.0, 2.0, 0.0, 4.0, 1.0])
    assert relative(g, f).tolist()[:4] == [0.0, 0.0, torch.inf, 0.25] and relative(g, f)[4].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_scaled_norm_is_right_at_every_size(dtype: torch.dtype) -> None:
    v = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-3.0, 4.0]], dtype=dtype)
    largest = 1e30 if dtype == torch.float32 else 1e300
    for scale in (1.0, 1 / largest, largest):
        assert torch.allclose(scaled_norm(v * scale) / scale, torch.tensor([5.0, 0.0, 5.0], dtype=dtype), rtol=1e-5)
    odd = scaled_norm(torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0]], dtype=dtype))
    assert odd[0] == torch.inf and odd[1].isnan()
    assert scaled_norm(torch.zeros(3, 0, dtype=dtype)).tolist() == [0, 0, 0]


def point_at(z: Tensor, fz: Tensor, *, evaluations: list[int], max_steps: int) -> Point:
    g = fz - z
    r = g.norm(dim=1)
    return Point(z, fz, g, r, 0 * r, torch.tensor(evaluations), max_steps)


def test_backtracking_is_each_samples_own() -> None:
    """g(z) = -z, directions too long by 1, 3, 9: t = 1, then 1/2, then 1/8 are the first that do not increase |g|."""
    z = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64)
    p = Problem("half", lambda z: 0.0 * z, (), z, None, 0.0, 1.0)
    f = CountingMap(p)
    direction = torch.tensor([[-1.0], [-3.0], [-9.0]], dtype=torch.float64)
    point = point_at(z, f.tracked(z), evaluations=[1, 1, 1], max_steps=100)
    step = backtrack(f, point, direction, accept=point.r, halvings=5, used=torch.zeros(3, dtype=torch.int64))
    assert step.z.flatten().tolist() == [0.0, -0.5, -0.125]
    assert torch.equal(step.fz, p.f(step.z))
    assert step.evaluations.tolist() == f.counts.tolist() == [1, 2, 4]  # type: ignore[union-attr]


def test_backtracking_keeps_the_best_try_and_the_budget() -> None:
    z = torch.tensor([[1.0], [1.0]], dtype=torch.float64)
    p = Problem("half", lambda z: 0.0 * z, (), z, None, 0.0, 1.0)
    f = CountingMap(p)
    direction = torch.tensor([[100.0], [100.0]], dtype=torch.float64)
    point = point_at(z, f.tracked(z), evaluations=[1, 8], max_steps=10)
    step = backtrack(f, point, direction, accept=0.5 * point.r, halvings=4, used=torch.zeros(2, dtype=torch.int64))
    assert step.z.flatten().tolist() == [1 + 100 / 16, 1 + 100 / 2]  # the second could afford one halving only
    assert step.evaluations.tolist() == f.counts.tolist() == [5, 2]  # type: ignore[union-attr]


def test_backtracking_from_nan() -> None:
    z = torch.tensor([[4.0]], dtype=torch.float64)
    f = FunctionMap(torch.sqrt, Layout.of(z, "z0"))
    point = point_at(z, f(z), evaluations=[1], max_steps=100)
    step = backtrack(f, point, torch.tensor([[-6.0]]).double(), accept=point.r, halvings=5, used=torch.zeros(1).long())
    assert step.z.item() == 1.0 and step.fz.item() == 1.0


def test_a_large_run_is_the_sum_of_its_samples() -> None:
    """Many samples, so that idle ones linger before they are compacted away: every one as if it were alone."""
    n, batch = 5, 150
    q = torch.rand(batch, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 1.05
    Q = torch.linalg.qr(gaussian(n, n, seed=6))[0]
    c = gaussian(batch, n, seed=7)
    p = Problem(
        "many", lambda z, q, c: torch.tanh(q.unsqueeze(1) * (z @ Q.T) + c), (q, c), torch.zeros_like(c), None, 1.05, 1.0
    )
    for solver in (wp.Picard(), wp.Anderson(), wp.Broyden(), wp.Auto()):
        together = wp.fixed_point(p.f, p.z0, solver, args=p.args, rtol=1e-8, on_failure="ignore")
        for i in range(0, batch, 13):
            part = p.take([i])
            alone = wp.fixed_point(part.f, part.z0, solver, args=part.args, rtol=1e-8, on_failure="ignore")
            assert alone.num_steps[0] == together.num_steps[i] and alone.status[0] == together.status[i]
            assert torch.allclose(flat(alone.value)[0], flat(together.value)[i], rtol=1e-9, atol=1e-11)


def test_a_failed_sample_keeps_the_least_absolute_residual_recorded_or_not() -> None:
    values = torch.tensor([0.0, 1.0, 11.0, 20.0, 119.0, 150.0, 350.0])[:, None]  # f of each is the next one

    def f(z: Tensor) -> Tensor:
        return values[(values == z).long().argmax() + 1].expand_as(z)

    for record in (False, True):
        solution = wp.fixed_point(f, torch.zeros(1, 1), wp.Picard(), max_steps=6, on_failure="ignore", record=record)
        assert solution.status[0] is Status.MAX_STEPS and float(solution.value) == 0.0
        assert float(solution.absolute_residual) == 1.0 and float(solution.residual) == 1.0
    assert solution.history is not None and float(solution.history.nan_to_num(9.0).min()) < 0.3  # relative, and later


def test_what_is_returned_does_not_depend_on_record() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 12, generator=generator)
    options: dict[str, Any] = {"args": (x,), "max_steps": 17, "on_failure": "ignore"}
    failed = 0
    for scale in (0.95, 1.5, 3.0):
        W = scale * torch.randn(12, 12, generator=generator) / 12**0.5
        f = functools.partial(lambda W, z, x: torch.tanh(z @ W.T + x), W)
        for solver in (wp.Picard(), wp.Auto(), wp.Anderson(), wp.Broyden()):
            found = [wp.fixed_point(f, 0 * x, solver, record=record, **options) for record in (False, True)]
            assert torch.equal(found[0].status.codes, found[1].status.codes)
            assert torch.allclose(found[0].value, found[1].value, rtol=1e-4, atol=1e-5)
            failed += int((~found[0].converged).sum())
    assert failed > 100
