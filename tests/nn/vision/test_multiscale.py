"""MultiscaleDEQ of random shapes against a long plain iteration and against dense implicit differentiation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wellposed.nn import MultiscaleDEQ

F64 = torch.float64
RTOL = 1e-12
cases = pytest.mark.parametrize("cases", [range(4), pytest.param(range(200), marks=pytest.mark.slow)], ids=["few", "all"])


def drawn(seed: int) -> tuple[MultiscaleDEQ, Tensor, tuple[int, ...], int]:
    """A classifier or segmenter of one to three resolutions, images, the channels, and the number of classes."""
    g = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=g))

    channels = tuple(2 * integer(1, 2) for _ in range(integer(1, 3)))
    height, width, stride, classes = integer(2, 6), integer(2, 6), integer(1, 2), integer(2, 4)
    make = MultiscaleDEQ.segmenter if seed % 2 else MultiscaleDEQ.classifier
    options = {"init_std": 0.02, "rtol": RTOL, "on_failure": "ignore", "max_steps": 1000}
    model = make(2, channels, classes, groups=1, stride=stride, generator=g, dtype=F64, **options)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.005 * torch.randn(p.shape, generator=g, dtype=F64))  # also what starts at 0 or 1
    return model, torch.randn(integer(1, 3), 2, height, width, generator=g, dtype=F64), channels, classes


def joined(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)


@cases
def test_equilibria_gradients_and_shapes(cases):
    """A cell that does not contract may have several equilibria: where ours is another one, it is one, by its residual."""
    same = 0
    for seed in cases:
        model, X, channels, classes = drawn(seed)
        x = model.inputs(X)
        check_resolutions([part.shape for part in x], channels)
        parameters = [p for p in model.parameters() if p.requires_grad]
        prediction = model(X)
        assert prediction.shape[:2] == (len(X), classes)
        assert prediction.shape[2:] == (X.shape[2:] if seed % 2 else torch.Size([]))
        found = torch.autograd.grad(prediction.square().sum(), parameters)
        if not (model.layer.last_solution.converged.all() and model.layer.last_adjoint.converged.all()):
            continue  # it says so
        z = tuple(part.detach() for part in model.layer.last_solution.value)
        with torch.no_grad():
            residual = (joined(model.cell(z, x)) - joined(z)).norm(dim=1) / joined(z).norm(dim=1)
        assert float(residual.max()) <= 2 * RTOL, seed
        J = dense_jacobian(model, x, z)
        inverse = torch.linalg.inv(torch.eye(J.shape[1], dtype=F64) - J)
        condition = float(torch.linalg.matrix_norm(inverse, 2).max())
        plain = by_plain_iteration(model, x)
        same += float(((joined(z) - plain).norm(dim=1) / plain.norm(dim=1)).max()) <= 2 * condition * RTOL
        expected = densely(model, X, z, inverse, parameters)
        scale = max(float(p.abs().max()) for p in expected)
        for p, q in zip(found, expected, strict=True):
            # equilibrium and adjoint are off by condition * RTOL, and the adjoint's system varies with the equilibrium
            assert float((p - q).abs().max()) <= 2 * condition**2 * RTOL * scale, seed
    assert same >= 0.9 * len(cases)


def check_resolutions(shapes: list[torch.Size], channels: tuple[int, ...]) -> None:
    """Each halves the one before, rounding up."""
    assert [shape[1] for shape in shapes] == list(channels)
    for fine, coarse in zip(shapes, shapes[1:], strict=False):
        assert [-(-side // 2) for side in fine[2:]] == list(coarse[2:])


def by_plain_iteration(model: MultiscaleDEQ, x: tuple[Tensor, ...]) -> Tensor:
    """(batch, n) z <- f(z) from 0 until nothing moves, or 5000 times."""
    z = tuple(torch.zeros_like(part) for part in x)
    with torch.no_grad():
        for _ in range(5000):
            before, z = z, model.cell(z, x)
            if float((joined(z) - joined(before)).norm()) <= 1e-15 * float(joined(z).norm()):
                break
    return joined(z)


def dense_jacobian(model: MultiscaleDEQ, x: tuple[Tensor, ...], z: tuple[Tensor, ...]) -> Tensor:
    """(batch, n, n) df/dz, sample by sample."""
    x = tuple(part.detach() for part in x)
    shapes = [part.shape[1:] for part in z]

    def f(row: Tensor, sample: int) -> Tensor:
        parts = row.split([shape.numel() for shape in shapes])
        state = tuple(part.reshape(1, *shape) for part, shape in zip(parts, shapes, strict=True))
        return joined(model.cell(state, tuple(part[sample : sample + 1] for part in x)))[0]

    rows = joined(z)
    return torch.stack([torch.autograd.functional.jacobian(lambda row, i=i: f(row, i), rows[i]) for i in range(len(rows))])


def densely(model: MultiscaleDEQ, X: Tensor, z: tuple[Tensor, ...], inverse: Tensor, parameters: list) -> list[Tensor]:
    """Gradients of |prediction|^2: the head's own, and those of <u, f> with (I - J)^T u = dL/dz through one step."""
    held = tuple(part.detach().requires_grad_() for part in z)
    loss = model.head(held, tuple(X.shape[2:])).square().sum()
    v = joined(torch.autograd.grad(loss, held, retain_graph=True))
    u = torch.stack([matrix.T @ row for matrix, row in zip(inverse, v, strict=True)])
    step = (joined(model.cell(z, model.inputs(X))) * u).sum()
    total = torch.autograd.grad(loss + step, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, total, strict=True)]
