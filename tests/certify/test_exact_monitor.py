"""The monitor's incremental bounds along real descents: against exact values in 60 digits and against bounds from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from mpmath import mp
from torch import Tensor

import wellposed as wp
from certificate_problems import FAMILIES, problem
from exact_networks import DIGITS, exact, largest_singular_value, least_singular_value, norm, number, point_of, row_norms
from exact_theorems import check_descent_theorem, check_flow_theorem, check_plain_descent_theorem
from wellposed.certify import Certificate
from wellposed.certify._gate import check_data
from wellposed.certify.measurement import Measurement, measure
from wellposed.certify.monitor import IncrementalMeasure
from wellposed.certify.radius_certificate import radius_at

SHARPENINGS: tuple[tuple[str, ...], ...] = ((), ("active", "kernel"))


@pytest.fixture(autouse=True)
def digits() -> Iterator[None]:
    with mp.workdps(DIGITS):
        yield


def drawn(seed: int) -> tuple[str, Any, Tensor, Tensor]:
    family, g = FAMILIES[seed % 4], torch.Generator().manual_seed(seed)
    n, d, m = (int(torch.randint(low, high, (), generator=g)) for low, high in ((2, 5), (4, 7), (8, 15)))
    model, X, y = problem(family, seed, n, d, m)
    if seed // 4 % 3 == 0:
        model, X, y = model.float(), X.float(), y.float()
        model.layer.rtol = 1e-6
    return family, model, X, y


@dataclass
class Compare:
    """Every few steps: the incremental bounds on their side of the exact values, and not far from bounds made from scratch.

    Attributes:
        points: How many points were compared.
        certified: How many certificates held at them.
        loosest: The largest relative loss against bounds from scratch.
    """

    family: str
    X: Tensor
    y: Tensor
    incremental: IncrementalMeasure
    every: int
    sharpen: tuple[str, ...]
    plain_flow: bool = False
    points: int = 0
    certified: int = 0
    loosest: float = 0.0
    decompositions: list[int] = field(default_factory=list)

    def on_step(self, state: Any) -> None:
        at = self.incremental(state.model, state.point)  # at every step, as references age by steps
        self.decompositions.append(self.incremental.decompositions)
        if state.step % self.every:
            return
        X, y = check_data(state.model, self.X, self.y)
        scratch = measure(state.model, X, y)
        assert isinstance(at, Measurement) and isinstance(scratch, Measurement)
        self.points += 1
        point = point_of(at.model, X, y)
        above = {
            "contraction": largest_singular_value(point.R),
            "Z_norm": largest_singular_value(point.Z),
            "F_norm": largest_singular_value(point.features),
            "X_norm": largest_singular_value(point.X),
            "residual": norm(point.r),
        }
        for name, truth in above.items():
            assert number(getattr(at, name)) >= truth, name
            assert number(getattr(scratch, name)) >= truth, name
        below = {"Z_least": least_singular_value(point.Z), "F_least": least_singular_value(point.features)}
        for name, truth in below.items():
            assert 0 <= number(getattr(at, name)) <= truth, name
        errors = row_norms(exact(at.Z) - point.Z)
        assert all(number(float(bound)) >= error for bound, error in zip(at.z_error, errors, strict=True))
        assert number(at.v_error) >= abs(exact(at.V) - point.V).max() and number(at.r_error) >= norm(exact(at.r) - point.r)
        if not self.plain_flow:  # there nothing is decomposed far from a proof
            self._loss(at, scratch)
        for certificate in self._certificates(at):
            self.certified += certificate.certified
            if certificate.certified and certificate.dynamics == "flow":
                check_flow_theorem(point, at, certificate, self.sharpen)
            elif certificate.certified:
                check = check_descent_theorem if point.network.readout else check_plain_descent_theorem
                check(point, at, certificate, self.sharpen)

    def _loss(self, at: Measurement, scratch: Measurement) -> None:
        """What Weyl's inequality may lose: the drift is at most 5 per cent of s_0 = sigma_min(F_0) and of 1 - |R_0|.

        So the bound is at least 0.95 s_0, and the truth at most 1.05 s_0; |F| is at most |F_0| + 0.05 s_0, and at least
        |F_0| - 0.05 s_0, where 0.95 s_0 is at most the truth. What the equilibria of training are off is taken off too.
        """
        error = 4 * at.z_error_F + 2 * scratch.z_error_F
        assert at.F_least >= 0.95 / 1.05 * scratch.F_least * (1 - 1e-9) - error
        assert at.F_norm <= scratch.F_norm + 2 * 0.05 / 0.95 * scratch.F_least * (1 + 1e-9) + error
        if self.family != "monotone":
            assert 1 - at.contraction >= 0.95 / 1.05 * (1 - scratch.contraction) * (1 - 1e-9)
        self.loosest = max(self.loosest, 1 - at.F_least / scratch.F_least if scratch.F_least else 0.0)

    def _certificates(self, at: Measurement) -> list[Certificate]:
        if self.plain_flow:
            return [radius_at(at, "flow", 1.0, self.sharpen)]
        return [radius_at(at, "flow", "largest", self.sharpen), radius_at(at, "descent", "largest", self.sharpen)]


def descended(seed: int, steps: int, every: int) -> Compare:
    family, model, X, y = drawn(seed)
    sharpen, plain_flow = SHARPENINGS[seed // 2 % 2], seed // 8 % 2 == 0
    incremental = IncrementalMeasure(model, X, y, plain_flow=plain_flow)
    compare = Compare(family, X, y, incremental, every, sharpen if not plain_flow else (), plain_flow)
    step = 1 / float(torch.linalg.eigvalsh(wp.kernel.tangent_kernel(model, X).double())[-1])
    wp.descend(model, X, y, step_size=step, steps=steps, callbacks=[compare])
    return compare


@pytest.mark.parametrize("seed", [1, 8, 12, 15])
def test_bounds_along_a_descent(seed: int) -> None:
    compare = descended(seed, 12, 6)
    assert compare.points == 3


@pytest.mark.parametrize("family", ["gaussian", "monotone"])
def test_features_that_shrink_without_a_new_decomposition(family: str) -> None:
    model, X, y = problem(family, 5, 3, 5, 12)
    incremental = IncrementalMeasure(model, X, y)
    incremental(model, model.linearise(X))
    made = incremental.decompositions
    for _ in range(3):
        with torch.no_grad():
            model.U *= 0.9995  # equilibria are homogeneous in U: sigma_min falls by as much
        at = incremental(model, model.linearise(X))
        assert isinstance(at, Measurement) and incremental.decompositions == made
        assert number(at.F_least) <= least_singular_value(point_of(model, X, y).features)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3000, 3096, 16))
def test_hundreds_of_points_along_descents(first: int) -> None:
    found = [descended(seed, 60, 15) for seed in range(first, first + 16)]
    assert sum(compare.points for compare in found) >= 60 and sum(compare.certified for compare in found) >= 20
    # without reuse it would be two a step, of F and of R
    assert sum(compare.decompositions[-1] for compare in found) < 61 * len(found)
