"""Derivatives of higher order: the adjoint as an equilibrium, and what z* adds to f(z*)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed._torch import Edge, graph_edge, runs, uncompiled
from wellposed._tree import Layout
from wellposed.errors import WellposedError
from wellposed.implicit._captured import Substitution
from wellposed.implicit.adjoint import Graph
from wellposed.solve.map import AbstractMap, FunctionMap


def adjoint_map(f: AbstractMap, z: Tensor, v: Tensor, u_star: Tensor) -> FunctionMap:
    """u -> v + J^T u, whose equilibrium is the adjoint, of v, z and the inputs of f."""
    recorded: list[Tensor] = []  # f(z), z, and the other inputs of f

    def step(u: Tensor, v: Tensor, z: Tensor, *inputs: Tensor) -> Tensor:
        if not recorded or any(a is not b for a, b in zip(recorded[1:], (z, *inputs), strict=True)):
            with torch.enable_grad():
                recorded[:] = [f.with_inputs(*inputs).tracked(z), z, *inputs]
        (product,) = torch.autograd.grad(recorded[0], z, u, create_graph=True, allow_unused=True)
        return v if product is None else v + product

    return FunctionMap(step, Layout.of(u_star, "u"), (v, z, *f.inputs()))


def correction(
    f: AbstractMap, z: Tensor, u: Tensor, extras: list[Tensor], needed: tuple[bool, ...], fz: Tensor
) -> list[Tensor | None]:
    """What a second derivative needs beyond the graph of f(z*), which was recorded with z* held.

    (df/dtheta)^T u with z free minus the same with z held: zero, but its derivative is not. The
    gates stop the engine from passing through z, and through what f depends on, to what those
    depend on. `fz` has the graph of f(z*).
    """
    recorded = Graph.behind(fz, {graph_edge(x) for x in extras if x.grad_fn is not None})
    count = len(f.inputs())
    gates = [Gate() for _ in range(len(extras) + 1)]
    free = [
        # A captured leaf depends on nothing else and may stay where f finds it.
        Pass.apply(x, gate) if x.requires_grad and (i < count or x.grad_fn is not None) else x
        for i, (x, gate) in enumerate(zip(extras, gates, strict=False))
    ]
    f = f.with_inputs(*free[:count])
    moved = Pass.apply(z, gates[-1])
    with Substitution(extras, free, recorded.nodes) as substitution:
        difference = uncompiled(lambda: f.tracked(moved) - f.tracked(z.detach()))
    captured = [graph_edge(x) for x, need in list(zip(extras, needed, strict=True))[count:] if need and x.grad_fn is not None]
    if not substitution.used.issuperset(captured):
        raise WellposedError(
            "second derivative of the equilibrium: f does not use a tensor that it used in the forward pass. Give f the same "
            "tensors as then."
        )
    again = Graph.behind(difference, {graph_edge(x) for x in (*free, moved) if x.grad_fn is not None})
    _check_unseen(recorded, again, substitution.missed)
    wanted = [x for x, need in zip(free, needed, strict=True) if need]
    for gate in gates:
        gate.open = False
    products = iter(torch.autograd.grad(difference, wanted, u, create_graph=True, allow_unused=True))
    for gate in gates:
        gate.open = True
    return [next(products) if need else None for need in needed]


def _check_unseen(recorded: Graph, again: Graph, missed: set[Edge]) -> None:
    """Raises if a derivative with respect to a captured tensor would lack the correction.

    Args:
        recorded: The graph of f(z*).
        again: That of another evaluation; f has captured what they share.
        missed: Edges of captured tensors that were used and not replaced.
    """
    if missed:
        raise WellposedError(
            "second derivative of the equilibrium: f uses a tensor with a graph that was made in another thread. Make it in "
            "the thread that calls the layer, or pass it through x or args."
        )
    if any(map(runs, again.nodes & recorded.nodes)):
        raise WellposedError(
            "second derivative of the equilibrium: f has captured a tensor with a graph in a way that cannot be followed, such "
            "as code of torch.jit. Pass the tensor through x or args."
        )


class Gate:
    """Whether derivatives may pass now."""

    open = True


class Pass(torch.autograd.Function):
    """The identity, with a gate for derivatives."""

    @staticmethod
    def forward(x: Tensor, gate: Gate) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gate = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, v: Tensor | None) -> tuple[Tensor | None, None]:
        return (v if ctx.gate.open else None), None
