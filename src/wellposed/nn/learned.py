"""A solver trained on a frozen model: a network proposes the weights of Anderson's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, NotConverged
from wellposed.solve import AbstractMap, AbstractSolver, Point, Step, fixed_point


class AndersonWeights(nn.Module):
    r"""Proposes the weights and the damping of a step from the last residuals of each sample.

    With g_i = f(z_i) - z_i of the last m points (newest first) it sees their cosines <g_i,
    g_j>/(|g_i| |g_j|) and the logarithms of |g_i|/|g_1|: numbers that do not depend on the width of
    the state, its units or its other symmetries. It gives a_1, ..., a_m with sum 1 and b in (0, 2);
    untrained it gives a = (1, 0, ...), b = 1, the plain step.

    Args:
        memory: m.
        hidden: Width of the network.
        generator, device, dtype: Of the parameters.

    Examples:
        >>> import torch, wellposed as wp
        >>> weights = wp.nn.AndersonWeights(memory=3)
        >>> solver = wp.nn.LearnedAnderson(weights)  # untrained: plain steps
        >>> wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(3, 2), solver).status
        StatusArray(CONVERGED: 3)
    """

    def __init__(
        self,
        memory: int = 4,
        hidden: int = 32,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("AndersonWeights", "memory", memory)
        check_positive_integer("AndersonWeights", "hidden", hidden)
        self.memory = memory
        inputs = memory * (memory + 1)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.V = nn.Parameter(torch.empty(hidden, inputs, **factory_kwargs).normal_(0.0, inputs**-0.5, generator=generator))
        self.c = nn.Parameter(torch.zeros(hidden, **factory_kwargs))
        self.W = nn.Parameter(torch.zeros(memory + 1, hidden, **factory_kwargs))
        self.b = nn.Parameter(torch.zeros(memory + 1, **factory_kwargs))

    def forward(self, G: Tensor, filled: int) -> tuple[Tensor, Tensor]:
        """(batch, m, features) residuals, newest first -> (batch, m) weights, (batch, 1) damping.

        Args:
            G: Zeros in places not yet filled.
            filled: How many places are.
        """
        size = torch.linalg.vector_norm(G, dim=2, keepdim=True)
        unit = G / size.clamp_min(torch.finfo(G.dtype).tiny)
        ratios = torch.log((size / size[:, :1].clamp_min(torch.finfo(G.dtype).tiny)).clamp(1e-6, 1e6)).squeeze(2)
        known = torch.arange(self.memory, device=G.device) < filled
        seen = torch.cat([(unit @ unit.mT).flatten(1), torch.where(known, ratios, torch.zeros_like(ratios)) / 4], dim=1)
        out = torch.tanh(seen @ self.V.mT + self.c) @ self.W.mT + self.b
        raw = torch.where(known, out[:, :-1], torch.zeros_like(out[:, :-1]))
        first = torch.zeros_like(raw)
        first[:, 0] = 1.0
        # the last degree of freedom goes to the newest point, so that the sum is 1
        alpha = raw + first * (1.0 - raw.sum(dim=1, keepdim=True))
        return alpha, 2 * torch.sigmoid(out[:, -1:])


class LearnedAnderson(AbstractSolver):
    r"""z_next = sum_i a_i (z_i + b g_i), with a and b proposed by `AndersonWeights`.

    Only the *way* is learned, after [bai2022], with our own inputs and safeguard. Whether a sample
    has converged is measured by the loop as for every solver, so a bad proposal costs evaluations
    and never a wrong answer. *Safeguard*: where a proposed step has made the residual more than
    twice the best one, the next step is the plain one from the best point, and the memory is
    emptied.

    Args:
        weights: The network; it is used without a graph.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.DenseCell(4, 16, wp.nn.Tanh())
        >>> layer = wp.EquilibriumLayer(cell, wp.nn.LearnedAnderson(wp.nn.AndersonWeights()))
        >>> layer.solve(torch.ones(8, 4)).status
        StatusArray(CONVERGED: 8)
    """

    idle_part: ClassVar[float] = 1 / 4

    def __init__(self, weights: AndersonWeights) -> None:
        self.weights = weights

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        batch, features = point.z.shape
        memory = point.z.new_zeros(batch, self.weights.memory, features)
        return {
            "Z": memory,
            "G": torch.zeros_like(memory),
            "best_f": point.fz,
            "best_r": point.r,
            "age": torch.zeros(batch, dtype=torch.int64, device=point.z.device),
        }

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        worse = point.r > 2 * state["best_r"]
        better = point.r <= state["best_r"]
        state["best_f"] = torch.where(better.unsqueeze(1), point.fz, state["best_f"])
        state["best_r"] = torch.where(better, point.r, state["best_r"])
        state["age"] = torch.where(worse, torch.zeros_like(state["age"]), state["age"] + 1).clamp(max=self.weights.memory)
        for name, row in (("Z", point.z), ("G", point.g)):
            moved = torch.cat([row.unsqueeze(1), state[name][:, :-1]], dim=1)
            state[name] = torch.where(worse[:, None, None], torch.zeros_like(moved), moved)
        z = point.z.clone()
        with torch.no_grad():
            for filled in range(1, self.weights.memory + 1):
                rows = (state["age"] == filled).nonzero().squeeze(1)
                if rows.shape[0]:
                    z[rows] = proposed(self.weights, state["Z"][rows], state["G"][rows], filled)
        z = torch.where(worse.unsqueeze(1), state["best_f"], z)
        return Step(z, f(z))

    def __repr__(self) -> str:
        return f"LearnedAnderson(memory={self.weights.memory})"


def proposed(weights: AndersonWeights, Z: Tensor, G: Tensor, filled: int) -> Tensor:
    """(batch, features) the next point, differentiable in the network's parameters."""
    parameter = weights.V
    alpha, beta = weights(G.to(parameter.dtype), filled)
    alpha, beta = alpha.to(G.dtype), beta.to(G.dtype)
    return (alpha.unsqueeze(1) @ (Z + beta.unsqueeze(2) * G)).squeeze(1)


