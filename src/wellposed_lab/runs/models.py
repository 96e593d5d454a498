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
from wellposed.implicit import PhantomGradient
from wellposed.nn import (
    DenseCell,
    EquilibriumLayer,
    MonotoneClassifier,
    MonotoneConvCell,
    MultiscaleDEQ,
    ResidualDEQ,
    Spectral,
    TransformerDEQ,
)
from wellposed.nn.families import FAMILIES
from wellposed.solve import PeacemanRachford, TunedStep
from wellposed.tasks import PuzzleSolver
from wellposed_lab.runs.own_class import own_network
from wellposed_lab.runs.task_networks import deblurring, multiscale_segmenter, nodes, puzzle

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import ModelSection

__all__ = ["MODELS", "OWN", "ModelKind", "build", "kind_of"]

#: Keys of the section `model` that every network takes.
COMMON = ("name", "width", "rtol", "max_steps", "on_failure", "class", "arguments")


@dataclass(frozen=True)
class Design:
    """What a network is made from.

    Attributes:
        shape: Of one input.
        classes, width: Outputs of a classifier, units or channels of the equilibrium.
        options: Keys of the section `model` that belong to this network.
        factory_kwargs: generator, dtype and device of the parameters.
        solver_kwargs: rtol, max_steps and on_failure, as far as they were given.
    """

    shape: tuple[int, ...]
    classes: int
    width: int
    options: dict[str, Any]
    factory_kwargs: dict[str, Any]
    solver_kwargs: dict[str, Any]

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    def read_out(self, like: nn.Linear | nn.Conv2d) -> None:
        """Draws the weights of a read-out from N(0, 1/width) and sets its bias to 0."""
        with torch.no_grad():
            like.weight.copy_(torch.randn(like.weight.shape, **self.factory_kwargs) / math.sqrt(self.width))
            assert like.bias is not None
            like.bias.zero_()


class Classifier(nn.Module):
    """logits = V z + v on the equilibrium z of `features`, (n, d) -> (n, m)."""

    def __init__(self, features: nn.Module, design: Design) -> None:
        super().__init__()
        self.features = features
        factory = design.factory_kwargs
        self.head = nn.Linear(design.width, design.classes, device=factory["device"], dtype=factory["dtype"])
        design.read_out(self.head)

    def forward(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, k)."""
        equilibrium = getattr(self.features, "equilibrium", self.features)
        logits: Tensor = self.head(equilibrium(x))
        return logits


class Segmenter(nn.Module):
    """Logits of every pixel: a 1x1 convolution on the equilibrium of a monotone convolution."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        factory, state = design.factory_kwargs, design.width
        cell = MonotoneConvCell(design.shape[0], state, margin=design.options.get("margin", 0.5), **factory)
        self.layer = EquilibriumLayer(cell, PeacemanRachford(TunedStep()), **design.solver_kwargs)
        self.head = nn.Conv2d(state, design.classes, 1, device=factory["device"], dtype=factory["dtype"])
        design.read_out(self.head)

    def forward(self, x: Tensor) -> Tensor:
        """(n, c, h, w) -> (n, classes, h, w)."""
        logits: Tensor = self.head(self.layer(x))
        return logits


def _theory(network: Callable[..., nn.Module]) -> Callable[[Design], nn.Module]:
    return lambda d: network(d.features, d.width, **d.options, **d.factory_kwargs, **d.solver_kwargs)


def _dense(d: Design) -> nn.Module:
    cell = DenseCell(d.features, d.width, weight=Spectral(d.options.get("bound", 0.9)), **d.factory_kwargs)
    return Classifier(EquilibriumLayer(cell, **d.solver_kwargs), d)


def _monotone(d: Design) -> nn.Module:
    return MonotoneClassifier.dense(d.features, d.width, d.classes, **d.options, **d.factory_kwargs, **d.solver_kwargs)


def _monotone_conv(d: Design, kwargs: dict[str, Any]) -> nn.Module:
    shape = (d.shape[0], d.shape[1], d.shape[2])
    return MonotoneClassifier.conv(shape, d.width, d.classes, **kwargs)


def _residual(d: Design, kwargs: dict[str, Any]) -> nn.Module:
    return ResidualDEQ(d.shape[0], d.width, d.classes, **{"grid": 2, "rtol": 1e-3, **kwargs})


def _multiscale(d: Design, kwargs: dict[str, Any]) -> nn.Module:
    widths = (d.width, d.width)
    return MultiscaleDEQ.classifier(d.shape[0], widths, d.classes, **{"grid": 2, "rtol": 1e-3, **kwargs})


def _transformer(d: Design) -> nn.Module:
    if len(d.shape) != 1 or not d.classes:
        raise InvalidArgument("model.name='transformer' needs a text: set data.name=wikitext2, or to a .txt file.")
    steps = d.options.get("gradient_steps")
    gradient = {} if steps is None else {"gradient": PhantomGradient(steps, damping=1.0)}
    kwargs = {**d.factory_kwargs, **d.solver_kwargs, **gradient}
    return TransformerDEQ(d.classes, d.width, d.options.get("heads", 4), length=d.shape[0], **kwargs)


def _opteq(d: Design) -> nn.Module:
    return Classifier(OptEq(d.features, d.width, **d.factory_kwargs, **d.solver_kwargs), d)


@dataclass(frozen=True)
class ModelKind:
    """A kind of network.

    Attributes:
        task: "regression" (one number a sample), "classification", "segmentation", "language" or
            "reconstruction" (an image of an image).
        options: Keys of the section `model` that it takes besides the common ones.
        make: Makes the network.
        summary: What it is, in a few words.
        images: Whether it takes images and not rows.
    """

    task: str
    options: tuple[str, ...]
    make: Callable[[Design], nn.Module]
    summary: str
    images: bool = False


