"""Certificates of random small cells against the truth: no false one, and most are decided.

The truth is computed with PyTorch's own code in float64, and with mpmath where the cell is of linear
maps and activations of vectors.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import wellposed as wp
from own_cells import KINDS, Truth, draw, exact_distance
from wellposed.certify._evidence import starts
from wellposed.certify._followed import Followed
from wellposed.certify.local_certificate import LocalCertificate

CERTIFIED, VIOLATED, UNDECIDED = wp.Verdict.CERTIFIED, wp.Verdict.VIOLATED, wp.Verdict.UNDECIDED


def check(kind: str, seed: int, counts: Counter[tuple[str, str]]) -> None:
    """Certifies one cell, compares with the truth, and counts."""
    layer, x = draw(kind, seed)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    certificate = wp.certify(layer, x)
    assert isinstance(certificate, LocalCertificate)
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert layer.last_solution is None
    everywhere, verdict = certificate.others[0], certificate.verdicts[0]
    solution = layer.solve(x)
    z = solution.value.reshape(-1).double()
    truth = Truth(layer, x)
    finite = bool(torch.isfinite(z).all())
    least = truth.least_singular_value(z) if finite else 0.0
    counts[kind, "cells"] += 1
    counts[kind, str(verdict)] += 1
    counts[kind, f"everywhere {everywhere.theorem if everywhere.certified else everywhere.verdict}"] += 1
    if least >= 0.05 and float(solution.residual) <= 1e-6:
        counts[kind, "eligible"] += 1
        counts[kind, "decided"] += verdict is not UNDECIDED
    draws = torch.Generator().manual_seed(seed)
    if verdict is not UNDECIDED:
        z_star = _check_near(layer, x, z, certificate, truth, least, draws, counts, kind)
        if everywhere.certified:
            assert verdict is CERTIFIED
            _check_everywhere(everywhere, z_star, truth, draws)
    if verdict is VIOLATED:
        assert len(_equilibria(layer, x, truth)) >= 2


def _check_near(
    layer: wp.EquilibriumLayer,
    x: Tensor,
    z: Tensor,
    certificate: LocalCertificate,
    truth: Truth,
    least: float,
    draws: torch.Generator,
    counts: Counter[tuple[str, str]],
    kind: str,
) -> Tensor:
    """The error, the gradient's error and the ball."""
    error, gradient = float(certificate.error_bound[0]), float(certificate.gradient_error[0])
    z_star = truth.newton(z)
    assert z_star is not None
    rounding = 200 * 2.0**-52 * (1 + float(z.norm())) * (1 + 1 / max(least, 1e-3))  # of the truth
    assert float((z_star - z).norm()) <= error + rounding
    if x.dim() == 2:
        distance = exact_distance(layer, x, z, truth.jacobian(z).detach())
        if distance is not None:
            assert distance <= error
            counts[kind, "compared with mpmath"] += 1
    eye = torch.eye(len(z), dtype=torch.float64)
    inverse = [torch.linalg.inv(eye - truth.jacobian(point)) for point in (z, z_star)]
    change = float(torch.linalg.matrix_norm(inverse[0] - inverse[1], ord=2).detach())
    assert change <= gradient + 1e-9 * (1 + 1 / least**2)
    if (radius := float(certificate.radius[0])) > 0:
        start = z + min(radius, 3.0) * (2 * torch.rand(len(z), generator=draws, dtype=torch.float64) - 1)
        other = truth.newton(start)
        inside = other is not None and float((other - z).abs().max()) < radius
        assert not inside or _same(other, z_star)
    return z_star


def _check_everywhere(certificate: wp.Certificate, z_star: Tensor, truth: Truth, draws: torch.Generator) -> None:
    start = 3 * torch.randn(len(z_star), generator=draws, dtype=torch.float64)
    other = truth.newton(start)
    assert other is None or _same(other, z_star)
    if certificate.theorem == "contraction":
        norm = float(torch.linalg.matrix_norm(truth.jacobian(start), ord=2).detach())
        assert norm <= certificate.hypotheses[0].value * (1 + 1e-9)


def _equilibria(layer: wp.EquilibriumLayer, x: Tensor, truth: Truth) -> list[Tensor]:
    """Those of the map in float64, by Newton's method from where the certificate has looked."""
    found: list[Tensor] = []
    followed = Followed(layer, layer, x)
    z, _ = followed.solve()
    for point in (z, *(end for end, _ in followed.solve_from(starts(z)))):
        other = truth.newton(point.reshape(-1).double())
        if other is not None and not any(_same(other, known) for known in found):
            found.append(other)
    return found


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and float((a - b).norm()) <= 1e-6 * (1 + float(b.norm()))


def _run(seeds: range) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for kind in KINDS:
        for seed in seeds:
            check(kind, seed, counts)
        assert counts[kind, "eligible"] >= len(seeds) / 2
        assert counts[kind, "decided"] >= 0.9 * counts[kind, "eligible"]
    return counts


def test_no_certificate_is_false_and_most_cells_are_decided() -> None:
    counts = _run(range(8))
    assert counts["dense", "compared with mpmath"] >= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2500, 125))
def test_ten_thousand_cells(first: int) -> None:
    counts = _run(range(first, first + 125))
    for key, count in sorted(counts.items()):
        print(*key, count)
