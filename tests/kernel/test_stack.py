"""Dense layers around an infinitely wide equilibrium: against wide networks and autograd, and against each other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import WideLayer, deq_ntk, relu_gram
from wellposed.nn import Identity, ReLU, Tanh

F64 = torch.float64
FUNCTIONS: dict[Any, Any] = {ReLU: torch.relu, Tanh: torch.tanh, Identity: lambda v: v}


def samples(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=F64)


def normal(generator: torch.Generator, *shape: int, variance: float) -> Tensor:
    return (math.sqrt(variance) * torch.randn(*shape, generator=generator, dtype=F64)).requires_grad_()


def finite(X: Tensor, m: int, generator: torch.Generator, *, s: float, before: Any, after: Any, f: Any, readout: float) -> Any:
    """The parts of the tangent kernel of one network of width m, by autograd through 40 layers of the equilibrium, over m."""
    parameters: dict[str, Tensor] = {}

    def dense(name: str, layer: WideLayer, h: Tensor) -> Tensor:
        parameters[f"{name}V"] = V = normal(generator, m, h.shape[1], variance=2 * layer.weight_variance / h.shape[1])
        parameters[f"{name}b"] = b = normal(generator, m, variance=2 * layer.bias_variance)
        return FUNCTIONS[type(layer.activation)](h @ V.T + b)

    h = X
    for i, layer in enumerate(before):
        h = dense(f"before.{i}.", layer, h)
    parameters["U"] = U = normal(generator, m, h.shape[1], variance=2 * 0.8 / h.shape[1])
    parameters["b"] = b = normal(generator, m, variance=2 * 0.1)
    parameters["W"] = W = normal(generator, m, m, variance=2 * s / m)
    c, z = h @ U.T + b, torch.zeros(len(X), m, dtype=F64)
    for _ in range(40):
        z = FUNCTIONS[type(f)](z @ W.T + c)
    for i, layer in enumerate(after):
        z = dense(f"after.{i}.", layer, z)
    parameters["a"] = a = normal(generator, m, variance=readout / m)
    names = list(parameters)
    rows = [torch.autograd.grad(y, [parameters[name] for name in names], retain_graph=True) for y in z @ a]
    jacobians = {name: torch.stack([row[i].flatten() for row in rows]) for i, name in enumerate(names)}
    return {name: J @ J.T / m for name, J in jacobians.items()}


STACKS: dict[str, tuple[list[WideLayer], Any, float, list[WideLayer]]] = {
    "before": ([WideLayer(Tanh(), 0.7, 0.2)], ReLU(), 0.2, []),
    "after": ([], Tanh(), 0.15, [WideLayer(ReLU(), 1.0, 0.1)]),
    "both": ([WideLayer(ReLU(), 1.0, 0.1), WideLayer(Tanh(), 0.8, 0.3)], ReLU(), 0.15, [WideLayer(Tanh(), 0.6, 0.1)]),
}


@pytest.mark.parametrize("name", [pytest.param(key, marks=pytest.mark.slow if key != "both" else ()) for key in STACKS])
def test_wide_networks_part_by_part(name: str) -> None:
    """The mean of some networks is off by four of its standard errors at most, and by a bias of the order 1/m."""
    before, f, s, after = STACKS[name]
    X, m, count, generator = samples(3, 5), 200, 30, torch.Generator().manual_seed(7)
    draws = [finite(X, m, generator, s=s, before=before, after=after, f=f, readout=1.5) for _ in range(count)]
    options: Any = {"weight_variance": s, "activation": f, "before": before, "after": after, "readout_variance": 1.5}
    limit = deq_ntk(X, input_variance=0.8, bias_variance=0.1, width=m, by_parameter=True, **options)
    assert set(limit) == set(draws[0])
    for part, expected in limit.items():
        drawn = torch.stack([draw[part] for draw in draws])
        allowed = 4 * float(drawn.std(dim=0).norm()) / math.sqrt(count) + 10 / m * float(expected.norm())
        assert float((drawn.mean(dim=0) - expected).norm()) < allowed < 0.5 * float(expected.norm()), part


@pytest.mark.slow
def test_error_falls_like_one_over_the_root_of_the_width() -> None:
    before, f, s, after = STACKS["both"]
    X, generator, errors = samples(3, 5), torch.Generator().manual_seed(11), {}
    for m, draws in ((40, 40), (160, 20), (640, 10)):
        options: Any = {"weight_variance": s, "activation": f, "before": before, "after": after, "width": m}
        limit = deq_ntk(X, input_variance=0.8, bias_variance=0.1, **options)
        squares = [
            float((sum(finite(X, m, generator, s=s, before=before, after=after, f=f, readout=1.0).values()) - limit).norm())
            ** 2
            for _ in range(draws)
        ]
        errors[m] = math.sqrt(sum(squares) / draws)
    assert -0.75 < math.log(errors[640] / errors[40]) / math.log(16) < -0.35


def test_an_equilibrium_without_recurrence_is_a_dense_layer() -> None:
    """The same network three times: its middle layer before, in the place of, and behind the equilibrium."""
    X, X2 = samples(4, 5), samples(3, 5, 1)
    layers = [WideLayer(Tanh(), 0.7, 0.2), WideLayer(ReLU(), 1.1, 0.1), WideLayer(torch.sin, 0.9, 0.3)]
    for ntk, second in ((False, None), (True, X2)):
        found = []
        for place, layer in enumerate(layers):
            inside: Any = {"input_variance": layer.weight_variance, "bias_variance": layer.bias_variance}
            around: Any = {"before": layers[:place], "after": layers[place + 1 :], "activation": layer.activation}
            parts = deq_ntk(X, second, weight_variance=0.0, ntk_parametrization=ntk, by_parameter=True, **inside, **around)
            del parts["W"]  # of weights that multiply z and are 0: of the equilibrium alone
            found.append(sum(parts.values()))
        scale = float(found[0].abs().max())
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=0.0, atol=1e-12 * scale)


@pytest.mark.parametrize("ntk", [False, True])
def test_one_equilibrium_by_both_ways(ntk: bool) -> None:
    """A linear layer with the variance 1/2 in front repeats the inputs: K and Pi are those of `deq_ntk` alone."""
    X, X2 = samples(4, 5), samples(3, 5, 1)
    for activation in (ReLU(), Tanh()):
        options: Any = {"weight_variance": 0.2, "bias_variance": 0.1, "activation": activation, "readout_variance": 1.3}
        for second in (None, X2):
            alone = deq_ntk(X, second, **options, by_parameter=True, ntk_parametrization=ntk)
            stack = deq_ntk(
                X, second, **options, by_parameter=True, ntk_parametrization=ntk, before=[WideLayer(Identity(), 0.5)]
            )
            for name in ("W", "a", "b"):
                scale = float(alone[name].abs().max()) + 1e-300
                torch.testing.assert_close(stack[name], alone[name], rtol=0.0, atol=1e-10 * scale)
            # V has the kernel Pi_V o h with Pi_V = 2 input_variance Pi and h = X X^T/d, as U has
            if ntk:
                torch.testing.assert_close(stack["before.0.V"], stack["U"], rtol=1e-11, atol=1e-12)


def test_a_deep_relu_network_by_its_recursion() -> None:
    """Sigma' = 2 v relu_gram, Theta' = Sigma' + 2 v Theta o (pi - theta)/(2 pi), layer after layer, without a bias."""
    X = samples(4, 6)
    Sigma = 2 * 1.1 * X @ X.T / 6
    Theta = Sigma
    for v in (0.9, 1.2):
        scale = torch.outer(Sigma.diagonal().sqrt(), Sigma.diagonal().sqrt())
        L = torch.linalg.cholesky(Sigma)
        slopes = (math.pi - torch.arccos((Sigma / scale).clamp(-1, 1).fill_diagonal_(1.0))) / (2 * math.pi)
        gram = relu_gram(L)
        Sigma = 2 * v * gram
        Theta = Sigma + 2 * v * Theta * slopes
    scale = torch.outer(Sigma.diagonal().sqrt(), Sigma.diagonal().sqrt())
    slopes = (math.pi - torch.arccos((Sigma / scale).clamp(-1, 1).fill_diagonal_(1.0))) / (2 * math.pi)
    expected = relu_gram(torch.linalg.cholesky(Sigma)) + Theta * slopes
    stack = deq_ntk(
        X,
        weight_variance=0.0,
        input_variance=0.9,
        ntk_parametrization=True,
        before=[WideLayer(ReLU(), 1.1)],
        after=[WideLayer(ReLU(), 1.2)],
    )
    torch.testing.assert_close(stack, expected, rtol=0.0, atol=1e-12 * float(expected.max()))


