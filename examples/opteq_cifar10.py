"""The convolutional OptEq on CIFAR-10: which alpha, which prior, unrolled or implicit.

    WELLPOSED_DATA=folder python examples/opteq_cifar10.py --images 10000 --epochs 2 --alphas 0.4 1.0

Table 1a of Xie et al. (2021), sized for a CPU: a quarter of its channels, equilibria on 8 x 8. The
paper's network is
`--channels 16 32 64 128 128 --state-channels 32 --feature-channels 26 --reduce 1`, on all images
and for 200 epochs: for who has a GPU (`--device cuda`). Finished runs go to `--out`;
`benchmarks/opteq_tables.py` makes tables of them.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from opteq_training import Ledger, accuracy, cifar10, configuration, count, fit, head, parser, stem
from torch import nn

import wellposed as wp

ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
PRIORS: dict[str, Any] = {
    "none": None,
    "decorrelation": wp.convex.GradientStep(wp.convex.Decorrelation(0.01, across="pixels"), 0.1),
    **{f"l1 {weight:g}": wp.convex.L1(weight) for weight in (0.01, 0.15, 0.5)},
    **{f"squared l2 {weight:g}": wp.convex.SquaredL2(weight) for weight in (0.01, 1.0, 10.0)},
}


def build(options: argparse.Namespace, *, alpha: float, prior: Any = None) -> wp.convex.ConvOptEq:
    torch.manual_seed(options.seed)
    gradient = wp.UnrolledGradient(20) if options.gradient == "unrolled" else wp.ImplicitGradient()
    return wp.convex.ConvOptEq(
        3,
        tuple(options.channels),
        state_channels=options.state_channels,
        feature_channels=options.feature_channels,
        extractor=stem(options.feature_channels, options.reduce),
        head=head(options.state_channels),
        alpha=alpha,
        prior=prior,
        gradient=gradient,
        rtol=options.rtol,
        max_steps=500,
        on_failure="ignore",  # the share of converged samples is recorded
        generator=torch.Generator().manual_seed(options.seed),
    ).to(options.device)


def main() -> None:
    made = parser("Train convolutional OptEq networks on CIFAR-10.")
    made.add_argument("--alphas", type=float, nargs="+", default=list(ALPHAS))
    made.add_argument("--priors", nargs="+", choices=list(PRIORS), default=["none"])
    made.add_argument("--gradient", choices=("implicit", "unrolled"), default="implicit")
    made.add_argument("--channels", type=int, nargs="+", default=[4, 8, 16, 32, 32])
    made.add_argument("--state-channels", type=int, default=12)
    made.add_argument("--feature-channels", type=int, default=12)
    made.add_argument("--rtol", type=float, default=1e-3)
    made.add_argument("--lr", type=float, default=0.01)
    options = made.parse_args()
    torch.set_flush_denormal(True)  # cotangents of an unrolled contraction become subnormal, which is slow

    X, y, X_test, y_test = cifar10(options)
    ledger = Ledger(options.out)
    for prior in options.priors:
        for alpha in options.alphas:
            key = {"table": "1a", "alpha": alpha, "prior": prior, "gradient": options.gradient, "lr": options.lr}
            key |= {"channels": options.channels, **configuration(options)}
            if ledger.has(**key):
                continue
            model = build(options, alpha=alpha, prior=PRIORS[prior])
            run = fit(model, X, y, nn.functional.cross_entropy, accuracy(X_test, y_test), options, lr=options.lr)
            with torch.no_grad():
                z = model.equilibrium(X_test[:200])
            known = {"parameters": count(model), "contraction_upper": model.contraction_upper()}
            known |= {"mean_abs_z": float(z.abs().mean()), "zeros_of_z": float((z == 0).double().mean())}
            ledger.add({"name": f"alpha {alpha:g}, prior {prior}", **key, **known, **run})


if __name__ == "__main__":
    main()
