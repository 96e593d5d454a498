"""OptEq networks through the public certificate; the bounds themselves are tested in tests/convex/test_sensitivity.py."""

from __future__ import annotations

import pytest
import torch

import wellposed as wp
from wellposed.convex import L1

F64 = torch.float64


def problem(gap: float, *, deep: bool = False, dtype: torch.dtype = F64, **options: object) -> tuple:
    generator = torch.Generator().manual_seed(5)
    make = (lambda **o: wp.DeepOptEq(6, (10, 12), **o)) if deep else (lambda **o: wp.OptEq(6, 14, **o))
    model = make(dtype=dtype, generator=generator, **options)
    X = torch.randn(4, 6, dtype=dtype, generator=generator)
    y = model(X).detach() + gap * torch.randn(4, dtype=dtype, generator=generator)
    return model, X, y


@pytest.mark.parametrize("deep", [False, True])
def test_a_small_residual_is_certified_and_the_descent_keeps_every_bound(deep: bool) -> None:
    model, X, y = problem(1e-3, deep=deep)
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.verdict is wp.Verdict.CERTIFIED
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    e = float((model(X) - y).detach().norm())
    history = wp.descend(model, X, y, step_size=dict(certificate.step_size), steps=40)
    for k, r in enumerate(history.residual_norm.tolist()):
        assert r <= certificate.rate**k * e * (1 + 1e-9)
    for name, p in model.named_parameters():
        assert float((p.detach() - start[name]).norm()) <= certificate.radii[name]


def test_auto_returns_the_stronger_of_flow_and_descent() -> None:
    model, X, y = problem(1e-6)
    certificate = wp.certify(model, X, y)
    assert certificate.certified and certificate.dynamics == "flow"
    assert [other.dynamics for other in certificate.others] == ["descent"]
    assert "certified" in str(certificate).lower()


def test_a_large_residual_is_not_certified_for_the_plain_flow() -> None:
    model, X, y = problem(10.0)
    assert wp.certify(model, X, y, theorem="radius").verdict is wp.Verdict.UNDECIDED


def test_float32_models_are_measured_in_float64() -> None:
    model, X, y = problem(1e-3, dtype=torch.float32)
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    assert certificate.certified and certificate.errors["|Z - Z*|_F"] < 1e-9


def test_what_is_not_covered_is_said() -> None:
    model, X, y = problem(1e-3, prior=L1(0.1))
    with pytest.raises(wp.InvalidArgument, match="prior"):
        wp.certify(model, X, y, theorem="radius")
    model, X, y = problem(1e-3)
    with pytest.raises(wp.InvalidType, match="GaussianDEQ"):
        wp.certify(model, X, y, theorem="ling2022")
    model.b.requires_grad_(False)
    assert "would be trained" in wp.certify(model, X, y, theorem="radius").note
