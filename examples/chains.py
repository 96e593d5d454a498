"""Trains a graph equilibrium to carry a class along chains of nodes, and prints what it reached.

    python examples/chains.py --length 100

Only the first node of a chain has its class as a feature; every node is to be labelled. The cell
has |W| <= 0.99 by parametrization, so each chain has exactly one equilibrium. `--save FOLDER`
writes the weights for `wp.tasks.load("chains", FOLDER)`.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import wellposed as wp


def train(model: nn.Module, data: wp.data.Dataset, *, steps: int, rate: float = 1e-2, seed: int = 0) -> list[float]:
    """Adam with minibatches of 20 chains; returns the losses."""
    # a slow W: what it mixes in one step it mixes a hundred times along a chain
    slow = [parameter for name, parameter in model.named_parameters() if name.endswith("cell.W")]
    fast = [parameter for name, parameter in model.named_parameters() if not name.endswith("cell.W")]
    optimizer = torch.optim.Adam([{"params": slow, "lr": rate / 30}, {"params": fast, "lr": rate}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        rows = torch.randint(len(data.X), (20,), generator=generator)
        loss = nn.functional.cross_entropy(model(data.X[rows]), data.y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def right(model: nn.Module, data: wp.data.Dataset) -> torch.Tensor:
    """(n_test, length) whether each node of the test chains has the right class."""
    return model(data.X_test).argmax(1) == data.y_test


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FOLDER", help="where to write the weights")
    options = parser.parse_args()
    data = wp.data.load("chains", n=400, n_test=100, size=options.length, seed=options.seed)
    model = wp.tasks.NodeClassifier(20, 64, 20, bound=0.99, generator=torch.Generator().manual_seed(options.seed))
    begin = time.process_time()
    losses = train(model, data, steps=options.steps, seed=options.seed)
    seconds = time.process_time() - begin
    nodes = right(model, data)
    solution = model.layer.last_solution
    print(f"{options.steps} steps in {seconds:.1f} s of processor time, loss {losses[-1]:.4f}")
    print(f"accuracy of all test nodes {nodes.float().mean():.4f}, of the last nodes {nodes[:, -1].float().mean():.4f}")
    print(f"all equilibria found: {bool(solution.converged.all())}, largest residual {float(solution.residual.max()):.1e}")
    if options.save:
        card = {"data": f"chains of {options.length} nodes, drawn", "license": "MIT", "steps": options.steps}
        print(wp.tasks.save(model, "chains", options.save, card={**card, "test_accuracy": float(nodes.float().mean())}))


if __name__ == "__main__":
    main()
