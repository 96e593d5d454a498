"""Lipschitz bounds of the theory networks and dense layers: dense algebra, no pair of inputs above, attained where linear."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import wellposed as wp
from wellposed.certify import lipschitz_lower, lipschitz_upper
from wellposed.certify._lipschitz_network import NetworkLipschitz
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import DenseCell, EquilibriumLayer, LeakyReLU, Monotone, MonotoneClassifier, ReLU, Sigmoid, Spectral, Tanh

F64 = torch.float64
FAMILIES = ("gaussian", "skip", "implicit", "half_normal", "monotone")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(family: str, seed: int = 0, *, d: int = 4, m: int = 12, **more: Any) -> Any:
    options: dict[str, Any] = {"generator": generator(seed), "dtype": F64, "rtol": 1e-12, "max_steps": 5000} | more
    if family == "gaussian":
        return wp.GaussianDEQ(d, m, weight_variance=0.06, on_ill_posed="ignore", **options)
    if family == "skip":
        return wp.SkipDEQ(d, m, gamma=0.25, on_ill_posed="ignore", **options)
    if family == "monotone":
        return wp.MonotoneDEQ(d, m, margin=0.3, **options)
    init = "half_normal" if family == "half_normal" else "gaussian"
    return wp.ImplicitOnlyDEQ(d, m, gamma0=0.3, init=init, on_ill_posed="ignore", **options)


def inputs(seed: int, n: int = 6, d: int = 4) -> Tensor:
    return torch.randn(n, d, generator=generator(seed), dtype=F64)


def check_pairs(model: Any, bounds: NetworkLipschitz, x: Tensor, other: Tensor) -> None:
    with torch.no_grad():
        dz, dy = model.equilibrium(x) - model.equilibrium(other), model(x) - model(other)
    moved = (x - other).norm(dim=1)
    assert bounds.prediction is not None and bounds.prediction <= bounds.plain
    assert bool((dz.norm(dim=1) <= bounds.equilibrium * moved * (1 + 1e-9) + 1e-10).all())
    assert bool((dy.abs() <= bounds.prediction * moved * (1 + 1e-9) + 1e-10).all())


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.2, 1.2), distance=st.sampled_from([1e-4, 1e-1, 1.0, 50.0]))
def test_no_pair_of_inputs_breaks_the_bounds(family: str, seed: int, spread: float, distance: float) -> None:
    model = make(family, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(spread)
    try:
        bounds = lipschitz_upper(model)
    except InvalidArgument:
        assert family != "monotone"  # which is well-posed for every A and B
        return
    x = inputs(seed + 1)
    check_pairs(model, bounds, x, x + distance * inputs(seed + 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_search_breaks_the_bounds(family: str) -> None:
    model, x = make(family, 0), inputs(10)
    bounds = lipschitz_upper(model)
    found = lipschitz_lower(model, x, steps=8, generator=generator(0))
    assert found.shape == (6,) and found.dtype == F64 and bool((found > 0).all())
    assert float(found.max()) <= bounds.prediction
    # it beats the gradients at the starting points, nearly: the first secants go along them
    start = x.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(model(start).sum(), start)
    assert float(found.max()) >= 0.8 * float(slopes.norm(dim=1).max())
    assert float(found.max()) >= bounds.prediction / 30  # the gap is visible, and not absurd


@pytest.mark.parametrize("family", FAMILIES)
def test_formulas_by_dense_algebra(family: str) -> None:
    """Every field, with M^(-1/2) by eigenvectors instead of solves, and the constants of each network written down again."""
    model = make(family, 3)
    bounds = lipschitz_upper(model)
    eye, m = torch.eye(model.width, dtype=F64), model.width
    with torch.no_grad():
        R, v = model.recurrent(), model.readout_weight()
        U = {"gaussian": "U", "monotone": "U", "skip": "W"}.get(family)
        U = model.W.t() if U is None else getattr(model, U) / (math.sqrt(m) if family == "skip" else 1.0)
        skip = model.v if family == "skip" else torch.zeros_like(v)
        values, Q = torch.linalg.eigh(eye - (R + R.t()) / 2)
        root = (Q / values.sqrt()) @ Q.t()
        size = float(torch.linalg.matrix_norm(U, ord=2))
        w = root @ root @ v / 2 + skip
        if family in ("gaussian", "monotone"):
            weighted = float(torch.linalg.matrix_norm(root @ U, ord=2))
            aligned = float((U.t() @ w).norm())
        else:
            weighted = size / math.sqrt(float(values[0]))
            aligned = (float((U.t() @ w).norm()) + float(w.norm()) * size) / 2
        sharp = aligned + float((root @ v).norm()) * weighted / 2
        norm = float(torch.linalg.matrix_norm(R, ord=2))
        inverse = 1 / model.margin if family == "monotone" else 1 / (1 - norm)
        if family == "monotone" and norm < 1:
            inverse = min(inverse, 1 / (1 - norm))
        plain = (float(v.norm()) * inverse + float(skip.norm())) * size
    assert bounds.margin == pytest.approx(float(values[0]), rel=1e-9) and bounds.margin <= float(values[0]) * (1 + 1e-13)
    assert bounds.contraction == pytest.approx(norm, rel=1e-9)
    assert bounds.input_norm == pytest.approx(size, rel=1e-9)
    assert bounds.plain == pytest.approx(plain, rel=1e-8) and bounds.plain >= plain * (1 - 1e-13)
    assert bounds.prediction == pytest.approx(min(plain, sharp), rel=1e-8)
    assert bounds.prediction >= min(plain, sharp) * (1 - 1e-13)


def linear(model: Any, rho: float) -> float:
    """Makes z = s t with t = x_1/(1 - rho) for x_1 > 0: every norm bound is an equality. Returns the constant."""
    g = generator(5)
    s = torch.rand(model.width, generator=g, dtype=F64) + 0.5
    with torch.no_grad():
        model.W.copy_(rho * torch.outer(s, s) / s.square().sum())
        model.U.zero_()
        model.U[:, 0] = s
        model.a.copy_(2.0 * s)
    return 2.0 * float(s.square().sum()) / (1 - rho)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.99])
def test_a_linear_network_attains_the_bound(rho: float) -> None:
    model = make("gaussian")
    exact = linear(model, rho)
    bounds = lipschitz_upper(model)
    assert exact * (1 - 1e-12) <= bounds.prediction <= exact * (1 + 1e-8)
    x = torch.zeros(2, 4, dtype=F64)
    x[:, 0] = torch.tensor([1.0, 3.0])
    with torch.no_grad():
        y = model(x)
    assert float(y[1] - y[0]) / 2.0 == pytest.approx(exact, rel=1e-9)
    found = lipschitz_lower(model, x, steps=0, generator=generator(0))
    assert 0.9 * exact <= float(found.max()) <= exact * (1 + 1e-8)  # a tenth of the first direction is noise


def test_norms_alone_are_beaten_where_the_matrix_turns() -> None:
    """Skew matrices have |R| without moving M: the sharp bound stays where the plain one has nothing to say."""
    model = make("gaussian")
    with torch.no_grad():
        skew = model.W - model.W.t()
        model.W.copy_(3.0 * skew / torch.linalg.matrix_norm(skew, ord=2))
    bounds = lipschitz_upper(model)
    assert bounds.contraction == pytest.approx(3.0) and bounds.plain == math.inf and bounds.margin == pytest.approx(1.0)
    assert bounds.prediction < math.inf
    g, eye = generator(1), torch.eye(model.width, dtype=F64)
    with torch.no_grad():
        for density in (0.3, 0.6, 1.0):  # on whatever units are active, dy/dx = a_S^T (I - W_SS)^(-1) U_S
            D = torch.diag((torch.rand(model.width, generator=g) < density).double())
            J = model.a @ torch.linalg.solve(eye - D @ model.W, D @ model.U)
            assert 0 < float(J.norm()) <= bounds.prediction


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    activation=st.sampled_from([ReLU(), Tanh(), Sigmoid(), LeakyReLU(0.2)]),
    weight=st.sampled_from(["none", "spectral", "monotone"]),
    distance=st.sampled_from([1e-3, 1.0, 20.0]),
)
def test_layers_with_a_dense_cell(seed: int, activation: Any, weight: str, distance: float) -> None:
    made = {"none": None, "spectral": Spectral(0.6), "monotone": Monotone(0.4)}[weight]
    cell = DenseCell(4, 9, activation, weight=made, generator=generator(seed), dtype=F64)
    solver = wp.PeacemanRachford(step_size=1.0) if weight == "monotone" else wp.Picard()
    layer = EquilibriumLayer(cell, solver, rtol=1e-12, max_steps=5000, on_failure="ignore")
    try:
        bounds = lipschitz_upper(layer)
    except InvalidArgument:
        assert weight == "none"
        return
    assert bounds.prediction is None and bounds.equilibrium <= bounds.plain
    x = inputs(seed + 1)
    other = x + distance * inputs(seed + 2)
    with torch.no_grad():
        change = (layer(x) - layer(other)).norm(dim=1)
        if weight == "none" and not bool((layer.last_solution.converged).all()):
            return
    assert bool((change <= bounds.equilibrium * (x - other).norm(dim=1) * (1 + 1e-9) + 1e-9).all())
    if weight == "spectral":
        assert bounds.contraction <= 0.6 * activation.lipschitz * (1 + 1e-9)


def test_a_search_in_a_layer() -> None:
    layer = EquilibriumLayer(DenseCell(4, 9, weight=Spectral(0.6), generator=generator(0), dtype=F64), rtol=1e-10)
    found = lipschitz_lower(layer, inputs(1), steps=5, generator=generator(2))
    assert found.shape == (6,) and 0 < float(found.max()) <= lipschitz_upper(layer).equilibrium


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_parameters_are_bounded_as_stored(family: str) -> None:
    model = make(family, 1).float()
    single, double = lipschitz_upper(model), lipschitz_upper(make(family, 1).float().double())
    assert single == double and next(model.parameters()).dtype == torch.float32
    x = inputs(2).float()
    found = lipschitz_lower(model, x, steps=3, generator=generator(0))
    assert float(found.max()) <= single.prediction and found.dtype == F64
    assert next(model.parameters()).dtype == torch.float32 and next(model.parameters()).requires_grad


def test_nothing_is_claimed_where_nothing_is_proved() -> None:
    for family, name in (("gaussian", "W"), ("skip", "A"), ("implicit", "A")):
        model = make(family)
        with torch.no_grad():
            weight = getattr(model, name)
            weight.copy_(torch.eye(model.width, dtype=F64))
            weight *= 1.0 / float(torch.linalg.matrix_norm(model.recurrent(), ord=2))  # |R| = 1, M = 0
        with pytest.raises(InvalidArgument, match="nothing proves"):
            lipschitz_upper(model)
        with torch.no_grad():
            weight[0, 0] = math.nan
        with pytest.raises(InvalidArgument, match="NaN"):
            lipschitz_upper(model)


def test_unsupported_models_are_refused() -> None:
    class Other(wp.nn.AbstractNetwork):
        recurrent = injection = readout_weight = _tangent = lambda self, *a: torch.ones(2, 2)

    with pytest.raises(InvalidType, match="GaussianDEQ.*; got Other"):
        lipschitz_upper(Other(2, 2))
    with pytest.raises(InvalidType, match="needs an EquilibriumLayer with a DenseCell; got one with"):
        lipschitz_upper(EquilibriumLayer(lambda z, x: 0.5 * z + x))
    cell = DenseCell(2, 3)
    cell.weight = torch.nn.Identity()
    with pytest.raises(InvalidType, match="Spectral and Monotone; got Identity"):
        lipschitz_upper(EquilibriumLayer(cell))


def test_a_family_can_be_added() -> None:
    class Mine(torch.nn.Linear):
        pass

    expected = NetworkLipschitz(1.0, 0.0, 2.0, 2.0, 2.0, 2.0)
    lipschitz_upper.register(Mine, lambda model: expected)
    assert lipschitz_upper(Mine(2, 1)) is expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unused_network_moves_nothing(family: str) -> None:
    model = make(family)
    with torch.no_grad():
        for name in ("a", "u", "v", "b"):
            if isinstance(getattr(model, name, None), Tensor):
                getattr(model, name).zero_()
    assert lipschitz_upper(model).prediction == 0.0
    assert bool((lipschitz_lower(model, inputs(0), steps=2, generator=generator(0)) == 0).all())


WRONG_INPUTS = {
    "nan": (torch.full((2, 4), math.nan, dtype=F64), InvalidArgument, "NaN or infinite"),
    "infinite": (torch.full((2, 4), math.inf, dtype=F64), InvalidArgument, "NaN or infinite"),
    "empty": (torch.zeros(0, 4, dtype=F64), InvalidArgument, r"no samples \(shape \(0, 4\)\)"),
    "features": (torch.zeros(2, 5, dtype=F64), InvalidArgument, r"shape \(batch, 4\); got \(2, 5\)"),
    "flat": (torch.zeros(4, dtype=F64), InvalidArgument, r"shape \(batch, 4\); got \(4,\)"),
    "integers": (torch.zeros(2, 4, dtype=torch.long), InvalidType, "floating-point tensor.*got torch.int64"),
    "list": ([0.0], InvalidType, "floating-point tensor.*got list"),
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
@pytest.mark.parametrize("family", [*FAMILIES, "layer", "classifier"])
def test_the_search_refuses_wrong_inputs_in_a_sentence(family: str, wrong: str) -> None:
    if family == "layer":
        model: Any = EquilibriumLayer(DenseCell(4, 6, weight=Spectral(0.9), dtype=F64))
    else:
        model = MonotoneClassifier.dense(4, 6, 3, dtype=F64) if family == "classifier" else make(family)
    x, kind, words = WRONG_INPUTS[wrong]
    with pytest.raises(kind, match=f"lipschitz_lower: .*{words}"):
        lipschitz_lower(model, x)


def test_the_search_asks_for_one_dtype_and_for_images() -> None:
    with pytest.raises(InvalidType, match=r"the model is torch.float64 and x is torch.float32"):
        lipschitz_lower(MonotoneClassifier.dense(4, 6, 3, dtype=F64), torch.zeros(2, 4))
    images = MonotoneClassifier.conv((1, 4, 4), 2, 3, dtype=F64)
    with pytest.raises(InvalidArgument, match=r"shape \(batch, 1, 4, 4\); got \(2, 16\)"):
        lipschitz_lower(images, torch.zeros(2, 16, dtype=F64))
    flat = MonotoneClassifier.dense(4, 6, 3, dtype=F64)
    folded = inputs(0).reshape(6, 2, 2)  # a dense classifier flattens what it is given
    assert lipschitz_lower(flat, folded, steps=1, generator=generator(0)).shape == (6,)
