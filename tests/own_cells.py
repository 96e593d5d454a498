"""Random small cells of a user's own, by kind, and the truth about them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mpmath
import torch
from torch import Tensor, nn

import wellposed as wp

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.Hardtanh,
)  # fmt: skip
KINDS = ("dense", "convolutional", "residual", "sequential")


class Dense(nn.Module):
    """s(W z + U x + b)."""

    def __init__(self, body: nn.Module, inject: nn.Module, activation: nn.Module) -> None:
        super().__init__()
        self.body, self.inject, self.activation = body, inject, activation

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.activation(self.body(z) + self.inject(x))


class Residual(nn.Module):
    """a z + (body of z) + U x, with an activation around it or none."""

    def __init__(self, body: nn.Module, inject: nn.Module, keep: float, outer: nn.Module) -> None:
        super().__init__()
        self.body, self.inject, self.keep, self.outer = body, inject, keep, outer

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.outer(self.keep * z + self.body(z) + self.inject(x))


def draw(kind: str, seed: int) -> tuple[wp.EquilibriumLayer, Tensor]:
    """A layer with a random cell of the kind, and an input of one sample.

    Args:
        kind: Of `KINDS`.
        seed: Of everything in it.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def choice(options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    image = kind == "convolutional" or (kind != "dense" and number(0, 1) < 0.3)
    width, inputs = choice((2, 4, 7, 10)), choice((2, 5))
    channels, side = choice((1, 2, 3)), choice((3, 4))
    gain = number(0.3, 1.6)

    def linear(a: int, b: int) -> nn.Module:
        if not image:
            return nn.Linear(a, b)
        return nn.Conv2d(a, b, 3, padding=1, padding_mode=choice(("zeros", "circular")))

    size, given = (channels, channels) if image else (width, inputs)
    activation = choice(ACTIVATIONS)
    if kind in ("dense", "convolutional"):
        cell: nn.Module = Dense(linear(size, size), linear(given, size), activation())
    elif kind == "residual":
        hidden = 2 * size
        body = nn.Sequential(linear(size, hidden), activation(), linear(hidden, size))
        cell = Residual(body, linear(given, size), number(0.0, 0.6), choice((nn.Identity, activation))())
    else:
        deep = [part for _ in range(choice((1, 2, 3))) for part in (linear(size, size), choice(ACTIVATIONS)())]
        cell = Dense(nn.Sequential(*deep, linear(size, size)), linear(given, size), activation())
    for parameter in cell.parameters():
        fan = parameter[0].numel() if parameter.dim() > 1 else 4
        scale = gain * (1 if parameter.dim() > 1 else 0.5) / fan**0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    dtype = choice((torch.float32, torch.float64))
    shape = (channels, side, side) if image else (width,)
    x = torch.randn((1, channels, side, side) if image else (1, inputs), generator=generator).to(dtype)
    rtol = choice((1e-6, 1e-7)) if dtype == torch.float32 else choice((1e-6, 1e-9, 1e-12))
    return wp.EquilibriumLayer(cell.to(dtype), state_shape=shape, rtol=rtol, on_failure="ignore"), x


class Truth:
    """The map in float64, by PyTorch's own code.

    Args:
        layer: The layer. x: Its input.
    """

    def __init__(self, layer: wp.EquilibriumLayer, x: Tensor) -> None:
        cell = copy.deepcopy(layer.cell).double().requires_grad_(False)
        shape, self._x = (1, *layer._state_shape), x.double()
        self.f = lambda z: cell(z.reshape(shape), self._x).reshape(-1)

    def jacobian(self, z: Tensor) -> Tensor:
        return torch.func.jacrev(self.f)(z)

    def newton(self, z: Tensor, steps: int = 40) -> Tensor | None:
        """The equilibrium to which Newton's method goes, or None."""
        eye = torch.eye(len(z), dtype=torch.float64)
        with torch.no_grad():
            for _ in range(steps):
                residual = self.f(z) - z
                J = self.jacobian(z)
                if not bool(torch.isfinite(J).all()):
                    return None
                step, info = torch.linalg.solve_ex(eye - J, residual)
                if int(info) or not bool(torch.isfinite(step).all()):
                    return None
                z = z + step
                if float(step.norm()) <= 1e-14 * (1 + float(z.norm())):
                    break
            if float((self.f(z) - z).norm()) <= 1e-11 * (1 + float(z.norm())):
                return z
        return None

    def least_singular_value(self, z: Tensor) -> float:
        return float(torch.linalg.svdvals(torch.eye(len(z), dtype=torch.float64) - self.jacobian(z))[-1])


def _relu(v: Any) -> Any:
    return v if v > 0 else v * 0


#: Activations in the arithmetic of mpmath, with the threshold that PyTorch's softplus has.
EXACT: dict[type[nn.Module], Callable[[Any], Any]] = {
    nn.Identity: lambda v: v,
    nn.ReLU: _relu,
    nn.Tanh: lambda v: mpmath.tanh(v),
    nn.Sigmoid: lambda v: 1 / (1 + mpmath.exp(-v)),
    nn.Softplus: lambda v: v if v > 20 else mpmath.log1p(mpmath.exp(v)),
    nn.LeakyReLU: lambda v: v if v > 0 else mpmath.mpf(0.01) * v,
    nn.ELU: lambda v: v if v > 0 else mpmath.expm1(v),
    nn.SiLU: lambda v: v / (1 + mpmath.exp(-v)),
    nn.GELU: lambda v: v * mpmath.ncdf(v),
    nn.Hardtanh: lambda v: max(mpmath.mpf(-1), min(mpmath.mpf(1), v)),
}


def exact(module: nn.Module, v: list[Any]) -> list[Any]:
    """A module of linear maps and activations, of a vector of numbers of mpmath."""
    if isinstance(module, nn.Sequential):
        for part in module:
            v = exact(part, v)
        return v
    if isinstance(module, nn.Linear):
        W, b = module.weight.double().tolist(), module.bias.double().tolist()
        return [mpmath.fdot(row, v) + shift for row, shift in zip(W, b, strict=True)]
    return [EXACT[type(module)](entry) for entry in v]


def exact_cell(cell: Any, z: list[Any], x: list[Any]) -> list[Any]:
    """`Dense` or `Residual` without images."""
    inside = [a + b for a, b in zip(exact(cell.body, z), exact(cell.inject, x), strict=True)]
    if isinstance(cell, Residual):
        return exact(cell.outer, [mpmath.mpf(cell.keep) * a + b for a, b in zip(z, inside, strict=True)])
    return exact(cell.activation, inside)


def exact_distance(layer: Any, x: Tensor, z: Tensor, J: Tensor) -> Any:
    """|z - z*| to about 30 digits, by Newton's method with a fixed matrix; None if it does not
    converge.

    Args:
        layer, x: Of `draw`, without images.
        z: (n,) near z*.
        J: (n, n) the derivative there.
    """
    with mpmath.workdps(45), torch.no_grad():
        C = torch.linalg.inv(torch.eye(len(z), dtype=torch.float64) - J).tolist()
        inputs, start = [mpmath.mpf(v) for v in x[0].double().tolist()], [mpmath.mpf(v) for v in z.tolist()]
        point = start
        for _ in range(60):
            gap = [a - b for a, b in zip(exact_cell(layer.cell, point, inputs), point, strict=True)]
            point = [a + mpmath.fdot(row, gap) for a, row in zip(point, C, strict=True)]
            if max(map(abs, gap)) < mpmath.mpf(10) ** -35:
                return mpmath.norm([a - b for a, b in zip(point, start, strict=True)])
    return None
