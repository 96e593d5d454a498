"""MonotoneClassifier: its three forms learn the digits, and say what is wrong with bad arguments."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import wellposed as wp
from wellposed.nn import DenseCell, Monotone, MonotoneClassifier, MonotoneConvCell, MonotoneTierCell
from wellposed.nn.maps.operator import MonotoneOperator


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.tensor(data.images / 16.0, dtype=torch.float32).unsqueeze(1), torch.tensor(data.target)


def make(form: str) -> MonotoneClassifier:
    options = {"margin": 1.0, "generator": generator(0), "rtol": 1e-3, "on_failure": "raise"}
    if form == "dense":
        return MonotoneClassifier.dense(64, 40, 10, **options)
    if form == "conv":
        return MonotoneClassifier.conv((1, 8, 8), 6, 10, grid=4, **options)
    if form == "zeros":
        return MonotoneClassifier.conv((1, 8, 8), 6, 10, grid=4, padding="zeros", **options)
    return MonotoneClassifier.multitier((1, 8, 8), (3, 4), 10, grid=4, **options)


@pytest.mark.parametrize("form", ["dense", "conv", pytest.param("zeros", marks=pytest.mark.slow), "multitier"])
def test_it_learns_the_digits(form):
    """Two passes over the training part: far above chance on images it has not seen, every solve converged."""
    X, y = digits()
    model = make(form)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    order = torch.randperm(1400, generator=generator(1)).repeat(2)
    for rows in order.split(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        accuracy = float((model(X[1400:]).argmax(dim=1) == y[1400:]).float().mean())
    assert accuracy > 0.6, accuracy
    # training did not touch the margin; in double precision, where the allowance for rounding is nothing beside it
    m, _ = model.double().cell.bind(model.prepared(X[:1].double())).monotonicity()
    assert m >= 1.0 - 1e-9


@pytest.mark.parametrize("form", ["dense", "conv", "zeros", "multitier"])
def test_copies_and_state_dicts(form):
    X, _ = digits()
    model, other = make(form), make(form)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    other.load_state_dict(model.state_dict())
    expected = model(X[:3])
    for same in (other, copy.deepcopy(model)):
        torch.testing.assert_close(same(X[:3]), expected, rtol=1e-3, atol=1e-3)
    assert not any("memory" in key for key in model.state_dict())


def test_pooling_and_tiers():
    model = make("multitier")
    z = torch.randn(2, 3 * 64 + 4 * 16, generator=generator(0))
    fine, coarse = model.cell.split(z, 8, 8)
    assert fine.shape == (2, 3, 8, 8) and coarse.shape == (2, 4, 4, 4)
    pooled = model.readout(z)
    expected = torch.cat([fine.reshape(2, 3, 4, 2, 4, 2).mean(dim=(3, 5)).flatten(1), coarse.flatten(1)], dim=1)
    torch.testing.assert_close(pooled, expected)
    x = torch.rand(2, 1, 8, 8, generator=generator(1))
    c = model.cell.injection(x)
    assert c.shape == z.shape


@pytest.mark.parametrize(("k", "batch"), [(3, 2), (7, 5)])
def test_the_dense_operator_is_its_parametrization(k, batch):
    """W, tracked products and cotangents of (A, B) against autograd through `Monotone`; A need not be square."""
    A, B = (torch.randn(n, 6, dtype=torch.float64, generator=generator(n)).requires_grad_() for n in (k, 6))
    p, z = torch.randn(2, batch, 6, dtype=torch.float64, generator=generator(9)).unbind()
    operator = MonotoneOperator(A, B, 0.3)
    W = Monotone(0.3)(A, B)
    torch.testing.assert_close(operator.dense(6), W.detach(), rtol=0, atol=1e-13)
    torch.testing.assert_close(operator.tracked(z), z @ W.T, rtol=0, atol=1e-12)
    expected = torch.autograd.grad((p * (z @ W.T)).sum(), (A, B))
    for ours, theirs in zip(operator.cotangents(p, z, (True, True)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert operator.cotangents(p, z, (False, False)) == (None, None)


@pytest.mark.parametrize("form", ["dense", "conv", "tiers"])
def test_inputs_that_do_not_fit_are_refused(form):
    model = make(form)
    shape = r"\(batch, 64\)" if form == "dense" else r"\(batch, 1, 8, 8\)"
    with pytest.raises(wp.InvalidType, match=rf"a tensor x of shape {shape}; got ndarray. Convert it, e.g. torch.as_tensor"):
        model(np.zeros((2, 1, 8, 8), dtype=np.float32))
    with pytest.raises(
        wp.InvalidArgument, match=rf"expects x of shape {shape}; got \(64,\)\. For one sample give x.unsqueeze\(0\)"
    ):
        model(torch.zeros(64))
    with pytest.raises(wp.InvalidArgument, match=rf"expects x of shape {shape}; got \(\)"):
        model.solve(torch.tensor(1.0))
    with pytest.raises(wp.InvalidArgument, match=rf"expects x of shape {shape}; got \(2, 63\)"):
        model(torch.zeros(2, 63))
    with pytest.raises(wp.InvalidType, match=r"has torch.float32 parameters and got x of torch.float64; convert one"):
        model(torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    assert model(torch.zeros(0, 1, 8, 8)).shape == (0, 10)


def test_bad_arguments():
    with pytest.raises(wp.InvalidType, match=r"or a MonotoneTierCell; got int\. MonotoneClassifier\.dense\(in_features"):
        MonotoneClassifier(4, 8, 3)  # type: ignore[arg-type]
    with pytest.raises(wp.InvalidArgument, match=r"grid=3 must divide the height and width of every tier; got 8 x 8"):
        MonotoneClassifier.conv((1, 8, 8), 2, 10, grid=3)
    with pytest.raises(wp.InvalidArgument, match=r"expects x of shape \(batch, 1, 8, 8\); got \(2, 1, 4, 4\)"):
        make("conv")(torch.zeros(2, 1, 4, 4))
    with pytest.raises(wp.InvalidArgument, match=r"image must be a tuple \(channels, height, width\).*got 8"):
        MonotoneClassifier.conv(8, 2, 10)  # type: ignore[arg-type]
    with pytest.raises(
        wp.InvalidArgument, match="at least two integers. Got 4 instead; for one resolution use MonotoneConvCell"
    ):
        MonotoneTierCell(1, 4)  # type: ignore[arg-type]
    with pytest.raises(wp.InvalidType, match=r"such as wp.nn.ReLU\(\)"):
        MonotoneConvCell(1, 2, torch.relu)  # type: ignore[arg-type]
    with pytest.raises(wp.InvalidArgument, match=r"MonotoneConvCell expects x of shape \(batch, 1, height, width\)"):
        MonotoneConvCell(1, 2).state_shape(torch.zeros(2, 3))
    with pytest.raises(wp.InvalidType, match="has torch.float32 parameters and got x of torch.float64"):
        MonotoneConvCell(1, 2).state_shape(torch.zeros(2, 1, 4, 4, dtype=torch.float64))
    with pytest.raises(wp.InvalidArgument, match="wraps around images of 1 x 1 more than once"):
        MonotoneConvCell(1, 2, kernel_size=5).bind(torch.zeros(1, 1, 1, 1))
    with pytest.raises(wp.InvalidType, match=r"DenseCell has torch.float32 parameters"):
        DenseCell(2, 3, weight=Monotone(0.5)).state_shape(torch.zeros(1, 2, dtype=torch.float64))
