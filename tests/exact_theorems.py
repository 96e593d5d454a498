"""Theorems 1 to 3 of docs/certificates.md in 60 digits: their hypotheses at the radii, steps and rates of a certificate.

Written from that page, not from the library. The vectors that were found in float64, z_f and p_f, are data like the
parameters: the bound of the Jacobian is about them, with their exact distance from the true ones.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
from mpmath import mp

import wellposed as wp
from exact_networks import (
    Array,
    ExactPoint,
    exact,
    largest_of_symmetric_part,
    largest_singular_value,
    least_root,
    least_singular_value,
    norm,
    number,
    row_norms,
)
from wellposed.certify import Certificate
from wellposed.certify._radius_search import FLOW_PARTS
from wellposed.certify.measurement import Measurement


@dataclass
class Change:
    """By sample: |dz_i|, |dp_i| and |(v + R^T p_i)_T|; |J' - J|_F; whether a unit may flip."""

    equilibria: Array
    adjoints: Array
    flips: Array
    jacobian: Any
    flippable: Array


@functools.lru_cache(maxsize=4)
def _numbers(point: ExactPoint) -> dict[str, Any]:
    """What does not depend on a radius."""
    k, scale = point.network.scales
    both = np.concatenate([k * point.Z, scale * point.X], axis=1)
    norms = {name: largest_singular_value(getattr(point, name)) for name in "ZXR"}
    least = {"inputs": point.X, "both": both, "features": point.features}
    rows = {"z": row_norms(point.Z), "x": row_norms(point.X), "rows": row_norms(point.R)}
    return (
        norms
        | rows
        | {name: least_singular_value(M) for name, M in least.items()}
        | {"omega": largest_of_symmetric_part(point.R)}
    )


class ExactContraction:
    """The sensitivities of GaussianDEQ, SkipDEQ and ImplicitOnlyDEQ, within `hidden` of the present hidden parameters."""

    def __init__(self, point: ExactPoint, at: Measurement, sharpen: tuple[str, ...], hidden: Any) -> None:
        network = point.network
        self.point, self.at, self.sharpen, self.hidden = point, at, sharpen, hidden
        self.skip, self.readout = network.kind is wp.SkipDEQ, bool(network.readout)
        self.k, self.l = network.scales
        self.known = known = _numbers(point)
        self.B, self.b, self.norm, self.omega = (known[name] for name in ("Z", "X", "R", "omega"))
        self.z, self.x = known["z"], known["x"]
        if "active" in sharpen:
            for _ in range(2):
                possible, _ = self.reach()
                sets = [np.flatnonzero(row) for row in possible]
                self.omega = max([mp.mpf(0), *(largest_of_symmetric_part(point.R[np.ix_(S, S)]) for S in sets)])
                if not self.readout:
                    self.norm = min(self.norm, max(largest_singular_value(point.R[np.ix_(S, S)]) for S in sets))

    def factor(self, moved: Any) -> Any:
        omega = self.omega + self.k * moved
        assert omega < 1, "a certificate without exactly one equilibrium"
        return 1 / (1 - omega)

    def jump(self, moved: Any) -> Any:
        """Of a vector that no mask precedes."""
        q = self.norm + self.k * moved
        return min(1 + q * self.factor(moved), 1 / (1 - q) if q < 1 else mp.inf)

    def moved(self) -> Array:
        return np.array([self.hidden * mp.hypot(self.k * z, self.l * x) for z, x in zip(self.z, self.x, strict=True)])

    def reach(self) -> tuple[Array, Array]:
        """Units that may be active somewhere in the ball, and those that are active everywhere."""
        moved = self.moved()
        rows = self.known["rows"] + self.k * self.hidden
        reach = np.outer(moved * self.factor(self.hidden), rows) + moved[:, None]
        return self.point.V >= -reach, self.point.V > reach

    def least(self, R: Any, h: Any) -> Any:
        """s: the best of the lower bounds of sqrt(lambda_min(K)) that are switched on."""
        drift = self.hidden * mp.hypot(self.k * self.B, self.l * self.b) * self.factor(self.hidden)
        features = mp.hypot(drift, self.l * self.hidden * self.b) if self.skip else drift
        simple = self.known["features"] - features
        if self.readout and ("kernel" not in self.sharpen or self.skip):
            return simple
        jacobian = least_root(self.found_gram(h)) - self.change(R, h).jacobian
        if not self.readout:
            return jacobian
        inputs = max(self.l * self.known["inputs"], self.known["both"] - self.k * drift)
        share = h * self.least_adjoint(R) ** 2 * inputs**2
        return max(mp.sqrt(max(mp.mpf(0), simple) ** 2 + share), jacobian)

    def least_adjoint(self, R: Any) -> Any:
        """Of min |p_i|: by norms, and with "active" at most the least p on S with p_Q = v_Q + (R^T p)_Q."""
        possible, sure = self.reach()
        v, found = self.point.network.weight(), []
        for S, Q in zip(map(np.flatnonzero, possible), map(np.flatnonzero, sure), strict=True):
            best = max(mp.mpf(0), norm(v[Q]) - R) / (1 + self.norm + self.k * self.hidden)
            if "active" in self.sharpen and len(Q):
                B = (np.eye(len(v), dtype=int) - self.point.R)[np.ix_(S, Q)]
                w = np.array(mp.lu_solve(mpmath.matrix((B.T @ B).tolist()), mpmath.matrix(v[Q].tolist())).T.tolist()[0])
                best = max(best, mp.sqrt(w @ v[Q]))
            found.append(best)
        return min(found)

    def found(self) -> tuple[Array, Array, Array]:
        """The equilibria and adjoints that float64 found, and its masks."""
        masks = (self.at.V > 0).numpy()
        return exact(self.at.Z), exact(self.at.P) * masks, masks

    def found_gram(self, h: Any) -> Array:
        Z, P, _ = self.found()
        hidden = h * (P @ P.T) * (self.k**2 * (Z @ Z.T) + self.l**2 * (self.point.X @ self.point.X.T))
        return hidden + Z @ Z.T if self.readout else hidden

    def change(self, R: Any, h: Any) -> Change:
        Z, P, masks = self.found()
        factor, moved, p = self.factor(self.hidden), self.moved(), row_norms(P)
        dz = moved * factor + row_norms(Z - self.point.Z)
        possible, sure = self.reach()
        flippable = (possible & ~sure) | (masks != self.point.masks)
        back = self.point.network.weight() + P @ self.point.R
        flips, residual = row_norms(back * flippable), row_norms(back * masks - P)
        dp = ((R if self.readout else 0) + self.k * self.hidden * p) * factor + (flips + residual) * self.jump(self.hidden)
        outer = self.k * (dp * (self.z + moved * factor) + p * dz)
        square = h * (outer**2 + (self.l * dp * self.x) ** 2) + (dz**2 if self.readout else 0)
        return Change(dz, dp, flips + residual, mp.sqrt(mp.fsum(square)), flippable)


