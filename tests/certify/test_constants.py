"""Constants of a network that are changed after it was made: gamma and the margin."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import lipschitz_upper
from wellposed.errors import InvalidArgument


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(model: Any, seed: int, size: float) -> tuple[Tensor, Tensor]:
    X = torch.randn(4, 6, generator=generator(seed), dtype=torch.float64)
    return X, model(X).detach() + size * torch.randn(4, generator=generator(seed + 1), dtype=torch.float64)


@pytest.mark.parametrize("gamma", [-0.2, -0.45])
def test_radii_of_a_negative_gamma_cover_what_moves(gamma: float) -> None:
    model = wp.SkipDEQ(6, 40, generator=generator(0), dtype=torch.float64, on_ill_posed="ignore", rtol=1e-13)
    model.gamma = gamma
    X, y = problem(model, 1, 3.0)
    certificate = wp.certify(model, X, y, theorem="radius", dynamics="descent")
    # the map with -A and -gamma is the same, so the certificate is
    mirrored = copy.deepcopy(model)
    mirrored.gamma = -gamma
    with torch.no_grad():
        mirrored.A.neg_()
    assert certificate == wp.certify(mirrored, X, y, theorem="radius", dynamics="descent")
    if not certificate.certified:
        return
    assert certificate.radii is not None and isinstance(certificate.step_size, dict)
    start = model.A.detach().clone()
    for _ in range(50):
        r = model(X) - y
        gradients = torch.autograd.grad(r.square().sum() / 2, list(model.parameters()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
                parameter -= certificate.step_size[name] * gradient
    assert 0 < float((model.A.detach() - start).norm()) <= certificate.radii["A"]


def test_a_negative_gamma_of_the_implicit_network() -> None:
    model = wp.ImplicitOnlyDEQ(6, 40, gamma0=0.2, init="half_normal", generator=generator(0), dtype=torch.float64)
    mirrored = copy.deepcopy(model)
    mirrored.gamma = -model.gamma
    with torch.no_grad():
        mirrored.A.neg_()
    X, y = problem(model, 1, 1e-6)
    for theorem in ("radius", "gao2023"):
        assert wp.certify(model, X, y, theorem=theorem) == wp.certify(mirrored, X, y, theorem=theorem)


@pytest.mark.parametrize("gamma", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("theorem", ["auto", "radius", "contraction", "monotone", "perron_frobenius", "gao2022"])
def test_a_gamma_that_is_not_finite(gamma: float, theorem: str) -> None:
    model = wp.SkipDEQ(6, 20, generator=generator(0), dtype=torch.float64, on_ill_posed="ignore", on_failure="ignore")
    X, y = problem(model, 1, 1.0)
    model.gamma = gamma
    certificate = wp.certify(model, X, y, theorem=theorem)
    assert certificate.verdict is wp.Verdict.UNDECIDED
    assert certificate.note == "The recurrent matrix has NaN or infinite entries."


def margin_of(R: Tensor) -> float:
    F = torch.eye(len(R), dtype=R.dtype) - R
    return float(torch.linalg.eigvalsh((F + F.t()) / 2)[0])


def test_there_is_one_margin() -> None:
    model = wp.MonotoneDEQ(3, 24, margin=1.0, generator=generator(0), dtype=torch.float64)
    X = torch.randn(4, 3, generator=generator(1), dtype=torch.float64)
    y = torch.randn(4, generator=generator(2), dtype=torch.float64)
    model(X)  # what the solver keeps of W is that of the old margin
    model.margin = 50.0
    assert model.parametrization.margin == 50.0
    eps = torch.finfo(torch.float64).eps
    certificate = wp.certify(model, X, y, theorem="monotone")
    truth = margin_of(model.recurrent().detach())
    assert certificate.measured["margin"] <= truth + 100 * 24 * eps * 50
    assert lipschitz_upper(model).margin <= truth + 100 * 24 * eps * 50
    z = model.solve(X).value
    residual = z - torch.relu(z @ model.recurrent().detach().t() + model.injection(X).detach())
    assert float(residual.norm()) <= 1e-11 * 50 * (1 + float(z.norm()))
    model.parametrization.margin = 2.0
    assert model.margin == 2.0


@pytest.mark.parametrize("margin", [-3.0, 0.0, math.nan, math.inf, "1"])
def test_a_margin_is_checked_when_it_is_assigned(margin: Any) -> None:
    model = wp.MonotoneDEQ(3, 24, margin=1.0, generator=generator(0))
    for owner in (model, model.parametrization):
        with pytest.raises(InvalidArgument, match="'margin' parameter of Monotone must be a float in"):
            owner.margin = margin
    assert model.margin == model.parametrization.margin == 1.0


def test_the_margin_of_a_cell_is_not_remembered() -> None:
    cell = wp.nn.DenseCell(3, 8, weight=wp.nn.Monotone(0.1), generator=generator(0), dtype=torch.float64)
    layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford(step_size=1.0))
    X = torch.randn(4, 3, generator=generator(1), dtype=torch.float64)
    layer.solve(X)
    assert isinstance(cell.weight, wp.nn.Monotone)
    cell.weight.margin = 5.0
    z = layer.solve(X).value
    assert float((z - cell(z, X).detach()).norm()) <= 1e-10 * float(z.norm())


def test_copies_and_files_keep_the_margin() -> None:
    model = wp.MonotoneDEQ(3, 24, margin=1.5, generator=generator(0))
    assert copy.deepcopy(model).margin == 1.5
    assert "margin=1.5" in repr(model)
