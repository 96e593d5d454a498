"""Certificates of models with an equilibrium layer, against dense algebra."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.certify import certify
from wellposed.certify._dispatch import has_certificate
from wellposed.errors import InvalidArgument, InvalidType

X, Y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)


def classifier(weight: object = None, scale: float = 1.0, dtype: torch.dtype = torch.float32, **options: object) -> nn.Module:
    cell = wp.nn.DenseCell(3, 12, weight=weight, generator=torch.Generator().manual_seed(0), dtype=dtype, **options)
    if hasattr(cell, "W"):
        cell.W.data *= scale
    return nn.Sequential(wp.EquilibriumLayer(cell), nn.Linear(12, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contraction_is_the_norm_of_the_matrix_that_is_used(dtype: torch.dtype) -> None:
    model = classifier(wp.nn.Spectral(0.9), 5.0, dtype)
    certificate = certify(model, X, Y)
    norm = float(torch.linalg.matrix_norm(model[0].cell.recurrent().detach().double(), ord=2))
    assert certificate.certified and certificate.theorem == "contraction"
    # with and without a graph the matrix is rounded differently, so both must be covered
    with torch.no_grad():
        other = float(torch.linalg.matrix_norm(model[0].cell.recurrent().double(), ord=2))
    assert max(norm, other) <= certificate.hypotheses[0].value <= norm * (1 + max(100 * torch.finfo(dtype).eps, 1e-12))


def test_no_contraction_is_not_certified() -> None:
    certificate = certify(classifier(None, 5.0), X, Y)
    assert certificate.verdict is wp.Verdict.UNDECIDED and certificate.hypotheses[0].value > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_monotone_is_the_least_eigenvalue(dtype: torch.dtype) -> None:
    model = classifier(wp.nn.Monotone(0.3), dtype=dtype)
    model[0].cell.A.data *= 4
    certificate = certify(model, X, Y)
    W = model[0].cell.recurrent().detach().double()
    least = float(torch.linalg.eigvalsh(torch.eye(12, dtype=torch.float64) - (W + W.t()) / 2)[0])
    assert certificate.certified and certificate.theorem == "monotone"
    assert least - 300 * torch.finfo(dtype).eps * float(W.norm()) <= certificate.hypotheses[0].value <= least


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_monotone_without_contraction(shift: float) -> None:
    model = classifier(None, 1.0, torch.float64)
    model[0].cell.W.data += shift * torch.eye(12, dtype=torch.float64)  # sym(I - W) is about 4, or -2; |W| is above 2
    assert certify(model, X, Y, theorem="monotone").certified == (shift < 0)
    assert not certify(model, X, Y).certified


def test_who_has_none() -> None:
    assert not has_certificate(nn.Linear(2, 2))
    assert not has_certificate(nn.Sequential(classifier(), classifier()))  # two layers: no single matrix
    with pytest.raises(InvalidType, match="certify knows GaussianDEQ.* got Linear"):
        certify(nn.Linear(2, 2), X, Y)
    with pytest.raises(InvalidArgument, match="is about theory networks"):
        certify(classifier(), X, Y, theorem="radius")


def test_opteq_inside_a_classifier() -> None:
    model = nn.Sequential(wp.OptEq(3, 8, norm_bound=0.8), nn.Flatten(0))
    certificate = certify(model, X, Y)
    assert certificate.certified and certificate.hypotheses[0].value == pytest.approx(model[0].contraction_upper())
    free = wp.OptEq(3, 8, norm_bound=None)
    free.W.data *= 10
    assert not certify(free, X, Y.float()).certified


@pytest.mark.parametrize("padding", ["circular", "zeros"])
def test_monotone_convolutions(padding: str) -> None:
    images = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    options = {"padding": padding, "margin": 0.2, "dtype": torch.float64, "generator": torch.Generator().manual_seed(0)}
    conv = wp.nn.MonotoneClassifier.conv((1, 4, 4), 3, 2, **options)
    tiers = wp.nn.MonotoneClassifier.multitier((1, 4, 4), (3, 2), 2, **options)
    for model in (conv, tiers):
        certificate = certify(model, images, Y)
        (layer,) = (module for module in model.modules() if isinstance(module, wp.EquilibriumLayer))
        with torch.no_grad():
            W = torch.func.jacrev(layer.cell.bind(images[:1]).operator.product)(
                torch.zeros(1, layer.cell.features(images), dtype=torch.float64)
            )[0, :, 0]
        least = float(torch.linalg.eigvalsh(torch.eye(len(W), dtype=torch.float64) - (W + W.T) / 2)[0])
        assert certificate.certified and certificate.theorem == "monotone"
        assert 0.2 - 1e-9 <= certificate.hypotheses[0].value <= least
        with pytest.raises(InvalidArgument, match="need not contract"):
            certify(model, images, Y, theorem="contraction")
