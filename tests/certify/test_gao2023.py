"""[gao2023, Theorem 3.1] is reported, never certified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from theorem_problems import generator, sphere
from wellposed.certify import Certificate, Verdict, gao2023
from wellposed.errors import InvalidType


def implicit(
    init: str = "gaussian", seed: int = 0, m: int = 300, n: int = 3, gamma0: float = 0.2
) -> tuple[Any, Tensor, Tensor]:
    X, y = sphere(n, 8, seed)
    model = wp.ImplicitOnlyDEQ(8, m, gamma0=gamma0, init=init, generator=generator(seed), dtype=torch.float64)
    return model, X, y


def hypothesis(certificate: Certificate, name: str) -> Any:
    return next(h for h in certificate.hypotheses if h.name == name)


@pytest.mark.parametrize("init", ["gaussian", "half_normal", "diagonal"])
def test_never_certified(init: str) -> None:
    for seed in range(4):
        cert = gao2023(*implicit(init, seed))
        assert cert.verdict is Verdict.UNDECIDED and cert.licenses == () and cert.rate is None
        assert hypothesis(cert, "the start contracts").holds is True


def test_kernel_against_autograd() -> None:
    model, X, y = implicit(m=40)
    rows = [torch.autograd.grad(model(X[i : i + 1]).sum(), model.A)[0].flatten() for i in range(3)]
    J = torch.stack(rows)
    least = torch.linalg.eigvalsh(J @ J.t())[0].item()
    cert = gao2023(model, X, y)
    assert cert.measured["lambda_min(H(0))"] == pytest.approx(least, rel=1e-6)
    assert cert.measured["lambda_min(H(0))"] <= least
    # Schur: lambda_min of a Hadamard product
    assert cert.measured["least |p|^2 lambda_min(Z Z^T) gamma^2"] <= least * (1 + 1e-9)


def test_the_radius_is_a_fixed_point() -> None:
    # scaled so that the path is short: few samples, small residual
    model, X, _ = implicit(n=2)
    with torch.no_grad():
        y = model(X) + 1e-3
    cert = gao2023(model, X, y)
    R = cert.measured["R, if lambda_min(H(t)) >= lambda_0/2"]
    A = torch.linalg.matrix_norm(model.A.detach(), ord=2).item()
    q = model.gamma * (A + R)
    Phi = model.injection(X).detach().norm().item()
    need = 2 * model.gamma * Phi * cert.measured["|r|"] / (cert.measured["lambda_min(H(0))"] * (1 - q) ** 2)
    assert need <= R <= need * (1 + 1e-6)
    assert hypothesis(cert, "training keeps the contraction").holds is True
    assert cert.verdict is Verdict.UNDECIDED


def test_false_hypotheses_are_named() -> None:
    model, X, y = implicit()
    assert gao2023(model, 3 * X, y).verdict is Verdict.VIOLATED
    cert = gao2023(model, X, 2 * y)
    assert cert.verdict is Verdict.VIOLATED and hypothesis(cert, "labels are at most 1").holds is False


def test_errors_and_reasons() -> None:
    model, X, y = implicit()
    with pytest.raises(InvalidType, match="ImplicitOnlyDEQ; got SkipDEQ"):
        gao2023(wp.SkipDEQ(8, 10), X, y)
    with torch.no_grad():
        model.A *= 100
    assert "not below 1" in gao2023(model, X, y).note


def test_the_readout_is_a_buffer_and_the_note_says_so() -> None:
    model = wp.ImplicitOnlyDEQ(5, 20, gamma0=0.2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert "b" in dict(model.named_buffers()) and "b" not in dict(model.named_parameters())
    X = torch.nn.functional.normalize(torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    signs = next(h for h in gao2023(model, X, torch.ones(3, dtype=torch.float64)).hypotheses if h.name.startswith("b has"))
    assert signs.holds and signs.note == "as drawn; it is not trained"
