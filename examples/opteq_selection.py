"""Many equilibria, and the averaging that picks the one of least norm.

    python examples/opteq_selection.py [--steps 30000]

The layer has |W| = 1 and a whole segment of equilibria; all of them minimise its objective. Plain
iteration ends wherever it began; the modified sequential averaging of Xie et al. (2021, Theorem 4)
ends at the point of least norm, slowly.
"""

from __future__ import annotations

import argparse

import torch

import wellposed as wp


def main() -> None:
    parser = argparse.ArgumentParser(description="Select the smallest of many equilibria.")
    parser.add_argument("--steps", type=int, default=30_000)
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")

    model, first, last = wp.convex.line_of_equilibria()
    x = torch.zeros(1, 1, dtype=torch.float64)
    phi = wp.convex.objective(model, x)
    smallest = 0.6 / (1 - 0.6**2) * model.b.detach()
    print("equilibria from the first end to the last: residual, objective, norm")
    for t in torch.linspace(0, 1, 6, dtype=torch.float64).tolist():
        z = ((1 - t) * first + t * last)[None]
        residual = (model.bind(x)(z) - z).norm()
        print(f"  t = {t:.1f}: {float(residual):.1e}  {float(phi(z)):.6f}  {float(z.norm()):.4f}")
    print(f"least norm: {float(smallest.norm()):.4f}, at {[round(v, 4) for v in smallest.tolist()]}\n")

    print("distance to it, from both ends")
    print("  steps      plain iteration   averaging")
    steps = 10
    while steps <= options.steps:
        plain, averaged = [], []
        for start in (first, last):
            z = start[None]
            with torch.no_grad():
                found = wp.convex.select_equilibrium(model, x, wp.convex.SquaredL2(0.5), steps=steps, z0=z)
            plain.append(float((model.solve(x, z).value - smallest).norm()))
            averaged.append(float((found.value - smallest).norm()))
        print(f"  {steps:<9}  {plain[0]:.4f} {plain[1]:.4f}     {averaged[0]:.4f} {averaged[1]:.4f}")
        steps *= 10


if __name__ == "__main__":
    main()
