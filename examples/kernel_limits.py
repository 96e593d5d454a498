"""How fast do kernels of wide equilibrium networks reach their infinite-width limits? Prints the
errors and draws them.

    python examples/kernel_limits.py --widths 64 128 256 512 1024 --draws 8 --out kernel_limits.png

For each width m several networks are drawn, and the root mean square of |K_m - K|_F/|K|_F is taken
over them: for the Gram matrix of equilibria (`population_gram`), the whole tangent kernel
(`deq_ntk`) and a layer that starts diagonal (`diagonal_limit`). Theory says m^(-1/2). Without --out
nothing is drawn, and matplotlib is not needed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from wellposed.kernel import deq_ntk, diagonal_limit, population_gram

Draw = Callable[[int], Tensor]


def gaussian(X: Tensor, m: int, s: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Z Z^T/m and the tangent kernel over m of one network z = relu(W z + U x), y = a . z
    [ling2022]."""
    d = X.shape[1]
    W = torch.randn(m, m, generator=generator, dtype=X.dtype) * math.sqrt(2 * s / m)
    C = X @ (torch.randn(m, d, generator=generator, dtype=X.dtype) * math.sqrt(2 / d)).T
    a = torch.randn(m, generator=generator, dtype=X.dtype) / math.sqrt(m)
    Z, P = torch.relu(C), torch.zeros_like(C)
    for _ in range(80):
        Z = torch.relu(Z @ W.T + C)
    for _ in range(80):
        P = (Z > 0) * (a + P @ W)
    G = Z @ Z.T
    return G / m, (G + (P @ P.T) * (G + X @ X.T)) / m


def diagonal(X: Tensor, m: int, gamma0: float, generator: torch.Generator) -> Tensor:
    """The tangent kernel of one network z = relu(gamma A z + relu(W x)) with A diagonal, of which A
    is trained [gao2023]."""
    decay = 1 - gamma0 / math.sqrt(m) * torch.randn(m, generator=generator, dtype=X.dtype)
    Phi = torch.relu(X @ torch.randn(X.shape[1], m, generator=generator, dtype=X.dtype))
    Z, P = Phi / decay, (Phi > 0) / decay  # the signs of the read-out cancel in P P^T
    return gamma0**2 / m**2 * (P @ P.T) * (Z @ Z.T)


def slope(widths: list[int], errors: list[float]) -> float:
    """Least-squares slope of log error over log width."""
    u, v = torch.tensor(widths).log(), torch.tensor(errors).log()
    u = u - u.mean()
    return float((u * v).sum() / (u * u).sum())


def measure(options: argparse.Namespace) -> dict[str, list[float]]:
    """Relative errors per width, for each of the three limits."""
    generator = torch.Generator().manual_seed(options.seed)
    X = torch.randn(options.samples, options.features, generator=generator, dtype=torch.float64)
    X *= math.sqrt(options.features) / X.norm(dim=1, keepdim=True)
    s, gamma0 = options.weight_variance, 0.5
    limits = {"Gram": population_gram(X, s), "tangent": deq_ntk(X, weight_variance=s), "diagonal": diagonal_limit(X, gamma0)}
    errors: dict[str, list[float]] = {name: [] for name in limits}
    for m in options.widths:
        squares = dict.fromkeys(limits, 0.0)
        for _ in range(options.draws):
            G, H = gaussian(X, m, s, generator)
            for name, K in (("Gram", G), ("tangent", H), ("diagonal", diagonal(X, m, gamma0, generator))):
                squares[name] += float((K - limits[name]).norm() / limits[name].norm()) ** 2
        for name, total in squares.items():
            errors[name].append(math.sqrt(total / options.draws))
    return errors


def draw(widths: list[int], errors: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

    figure, axes = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for (name, values), marker in zip(errors.items(), "os^", strict=True):
        axes.loglog(widths, values, marker=marker, label=f"{name}: slope {slope(widths, values):.2f}")
    first = max(values[0] for values in errors.values()) * 1.4
    axes.loglog(widths, [first * math.sqrt(widths[0] / m) for m in widths], "k--", linewidth=1, label="slope -1/2")
    axes.set_xticks(widths, [str(m) for m in widths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.set(xlabel="width m", ylabel="relative error in the Frobenius norm", title="Kernels of finite width and their limits")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how kernels approach their infinite-width limits.")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--draws", type=int, default=8, help="networks per width")
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--features", type=int, default=20)
    parser.add_argument("--weight-variance", type=float, default=0.08)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="draw a figure into this file (needs matplotlib)")
    options = parser.parse_args()
    if min(*options.widths, options.draws, options.samples, options.features) < 1 or len(set(options.widths)) < 2:
        parser.error("all sizes must be at least 1, and there must be two widths or more")

    errors = measure(options)
    print(f"{'width':>8}" + "".join(f"{name:>12}" for name in errors))
    for i, m in enumerate(options.widths):
        print(f"{m:>8}" + "".join(f"{values[i]:>12.4f}" for values in errors.values()))
    print(f"{'slope':>8}" + "".join(f"{slope(options.widths, values):>12.3f}" for values in errors.values()))
    if options.out is not None:
        draw(options.widths, errors, options.out)
        print(f"figure: {options.out}")


if __name__ == "__main__":
    main()
