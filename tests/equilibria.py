"""Cells with their inputs, and gradients of equilibria by dense linear algebra: what the tests of differentiation share.

The reference forms the Jacobian of the whole batch as one matrix and solves with it. It knows nothing of rows, of
solvers, or of products, so it cannot share their mistakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

F64 = torch.float64


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = F64) -> Tensor:
    return normal(*shape, seed=seed, scale=scale, dtype=dtype).requires_grad_()


@dataclass
class Case:
    """z = cell(z, x), and every leaf its equilibrium depends on. `make` makes the cell, once for each layer."""

    make: Callable[[], Callable[..., Any]]
    x: Any
    leaves: tuple[Tensor, ...]
    z0: Any = None
    options: dict[str, Any] = field(default_factory=dict)

    def layer(self, **options: Any) -> wp.EquilibriumLayer:
        return wp.EquilibriumLayer(self.make(), **{"on_failure": "raise", **self.options, **options})

    def rows(self, **options: Any) -> Tensor:
        """(batch, features) the equilibrium with its graph, whatever its structure."""
        return flat(self.layer(**options)(self.x, self.z0))


def flat(state: Any) -> Tensor:
    """(batch, features) of a tensor, tuple or dict."""
    tensors = list(state.values()) if isinstance(state, dict) else list(state) if isinstance(state, tuple) else [state]
    return torch.cat([tensor.flatten(1) for tensor in tensors], dim=1)


def like(rows: Tensor, state: Any) -> Any:
    """Rows in the structure of a state: the inverse of `flat`."""
    if isinstance(state, dict):
        return dict(zip(state, like(rows, tuple(state.values())), strict=True))
    if isinstance(state, tuple):
        parts = rows.split([tensor[0].numel() for tensor in state], dim=1)
        return tuple(part.reshape(tensor.shape) for part, tensor in zip(parts, state, strict=True))
    return rows.reshape(state.shape)


def dense_gradients(case: Case, v: Tensor) -> tuple[Tensor | None, ...]:
    """v^T dz/d(leaf) for each leaf, by (I - J)^-1 as a matrix of the whole batch."""
    return by_formula(case, v, lambda JT, v: torch.linalg.solve(torch.eye(len(v), dtype=v.dtype) - JT, v))


def by_formula(case: Case, v: Tensor, pulled: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor | None, ...]:
    """(df/d leaf)^T u for u = pulled(J^T, v), with J the matrix of the whole batch."""
    layer = case.layer()
    state = layer.solve(case.x, case.z0).value
    z = flat(state).detach()

    def f(vector: Tensor) -> Tensor:
        return flat(layer.cell(like(vector.reshape(z.shape), state), case.x)).flatten()

    J = torch.autograd.functional.jacobian(f, z.flatten())
    return torch.autograd.grad(f(z.flatten()), case.leaves, pulled(J.T, v.flatten()), allow_unused=True)


# --- cells ----------------------------------------------------------------------------------------


def dense(activation: Any, *, bias: bool = True, spectral: bool = False) -> Case:
    weight = wp.nn.Spectral(0.7) if spectral else None
    generator = torch.Generator().manual_seed(3)
    cell = wp.nn.DenseCell(2, 4, activation, weight=weight, bias=bias, generator=generator, dtype=F64)
    if spectral:
        cell.W.data *= 2  # beyond the bound, so that the parametrization is really differentiated
    if cell.b is not None:
        cell.b.data = normal(4, seed=1)
    x = leaf(3, 2, seed=2)
    return Case(lambda: cell, x, (x, *cell.parameters()))


def function_of_leaves() -> Case:
    W, U, x = leaf(3, 3, seed=0, scale=0.3), leaf(3, 2, seed=1), leaf(3, 2, seed=2)
    return Case(lambda: lambda z, x: torch.tanh(z @ W.T + x @ U.T), x, (x, W, U), options={"state_shape": (3,)})


def function_of_a_tensor_with_a_graph() -> Case:
    V, x = leaf(3, 3, seed=0), leaf(2, 3, seed=2)

    def make() -> Callable[..., Any]:
        W = wp.nn.Spectral(0.6)(V)
        return lambda z, x: torch.tanh(z @ W.T + x)

    return Case(make, x, (x, V))


def function_of_nothing() -> Case:
    x = leaf(3, 2, seed=2)
    return Case(lambda: lambda z, x: 0.5 * torch.sin(z) + x, x, (x,))


class ModuleCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.Linear(3, 3, dtype=F64)
        self.inner = nn.Sequential(nn.Linear(3, 5, dtype=F64), nn.Tanh(), nn.Linear(5, 3, dtype=F64))
        for i, parameter in enumerate(self.parameters()):
            parameter.data = normal(*parameter.shape, seed=10 + i, scale=0.3)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + self.inner(x) + x)


def module() -> Case:
    cell, x = ModuleCell(), leaf(2, 3, seed=2)
    return Case(lambda: cell, x, (x, *cell.parameters()))


def tuple_state() -> Case:
    A, B, x = leaf(2, 3, seed=0, scale=0.3), leaf(3, 2, seed=1, scale=0.3), leaf(3, 2, seed=2)

    def cell(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        p, q = z
        return torch.tanh(q.flatten(1) @ A.T + x), (p @ B.T).cos().reshape(q.shape)

    return Case(lambda: cell, x, (x, A, B), z0=(torch.zeros(3, 2, dtype=F64), torch.zeros(3, 3, 1, dtype=F64)))


def dict_state() -> Case:
    A, x, y = leaf(2, 2, seed=0, scale=0.3), leaf(3, 2, seed=2), leaf(3, 1, seed=3)

    def cell(z: dict[str, Tensor], x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": torch.tanh(z["b"] @ A.T + x["x"]), "b": 0.5 * z["a"].flip(1) + x["y"]}

    zeros = {"a": torch.zeros(3, 2, dtype=F64), "b": torch.zeros(3, 2, dtype=F64)}
    return Case(lambda: cell, {"x": x, "y": y}, (x, y, A), z0=zeros)


def convolution() -> Case:
    K, x = leaf(2, 2, 3, 3, seed=0, scale=0.15), leaf(2, 2, 3, 2, seed=2)
    return Case(lambda: lambda z, x: torch.tanh(nn.functional.conv2d(z, K, padding=1) + x), x, (x, K))


def network(make: Callable[..., wp.nn.AbstractNetwork]) -> Case:
    """The cell inside a theory network: its input is the injection c; the recurrent matrix depends on A, and on B if any."""
    model = make(2, 4, generator=torch.Generator().manual_seed(3), dtype=F64)
    names = ("A", "B") if isinstance(model, wp.MonotoneDEQ) else ("A",)
    c = leaf(3, 4, seed=2)
    return Case(lambda: model.layer.cell, c, (c, *(getattr(model, name) for name in names)))


def weight_tied() -> Case:
    weights = [nn.Parameter(normal(3, 2, seed=0)), nn.Parameter(normal(2, 3, seed=1))]
    biases = [nn.Parameter(normal(3, seed=3)), None]
    x = leaf(3, 2, seed=2)
    cell = wp.nn.weight_tied(weights, biases)
    return Case(lambda: cell, x, (x, *weights, biases[0]))


CASES: dict[str, Callable[[], Case]] = {
    "relu": lambda: dense(wp.nn.ReLU()),
    "tanh": lambda: dense(wp.nn.Tanh()),
    "identity": lambda: dense(wp.nn.Identity()),
    "relu, no bias": lambda: dense(wp.nn.ReLU(), bias=False),
    "relu, spectral": lambda: dense(wp.nn.ReLU(), spectral=True),
    "tanh, spectral": lambda: dense(wp.nn.Tanh(), spectral=True),
    "identity, spectral": lambda: dense(wp.nn.Identity(), spectral=True),
    "function of leaves": function_of_leaves,
    "function of a tensor with a graph": function_of_a_tensor_with_a_graph,
    "function of nothing": function_of_nothing,
    "module": module,
    "tuple": tuple_state,
    "dict": dict_state,
    "convolution": convolution,
    "SkipDEQ": lambda: network(wp.SkipDEQ),
    "MonotoneDEQ": lambda: network(lambda *args, **options: wp.MonotoneDEQ(*args, margin=0.5, **options)),
    "weight tied": weight_tied,
}