def check_flow_theorem(point: ExactPoint, at: Measurement, cert: Certificate, sharpen: tuple[str, ...]) -> Any:
    """Theorem 1 at the radius of the certificate; returns s, claimed over exact."""
    network, e = point.network, norm(point.r)
    rates, radii, claimed = cert.rates, cert.radii, number(cert.hypotheses[0].value)
    h = number(rates[network.hidden[0]])
    R = number(radii[network.readout[0]]) if network.readout else number(radii[network.hidden[0]])

    def least(radius: Any) -> Any:
        hidden = mp.sqrt(h) * radius
        if network.kind is not wp.MonotoneDEQ:
            return ExactContraction(point, at, sharpen, hidden).least(radius, h)
        A, B, b = (largest_singular_value(M) for M in (network.parameters["A"], point.Z, point.X))
        slope = mp.sqrt(((2 * A + hidden) * B) ** 2 + (2 * B) ** 2 + b**2)
        return least_singular_value(point.Z) - hidden * slope / network.margin

    s = least(R)
    assert 0 < claimed <= s, "s from above"
    assert number(cert.rate) <= s**2
    # the integral of s over [0, R] is at least e: sums over ever more parts, from below
    assert any(R / parts * mp.fsum(least(R * j / parts) for j in range(1, parts + 1)) >= e for parts in (1, 4, FLOW_PARTS))
    assert all(number(radii[name]) >= mp.sqrt(h) * R * (1 - mp.mpf(2) ** -50) for name in network.hidden)
    assert all(number(radii[name]) >= R for name in network.readout)
    return claimed / s


