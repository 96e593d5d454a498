"""What the experiments about theorems are made of, against answers by other ways."""

from __future__ import annotations

from typing import Any

import torch

from wellposed.convex import OptEq
from wellposed.descent import descend
from wellposed.kernel import population_gram, population_gram_layers, tangent_kernel
from wellposed.nn import GaussianDEQ, ImplicitOnlyDEQ
from wellposed_lab.papers.datasets import samples
from wellposed_lab.papers.gao2023.kernel_machine import _rank_correlation, machine
from wellposed_lab.papers.ling2022.depth import _factor, _first, fresh_randomness
from wellposed_lab.papers.ling2022.figure1 import WEIGHT_VARIANCE
from wellposed_lab.papers.xie2021.theorems import _least_rise

F64 = torch.float64


def test_the_levels_tend_to_the_population_gram() -> None:
    X = samples("sphere", 6, 1, paper="ling2022", seed=0, dtype=F64).X
    K = population_gram_layers(X, WEIGHT_VARIANCE, 60)[1:]
    inner = X @ X.t() / 6
    first = (torch.sqrt(1 - inner.clamp(-1, 1) ** 2) + (torch.pi - torch.arccos(inner.clamp(-1, 1))) * inner) / torch.pi
    assert torch.allclose(K[0], first, atol=1e-7)  # the root of 1 - c^2 at c = 1
    assert torch.allclose(K[-1], population_gram(X, WEIGHT_VARIANCE), atol=1e-6)


def test_the_construction_of_lemma_4_is_exact_at_every_depth() -> None:
    generator = torch.Generator().manual_seed(0)
    X = samples("sphere", 8, 1, paper="ling2022", seed=0, dtype=F64).X
    model = GaussianDEQ(8, 200, weight_variance=WEIGHT_VARIANCE, generator=generator, dtype=F64, on_ill_posed="ignore")
    layers: list[torch.Tensor] = []
    with torch.no_grad():
        z = torch.zeros(2, 200, dtype=F64)
        for _ in range(4):
            z = torch.relu(z @ model.W.t() + X[:2] @ model.U.t())
            layers.append(z)
            error, deviations = fresh_randomness(model, X, layers)
            assert error < 1e-12 and abs(deviations) < 5
        model.W.mul_(1.5)  # entries of another variance are seen, and so is a wrong state
        assert fresh_randomness(model, X, layers)[1] > 5


def test_factors_and_bounds_by_hand() -> None:
    assert abs(_factor([1, 2, 3], [1.0, 0.5, 0.25]) - 0.5) < 1e-12
    assert abs(_factor([1, 2, 3], [1.0, 0.5, 1e-14]) - 0.5) < 1e-12  # rounding is not part of the rate
    assert _first([1, 2], [1.5, 1.2], 2) is None and _first([1, 2], [1.5, 1.3], 2) == 2  # 2 * 0.8 and 2 * 0.64


def test_the_kernel_machine_makes_the_steps_of_a_linear_model() -> None:
    """Against its recursion, and against a network so wide that it hardly moves."""
    data = samples("digits", 8, 6, paper="gao2023", seed=0, dtype=F64)
    options = {"on_ill_posed": "ignore", "dtype": F64, "rtol": 1e-10}
    model = ImplicitOnlyDEQ(data.X.shape[1], 600, gamma0=0.3, generator=torch.Generator().manual_seed(0), **options)
    assert data.X_test is not None
    H, cross = tangent_kernel(model, data.X), tangent_kernel(model, data.X_test, data.X)
    size = 1 / float(torch.linalg.eigvalsh(H)[-1])
    with torch.no_grad():
        u, f = model(data.X), model(data.X_test)
    expected = []
    for _ in range(5):
        u, f = u - size * H @ (u - data.y), f - size * cross @ (u - data.y)
        expected.append(f)
    found = machine(model, data, data.y, H, size, [1, 3, 5])
    for one, other in zip(found, (expected[0], expected[2], expected[4]), strict=True):
        assert torch.allclose(one, other, atol=1e-10 * float(other.abs().max()))
    start = model(data.X_test).detach()
    descend(model, data.X, data.y, step_size=size, steps=5)
    moved = model(data.X_test).detach()
    assert float((moved - found[-1]).norm()) < 0.2 * float((moved - start).norm())


def test_rank_correlation_by_hand() -> None:
    assert _rank_correlation([1, 2, 3], [10, 20, 30]) == 1 and _rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert _rank_correlation([1, 2, 3], [5, 5, 5]) == 0
    assert abs(_rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) - 0.8) < 1e-12  # 1 - 6 * 2/(4 * 15)


def test_perturbed_states_of_one_layer_have_values() -> None:
    """Random states of 40 units are all outside the domain: their infinite values would decide nothing."""
    generator = torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "rtol": 1e-13, "norm_bound": 0.8}
    model = OptEq(6, 40, **options)
    X = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    assert 0 < _least_rise(model, X, 10, generator) < 1
    model.b.data += 1.0  # the objective of this network, at the equilibrium of another one
    equilibrium = model.solve(X)
    model.b.data -= 1.0
    model.solve = lambda X: equilibrium  # type: ignore[method-assign, assignment]
    assert _least_rise(model, X, 10, generator) < 0