def test_equal_and_zero_rows_and_single_precision() -> None:
    X = torch.cat([samples(3, 5), samples(1, 5), torch.zeros(1, 5, dtype=F64)])
    options: Any = {"weight_variance": 0.5, "before": [WideLayer()], "after": [WideLayer(Tanh(), 0.05)]}
    H = deq_ntk(X, **options)
    assert torch.equal(H, H.T) and bool(torch.isfinite(H).all())
    assert float(torch.linalg.eigvalsh(H)[0]) > -1e-7 * float(H.max())  # angles of equal rows are right to 1e-8
    torch.testing.assert_close(H[0], H[3], rtol=1e-6, atol=1e-12)
    single = deq_ntk(X.float(), **options)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, H.float(), rtol=1e-4, atol=1e-5)
    assert deq_ntk(X[:1], **options).shape == (1, 1)


def test_wrong_arguments() -> None:
    X = samples(3, 4)
    with pytest.raises(InvalidArgument, match="WideLayer: 'weight_variance' must be a finite number above 0, got 0"):
        WideLayer(weight_variance=0.0)
    with pytest.raises(InvalidArgument, match="WideLayer: 'bias_variance' must be a finite number at least 0, got nan"):
        WideLayer(bias_variance=math.nan)
    with pytest.raises(InvalidType, match=r"must hold WideLayer\(...\), got Tanh"):
        deq_ntk(X, weight_variance=0.1, before=[Tanh()])
    with pytest.raises(InvalidArgument, match=r"'weight_variance' must be a number in \[0, 1\), got 1.0"):
        deq_ntk(X, weight_variance=1.0, after=[WideLayer()])
    with pytest.raises(InvalidArgument, match="only the kernel of an equilibrium alone is differentiable, and X requires"):
        deq_ntk(X.requires_grad_(), weight_variance=0.1, after=[WideLayer()])
