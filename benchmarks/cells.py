"""Cells that a user brings: plain `nn.Module`s of (z, x), and an input for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Problem = tuple[nn.Module, Tensor, tuple[int, ...]]


class Dense(nn.Module):
    """tanh(W z + U x + b); W as `nn.Linear` makes it, with a spectral radius of about 0.58, or given."""

    def __init__(self, width: int, W: Tensor | None = None, in_features: int = 32) -> None:
        super().__init__()
        self.recurrent, self.injection = nn.Linear(width, width, bias=False), nn.Linear(in_features, width)
        if W is not None:
            self.recurrent.weight.data = W

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.recurrent(z) + self.injection(x))


class ResidualConv(nn.Module):
    """Two convolutions around a sum, with group norms [bai2020 and its tutorials]."""

    def __init__(self, channels: int, inner: int, scale: float = 0.01) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.second = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(8, inner), nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)])
        for part in (self.first, self.second):
            nn.init.normal_(part.weight, std=scale)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = self.norms[0](F.relu(self.first(z)))
        return self.norms[2](F.relu(z + self.norms[1](x + self.second(inner))))


class ZeroPaddedConv(nn.Module):
    """tanh of one convolution with zero padding, a contraction of about `norm`."""

    def __init__(self, channels: int, norm: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv.weight.data *= norm / torch.linalg.matrix_norm(self.conv.weight.data.flatten(1), 2) / 1.5

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(z) + x)


class Attention(nn.Module):
    """A block of a transformer over the tokens of each sample; x is added before it."""

    def __init__(self, features: int, heads: int = 4, scale: float = 1.0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.up, self.down = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)
        self.norms = nn.ModuleList([nn.LayerNorm(features), nn.LayerNorm(features)])
        for part in (self.out, self.down):
            part.weight.data *= scale

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        batch, tokens, features = z.shape
        q, k, v = (h.transpose(1, 2) for h in self.qkv(z).view(batch, tokens, 3, self.heads, -1).unbind(2))
        weights = torch.softmax(q @ k.transpose(2, 3) * q.shape[-1] ** -0.5, dim=-1)
        mixed = (weights @ v).transpose(1, 2).reshape(z.shape)
        h = self.norms[0](x + self.out(mixed))
        return self.norms[1](h + self.down(F.gelu(self.up(h))))


class DeepResidual(nn.Module):
    """x + 0.5 times a network of several layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        h = z
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) / len(self.layers)
        return x + 0.5 * torch.tanh(h)


def gaussian(width: int, norm: float) -> Tensor:
    """A Gaussian matrix of about this norm."""
    return torch.randn(width, width) * norm / (2 * width**0.5)


def smoothing(width: int, norm: float) -> Tensor:
    """An average over neighbouring units: the slow directions are few."""
    distance = torch.arange(width).minimum(width - torch.arange(width)).float()
    kernel = torch.exp(-((distance / 12) ** 2) / 2)
    return norm * torch.stack([kernel.roll(shift) for shift in range(width)]) / kernel.sum()


def monotone(width: int) -> Tensor:
    """Norm above 1, symmetric part below: one equilibrium, and plain steps diverge."""
    skew = torch.randn(width, width) / width**0.5
    return -0.2 * torch.eye(width) + 0.9 * (skew - skew.T)


def dense(width: int, batch: int, W: Callable[[int], Tensor] | None = None) -> Callable[[], Problem]:
    return lambda: (Dense(width, None if W is None else W(width)), torch.randn(batch, 32), (width,))


def image(make: Callable[[], nn.Module], batch: int, *shape: int) -> Callable[[], Problem]:
    return lambda: (make(), torch.randn(batch, *shape), shape)


#: The table of docs/speed.md: compared with other libraries.
TABLE: dict[str, Callable[[], Problem]] = {
    "tanh dense, 64 units, batch 32": dense(64, 32),
    "tanh dense, 128 units, batch 128": dense(128, 128),
    "tanh dense, 512 units, batch 128": dense(512, 128),
    "residual conv, 32 channels 16 x 16, batch 32": image(lambda: ResidualConv(32, 32), 32, 32, 16, 16),
    "residual conv, 48 channels 28 x 28, batch 32": image(lambda: ResidualConv(48, 64), 32, 48, 28, 28),
    "residual conv, 48 channels 28 x 28, batch 64": image(lambda: ResidualConv(48, 64), 64, 48, 28, 28),
    "attention, d = 64, 32 tokens, batch 16": image(lambda: Attention(64), 16, 32, 64),
}
#: Further maps, on which `Auto` is compared with the solvers that it chooses from.
FURTHER: dict[str, Callable[[], Problem]] = {
    "slow smoothing, 256 units, batch 64": dense(256, 64, lambda m: smoothing(m, 0.97)),
    "slow Gaussian, 256 units, batch 64": dense(256, 64, lambda m: gaussian(m, 0.97)),
    "monotone, 128 units, batch 64": dense(128, 64, monotone),
    "tanh dense, 256 units, batch 1": dense(256, 1),
    "tanh dense, 128 units, batch 4096": dense(128, 4096),
    "zero-padded conv, 16 channels 16 x 16, batch 32": image(lambda: ZeroPaddedConv(16, 0.9), 32, 16, 16, 16),
    "deep residual, 128 units, 8 layers, batch 64": image(lambda: DeepResidual(128, 8), 64, 128),
}


def make(name: str) -> Problem:
    """The cell, its input and the shape of its state; the same in every run."""
    torch.manual_seed(0)
    return (TABLE | FURTHER)[name]()
