"""Solves that start at the last answers of the same samples: fewer evaluations, the same answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from problems import gaussian

SAMPLES, FEATURES = 12, 40


class Cell(nn.Module):
    """tanh(s W z + x), a slow contraction whose weight a test moves a little."""

    def __init__(self, norm: float = 0.85) -> None:
        super().__init__()
        W = gaussian(FEATURES, FEATURES, seed=0)
        self.W = nn.Parameter(norm * W / torch.linalg.matrix_norm(W, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.W.T + x)


X, V = 0.3 * gaussian(SAMPLES, FEATURES, seed=1), gaussian(SAMPLES, FEATURES, seed=2)


def dense() -> nn.Module:
    cell = wp.nn.DenseCell(FEATURES, FEATURES, wp.nn.Tanh(), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        cell.W.mul_(0.85 / torch.linalg.matrix_norm(cell.W, 2))
    return cell


def step(layer: wp.EquilibriumLayer, index: Tensor, t: float, warm: Any = None) -> tuple[Tensor, list[Tensor], int, int]:
    """z, gradients, and evaluations forward and backward."""
    layer.zero_grad()
    z = layer(X[index], warm_start=warm)
    ((1 + t) * V[index] * z).sum().backward()
    assert layer.last_solution is not None and layer.last_adjoint is not None
    counts = (int(s.num_steps.sum()) for s in (layer.last_solution, layer.last_adjoint))
    return z.detach(), [p.grad.clone() for p in layer.parameters() if p.grad is not None], *counts


@pytest.mark.parametrize("make", [Cell, dense], ids=["own", "dense"])
@pytest.mark.parametrize("solver", [None, wp.Picard(), wp.Anderson()], ids=repr)
def test_a_slowly_changing_problem_takes_fewer_evaluations_and_has_the_same_answers(make: Any, solver: Any) -> None:
    layer = wp.EquilibriumLayer(make(), solver, wp.ImplicitGradient(solver), rtol=1e-9, on_failure="raise")
    cache = wp.nn.EquilibriumCache(SAMPLES)
    counts = torch.zeros(2, 2)
    for epoch in range(4):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(4):
            z, gradients, *cold = step(layer, index, 1e-4 * epoch)
            z_warm, gradients_warm, *warm = step(layer, index, 1e-4 * epoch, cache[index])
            # residuals <= rtol |z| at both: each is within rtol |z| / (1 - 0.85) of the equilibrium
            assert (z - z_warm).norm(dim=1).max() <= 2 * 1e-9 * z.norm(dim=1).max() / 0.15
            for a, b in zip(gradients, gradients_warm, strict=True):
                assert (a - b).norm() <= 1e-6 * a.norm()
            if epoch > 0:
                counts += torch.tensor([cold, warm])
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(1 - 1e-5)
    assert len(cache) == SAMPLES
    assert counts[1, 0] < 0.75 * counts[0, 0] and counts[1, 1] < 0.75 * counts[0, 1], counts


def test_an_adjoint_of_another_size_or_sign_is_still_a_good_start() -> None:
    """The multiple with the least residual: the same cotangent times -1000 needs one product."""
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise", rtol=1e-9)
    cache, all_of_them = wp.nn.EquilibriumCache(SAMPLES), torch.arange(SAMPLES)
    step(layer, all_of_them, 0.0, cache[:])
    *_, backward = step(layer, all_of_them, -1001.0, cache[:])
    assert layer.last_adjoint is not None and layer.last_adjoint.converged.all()
    assert backward <= 3 * SAMPLES


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tiny_and_huge_cotangents(scale: float) -> None:
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise", rtol=1e-9)
    cache = wp.nn.EquilibriumCache(SAMPLES)
    x = X.clone().requires_grad_()
    found = [torch.autograd.grad(layer(x, warm_start=cache[:]), x, scale * V)[0] for _ in range(2)]
    assert found[0].isfinite().all() and (found[1] - found[0]).norm() <= 1e-6 * found[0].norm()


@pytest.mark.parametrize("linear", [wp.GMRES(), wp.Neumann(), None], ids=repr)
def test_second_derivatives_and_linear_solvers(linear: Any) -> None:
    """Nested solves are of other systems: they start at zero, and do not reach the cache."""
    layer = wp.EquilibriumLayer(Cell(), gradient=wp.ImplicitGradient(linear), rtol=1e-12, on_failure="raise")
    cache = wp.nn.EquilibriumCache(SAMPLES)
    x = X.clone().requires_grad_()
    results = []
    for _ in range(2):
        (first,) = torch.autograd.grad((V * layer(x, warm_start=cache[:])).sum(), x, create_graph=True)
        kept = cache._adjoints.clone()
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
        assert torch.equal(kept, cache._adjoints)
    (first,) = torch.autograd.grad((V * layer(x)).sum(), x, create_graph=True)
    (exact,) = torch.autograd.grad(first.square().sum(), x)
    assert all((result - exact).norm() <= 1e-8 * exact.norm() for result in results)


def test_coupled_rows_structures_and_solves_without_a_graph() -> None:
    coupled = wp.EquilibriumLayer(lambda z, x: 0.7 * torch.tanh(z.mean(0)) + x, coupled=True, on_failure="raise", rtol=1e-9)
    cache = wp.nn.EquilibriumCache(SAMPLES)
    x = X.clone().requires_grad_()
    cold = torch.autograd.grad(coupled(x), x, V)[0]
    for _ in range(2):
        assert (torch.autograd.grad(coupled(x, warm_start=cache[:]), x, V)[0] - cold).norm() <= 1e-6 * cold.norm()
    assert coupled.last_solution is not None and int(coupled.last_solution.num_steps.max()) <= 3
    pair = wp.EquilibriumLayer(lambda z, x: (0.8 * torch.sin(z[1]) + x, 0.8 * torch.sin(z[0])), on_failure="raise", rtol=1e-9)
    cache = wp.nn.EquilibriumCache(SAMPLES)
    first, second = (pair.solve(X, (X, X), warm_start=cache[range(SAMPLES)]) for _ in range(2))
    assert second.num_steps.max() <= 3 < first.num_steps.max()
    assert all((a - b).abs().max() <= 1e-7 for a, b in zip(first.value, second.value, strict=True))


def test_a_failed_sample_is_forgotten_and_reported() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: x * (z + 1), on_failure="ignore", max_steps=50)
    cache = wp.nn.EquilibriumCache(3)
    x = torch.tensor([[0.5], [0.1], [0.2]], dtype=torch.float64)
    assert layer.solve(x, warm_start=cache[:]).converged.all() and len(cache) == 3
    x[1] = torch.nan
    assert layer.solve(x, warm_start=cache[:]).converged.tolist() == [True, False, True] and len(cache) == 2
    x[1] = 0.3
    assert layer.solve(x, warm_start=cache[:]).converged.all() and len(cache) == 3 and cache._used == 3


def test_memory_is_bounded() -> None:
    """A sample takes 2 x 40 x 8 bytes: 5 of the 12 fit in 3300, and the others start at zero."""
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise")
    cache = wp.nn.EquilibriumCache(SAMPLES, max_bytes=3300)
    cold = layer.solve(X, warm_start=cache[:])
    warm = layer.solve(X, warm_start=cache[:])
    assert len(cache) == 5 and repr(cache).startswith("EquilibriumCache(5 of 12 samples")
    assert (warm.num_steps < cold.num_steps).tolist() == [True] * 5 + [False] * 7
    cache.clear()
    assert len(cache) == 0
    layer.float().solve(X.float(), warm_start=cache[:])
    assert len(cache) == 10  # in half the memory


def test_a_sample_may_be_in_a_batch_twice() -> None:
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise")
    cache, index = wp.nn.EquilibriumCache(SAMPLES), torch.tensor([3, 3, 5])
    first = layer.solve(X[index], warm_start=cache[index])
    second = layer.solve(X[index], warm_start=cache[index])
    assert len(cache) == 2 and second.num_steps.max() < first.num_steps.min()


def test_bad_input_gets_one_sentence() -> None:
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise")
    cache = wp.nn.EquilibriumCache(SAMPLES)
    with pytest.raises(wp.InvalidArgument, match=r"Index 12 is out of range of a cache of 12 samples \(0 to 11\)"):
        cache[torch.tensor([3, 12])]
    with pytest.raises(wp.InvalidArgument, match="Index -1 is out of range"):
        cache[[-1]]
    with pytest.raises(wp.InvalidType, match=r"one integer for each sample of the batch; got shape \(2,\) of torch.float32"):
        cache[torch.ones(2)]
    with pytest.raises(wp.InvalidArgument, match="indices of 3 samples, and the batch has 12 rows"):
        layer(X, warm_start=cache[:3])
    with pytest.raises(wp.InvalidType, match=r"must be cache\[index\] of an EquilibriumCache; got EquilibriumCache. Index it"):
        layer(X, warm_start=cache)
    with pytest.raises(wp.InvalidArgument, match="several rows in a sample; give z0 instead"):
        layer(X, None, torch.zeros(SAMPLES, dtype=torch.int64), warm_start=cache[:])
    with pytest.raises(wp.InvalidArgument, match="give only one of the two"):
        layer(X, states=3, warm_start=cache[:])
    with pytest.raises(wp.InvalidArgument, match=r"transforms of torch\.func hide"):
        torch.func.vmap(lambda x: layer(x, warm_start=cache[:1]))(X.unsqueeze(1))
    layer(X, warm_start=cache[:])
    with pytest.raises(wp.InvalidArgument, match=r"torch.float64, and this batch has shape \(40,\) and torch.float32"):
        wp.EquilibriumLayer(Cell().float())(X.float(), warm_start=cache[:])
    with pytest.raises(wp.InvalidArgument, match=r"this batch has shape \(2,\) and torch.float64. Make a new"):
        wp.EquilibriumLayer(lambda z, x: 0.5 * z + x)(X[:, :2], warm_start=cache[:])
    with pytest.raises(wp.InvalidArgument, match="less than the 640 that"):
        layer(X, warm_start=wp.nn.EquilibriumCache(SAMPLES, max_bytes=639)[:])
    with pytest.raises(wp.InvalidArgument, match="num_samples"):
        wp.nn.EquilibriumCache(0)


@pytest.mark.parametrize("made_there", [False, True], ids=["filled in inference mode", "made there too"])
def test_a_cache_filled_in_inference_mode_serves_outside_of_it(made_there: bool) -> None:
    layer = wp.EquilibriumLayer(Cell(), on_failure="raise")
    cache = wp.nn.EquilibriumCache(SAMPLES)
    with torch.inference_mode():
        if made_there:
            cache = wp.nn.EquilibriumCache(SAMPLES)
        cold = layer(X[:8], warm_start=cache[:8])
    warm = layer(X, warm_start=cache[:])
    warm.sum().backward()
    assert len(cache) == SAMPLES and torch.equal(warm[:8].detach(), cold)
    with torch.inference_mode():
        layer(X, warm_start=cache[:])
        cache.clear()
    assert len(cache) == 0
    layer(X, warm_start=cache[:]).sum().backward()


@pytest.mark.parametrize("index", [0, 1.5, None, "a", ["a"], [[0]], [0, None], [1.5]])
def test_an_index_that_is_not_one_of_a_batch_gets_one_sentence(index: Any) -> None:
    with pytest.raises(wp.InvalidType, match="The index of a cache must have one integer for each sample of the batch; got"):
        wp.nn.EquilibriumCache(SAMPLES)[index]


def test_lists_ranges_and_arrays_are_indices() -> None:
    cache = wp.nn.EquilibriumCache(SAMPLES)
    for index in ([2, 3], range(2, 4), np.array([2, 3]), np.array([2, 3], dtype=np.uint8), torch.tensor([2, 3]), slice(2, 4)):
        assert cache[index].index.tolist() == [2, 3]
    assert cache[[]].index.tolist() == []