def check_descent_theorem(point: ExactPoint, at: Measurement, cert: Certificate, sharpen: tuple[str, ...]) -> Any:
    """Theorem 2 at the radii and steps of the certificate; returns (1 - rate), claimed over exact."""
    network, e = point.network, norm(point.r)
    radii = {name: number(radius) for name, radius in cert.radii.items()}
    step = number(cert.step_size[network.readout[0]])
    h = max(number(cert.step_size[name]) for name in network.hidden) / step
    bounds = _monotone_descent if network.kind is wp.MonotoneDEQ else _contractive_descent
    s, largest, gradients, E = bounds(point, at, radii, h, sharpen)
    assert 0 < step <= 1 / largest**2 and s > 0 and 2 * h * E < s**2
    path = 2 * s * e / (s**2 - 2 * h * E)
    assert all(radii[name] >= path for name in network.readout)
    assert all(radii[name] >= h * g * path / s for name, g in gradients.items())
    rate = 1 - step * (s**2 - h * E)
    assert number(cert.rate) >= rate
    return (1 - number(cert.rate)) / (1 - rate)


def _contractive_descent(
    point: ExactPoint, at: Measurement, radii: dict[str, Any], h: Any, sharpen: tuple[str, ...]
) -> tuple[Any, ...]:
    recurrent, injected = point.network.hidden
    R_A, R_U = radii[recurrent], radii[injected]
    bounds = ExactContraction(point, at, sharpen, mp.hypot(R_A, R_U))
    k, scale, B, b, factor = bounds.k, bounds.l, bounds.B, bounds.b, bounds.factor(R_A)
    entered = scale * R_U * b
    drift = (k * R_A * B + entered) * factor
    moved = mp.hypot(drift, entered) if bounds.skip else drift
    weights = np.concatenate([point.network.parameters[name] for name in point.network.readout])
    alpha = norm(weights) + radii[point.network.readout[0]]
    kappa = alpha * factor
    g_A, g_U = k * kappa * (B + drift), scale * (kappa + alpha if bounds.skip else kappa) * b
    dZ = (k * g_A * (B + drift) + scale * g_U * b) * factor
    E = alpha * (mp.hypot(dZ, scale * g_U * b) if bounds.skip else dZ)
    F = point.features
    return least_singular_value(F) - moved, largest_singular_value(F) + moved, {recurrent: g_A, injected: g_U}, E


def _monotone_descent(
    point: ExactPoint, at: Measurement, radii: dict[str, Any], h: Any, sharpen: tuple[str, ...]
) -> tuple[Any, ...]:
    m, e = point.network.margin, norm(point.r)
    A, B, b = (largest_singular_value(M) for M in (point.network.parameters["A"], point.Z, point.X))
    R_A, R_B, R_U = (radii[name] for name in ("A", "B", "U"))
    drift = ((2 * A * R_A + R_A**2 + 2 * R_B) * B + R_U * b) / m
    u = norm(point.network.parameters["u"]) + radii["u"]
    g_A, g_B, g_U = 2 * (A + R_A) * u / m * (B + drift), 2 * u / m * (B + drift), u / m * b
    dW = (2 * (A + R_A) + h * g_A * e / B**2) * g_A + 2 * g_B
    E = u * (dW * (B + drift) + g_U * b) / m
    return least_singular_value(point.Z) - drift, B + drift, {"A": g_A, "B": g_B, "U": g_U}, E


def check_plain_descent_theorem(point: ExactPoint, at: Measurement, cert: Certificate, sharpen: tuple[str, ...]) -> Any:
    """Theorem 3 at the radius and the step of the certificate; returns (1 - rate), claimed over exact."""
    e, step, R = norm(point.r), number(cert.step_size["A"]), number(cert.radii["A"])
    bounds = ExactContraction(point, at, sharpen, R)
    change, k = bounds.change(R, mp.mpf(1)), bounds.k
    G = bounds.found_gram(mp.mpf(1))
    s, L = least_root(G) - change.jacobian, mp.sqrt(largest_singular_value(G)) + change.jacobian
    t, p = step * L**2, row_norms(bounds.found()[1])
    crossed = (change.flips + k * R * p + (bounds.norm + k * R) * change.adjoints) * change.flippable.any(axis=1)
    nearby = k * step * L * e * (p + change.adjoints) * bounds.factor(R) + crossed * bounds.jump(R)
    d = norm(k * np.minimum(2 * change.adjoints, nearby) * (bounds.z + change.equilibria))
    assert 0 < t <= 1 and number(cert.hypotheses[0].value) <= s
    slope = (1 - t / 2) * s - d
    assert slope > 0 and R >= e / slope
    rate = 1 - step * max(s * slope, s**2 - d * L)
    assert number(cert.rate) >= rate
    return (1 - number(cert.rate)) / (1 - rate)
