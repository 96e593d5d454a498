"""Are the error bars of a Gaussian process right? Calibration of the kernel of an infinitely wide
equilibrium network, before and after its hyper-parameters are learnt.

    pip install -c constraints.txt '.[gp,plot]'
    python examples/gaussian_process.py [--out docs/images/gaussian_process.png]

The target is a fixed function with noise, not a draw of the process. For every level p, the share
of 2000 new targets that lie in their central interval of probability p is counted.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import gpytorch
import torch
from torch import Tensor

from wellposed.gpytorch import WideKernel
from wellposed.kernel import KernelMachine, deq_ntk

BLUE, RED, GREY = "#0072B2", "#D55E00", "0.45"
LEVELS = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
NOISE = 0.2


class GP(gpytorch.models.ExactGP):
    def __init__(self, X: Tensor, y: Tensor, likelihood: Any) -> None:
        super().__init__(X, y, likelihood)
        self.mean, self.kernel = gpytorch.means.ZeroMean(), gpytorch.kernels.ScaleKernel(WideKernel(0.08, bias_variance=0.1))

    def forward(self, X: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean(X), self.kernel(X))


def data(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    f = torch.sin(2 * X[:, 0]) + X[:, 1] * X[:, 2] / 2
    return X, f + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)


def coverage(mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    """The share of y in the central interval of each level."""
    reach = math.sqrt(2) * torch.erfinv(LEVELS)[:, None] * variance.sqrt()
    return ((y - mean).abs() <= reach).double().mean(dim=1)


def posterior(gp: GP, likelihood: Any, X_new: Tensor) -> tuple[Tensor, Tensor]:
    gp.eval(), likelihood.eval()
    with torch.no_grad(), gpytorch.settings.max_cholesky_size(5000):
        found = likelihood(gp(X_new))
        return found.mean, found.variance


def learn(gp: GP, likelihood: Any, X: Tensor, y: Tensor, steps: int) -> None:
    gp.train(), likelihood.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, gp)
    optimizer = torch.optim.Adam(gp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(gp(X), y)
        loss.backward()
        optimizer.step()
    numbers = (loss, gp.kernel.base_kernel.weight_variance, gp.kernel.outputscale, likelihood.noise)
    names = ("negative log-likelihood a sample", "weight_variance", "scale", "noise variance")
    for name, value in zip(names, numbers, strict=True):
        print(f"{name}: {value.item():.4g}")


def ensemble(X: Tensor, y: Tensor, X_new: Tensor) -> tuple[Tensor, Tensor]:
    """Wide networks from random starts, trained to the end on the noisy targets."""
    both, n = torch.cat([X, X_new]), len(X)
    options: Any = {"weight_variance": 0.08, "bias_variance": 0.1}
    H, K = deq_ntk(both, X, **options), deq_ntk(both, X, readout_variance=0.0, **options)  # K: only the read-out is trained
    machine = KernelMachine(H[:n], y)
    diagonal = torch.cat([deq_ntk(x[None], readout_variance=0.0, **options)[0] for x in X_new])
    return machine.predict(math.inf, H[n:]), machine.variance(math.inf, H[n:], diagonal, start=(K[:n], K[n:]))


def draw(curves: dict[str, tuple[Tensor, str]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6, 4.2), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color="0.75", linewidth=1)
    for label, (shares, colour) in curves.items():
        ax.plot(LEVELS, shares, "o-", color=colour, markersize=3.5, linewidth=1.8, label=label)
    ax.set(xlabel="probability of the interval", ylabel="share of new targets in it", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.legend(fontsize=8, loc="upper left")
    ax.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the calibration of a Gaussian process.")
    parser.add_argument("--out", type=Path, default=Path("docs/images/gaussian_process.png"))
    parser.add_argument("--n", type=int, default=250, help="training samples")
    parser.add_argument("--steps", type=int, default=100, help="steps on the hyper-parameters")
    options = parser.parse_args()
    (X, y), (X_new, y_new) = data(options.n, seed=0), data(2000, seed=1)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    gp = GP(X, y, likelihood).double()
    curves = {"Gaussian process, not learnt": (coverage(*posterior(gp, likelihood, X_new), y_new), GREY)}
    learn(gp, likelihood, X, y, options.steps)
    curves["Gaussian process, learnt"] = (coverage(*posterior(gp, likelihood, X_new), y_new), BLUE)
    curves["trained networks, no noise"] = (coverage(*ensemble(X, y, X_new), y_new), RED)
    for label, (shares, _) in curves.items():
        print(f"{label}: largest difference from the level {float((shares - LEVELS).abs().max()):.3f}")
    draw(curves, options.out)


if __name__ == "__main__":
    main()
