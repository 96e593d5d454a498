"""[gao2022] is reported, never certified."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from theorem_problems import generator, sphere
from wellposed.certify import Certificate, Verdict, gao2022
from wellposed.errors import InvalidArgument, InvalidType


def skip(seed: int = 0, m: int = 300, gamma: float = 0.1) -> tuple[Any, Tensor, Tensor]:
    X, y = sphere(4, 8, seed)
    return wp.SkipDEQ(8, m, gamma=gamma, generator=generator(seed), dtype=torch.float64), X, y


def hypothesis(certificate: Certificate, name: str) -> Any:
    return next(h for h in certificate.hypotheses if h.name == name)


@pytest.mark.parametrize("dynamics", ["flow", "descent"])
def test_never_certified(dynamics: str) -> None:
    for seed in range(3):
        model, X, y = skip(seed, m=100 + 100 * seed)
        cert = gao2022(model, X, y, dynamics=dynamics)
        assert cert.verdict is Verdict.UNDECIDED
        assert cert.dynamics == dynamics
        assert cert.step_size is None and cert.rate is None and cert.radii is None and cert.licenses == ()
        assert hypothesis(cert, "the network is wide").holds is None


def test_numbers_by_hand() -> None:
    model, X, y = skip(m=500)
    cert = gao2022(model, X, y)
    # G_inf by Monte Carlo
    w = torch.randn(8, 400_000, generator=generator(7), dtype=torch.float64)
    features = torch.relu(X @ w)
    least = torch.linalg.eigvalsh(features @ features.t() / w.shape[1])[0].item()
    assert cert.measured["lambda_min(G_inf)"] == pytest.approx(least, rel=0.02)
    with torch.no_grad():
        Phi = torch.relu(X @ model.W.t()) / math.sqrt(500)
        r0 = (model(X) - y).norm().item()
    assert cert.measured["lambda_min(G(0))"] == pytest.approx(torch.linalg.eigvalsh(Phi @ Phi.t())[0].item(), rel=1e-9)
    assert cert.measured["|u|/sqrt(m)"] == pytest.approx(1.0)
    n, lam = 4, cert.measured["lambda_min(G_inf)"]
    c = max(torch.linalg.matrix_norm(p.detach(), ord=2).item() for p in (model.A, model.W)) / math.sqrt(500)
    assert cert.measured["width, order printed n^2/lambda_0^2"] == pytest.approx(n**2 / lam**2)
    assert cert.measured["width, repaired proof"] == pytest.approx(192**2 * c**2 * n * n**2 * r0**2 / lam**4, rel=1e-6)


def test_lemma_contradicts_itself_at_every_width() -> None:
    for seed in range(10):
        model, X, y = skip(seed, m=50 * (seed + 1))
        measured = gao2022(model, X, y).measured
        most, least = (measured[f"width at {side}, for {what}"] for side, what in SIDES)
        assert least >= 16 * most


SIDES = (("most", "Lemma 3.5 (ii) at t = 0"), ("least", "the proof of Lemma 3.5"))


def test_false_hypotheses_are_named() -> None:
    model, X, y = skip()
    cert = gao2022(model, 2 * X, y)
    assert cert.verdict is Verdict.VIOLATED and hypothesis(cert, "inputs have norm 1").holds is False
    cert = gao2022(model, torch.cat([X, X[:1]]), torch.cat([y, y[:1]]))
    assert cert.verdict is Verdict.VIOLATED and hypothesis(cert, "no two inputs are parallel").holds is False
    assert hypothesis(cert, "G_inf is positive definite").holds is None
    with torch.no_grad():
        model.u *= 2
    cert = gao2022(model, X, y)
    assert cert.verdict is Verdict.VIOLATED and hypothesis(cert, "u has entries +1 and -1").holds is False


def test_gamma_too_large_is_undecided() -> None:
    model, X, y = skip(gamma=0.3)
    cert = gao2022(model, X, y)
    assert hypothesis(cert, "gamma leaves room for |A| to double").holds is None


def test_errors_and_reasons() -> None:
    model, X, y = skip()
    with pytest.raises(InvalidArgument, match="Did you mean 'flow'"):
        gao2022(model, X, y, dynamics="flows")
    with pytest.raises(InvalidType, match="SkipDEQ; got GaussianDEQ"):
        gao2022(wp.GaussianDEQ(8, 10), X, y)
    with torch.no_grad():
        model.A *= 100
    assert "not below 1" in gao2022(model, X, y).note