#: Of a family: its own keys, and what it is; one that is not listed has the common keys and its docstring.
_ABOUT = {
    "gaussian": (("weight_variance",), "Gaussian ReLU network [ling2022]"),
    "skip": (("gamma",), "with a skip connection [gao2022]"),
    "implicit_only": (("gamma0", "init"), "only the recurrent matrix trains [gao2023]"),
    "monotone": (("margin",), "well-posed by construction [nguyen2022]"),
}


def _family(name: str) -> ModelKind:
    network = FAMILIES[name]
    options, summary = _ABOUT.get(name, ((), (network.__doc__ or network.__name__).partition("\n")[0]))
    return ModelKind("regression", options, _theory(network), summary)


def _images(name: str, options: tuple[str, ...], make: Callable[[Design, dict[str, Any]], nn.Module], what: str) -> ModelKind:
    """A classifier of images."""

    def made(d: Design) -> nn.Module:
        if len(d.shape) != 3:
            raise InvalidArgument(f"model.name={name!r} needs images, got inputs of shape {d.shape}: set data.flatten=false.")
        return make(d, {**d.options, **d.factory_kwargs, **d.solver_kwargs})

    return ModelKind("classification", options, made, what, images=True)


MODELS: dict[str, ModelKind] = {
    **{name: _family(name) for name in sorted(FAMILIES, key=[*_ABOUT, *FAMILIES].index)},
    "opteq": ModelKind("regression", (), _theory(OptEq), "the equilibrium minimises a convex function [xie2021]"),
    "dense": ModelKind("classification", ("bound",), _dense, "|W| <= bound < 1 and a linear read-out"),
    "monotone_classifier": ModelKind(
        "classification", ("margin",), _monotone, "monotone equilibrium, linear read-out [winston2020]"
    ),
    "monotone_conv": _images(
        "monotone_conv", ("margin", "grid"), _monotone_conv, "one monotone convolution, averages, read-out [winston2020]"
    ),
    "residual": _images("residual", ("grid",), _residual, "residual block [nguyen2022]; trains by few steps"),
    "multiscale": _images("multiscale", ("grid",), _multiscale, "two resolutions [bai2020]; trains by few steps"),
    "opteq_classifier": ModelKind("classification", (), _opteq, "opteq with a linear read-out"),
    "segmenter": ModelKind("segmentation", ("margin",), Segmenter, "monotone convolution, logits for every pixel", images=True),
    "multiscale_segmenter": ModelKind(
        "segmentation", (), multiscale_segmenter, "two resolutions of an image as one equilibrium [bai2020]", images=True
    ),
    "node_classifier": ModelKind("segmentation", ("bound",), nodes, "graph equilibrium, logits for every node", images=True),
    "sudoku_solver": ModelKind(
        "segmentation", (), puzzle(PuzzleSolver.sudoku, "sudoku"), "iterates to the answer", images=True
    ),
    "maze_solver": ModelKind("segmentation", (), puzzle(PuzzleSolver.mazes, "mazes"), "iterates to the answer", images=True),
    "transformer": ModelKind(
        "language", ("heads", "gradient_steps"), _transformer, "a transformer block repeated to equilibrium [bai2019]"
    ),
    "deblurring": ModelKind("reconstruction", ("bound",), deblurring, "restores blurred images [gilton2021]", images=True),
}


def _no_class(d: Design) -> nn.Module:
    raise InvalidArgument("A model.name that begins with own_ needs model.class, the import path of a module.")


#: Networks of `model.class`, by task.
OWN: dict[str, ModelKind] = {
    f"own_{task}": ModelKind(task, (), _no_class, "a class of your own", images=task in ("segmentation", "reconstruction"))
    for task in ("regression", "classification", "segmentation", "reconstruction", "language")
}


def build(
    section: ModelSection,
    shape: tuple[int, ...],
    classes: int,
    *,
    generator: torch.Generator,
    dtype: torch.dtype,
    allow_code: bool = False,
) -> nn.Module:
    """The network of a configuration, on the CPU.

    Args:
        section: `model` of the configuration.
        shape: Of one input.
        classes: The number of classes, for classifiers.
        generator: Of the initialization.
        dtype: Of the parameters.
        allow_code: Whether `model.class` may be imported.
    """
    kind = kind_of(section.name)
    solver_kwargs = {"rtol": section.rtol, "max_steps": section.max_steps, "on_failure": section.on_failure}
    solver_kwargs = {key: value for key, value in solver_kwargs.items() if value is not None}
    if section.class_ is not None:
        return own_network(
            section.class_,
            section.arguments or {},
            shape,
            classes,
            section.width,
            allow_code=allow_code,
            seed=generator.initial_seed(),
            generator=generator,
            dtype=dtype,
            solver_kwargs=solver_kwargs,
        )
    if section.arguments is not None:
        raise InvalidArgument("model.arguments are those of model.class, which is not given.")
    given = {key: value for key, value in section.model_dump().items() if value is not None and key not in COMMON}
    for key in given:
        if key not in kind.options:
            own = ", ".join(kind.options) or "no further keys"
            raise InvalidArgument(f"model.{key} is not for {section.name!r}, which has {own}.{did_you_mean(key, kind.options)}")
    factory_kwargs = {"generator": generator, "dtype": dtype, "device": None}
    return kind.make(Design(shape, classes, section.width, given, factory_kwargs, solver_kwargs))


def kind_of(name: str) -> ModelKind:
    """The kind of network of a name; an unknown name is refused with the nearest known one."""
    if name in OWN:
        return OWN[name]
    if name not in MODELS:
        raise InvalidArgument(f"Unknown model.name {name!r}; known are {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    return MODELS[name]
