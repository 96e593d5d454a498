"""The networks of the tables of [xie2021]: the same extractor and head around different middles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.convex import L1, ConvOptEq, Decorrelation, GradientStep, InverseNorm, SquaredL2, select_equilibrium
from wellposed.convex.regularizers import AbstractRegularizer
from wellposed.convex.selection import Schedule
from wellposed.errors import WellposedWarning
from wellposed.implicit import ImplicitGradient, UnrolledGradient
from wellposed.nn import EquilibriumLayer, MonotoneConvCell
from wellposed.solve import PeacemanRachford, TunedStep
from wellposed_lab.papers.experiment import Task

__all__ = ["AveragedOptEq", "NeuralODE", "count", "deep_opteq", "network", "widest"]

#: K of the paper, for unrolled training and sequential averaging.
UNROLLED = 20
#: Steps of Runge and Kutta from t = 0 to 1.
ODE_STEPS = 4
#: Channels of zeros that the augmented Neural ODE adds, as in Dupont et al. (2019).
AUGMENTED = 5


def count(model: nn.Module) -> int:
    """Parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def network(in_channels: int, task: Task) -> nn.Module:
    """The network of a task; its parameters are drawn with the seed of the task.

    Args:
        in_channels: Of the images.
        task: With `network` ("opteq", "averaged", "dnn", "monotone", "ode" or "augmented ode"), the
            sizes of `ConvConfig` and `seed`; an OptEq also has `alpha`, `regularizer`, `weight` and
            `gradient`.
    """
    kind = task["network"]
    with torch.random.fork_rng():  # modules of torch draw from the global generator
        torch.manual_seed(task["seed"])
        if kind == "averaged":
            return AveragedOptEq(deep_opteq(in_channels, task, alpha=task["alpha"]), regularizer(task))
        if kind == "opteq":
            gradient = UnrolledGradient(UNROLLED) if task["gradient"] == "unrolled" else ImplicitGradient()
            return deep_opteq(in_channels, task, alpha=task["alpha"], gradient=gradient, prior=prior(task))
        most = count(deep_opteq(in_channels, task))

        def make(width: int) -> nn.Module:
            torch.manual_seed(task["seed"])
            return OTHERS[kind](in_channels, width, task)

        return widest(make, most)


def deep_opteq(in_channels: int, task: Task, **options: Any) -> ConvOptEq:
    """The deep OptEq of a task; options as in `ConvOptEq`."""
    width, features = task["state_channels"], task["feature_channels"]
    solver_kwargs: dict[str, Any] = {"rtol": 1e-3, "max_steps": 200, "on_failure": "ignore"}
    return ConvOptEq(
        in_channels,
        tuple(task["channels"]),
        state_channels=width,
        feature_channels=features,
        extractor=_extractor(in_channels, features, task),
        head=_head(width),
        generator=torch.Generator().manual_seed(task["seed"]),
        **solver_kwargs,
        **options,
    )


def regularizer(task: Task) -> AbstractRegularizer | None:
    """R of a task, with its weight: those of [xie2021, Appendix A.1], and |.|_1."""
    name, weight = task["regularizer"], task["weight"]
    if name == "none":
        return None
    if name == "decorrelation":
        return Decorrelation(weight, across="pixels")
    return {"l1": L1, "l2": SquaredL2, "inverse": InverseNorm}[name](weight)


def prior(task: Task) -> Any:
    """R as a last stage of the map: its prox, or a step along its gradient where it has no prox."""
    chosen = regularizer(task)
    return chosen if chosen is None or chosen.has_prox else GradientStep(chosen, 0.1)


class AveragedOptEq(nn.Module):
    """A deep OptEq with K steps of sequential averaging in the place of its solver [xie2021, (10)].

    Args:
        opteq: The network.
        regularizer: R; a gradient of unknown smoothness is taken to be 1-Lipschitz.
    """

    def __init__(self, opteq: ConvOptEq, regularizer: AbstractRegularizer | None) -> None:
        super().__init__()
        assert regularizer is not None
        self.opteq, self.regularizer = opteq, regularizer

    def state(self, X: Tensor) -> Tensor:
        """z^K."""
        schedule = None if self.regularizer.smoothness() is not None else Schedule(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WellposedWarning)  # R is not convex: known, see the departures
            return select_equilibrium(self.opteq, X, self.regularizer, steps=UNROLLED, schedule=schedule).value

    def forward(self, X: Tensor) -> Tensor:
        logits: Tensor = self.opteq.head(self.state(X))
        return logits


