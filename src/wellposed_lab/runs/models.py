"""Networks by name, for configurations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.convex import OptEq
from wellposed.errors import InvalidArgument, did_you_mean
from wellposed.nn import (
    DenseCell,
    EquilibriumLayer,
    GaussianDEQ,
    ImplicitOnlyDEQ,
    MonotoneClassifier,
    MonotoneConvCell,
    MonotoneDEQ,
    SkipDEQ,
    Spectral,
)
from wellposed.nn.families import theory_of
from wellposed.solve import PeacemanRachford, TunedStep

if TYPE_CHECKING:
    from wellposed_lab.runs.config import ModelSection

__all__ = ["MODELS", "Kind", "build"]

#: Keys of the section that every network takes.
COMMON = ("name", "width", "rtol", "max_steps", "on_failure")


@dataclass(frozen=True)
class Kind:
    """A kind of network.

    Attributes:
        task: "regression" (one number a sample), "classification" or "segmentation".
        options: Keys of the section `model` that it takes besides the common ones.
        make: (shape of an input, classes, keywords) -> model.
        summary: What it is, in a few words.
        images: Whether it takes images and not rows.
    """

    task: str
    options: tuple[str, ...]
    make: Callable[..., nn.Module]
    summary: str
    images: bool = False


class Classifier(nn.Module):
    """logits = V z + v on the equilibrium z that `features` finds.

    Args:
        features: (n, d) -> (n, m).
        width: m. classes: k.
        made: generator, dtype and device of the read-out, which starts from V_ij ~ N(0, 1/m), v = 0.
    """

    def __init__(self, features: nn.Module, width: int, classes: int, made: dict[str, Any]) -> None:
        super().__init__()
        self.features = features
        self.head = nn.Linear(width, classes, device=made["device"], dtype=made["dtype"])
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(classes, width, **made) / math.sqrt(width))
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, k)."""
        features: Any = self.features
        logits: Tensor = self.head(features(x) if theory_of(features) is None else features.equilibrium(x))
        return logits


class Segmenter(nn.Module):
    """logits of every pixel: a convolution of size 1 on the equilibrium of a monotone convolution.

    Args:
        channels: (input, state, classes).
        margin: Of the cell.
        made: generator, dtype and device.
        solving: As in `EquilibriumLayer`.
    """

    def __init__(self, channels: tuple[int, int, int], margin: float, made: dict[str, Any], solving: dict[str, Any]) -> None:
        super().__init__()
        into, state, classes = channels
        cell = MonotoneConvCell(into, state, margin=margin, **made)
        self.layer = EquilibriumLayer(cell, PeacemanRachford(TunedStep()), **solving)
        self.head = nn.Conv2d(state, classes, 1, device=made["device"], dtype=made["dtype"])
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(classes, state, 1, 1, **made) / math.sqrt(state))
            assert self.head.bias is not None
            self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) -> (n, classes, h, w)."""
        logits: Tensor = self.head(self.layer(x))
        return logits


def _theory(network: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def make(shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict) -> nn.Module:
        return network(math.prod(shape), width, **options, **made, **solving)

    return make


def _dense(shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict) -> nn.Module:
    cell = DenseCell(math.prod(shape), width, weight=Spectral(options.get("bound", 0.9)), **made)
    return Classifier(EquilibriumLayer(cell, **solving), width, classes, made)


def _monotone(
    shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict
) -> nn.Module:
    return MonotoneClassifier.dense(math.prod(shape), width, classes, **options, **made, **solving)


def _monotone_conv(
    shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict
) -> nn.Module:
    if len(shape) != 3:
        raise InvalidArgument(f"model.name='monotone_conv' needs images, got inputs of shape {shape}: set data.flatten=false.")
    return MonotoneClassifier.conv((shape[0], shape[1], shape[2]), width, classes, **options, **made, **solving)


def _opteq(shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict) -> nn.Module:
    return Classifier(OptEq(math.prod(shape), width, **made, **solving), width, classes, made)


def _segmenter(
    shape: tuple[int, ...], classes: int, width: int, options: dict[str, Any], made: dict, solving: dict
) -> nn.Module:
    return Segmenter((shape[0], width, classes), options.get("margin", 0.5), made, solving)


MODELS: dict[str, Kind] = {
    "gaussian": Kind("regression", ("weight_variance",), _theory(GaussianDEQ), "Gaussian ReLU network [ling2022]"),
    "skip": Kind("regression", ("gamma",), _theory(SkipDEQ), "with a skip connection [gao2022]"),
    "implicit_only": Kind(
        "regression", ("gamma0", "init"), _theory(ImplicitOnlyDEQ), "only the recurrent matrix trains [gao2023]"
    ),
    "monotone": Kind("regression", ("margin",), _theory(MonotoneDEQ), "well-posed by construction [nguyen2022]"),
    "opteq": Kind("regression", (), _theory(OptEq), "the equilibrium minimises a convex function [xie2021]"),
    "dense": Kind("classification", ("bound",), _dense, "|W| <= bound < 1 and a linear read-out"),
    "monotone_classifier": Kind(
        "classification", ("margin",), _monotone, "monotone equilibrium, linear read-out [winston2020]"
    ),
    "monotone_conv": Kind(
        "classification",
        ("margin", "grid"),
        _monotone_conv,
        "one monotone convolution, averages, read-out [winston2020]",
        images=True,
    ),
    "opteq_classifier": Kind("classification", (), _opteq, "opteq with a linear read-out"),
    "segmenter": Kind("segmentation", ("margin",), _segmenter, "monotone convolution, logits for every pixel", images=True),
}


def build(
    section: ModelSection, shape: tuple[int, ...], classes: int, *, generator: torch.Generator, dtype: torch.dtype
) -> nn.Module:
    """The network of a configuration, on the CPU.

    Args:
        section: `model` of the configuration.
        shape: Of one input.
        classes: How many, for classifiers.
        generator: Of the initialization.
        dtype: Of the parameters.
    """
    kind = kind_of(section.name)
    given = {key: value for key, value in section.model_dump().items() if value is not None and key not in COMMON}
    for key in given:
        if key not in kind.options:
            own = ", ".join(kind.options) or "no keys of its own"
            raise InvalidArgument(f"model.{key} is not for {section.name!r}, which has {own}.{did_you_mean(key, kind.options)}")
    made = {"generator": generator, "dtype": dtype, "device": None}
    solving = {"rtol": section.rtol, "max_steps": section.max_steps, "on_failure": section.on_failure}
    solving = {key: value for key, value in solving.items() if value is not None}
    return kind.make(shape, classes, section.width, given, made, solving)


def kind_of(name: str) -> Kind:
    """The kind of a name, or a sentence with the nearest one."""
    if name not in MODELS:
        raise InvalidArgument(f"Unknown model.name {name!r}; known are {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    return MODELS[name]
