"""Many random proofs, each run on for 500 steps in double-double arithmetic: no promise is broken."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import wellposed as wp
from exact_descent import problem


class Double:
    """Matrices as unevaluated sums of two float64 numbers: about 31 digits. Written for the test alone."""

    def __init__(self, high: Tensor, low: Tensor | None = None) -> None:
        self.high, self.low = high, torch.zeros_like(high) if low is None else low

    def __add__(self, other: Double) -> Double:
        s = self.high + other.high
        b = s - self.high
        error = (self.high - (s - b)) + (other.high - b) + self.low + other.low
        high = s + error
        return Double(high, error - (high - s))

    def __neg__(self) -> Double:
        return Double(-self.high, -self.low)

    def __mul__(self, other: Double) -> Double:
        p = self.high * other.high
        a, b = _veltkamp(self.high), _veltkamp(other.high)
        error = ((a[0] * b[0] - p) + a[0] * b[1] + a[1] * b[0]) + a[1] * b[1]
        error = error + self.high * other.low + self.low * other.high
        high = p + error
        return Double(high, error - (high - p))

    def sum(self, dim: int) -> Double:
        """By halves: log2 of the terms is the number of additions."""
        found, size = self, self.high.shape[dim]
        while size > 1:
            half = size // 2
            head, tail = found.narrow(dim, 0, half), found.narrow(dim, half, half)
            rest = found.narrow(dim, 2 * half, size - 2 * half)
            total = head + tail
            found = Double(torch.cat([total.high, rest.high], dim), torch.cat([total.low, rest.low], dim))
            size = found.high.shape[dim]
        return Double(found.high.squeeze(dim), found.low.squeeze(dim))

    def narrow(self, dim: int, start: int, length: int) -> Double:
        return Double(self.high.narrow(dim, start, length), self.low.narrow(dim, start, length))

    def masked(self, mask: Tensor) -> Double:
        return Double(self.high * mask, self.low * mask)

    def norm(self) -> float:
        return float((self.high + self.low).norm())


def _veltkamp(a: Tensor) -> tuple[Tensor, Tensor]:
    c = a * 134217729.0
    high = c - (c - a)
    return high, a - high


def descend(W: Double, U: Double, a: Double, X: Tensor, y: Tensor, eta: float, steps: int):  # noqa: ANN201
    """Residual norms and the distance from the first point, step by step."""
    first = (W, U, a)
    n, m = X.shape[0], W.high.shape[0]
    Xd = Double(X)
    Z = Double(torch.zeros(n, m, dtype=torch.float64))
    P = Double(torch.zeros(n, m, dtype=torch.float64))
    one = torch.eye(m, dtype=torch.float64)
    for _ in range(steps):
        C = (Double(X[:, None, :]) * Double(U.high[None], U.low[None])).sum(2)
        read = Double(a.high.expand(n, m), a.low.expand(n, m))
        for _ in range(12):  # Newton's method, with the defect in 31 digits
            V = (Double(Z.high[:, None, :], Z.low[:, None, :]) * Double(W.high[None], W.low[None])).sum(2) + C
            mask = V.high > 0
            g = V.masked(mask) + -Z
            if g.norm() <= 1e-30 * Z.norm():
                break
            system = one - mask.double()[:, :, None] * W.high
            Z = Z + Double(torch.linalg.solve(system, g.high[:, :, None]).squeeze(2))
        for _ in range(6):
            Q = (Double(P.high[:, :, None], P.low[:, :, None]) * Double(W.high[None], W.low[None])).sum(1) + read
            g = Q.masked(mask) + -P
            if g.norm() <= 1e-30 * P.norm():
                break
            system = one - mask.double()[:, :, None] * W.high.T
            P = P + Double(torch.linalg.solve(system, g.high[:, :, None]).squeeze(2))
        r = (Z * read).sum(1) + Double(-y)
        moved = [part + -old for part, old in zip((W, U, a), first, strict=True)]
        yield r.norm(), sum(part.norm() ** 2 for part in moved) ** 0.5
        step = Double(torch.tensor(-eta, dtype=torch.float64))
        Pr = P * Double(r.high[:, None], r.low[:, None])
        left = Double(Pr.high[:, :, None], Pr.low[:, :, None])
        W = W + (left * Double(Z.high[:, None, :], Z.low[:, None, :])).sum(0) * step
        U = U + (left * Double(Xd.high[:, None, :], Xd.low[:, None, :])).sum(0) * step
        a = a + (Z * Double(r.high[:, None], r.low[:, None])).sum(0) * step


def run_on(seed: int, steps: int) -> bool:
    """Whether a proof was found; its promises are checked in the steps after it."""
    n, m, d = 2 + seed % 3, 12 + 4 * (seed % 4), 4 + seed % 3
    model, X, y = problem(n, m, d, seed, variance=0.04)
    try:
        proof = wp.prove(model, X, y, max_steps=300)
    except wp.InvalidArgument:  # omega >= 1: the network is small
        return False
    if proof.verdict is not wp.Verdict.CERTIFIED:
        return False
    parts = (Double(part.high, part.low) for part in proof._at.parts().values())
    bound = proof.tail["residual"]
    for r, distance in descend(*parts, X, y, proof.step_size, steps):
        assert r <= bound * (1 + 1e-9) + 1e-26, (seed, r, bound)
        assert distance <= proof.radius + proof.delta
        bound *= proof.rate
    return True


def test_a_few_random_proofs_keep_their_promises() -> None:
    assert sum(run_on(seed, 20) for seed in range(2)) >= 1


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_random_proofs_keep_their_promises_for_500_steps() -> None:
    proved = 0
    for seed in range(320):
        proved += run_on(seed, 500)
        if proved == 200:
            break
    assert proved == 200