class NeuralODE(nn.Module):
    """z(1) of dz/dt = conv1(relu(conv3(relu(conv1(z, t))))), z(0) the features with channels of
    zeros; the field is that of Dupont et al. (2019) for images.

    Args:
        extractor: Images to features.
        features: Their channels.
        filters: Inside the field.
        augmented: Channels of zeros.
    """

    def __init__(self, extractor: nn.Module, features: int, filters: int, augmented: int) -> None:
        super().__init__()
        channels = features + augmented
        sizes = [(channels + 1, filters, 1), (filters, filters, 3), (filters, channels, 1)]
        self.extractor, self.augmented, self.head = extractor, augmented, _head(channels)
        self.layers = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in sizes)

    def field(self, t: float, z: Tensor) -> Tensor:
        """dz/dt."""
        first, middle, last = self.layers
        value: Tensor = last(torch.relu(middle(torch.relu(first(torch.cat([z, torch.full_like(z[:, :1], t)], dim=1))))))
        return value

    def forward(self, X: Tensor) -> Tensor:
        features = self.extractor(X)
        zeros = features.new_zeros(len(X), self.augmented, *features.shape[2:])
        z, h = torch.cat([features, zeros], dim=1), 1 / ODE_STEPS
        for i in range(ODE_STEPS):  # the classical method of order 4
            t = i * h
            k1 = self.field(t, z)
            k2 = self.field(t + h / 2, z + h / 2 * k1)
            k3 = self.field(t + h / 2, z + h / 2 * k2)
            z = z + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.field(t + h, z + h * k3))
        logits: Tensor = self.head(z)
        return logits


class _Monotone(nn.Module):
    """The equilibrium of one monotone convolution of the features [winston2020]."""

    def __init__(self, extractor: nn.Module, features: int, width: int) -> None:
        super().__init__()
        solver = PeacemanRachford(TunedStep())
        cell = MonotoneConvCell(features, width, margin=0.5)
        options: dict[str, Any] = {"on_failure": "ignore", "rtol": 1e-3, "max_steps": 200}
        self.extractor, self.head = extractor, _head(width)
        self.layer = EquilibriumLayer(cell, solver, ImplicitGradient(solver), **options)

    def forward(self, X: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.extractor(X)))
        return logits


def _dnn(in_channels: int, width: int, task: Task) -> nn.Module:
    """An explicit network: as many 3 x 3 convolutions as the OptEq has layers, their channels in
    the same proportions; kernels have the variance 2/(fan in), as U_l of the OptEq. With the
    variance 1/(3 fan in) of torch the signal is lost, and nothing is learned for many steps."""
    features, layers = task["feature_channels"], [_extractor(in_channels, task["feature_channels"], task)]
    for share in task["channels"]:
        channels = max(1, round(width * share / max(task["channels"])))
        convolution = nn.Conv2d(features, channels, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        assert convolution.bias is not None
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.ReLU()]
        features = channels
    return nn.Sequential(*layers, _head(features))


def _of(kind: Callable[..., nn.Module], **options: Any) -> Callable[[int, int, Task], nn.Module]:
    def make(in_channels: int, width: int, task: Task) -> nn.Module:
        features = task["feature_channels"]
        return kind(_extractor(in_channels, features, task), features, width, **options)

    return make


OTHERS: dict[str, Callable[[int, int, Task], nn.Module]] = {
    "dnn": _dnn,
    "monotone": _of(_Monotone),
    "ode": _of(NeuralODE, augmented=0),
    "augmented ode": _of(NeuralODE, augmented=AUGMENTED),
}


def widest(make: Callable[[int], nn.Module], most: int) -> nn.Module:
    """The network of the greatest width that has at most so many parameters, by bisection."""
    width = 1
    while count(make(2 * width)) <= most:
        width *= 2
    step = width
    while step := step // 2:  # the count grows with the width
        if count(make(width + step)) <= most:
            width += step
    return make(width)


def _extractor(in_channels: int, features: int, task: Task) -> nn.Module:
    """One 3 x 3 convolution, as in [xie2021, Section 5.2]."""
    return nn.Sequential(nn.Conv2d(in_channels, features, 3, stride=task["stride"], padding=1), nn.ReLU())


def _head(channels: int) -> nn.Module:
    """Averages over 4 x 4 regions and a linear layer to 10 classes."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, 10))
