"""How many source files one call crosses: what a reader must open to follow it.

    python benchmarks/files_crossed.py

Counts, with `sys.setprofile`, the files of `wellposed` and `wellposed_lab` in which a function was called.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

SOURCE = Path(wp.__file__).parents[1]
PACKAGES = ("wellposed", "wellposed_lab")


class OwnCell(nn.Module):
    """tanh(W z + U x + b), as a user would write it."""

    def __init__(self, in_features: int = 4, width: int = 8) -> None:
        super().__init__()
        self.recurrent, self.injection = nn.Linear(width, width), nn.Linear(in_features, width)
        with torch.no_grad():
            self.recurrent.weight *= 0.5

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + self.injection(x))


def crossed(call: Callable[[], Any]) -> Counter[str]:
    """The files that a call crosses, with the number of functions called in each."""
    roots = tuple(str(SOURCE / package) + "/" for package in PACKAGES)
    seen: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(roots):
            seen[str(Path(name).relative_to(SOURCE))] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


def forward_backward(cell: nn.Module | None = None) -> Counter[str]:
    """One forward and backward pass of an `EquilibriumLayer` with default solver and gradient.

    Args:
        cell: Of 4 inputs and 8 units; `DenseCell` with `Spectral` if not given.
    """
    if cell is None:  # seeded: a slower map is solved with more files
        cell = wp.nn.DenseCell(4, 8, weight=wp.nn.Spectral(0.9), generator=torch.Generator().manual_seed(0))
    layer = wp.EquilibriumLayer(cell, state_shape=None if isinstance(cell, wp.nn.AbstractCell) else (8,))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def call() -> None:
        layer(x).sum().backward()

    return crossed(call)


def certify() -> Counter[str]:
    """`wp.certify` of a `GaussianDEQ` on six samples."""
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(4, 20, generator=generator, dtype=torch.float64)
    X = nn.functional.normalize(torch.randn(6, 4, generator=generator, dtype=torch.float64))
    y = torch.randn(6, generator=generator, dtype=torch.float64)
    return crossed(lambda: wp.certify(model, X, y))


def train() -> Counter[str]:
    """`wellposed train` of a small run without its page, in this process."""
    from wellposed_lab.cli.commands import app

    changes = ["data.name=sphere", "data.n=12", "model.width=8", "run.epochs=2"]
    options = [option for change in changes for option in ("--set", change)]
    with tempfile.TemporaryDirectory() as folder:
        return crossed(
            lambda: app(
                ["train", *options, "--no-report", "--quiet", "--out", str(Path(folder) / "run")], standalone_mode=False
            )
        )


if __name__ == "__main__":
    for title, count in (
        ("layer, DenseCell", forward_backward),
        ("layer, own module", lambda: forward_backward(OwnCell())),
        ("certify", certify),
        ("train", train),
    ):
        files = count()
        print(f"{title}: {len(files)} files")
        for name, calls in sorted(files.items()):
            print(f"    {calls:8d}  {name}")
