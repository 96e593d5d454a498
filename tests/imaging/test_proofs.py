"""Stated factors and distances stay true when numbers change, overflow or are of low precision."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from wellposed.errors import CheckpointRefused, InvalidArgument
from wellposed.imaging import (
    DEQADMM,
    AdaptiveDenoiser,
    Blur,
    BoundedDnCNN,
    CompressedSensing,
    DEQGrad,
    DEQProx,
    Inpainting,
    Reconstructor,
    gaussian_kernel,
)

CELLS = [DEQGrad, DEQProx, DEQADMM]
Cell = DEQGrad | DEQProx | DEQADMM


def mirror(bound: float = 0.5) -> BoundedDnCNN:
    """-bound x + a constant near the images that are tried: the factor is attained."""
    network = BoundedDnCNN(1, 1, 1, bound=bound, kernel_size=1)
    with torch.no_grad():
        network.kernels[0].fill_(1.0)
        network.biases[0].fill_(1000.0)
    return network


def seen(cell: Cell, y: Tensor, *shape: int, steps: int = 60) -> float:
    """A lower bound of the factor, by power iteration on the Jacobian at 0, in float64."""
    cell, y = copy.deepcopy(cell).double(), y.double()
    z = torch.zeros(shape, dtype=torch.float64)
    v = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(steps):
        v = v / v.norm()
        _, w = torch.func.jvp(lambda u: cell(u, y), (z,), (v,))
        (v,) = torch.func.vjp(lambda u: cell(u, y), z)[1](w)
    return float(v.detach().norm().sqrt())


def loaded(cell: Cell, factor: float) -> None:
    state = cell.state_dict()
    name = "operator.kernel" if "operator.kernel" in state else "operator.Q"
    cell.load_state_dict(state | {name: factor * state[name]})


def in_place(cell: Cell, factor: float) -> None:
    for buffer in cell.operator.buffers():
        buffer.mul_(factor)


def behind_the_version(cell: Cell, factor: float) -> None:
    for buffer in cell.operator.buffers():
        buffer.data.mul_(factor)


def replaced(cell: Cell, factor: float) -> None:
    other = copy.deepcopy(cell.operator)
    for buffer in other.buffers():
        buffer.mul_(factor)
    cell.operator = other


CHANGES = [loaded, in_place, behind_the_version, replaced]
OPERATORS: list[Callable[[], Any]] = [
    lambda: Blur(gaussian_kernel(1.0, 7)),
    lambda: CompressedSensing((1, 8, 8), 32, generator=torch.Generator().manual_seed(0)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("operator", OPERATORS, ids=["blur", "sensing"])
@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("factor", [1.8, 10.0])
def test_the_factor_is_that_of_the_present_operator(
    kind: type[Cell], operator: Callable[[], Any], change: Callable[[Cell, float], None], factor: float
) -> None:
    cell = kind(operator(), mirror(0.9))
    assert cell.contraction < 1
    change(cell, factor)
    found = seen(cell, cell.operator.A(torch.zeros(1, 1, 8, 8)), 1, 1, 8, 8)
    assert found > 0.1 and found <= cell.contraction
    if kind is not DEQADMM:
        assert cell.norm == cell.operator.norm >= factor and cell.contraction < 1  # the step follows the norm


def test_a_distance_after_the_kernel_changed() -> None:
    cell = DEQProx(Blur(gaussian_kernel(1.0, 7)), mirror(), step=0.9)
    loaded(cell, 1.8)
    cell.double()
    y = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rough, fine = (Reconstructor(cell, solver=wp.Picard(), rtol=rtol, max_steps=9000) for rtol in (1e-3, 1e-13))
    with torch.no_grad():
        distance = float((rough(y) - fine(y)).norm())
    assert 0 < distance <= float(rough.layer.last_solution.error_bound(cell.contraction))


def test_a_task_with_another_kernel_is_refused_or_has_a_true_factor(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model = wp.tasks.deblurrer(40, generator=torch.Generator().manual_seed(0))
    wp.tasks.save(model, "deblurring", tmp_path)
    tensors = safetensors.load((tmp_path / "model.safetensors").read_bytes())
    tensors["layer.cell.operator.kernel"] *= 10
    content = safetensors.save(tensors, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointRefused, match="operator.kernel"):
        wp.tasks.load("deblurring", tmp_path)
    model.load_state_dict(tensors)
    y = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(1))
    assert 0.9 < seen(model.layer.cell, y, 1, 3, 12, 12, steps=20) <= model.layer.cell.contraction


def test_more_channels_than_features_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="at least as many features as channels; got 1 and 3"):
        BoundedDnCNN(3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_low_precision_are_measured(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    operator = CompressedSensing((1, 8, 8), 32, dtype=dtype, generator=generator)
    found = float(torch.linalg.matrix_norm(operator.Q.double(), 2))
    assert 1 + 1e-5 < found <= operator.norm < 1.05
    cell = DEQADMM(operator.float(), mirror(0.99999), penalty=1e5)
    assert seen(cell, torch.zeros(1, 32), 1, 1, 8, 8, steps=200) <= cell.contraction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CELLS)
def test_nothing_is_proved_in_low_precision(kind: type[Cell], dtype: torch.dtype) -> None:
    cell = kind(Inpainting(torch.zeros(4, 4)), mirror()).to(dtype)
    assert cell.contraction == math.inf
    assert cell.float().contraction < 1


@pytest.mark.parametrize("bound", [0.3, 0.7, 0.99])
def test_the_constant_of_a_network_is_of_the_number_it_multiplies_by(bound: float) -> None:
    network = BoundedDnCNN(1, 1, 1, bound=bound, kernel_size=1)
    with torch.no_grad():
        network.kernels[0].zero_()
    assert float(network(torch.ones(1, 1, 1, 1)).detach()) <= network.lipschitz  # bound x, in float32


@pytest.mark.parametrize("weight", [1e-6, 0.1, 3.3, 1e5])
def test_the_factor_is_of_the_step_as_it_is_used(weight: float) -> None:
    cell = DEQGrad(Inpainting(torch.zeros(4, 4)), mirror(), weight=weight)
    numbers = {name: float(value.detach()) for name, value in cell._numbers().items()}
    step = numbers["step"] * numbers["weight"]
    assert 1 - step * (1 - cell.network.lipschitz) <= cell.contraction <= 1 - step * 0.5 * (1 - 1e-6) + 1e-11


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38, 3e38])
@pytest.mark.parametrize(
    "network", [lambda: mirror(0.9), lambda: AdaptiveDenoiser(1, 4, hidden=4)], ids=["bounded", "adaptive"]
)
def test_no_factor_of_numbers_that_are_not_finite(network: Callable[[], Any], value: float) -> None:
    for name, _ in network().named_parameters():
        cell = DEQGrad(Inpainting(torch.ones(8, 8)), network())
        with torch.no_grad():
            dict(cell.network.named_parameters())[name].fill_(value)
        assert cell.contraction == math.inf, name


def test_a_network_of_nan_gives_nan() -> None:
    for network in (mirror(), AdaptiveDenoiser(1, 4, hidden=4)):
        cell = DEQGrad(Inpainting(torch.ones(8, 8)), network)
        with torch.no_grad():
            next(network.parameters()).fill_(math.nan)
        model = Reconstructor(cell, on_failure="ignore")
        model(torch.rand(1, 1, 8, 8))
        assert model.layer.last_solution.status[0] == wp.Status.NOT_FINITE and network.lipschitz == math.inf


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("value", [89.0, 300.0, 711.0, 1e30, math.nan, math.inf])
def test_no_factor_of_weights_that_overflow(kind: type[Cell], value: float) -> None:
    cell = kind(Inpainting(torch.ones(8, 8)), mirror())
    number = next(p for name, p in cell.named_parameters(recurse=False))
    with torch.no_grad():
        number.fill_(value)
    if kind is DEQProx and value < math.inf and value < 1e19:  # its step is at most 1
        assert cell.contraction < 1
    else:
        assert cell.contraction == math.inf


def test_a_weight_that_vanishes_proves_nothing() -> None:
    cell = DEQGrad(Inpainting(torch.ones(8, 8)), mirror())
    with torch.no_grad():
        cell.log_weight.fill_(-40.0)
    assert 1 <= cell.contraction < 1 + 1e-10
    for change in (math.nan, math.inf):
        blurred = DEQGrad(Blur(gaussian_kernel(1.0)), mirror())
        blurred.operator.kernel[0, 0] = change
        assert blurred.operator.norm == blurred.contraction == math.inf


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("rtol", [1e-3, 1e-5, 1e-7])
def test_the_distance_includes_rounding(kind: type[Cell], rtol: float) -> None:
    """Against float64: a residual in float32 says little about the distance below 1e-6."""
    generator = torch.Generator().manual_seed(0)
    network = AdaptiveDenoiser(1, 8, hidden=8, bound=0.9, generator=generator)
    cell = kind(Blur(gaussian_kernel(1.0, 7)), network)
    y = torch.rand(4, 1, 32, 32, generator=generator)
    model = Reconstructor(cell, rtol=rtol, max_steps=500, on_failure="ignore")
    exact = Reconstructor(copy.deepcopy(cell).double(), rtol=1e-13, max_steps=3000, on_failure="ignore")
    with torch.no_grad():
        image, truth = model(y), exact(y.double())
    assert float(exact.layer.last_solution.residual.max()) < 1e-12
    distance = (image.double() - truth).flatten(1).norm(dim=1)
    bound = model.error_bound(y)
    assert bound.shape == (4,) and bound.dtype == torch.float64 and not bound.requires_grad
    assert bool((distance <= bound).all()) and bool((bound <= 60 * distance).all())


def test_distances_of_the_weights_of_the_package() -> None:
    y = wp.data.load("deblurring_leaves", n=1, n_test=8, seed=7).X_test
    model, exact = wp.tasks.load("deblurring"), wp.tasks.load("deblurring").double()
    model.layer.max_steps, exact.layer.rtol, exact.layer.max_steps = 500, 1e-13, 2000
    with pytest.raises(InvalidArgument, match="no images yet"):
        model.error_bound(y)
    with torch.no_grad():
        truth = exact(y.double())
        for rtol in (1e-3, 1e-5, 1e-7):
            model.layer.rtol = rtol
            distance = (model(y).double() - truth).flatten(1).norm(dim=1)
            assert bool((distance <= model.error_bound(y)).all())
    with torch.no_grad():
        model.layer.cell.log_weight.fill_(math.nan)
    assert bool((model.error_bound(y) == math.inf).all())
