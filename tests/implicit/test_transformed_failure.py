"""Inside torch.func: a solve that fails is counted and reported, and a random f too."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import wellposed as wp
from problems import gaussian

# torch itself calls torch.jit.script when forward mode is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
F64 = torch.float64
#: Not a contraction, but I - W is invertible.
W = torch.tensor([[-3.0, 0.5], [0.2, -2.5]], dtype=F64)


def batched_gradient(layer: wp.EquilibriumLayer, x: Tensor) -> Tensor:
    z = layer(x)
    v = torch.eye(2, dtype=F64)[:, None, :].expand(2, x.shape[0], 2).clone()
    v[0, 1] = 0  # the gradient of this sample is 0, whatever J is
    torch.autograd.grad(z, x, v[0], retain_graph=True)
    assert layer.last_adjoint.converged.all()
    return torch.func.vmap(lambda u: torch.autograd.grad(z, x, u, retain_graph=True)[0])(v)


@pytest.mark.parametrize("policy", ["ignore", "warn", "raise"])
def test_batched_cotangents_that_plain_iteration_cannot_carry(policy: str) -> None:
    layer = wp.EquilibriumLayer(lambda z, x: z @ W.T + x, wp.NewtonKrylov(), wp.ImplicitGradient(wp.GMRES()), on_failure=policy)
    x = gaussian(3, 2, seed=0).requires_grad_()
    if policy == "raise":
        with pytest.raises(wp.AdjointNotConverged, match=r"backward of the equilibrium.*5 of 6 samples.*NaN"):
            batched_gradient(layer, x)
    else:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            g = batched_gradient(layer, x)
        assert [issubclass(w.category, wp.AdjointNotConvergedWarning) for w in caught] == [True] * (policy == "warn")
        expected = torch.full((2, 3, 2), torch.nan, dtype=F64)
        expected[0, 1] = 0
        assert torch.equal(g.isnan(), expected.isnan()) and (g[0, 1] == 0).all()
    assert layer.last_adjoint is None and layer.failure_counts == {"backward inside torch.func": 1}


def test_batched_cotangents_that_it_can_carry() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.1 * z @ W.T + x, on_failure="raise")
    x = gaussian(3, 2, seed=0).requires_grad_()
    g = batched_gradient(layer, x)
    exact = torch.linalg.inv(torch.eye(2, dtype=F64) - 0.1 * W)
    assert (g[1] - exact[1]).norm() <= 1e-10 * exact.norm() and not layer.failure_counts and layer.last_adjoint is None


def test_a_forward_failure_is_counted_too() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0.1 * z @ W.T + x, max_steps=3, on_failure="ignore")
    torch.func.vmap(layer)(gaussian(2, 2, seed=0).unsqueeze(1))
    assert layer.failure_counts == {"forward inside torch.func": 1}


def rarely_off(z: Tensor, x: Tensor) -> Tensor:
    return 0.3 * torch.tanh(z) * (torch.rand(()) > 0.02) + x


def draws_where_recorded(z: Tensor, x: Tensor) -> Tensor:
    return 0.3 * torch.tanh(z) + x + (0 * torch.rand(()) if torch.is_grad_enabled() else 0)


@pytest.mark.parametrize("cell", [rarely_off, draws_where_recorded])
@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "vmap"])
def test_a_random_map_is_said_to_be_random(cell: Any, transform: str) -> None:
    x = gaussian(2, 4, seed=0)
    for seed in range(6):
        torch.manual_seed(seed)
        layer = wp.EquilibriumLayer(cell, rtol=1e-6)
        if transform == "vmap":
            run = torch.func.vmap(layer, randomness="different")
            x = gaussian(3, 2, 4, seed=1) if x.dim() == 2 else x
        else:
            run = getattr(torch.func, transform)(layer, **({"randomness": "same"} if transform == "jacfwd" else {}))
        with pytest.warns(wp.NotConvergedWarning, match="f is random"):
            run(x)
        assert any("f is random" in cause for cause in layer.failure_counts)


def test_a_random_map_without_an_evaluation_left() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 0 * z + x + 0 * torch.rand(()), max_steps=1)
    with pytest.warns(wp.NotConvergedWarning, match="f may be random"):
        torch.func.jacrev(layer)(torch.zeros(1, 1, dtype=F64))


def test_a_residual_that_is_small_because_the_state_grew_is_not_convergence() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.floor(z) + 1 + x, rtol=1e-2, max_steps=500)
    with pytest.warns(wp.NotConvergedWarning, match=r"1 of 1 samples .* only because \|f\(z\)\| has grown"):
        torch.func.vmap(layer)(torch.zeros(1, 1, 1))


def test_batched_cotangents_are_judged_by_the_rule_of_plain_iteration() -> None:
    def factor(z: Tensor, x: Tensor) -> Tensor:
        return 0.995 * z + x

    layer = wp.EquilibriumLayer(
        factor, gradient=wp.ImplicitGradient(wp.Picard()), rtol=1e-2, max_steps=2000, on_failure="raise"
    )
    x = torch.ones(1, 1, dtype=F64, requires_grad=True)
    z = layer(x)
    (alone,) = torch.autograd.grad(z, x, torch.ones_like(z), retain_graph=True)
    batched = torch.func.vmap(lambda v: torch.autograd.grad(z, x, v, retain_graph=True)[0])(torch.ones(1, 1, 1, dtype=F64))
    torch.testing.assert_close(batched[0], alone, rtol=1e-2, atol=0)
    assert alone > 0.9 / (1 - 0.995)


def test_a_row_that_has_not_run_away_is_held_beside_one_that_has() -> None:
    layer = wp.EquilibriumLayer(
        lambda z, x: torch.where(x > 0, torch.floor(z) + 1, 0.5 * z - 1), rtol=1e-2, max_steps=300, on_failure="ignore"
    )
    z = torch.func.vmap(layer)(torch.tensor([1.0, -1.0], dtype=F64)[:, None, None])
    assert abs(z[1] + 2) < 0.1 and layer.failure_counts == {"forward inside torch.func": 1}