def train_learned(
    cell: Callable[..., Any],
    weights: AndersonWeights,
    x: Any,
    *,
    z0: Any,
    start: Callable[[Any], Any] | None = None,
    unroll: int = 8,
    steps: int = 100,
    step_size: float = 1e-2,
    rtol: float = 1e-6,
    max_steps: int = 500,
) -> list[float]:
    r"""Trains the proposals on the equilibria of a frozen cell; returns the losses.

    The loss is the mean over the `unroll` points of a run of |z_k - z*|/|z*|, with later points
    counting more (weight k), and of the start if there is a network for it. z* is found once by
    `Auto()`; the cell's parameters do not change.

    Args:
        cell: `cell(z, x)`, row-wise.
        weights: Trained in place.
        x: The inputs, batch first.
        z0: Where runs begin without `start`, and the shape of the state.
        start: A module x -> z_0 that is trained as well, if given.
        unroll: Evaluations of a run.
        steps, step_size: Of Adam, full batch.
        rtol, max_steps: Of z*; samples that do not reach it raise.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell, weights = lambda z, x: torch.tanh(0.9 * z + x), wp.nn.AndersonWeights(memory=3)
        >>> x = torch.linspace(-1, 1, 8).reshape(4, 2)
        >>> losses = wp.nn.train_learned(cell, weights, x, z0=torch.zeros(4, 2), unroll=4, steps=4)
        >>> losses[-1] < losses[0]
        True
    """
    check_positive_integer("train_learned", "unroll", unroll)
    check_positive_integer("train_learned", "steps", steps)
    layout = Layout.of(z0, "z0")
    solution = fixed_point(cell, z0, args=(x,), rtol=rtol, max_steps=max_steps, on_failure="ignore")
    if not bool(solution.converged.all()):
        raise NotConverged(
            f"train_learned: {int((~solution.converged).sum())} of {layout.batch} samples have no equilibrium to learn from. "
            "Leave them out, raise max_steps or loosen rtol.",
            solution,
        )
    target = layout.flatten(solution.value)
    scale = torch.linalg.vector_norm(target, dim=1).clamp_min(torch.finfo(target.dtype).tiny)
    parameters = [*weights.parameters(), *(start.parameters() if isinstance(start, nn.Module) else [])]
    if not parameters:
        raise InvalidArgument("train_learned: there is no parameter to train.")
    optimizer = torch.optim.Adam(parameters, lr=step_size)
    seen = []
    for _ in range(steps):
        z = layout.flatten(z0 if start is None else start(x))
        Z = G = z.new_zeros(layout.batch, weights.memory, z.shape[1])
        loss = (torch.linalg.vector_norm(z - target, dim=1) / scale).mean() / unroll
        total = 1.0 / unroll
        for k in range(1, unroll + 1):
            g = layout.flatten(cell(layout.unflatten(z), x)) - z
            Z = torch.cat([z.unsqueeze(1), Z[:, :-1]], dim=1)
            G = torch.cat([g.unsqueeze(1), G[:, :-1]], dim=1)
            z = proposed(weights, Z, G, min(k, weights.memory))
            loss = loss + k * (torch.linalg.vector_norm(z - target, dim=1) / scale).mean()
            total += k
        optimizer.zero_grad()
        grads = torch.autograd.grad(loss / total, parameters, allow_unused=True)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        seen.append(float(loss.detach()) / total)
    return seen
