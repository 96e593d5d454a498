"""Loss at which the plain flow is first certified, along damped Gauss-Newton training.

Where gradient descent needs too long to reach small losses (100 images of MNIST), steps of -1/4 J^T K^-1 r get there in a
minute: the certificate asks only where the parameters are, not how they came there. Needs mnist.npz in $WELLPOSED_DATA.
"""

from __future__ import annotations

import argparse
import time

import torch

import wellposed as wp
from wellposed.certify import radius

DAMPING = 0.25
SHARPENINGS = ((), ("active",), ("kernel",), ("active", "kernel"))


def path(model: wp.GaussianDEQ, X: torch.Tensor, y: torch.Tensor, end: float) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Losses and parameters until the loss is below `end`."""
    points, at = [], None
    while True:
        at = model.linearise(X) if at is None else model.linearise(X, z0=at.value, p0=at.adjoint)
        with torch.no_grad():
            r = model.readout(at.value, model.injection(X)) - y
        loss = float(r.square().sum()) / 2
        points.append((loss, {name: value.clone() for name, value in model.state_dict().items()}))
        if loss < end:
            return points
        steps = model.gradients(X, at, torch.linalg.solve(wp.tangent_kernel(model, X), r))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= DAMPING * steps[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="images of MNIST, zeros and ones")
    parser.add_argument("-m", type=int, default=1000, help="width")
    options = parser.parse_args()
    X, y = wp.data.load("mnist", n=options.n, classes=(0, 1), paper="ling2022", dtype=torch.float64)
    model = wp.GaussianDEQ(784, options.m, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = path(model, X, y, 1e-8)
    for sharpen in SHARPENINGS:
        start, low, high = time.perf_counter(), 0, len(points) - 1
        while high - low > 1:  # assumes that what is certified stays so along the path
            middle = (low + high) // 2
            model.load_state_dict(points[middle][1])
            low, high = (low, middle) if radius(model, X, y, sharpen=sharpen).certified else (middle, high)
        name = " + ".join(sharpen) or "none"
        seconds = time.perf_counter() - start
        print(f"{name}: certified at loss {points[high][0]:.2e}, not at {points[low][0]:.2e} ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
