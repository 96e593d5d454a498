"""Whether Broyden's inverse estimate of the forward solve helps the adjoint solve, as SHINE [ramzi2022] proposes.

    WELLPOSED_DATA=folder python benchmarks/shine.py

Broyden's method models (J - I)^-1 by H = -I + sum_j u_j v_j^T. SHINE takes -H^T v for the adjoint (I - J)^-T v. For each map
and tolerance this measures the error of that against `JacobianFree` (v itself) and three steps of `PhantomGradient`, and the
products with J^T that an exact adjoint solve takes by GMRES: from zero, from -H^T v (one product measures its residual), and
with -H^T as a preconditioner. That H is read rightly is checked with dense matrices where they are small. Writes
results/shine.json and results/shine.md.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from wellposed._tree import Layout
from wellposed.solve.broyden import _apply
from wellposed.solve.loop import iterate
from wellposed.solve.map import FunctionMap
from wellposed.solve.solver import Tolerance

RESULTS = Path(__file__).parent / "results"
BATCH = 16
Problem = tuple[Callable[..., Tensor], Tensor, tuple[float, ...]]


class KeptBroyden(wp.Broyden):
    """Broyden's method whose last state is kept, of all samples: none leaves the batch."""

    states: list[dict[str, Any]] = []

    def init(self, f: Any, point: Any) -> dict[str, Any]:
        self.states.append(state := super().init(f, point))
        return state

    def takes_out(self, *_: Any) -> bool:
        return False


def linear(size: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(size, size, generator=generator, dtype=torch.float64)
    W *= 0.5 / torch.linalg.matrix_norm(W, 2)
    x = torch.randn(BATCH, size, generator=generator, dtype=torch.float64)
    return lambda z, x: z @ W.T + x, x, (1e-2, 1e-12)


def dense(size: int) -> Problem:
    generator = torch.Generator().manual_seed(0)
    W = 0.9 * torch.randn(size, size, generator=generator, dtype=torch.float64) / size**0.5
    x = torch.randn(BATCH, size, generator=generator, dtype=torch.float64)
    return lambda z, x: torch.tanh(z @ W.T + x), x, (1e-2, 1e-3, 1e-5)


def convolution(epochs: int) -> Problem:
    """The cell of a ResidualDEQ on images of CIFAR-10, after so many epochs of 2000 images."""
    data = wp.data.load("cifar10", 2000, flatten=False, seed=0)
    mean, deviation = data.X.mean((0, 2, 3), keepdim=True), data.X.std((0, 2, 3), keepdim=True)
    X, y = ((data.X - mean) / deviation).float(), data.y.long()
    generator = torch.Generator().manual_seed(0)
    model = wp.nn.ResidualDEQ(3, 24, 10, stride=2, grid=2, input_gain=1.0, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), 8e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(X), generator=generator).split(64):
            prediction, penalty = model.regularized(X[rows])
            optimizer.zero_grad()
            (torch.nn.functional.cross_entropy(prediction, y[rows]) + penalty).backward()
            optimizer.step()
    model.double().requires_grad_(False)
    return model.cell, model.inputs(X[:BATCH].double()).detach(), (1e-2, 1e-3, 1e-5)


def measure(name: str, problem: Problem) -> list[dict[str, Any]]:
    cell, x, tolerances = problem
    layout = Layout.of(x, "x")
    f = FunctionMap(cell, layout, (x,))
    rows = []
    for rtol in tolerances:
        with torch.no_grad():
            zero = torch.zeros_like(layout.flatten(x))
            outcome = iterate(f, zero, KeptBroyden(40), tolerance=Tolerance(rtol, 0.0), max_steps=200)
        state = KeptBroyden.states.pop()
        z = outcome.value.clone().requires_grad_()
        fz = f.tracked(z)
        v = torch.randn(z.shape, generator=torch.Generator().manual_seed(1), dtype=z.dtype)

        def rmv(u: Tensor, fz: Tensor = fz, z: Tensor = z) -> Tensor:
            return torch.autograd.grad(fz, z, u, retain_graph=True)[0]

        def shared(u: Tensor, state: dict[str, Any] = state) -> Tensor:
            return -_apply(state["v"], state["u"], u)  # -H^T u

        def products(system: Callable[[Tensor], Tensor], b: Tensor, target: Tensor) -> int:
            """Of GMRES until every residual is at most its target."""
            part = float((target / torch.linalg.vector_norm(b, dim=1)).min())
            return int(wp.GMRES()(system, b, rtol=min(part, 0.99), max_steps=200).num_steps.max())

        if z.shape[1] <= 64:  # H of each sample as a matrix
            H = torch.einsum("bji,bjk->bik", state["u"], state["v"]) - torch.eye(z.shape[1], dtype=z.dtype)
            torch.testing.assert_close(shared(v), -torch.einsum("bik,bi->bk", H, v))
        norm = torch.linalg.vector_norm(v, dim=1)
        solved = wp.GMRES()(lambda u: u - rmv(u), v, rtol=1e-12, max_steps=400)
        assert bool(solved.converged.all()), name
        u, estimate = solved.value, shared(v)

        def error(other: Tensor, u: Tensor = u) -> float:
            return float((torch.linalg.vector_norm(other - u, dim=1) / torch.linalg.vector_norm(u, dim=1)).mean())

        left = v - estimate + rmv(estimate)
        row: dict[str, Any] = {"map": name, "features": z.shape[1], "rtol": rtol, "steps": int(outcome.steps.max())}
        row |= {"free": error(v), "shine": error(estimate), "phantom": error(v + rmv(v) + rmv(rmv(v)))}
        row |= {"cold": products(lambda u: u - rmv(u), v, rtol * norm)}
        row |= {"start": 1 + products(lambda u: u - rmv(u), left, rtol * norm)}
        row |= {"preconditioned": products(lambda u: shared(u) - rmv(shared(u)), v, rtol * norm)}
        print(row, flush=True)
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| map | features | rtol | forward | free | SHINE | phantom 3 | from 0 | from SHINE | preconditioned |"]
    lines.append("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for r in rows:
        errors = " | ".join(f"{r[key]:.2g}" for key in ("free", "shine", "phantom"))
        solves = " | ".join(str(r[key]) for key in ("cold", "start", "preconditioned"))
        lines.append(f"| {r['map']} | {r['features']} | {r['rtol']:.0e} | {r['steps']} | {errors} | {solves} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", wp.errors.WellposedWarning)
    problems = {"linear": linear(4), "tanh": dense(64), "convolution": convolution(0), "the same, trained": convolution(2)}
    rows = [row for name, problem in problems.items() for row in measure(name, problem)]
    (RESULTS / "shine.json").write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    note = "Relative errors of adjoints, then products of GMRES to the tolerance of the forward solve; Broyden's steps forward."
    (RESULTS / "shine.md").write_text(f"# Broyden's inverse in the adjoint solve\n\n{note}\n\n{table(rows)}")


if __name__ == "__main__":
    main()
