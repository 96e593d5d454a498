"""The parts of `wp.verify`, each against a second road: fractions, dense algebra, autograd."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stored_proofs import NETWORKS, proved
from wellposed.prove._gain import least_gain
from wellposed.prove.verify_activation import evaluate
from wellposed.prove.verify_bounds import active_omega, is_positive, omega_bounds, spectral_norm, top_eigenvalue
from wellposed.prove.verify_digits import LOST, PLACES, Digits
from wellposed.prove.verify_expansion import curvature_weights
from wellposed.prove.verify_numbers import _least_quotient
from wellposed.prove.verify_place import Data, stored_place
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_step import PointCheck, StoredBall

seeds = st.integers(0, 10**6)


def fractions(values: Digits) -> list[Fraction]:
    return [Fraction(int(value), 1 << PLACES) for value in values.integers().ravel()]


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_digits_agree_with_fractions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    A, B = (draw.standard_normal(shape) * np.exp(draw.uniform(-9, 9, shape)) for shape in ((3, 7), (7, 2)))
    a, b = Digits.of(A), Digits.of(B)
    lost = Fraction(LOST)
    assert all(abs(x - Fraction(float(v))) <= lost for x, v in zip(fractions(a), A.ravel(), strict=True))
    exact = [[sum(x * y for x, y in zip(row, column, strict=True)) for column in _columns(b)] for row in _rows(a)]
    assert all(abs(x - y) <= lost for x, y in zip(fractions(a @ b), sum(exact, []), strict=True))
    assert all(abs(x - y * y) <= lost for x, y in zip(fractions(a * a), fractions(a), strict=True))
    assert fractions(a + a) == [2 * x for x in fractions(a)] and not any(fractions(a - a))
    assert (a.signs() == np.sign(A)).all() and (Digits.from_integers(a.integers()).limbs == a.limbs).all()
    assert np.abs(a.floats() - A).max() <= 2.0**-50 * np.abs(A).max()


def _rows(a: Digits) -> list[list[Fraction]]:
    flat, width = fractions(a), a.shape[1]
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def _columns(b: Digits) -> list[list[Fraction]]:
    return [list(column) for column in zip(*_rows(b), strict=True)]


def test_numbers_that_are_too_large_are_refused() -> None:
    from wellposed.errors import RunError

    with pytest.raises(RunError, match="numbers below"):
        Digits.of(np.array([1e13]))
    with pytest.raises(RunError, match="grows beyond"):
        _ = Digits.of(np.array([1e9])) * Digits.of(np.array([1e9]))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 8), (2, 150)])
@pytest.mark.parametrize("moved", [0.0, 0.1])
def test_the_curvature_of_smooth_activations_is_bounded(n: int, m: int, moved: float) -> None:
    """|K^T diag(a s'') K| by dense algebra, also at other pre-activations and another R."""
    draw = np.random.default_rng(m)
    R, V = 0.4 * draw.standard_normal((m, m)) / math.sqrt(m), draw.standard_normal((n, m))
    a = draw.standard_normal((n, m)) / math.sqrt(m)
    dR, dV = draw.standard_normal((m, m)), moved * draw.uniform(-1, 1, (n, m))
    R1 = R + moved * dR / np.linalg.norm(dR, 2) / 4
    slope = 1 / np.cosh(V + dV) ** 2
    bent = a * -2 * np.tanh(V + dV) * slope
    K = [np.linalg.inv(np.eye(m) - R1 * D) for D in slope]
    tau = max(
        max(np.linalg.norm(D[:, None] * k, 2), np.linalg.norm(np.sqrt(D)[:, None] * k, 2))
        for D, k in zip(slope, K, strict=True)
    )
    norms = {"tau": float(tau), "R_norm": float(np.linalg.norm(R, 2)) + moved / 4}
    c = curvature_weights("tanh", V, np.abs(a), np.full(n, moved), R=R, change=moved / 4, **norms)
    truth = [np.abs(np.linalg.eigvalsh(k.T @ (t[:, None] * k))).max() for t, k in zip(bent, K, strict=True)]
    assert (np.array(truth) <= c).all()
    if m == 150 and moved == 0:  # where |R| is far above the norm of its weighted rows that bound is the best
        curved = np.abs(bent).max(axis=1) * (1 + norms["R_norm"] * norms["tau"]) ** 2
        ratio = (np.abs(a) * 2 * np.abs(np.tanh(V))).max(axis=1) * norms["tau"] ** 2
        assert (c < 0.95 * np.minimum(curved, ratio)).all()


@pytest.mark.parametrize("name", ["tanh", "softplus"])
def test_smooth_activations_agree_with_mpmath(name: str) -> None:
    import mpmath

    V = np.array([-40.0, -3.0, -1e-9, 0.0, 0.3, 2.0, 30.0])
    values, slopes = evaluate(name, 0.0, Digits.of(V))
    with mpmath.workdps(60):
        for v, value, slope in zip(V, fractions(values), fractions(slopes), strict=True):
            x = mpmath.mpf(float(v))
            exact = mpmath.tanh(x) if name == "tanh" else mpmath.log1p(mpmath.exp(x))
            bend = 1 - mpmath.tanh(x) ** 2 if name == "tanh" else 1 / (1 + mpmath.exp(-x))
            for found, right in ((value, exact), (slope, bend)):
                assert abs(mpmath.mpf(found.numerator) / found.denominator - right) <= 4 * LOST


@given(seeds)
@settings(max_examples=30, deadline=None)
def test_bounds_hold_and_are_near(seed: int) -> None:
    draw = np.random.default_rng(seed)
    R = draw.standard_normal((12, 12)) / 4
    top = float(np.linalg.eigvalsh((R + R.T) / 2)[-1])
    below, above = omega_bounds(R, 0.0)
    assert below <= top <= above and above - below <= 1e-10
    norm = float(np.linalg.norm(R, 2))
    assert norm <= spectral_norm(R) <= norm * (1 + 1e-9)
    S = (R + R.T) / 2
    assert is_positive((above + 1e-9) * np.eye(12) - S, 0.0) and not is_positive((below - 1e-9) * np.eye(12) - S, 0.0)
    assert top_eigenvalue(S, 0.1) >= top + 0.1
    mask = (draw.random((3, 12)) > 0.5).astype(float)
    tops = [np.linalg.eigvalsh(S[np.ix_(m > 0, m > 0)])[-1] for m in mask if m.any()]
    assert max([0.0, *tops]) <= active_omega(R, 0.0, mask) <= max([0.0, *tops]) * 1.01 + 1e-9


@pytest.fixture(scope="module")
def proofs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredProof]:
    return {kind: StoredProof(proved(kind).save(tmp_path_factory.mktemp(kind))) for kind in NETWORKS}


def outputs(proof: StoredProof, X: torch.Tensor, theta: dict[str, torch.Tensor]) -> torch.Tensor:
    """f in float64 as a function of the scaled parameters, by many steps of Picard: for autograd."""
    act = {"relu": torch.relu, "tanh": torch.tanh, "softplus": lambda v: torch.nn.functional.softplus(v) - proof.shift}
    k, ell = proof.scales["R"] or 1.0, proof.scales["U"] or 1.0
    c = X @ (ell * theta["U"]).T
    c = torch.relu(c) if proof.rectified else c
    z = torch.zeros_like(c)
    for _ in range(150):
        z = act[proof.activation](z @ (k * theta["R"]).T + c)
    f = z @ theta["w"]
    return f if "v" not in theta else f + c @ theta["v"]


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_point_agrees_with_autograd(kind: str, proofs: dict[str, StoredProof]) -> None:
    """Residuals, kernel, gradient, and M against the Hessian itself (Lanczos-free: by its products)."""
    proof = proofs[kind]
    data = Data(proof)
    check = PointCheck(proof, data, stored_place(proof, 0))
    X, y = (torch.from_numpy(proof.tensor(name, *shape)) for name, shape in (("X", (proof.n, proof.d)), ("y", (proof.n,))))
    unscaled = {p: torch.from_numpy(v.floats()) / (proof.scales[p] or 1.0) for p, v in check.place.parts().items()}
    trained = [p for p in unscaled if proof.scales[p] > 0]
    sizes = [unscaled[p].numel() for p in trained]

    def residual(flat: torch.Tensor) -> torch.Tensor:
        theta = dict(unscaled)
        for p, part in zip(trained, flat.split(sizes), strict=True):
            theta[p] = part.reshape(unscaled[p].shape)
        return outputs(proof, X, theta) - y

    flat = torch.cat([unscaled[p].reshape(-1) for p in trained])
    r = residual(flat)
    assert np.abs(check.point.r.floats() - r.numpy()).max() < 1e-12
    J = torch.autograd.functional.jacobian(residual, flat)
    assert np.abs(check.H - (J @ J.T).numpy()).max() < 1e-10 * float((J @ J.T).max())
    moved = check.stepped().parts()
    step = torch.cat(
        [torch.from_numpy((check.place.parts()[p] - moved[p]).floats()).reshape(-1) / proof.scales[p] for p in trained]
    )
    assert torch.allclose(step, proof.step_size * (J.T @ r), rtol=1e-10, atol=1e-14)

    def weighted(flat: torch.Tensor) -> torch.Tensor:
        return (r.detach() * residual(flat)).sum()

    direction = torch.randn(len(flat), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(12):  # power iteration: a lower bound of the norm of the Hessian
        direction = direction / direction.norm()
        direction = torch.autograd.functional.hvp(weighted, flat, direction)[1]
    M = check.expansion(StoredBall(proof, data, check.point, check.omega, 0.0))
    assert float(direction.norm()) <= M <= 6 * float(direction.norm())


def test_an_equilibrium_agrees_with_fractions(proofs: dict[str, StoredProof]) -> None:
    """z = D (R z + c) solved by elimination in fractions, for one sample."""
    proof = proofs["relu"]
    check = PointCheck(proof, Data(proof), stored_place(proof, 0))
    R, m = _rows(check.place.R), proof.m
    x, U = _rows(check.data.X)[0], _rows(check.place.U)
    on = [u for u in range(m) if check.point.V.signs()[0, u] > 0]
    rows = [[Fraction(int(a == b)) - R[a][b] for b in on] + [sum(g * h for g, h in zip(U[a], x, strict=True))] for a in on]
    for i in range(len(on)):
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in range(len(on)):
            if j != i:
                rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = _rows(check.point.Z)[0]
    off = sum((found[u] - row[-1]) ** 2 for u, row in zip(on, rows, strict=True))
    off += sum(found[u] ** 2 for u in range(m) if u not in on)
    assert math.sqrt(float(off)) <= check.point.z_error[0] < 1e-26


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_the_quotient_of_the_tail_is_bounded_from_below(seed: int) -> None:
    draw = np.random.default_rng(seed)
    L = float(draw.uniform(5, 40))
    s, f = L * float(draw.uniform(0.1, 0.9)), float(draw.uniform(0, 0.3))
    e0, eta = f * L * float(draw.uniform(0, 1)), float(draw.uniform(0.5, 1.2)) / L**2
    x = np.linspace(s, L, 4001)
    A1, A2 = 1 - eta * L**2 / 2 - eta * s**2 / 2, eta * L**2 * s**2 / 2
    h, E = np.sqrt(np.maximum(0, (s**2 + L**2) * (x**2 - s**2) + s**4)), f * x + e0
    g, g0 = float(draw.uniform(0, 0.4)), float(draw.uniform(-0.3, 1.2)) * f**2
    pull = np.minimum(f**2, g * x**2 + g0)
    least = float(((A1 * x**2 + A2 - pull - eta * h * E - eta * E**2 / 2) / (x + f)).min())
    if least <= 0:
        return
    numbers = [Fraction(value) for value in (s, L, f, e0, eta)]
    pair = Fraction(g), Fraction(g0)
    assert _least_quotient(*numbers, Fraction(least * 0.999), *pair)[0]
    holds, found = _least_quotient(*numbers, Fraction(least * 1.001), *pair)
    assert not holds and abs(float(found) / least - 1) < 1e-3


def test_an_honest_kappa_is_accepted_when_the_singular_values_are_far_apart() -> None:
    """L/s is 60, and the quotient is least very near to s."""
    s, L, f, e0, eta, g, g0 = 1.0, 59.919, 0.99980, 8.619, 1 / 59.919**2, 0.71818, -0.07136
    kappa = least_gain(eta, s, L, f, e0, g, g0)
    exact = [Fraction(value) for value in (s, L, f, e0, eta, kappa, g, g0)]
    holds, found = _least_quotient(*exact)
    assert holds and Fraction(95, 100) * found <= Fraction(kappa) <= found
    x = np.sqrt(s * s + np.concatenate([[0.0], np.geomspace(1e-9, L * L - s * s, 1_000_000)]))
    E, h = f * x + e0, np.sqrt((s * s + L * L) * (x * x - s * s) + s**4)
    grow = (1 - eta * (s * s + L * L) / 2) * x * x + eta * s * s * L * L / 2
    dense = ((grow - np.minimum(f * f, g * x * x + g0) - eta * h * E - eta * E * E / 2) / (x + f)).min()
    assert abs(float(found) / dense - 1) < 1e-3
