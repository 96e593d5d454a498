"""From a configuration to data, a network and a loss that fit each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._memory import available_memory, readable
from wellposed.data import Dataset, load
from wellposed.data._load import is_path, is_text
from wellposed.data.own import checksum, own_path
from wellposed.data.puzzles import PUZZLES
from wellposed.data.restoration import IMAGES, NOISE, PAIRS
from wellposed.data.text import TEXTS
from wellposed.errors import InvalidArgument, WellposedError
from wellposed_lab.runs.losses import AbstractLoss, CrossEntropy, NextToken, Reconstruction, Segmentation, Squared
from wellposed_lab.runs.models import MODELS, OWN, build, kind_of

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import DataSection, RunConfig

__all__ = ["DataParts", "RunProblem", "prepare", "resolve_auto"]

#: The loss of a task.
LOSSES = {"regression": "squared", "classification": "cross_entropy", "segmentation": "segmentation"}
LOSSES |= {"reconstruction": "reconstruction", "language": "next_token"}
#: The network of a task, if none is named.
NETWORKS = {"regression": "gaussian", "classification": "dense", "segmentation": "segmenter"}
NETWORKS |= {"reconstruction": "deblurring", "language": "transformer"}
#: Data without classes to choose from, and their task.
WITHOUT_CLASSES = {"sphere": "regression", "moons": "regression", "camvid": "segmentation"}
WITHOUT_CLASSES |= dict.fromkeys(PUZZLES, "segmentation") | dict.fromkeys(TEXTS, "language")
WITHOUT_CLASSES |= dict.fromkeys((*IMAGES, *PAIRS), "reconstruction")
#: The network of data that need their own.
NETWORK_OF = {"chains": "node_classifier", "sudoku": "sudoku_solver", "mazes": "maze_solver"}
#: The default width of a network of images. These are channels, and a step costs their square at every pixel.
CHANNELS = 32
#: The label of pixels that belong to no class.
VOID = {"camvid": 11}


@dataclass(frozen=True)
class DataParts:
    """Inputs and targets by part: "train", and "validation" and "test" if they exist."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor] | None = None
    test: tuple[Tensor, Tensor] | None = None

    def items(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """(name, (X, y)) of the parts that exist."""
        for name in ("train", "validation", "test"):
            if (part := getattr(self, name)) is not None:
                yield name, part


@dataclass(frozen=True)
class RunProblem:
    """What `fit` needs.

    Attributes:
        data: As loaded, with the steps of its preprocessing.
        parts, model: On the device of the run.
        loss: What is minimised.
    """

    data: Dataset
    parts: DataParts
    model: nn.Module
    loss: AbstractLoss


def prepare(config: RunConfig, *, device: torch.device | None = None, allow_code: bool = False) -> RunProblem:
    """Loads the data and draws the network; the same configuration gives the same problem.

    Args:
        config: What to load and to draw.
        device: Of this process; `run.device` if not given.
        allow_code: Whether `model.class` may be imported, which runs its code.

    Raises:
        InvalidArgument: Parts of the configuration do not fit each other, or the memory.
    """
    with _within_memory("data.n, data.features, data.size or model.width"):
        return _prepared(resolve_auto(config), device, allow_code)


def resolve_auto(config: RunConfig) -> RunConfig:
    """The configuration with every `auto` replaced; what was given is never changed.

    The network follows the data, then the loss, then the number of classes. Classes and loss follow
    the network: one output learns the classes 0 and 1, a classifier all of them, and data without
    classes to choose from have none. A network of images has 32 channels if no width is given.
    """
    data, model, loss = _unscaled(config.data), config.model, config.loss
    if model.class_ is not None and model.name not in ("auto", *OWN):
        raise InvalidArgument(f"model.name={model.name!r} and model.class={model.class_!r} are two networks; omit one of them.")
    if model.name == "auto":
        task = _task(config)
        network = NETWORK_OF.get(data.name, NETWORKS[task])
        model = model.model_copy(update={"name": network if model.class_ is None else f"own_{task}"})
    kind = kind_of(model.name)
    task = kind.task
    if kind.images and "width" not in model.model_fields_set:
        model = model.model_copy(update={"width": CHANNELS})
    if data.classes == "auto":
        classes = [0, 1] if task == "regression" and data.name not in WITHOUT_CLASSES and not is_path(data.name) else None
        data = data.model_copy(update={"classes": classes})
    if data.name in (*PUZZLES, *IMAGES, *PAIRS) and "norm" not in data.model_fields_set:
        data = data.model_copy(update={"norm": None})  # a scale that depends on the sample would say nothing about it
    if data.name in PAIRS and "noise" not in data.model_fields_set:
        data = data.model_copy(update={"noise": NOISE})
    if data.flatten == "auto":
        data = data.model_copy(update={"flatten": not kind.images})
    if loss.name == "auto":
        loss = loss.model_copy(update={"name": LOSSES[task]})
    return config.model_copy(update={"data": data, "model": model, "loss": loss})


def _unscaled(data: DataSection) -> DataSection:
    """All of a file or a text, unscaled, unless given; with the full path and the checksum of a
    file for a resumed run."""
    if not is_path(data.name) and data.name not in TEXTS:
        return data
    given = data.model_fields_set
    changes: dict[str, Any] = {key: None for key in ("n", "norm") if key not in given}
    if data.name in TEXTS:
        return data.model_copy(update=changes)
    path = own_path(data.name).absolute()
    if data.sha256 is None:
        changes["sha256"] = checksum(str(path))
    return data.model_copy(update={**changes, "name": str(path)})


def _task(config: RunConfig) -> str:
    """The task of a network that is not named."""
    data, loss = config.data, config.loss
    if is_text(data.name):
        return "language"
    if data.name in WITHOUT_CLASSES:
        return WITHOUT_CLASSES[data.name]
    if loss.name != "auto":
        return next(task for task, name in LOSSES.items() if name == loss.name)
    if is_path(data.name):  # numbers, unless classes are named
        return "classification" if isinstance(data.classes, list) and len(data.classes) > 2 else "regression"
    return "regression" if data.classes == "auto" or (data.classes is not None and len(data.classes) == 2) else "classification"


def _prepared(config: RunConfig, device: torch.device | None, allow_code: bool) -> RunProblem:
    kind = kind_of(config.model.name)  # before data are loaded: the cheap mistakes first
    device, dtype = device or _device(config.run.device), getattr(torch, config.run.dtype)
    d = config.data
    own: dict[str, Any] = {}
    named = [key for key in ("target", "columns", "standardize") if getattr(d, key) is not None]
    if is_path(d.name):
        _check_unchanged(d.name, d.sha256)
    if named and is_text(d.name):
        raise InvalidArgument(f"data.{named[0]} is for tables and arrays (.csv, .parquet, .npz); omit it for {d.name}, a text.")
    if is_path(d.name) and not is_text(d.name):
        columns = None if d.columns is None else tuple(d.columns)
        own = {"target": d.target, "columns": columns, "standardize": d.standardize, "classify": kind.task == "classification"}
    elif not is_path(d.name) and (named := [*named, *(["sha256"] if d.sha256 is not None else [])]):
        raise InvalidArgument(f"data.{named[0]} is for files (.csv, .parquet, .npz); omit it for data.name={d.name}.")
    _check_memory("data.n, data.n_test and data.features", _drawn(d))
    classes = None if d.classes is None else tuple(int(c) for c in d.classes)
    same = d.model_dump(include={"seed", "n_test", "paper", "grey", "size", "norm", "features", "noise", "words", "length"})
    givens = None if d.givens is None else tuple(d.givens)
    data = load(d.name, d.n, classes, flatten=d.flatten is True, givens=givens, dtype=dtype, **same, **own)
    X, y, y_test = data.X, data.y, data.y_test
    if kind.task == "classification" and _are_signs(y):
        y, y_test = (y > 0).long(), None if y_test is None else (y_test > 0).long()
    loss, outputs = _loss(config, y, y_test, kind.task)
    outputs = len(data.tokens) or outputs
    generator = torch.Generator().manual_seed(config.run.seed)
    _check_memory("model.width", config.model.width * max(config.model.width, X.shape[1]) * X.element_size())
    model = build(config.model, tuple(X.shape[1:]), outputs, generator=generator, dtype=dtype, allow_code=allow_code).to(device)
    test = None if data.X_test is None or y_test is None else _to(device, data.X_test, y_test)
    if not d.validation:
        return RunProblem(data, DataParts(_to(device, X, y), None, test), model, loss)
    count = round(d.validation * len(X))
    if not 0 < count < len(X):
        raise InvalidArgument(f"data.validation={d.validation:g} of {len(X)} samples leaves a part empty; choose another one.")
    order = torch.from_numpy(np.random.default_rng([d.seed, 1]).permutation(len(X)))
    kept, apart = order[count:].sort().values, order[:count].sort().values
    parts = DataParts(_to(device, X[kept], y[kept]), _to(device, X[apart], y[apart]), test)
    return RunProblem(data, parts, model, loss)


def _check_unchanged(name: str, expected: str | None) -> None:
    """Refuses a file that changed after the configuration was made."""
    found = checksum(name)
    if expected is not None and found != expected:
        raise InvalidArgument(
            f"{name} has changed since this configuration was made: its checksum begins with {found[:8]}, and "
            f"data.sha256 with {expected[:8]}. Put the file back, or start a new run with data.sha256=null."
        )


def _loss(config: RunConfig, y: Tensor, y_test: Tensor | None, task: str) -> tuple[AbstractLoss, int]:
    """The loss, and the number of classes (0 for numbers), if data and network fit."""
    if y.is_floating_point() and y.dim() == 4:
        y_classes, of_data, natural = 0, "images", "reconstruction"
    elif y.is_floating_point():
        y_classes, of_data, natural = 0, "two classes, -1 and +1" if _are_signs(y) else "numbers", "squared"
    else:
        natural, of_data = ("cross_entropy", "classes") if y.dim() == 1 else ("segmentation", "a class for every pixel")
        if is_text(config.data.name):
            natural, of_data = "next_token", "the next token at every position"
        ignore = _ignored(config)
        y_classes = max(int(part[part != ignore].max()) for part in (y, y_test) if part is not None) + 1
    name = config.loss.name
    if not name == natural == LOSSES[task]:
        fitting = ", ".join(network for network, kind in MODELS.items() if LOSSES[kind.task] == natural)
        two = natural == "cross_entropy" and task == "regression"
        raise InvalidArgument(
            f"model.name={config.model.name!r} is for {task} with the loss {LOSSES[task]!r}; the targets of {config.data.name} "
            f"are {of_data}, and loss.name is {name!r}. For these targets leave loss.name out and choose model.name from "
            f"{fitting}{', or two classes by data.classes=[0, 1]' if two else ''}."
        )
    if name == "squared":
        return Squared(signs=_are_signs(y)), 0
    if name == "cross_entropy":
        return CrossEntropy(), y_classes
    if name == "next_token":
        return NextToken(), y_classes
    if name == "reconstruction":
        return Reconstruction(), 0
    return Segmentation(y_classes, ignore_index=_ignored(config)), y_classes


def _are_signs(y: Tensor) -> bool:
    """Whether the targets are two classes, -1 and +1."""
    return y.is_floating_point() and not bool((y.abs() != 1).any())


def _ignored(config: RunConfig) -> int:
    chosen = config.loss.ignore_index
    return VOID.get(config.data.name, -100) if chosen is None else chosen


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("tensors there have no values")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:  # ValueError: text that is not UTF-8
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InvalidArgument(f"run.device={name!r} cannot be used: {reason.rstrip('.')}. Try run.device=cpu.") from None
    return device


def _drawn(data: DataSection) -> int:
    """Bytes of inputs that are drawn, and not read: twice, because they are scaled afterwards."""
    train = data.n or 100
    samples = train + (data.n_test or train)
    each = {"sphere": data.features, "moons": 2, "chains": 20 * (data.size or 100), "mazes": 4 * (data.size or 9) ** 2}
    each["deblurring_leaves"] = 6 * (data.size or 64) ** 2
    return 2 * 8 * samples * each.get(data.name, 0)


def _check_memory(keys: str, needed: int) -> None:
    """Refuses what cannot fit, before the system ends the process for it."""
    have = available_memory(torch.device("cpu"))
    if have is not None and needed > have:
        raise InvalidArgument(
            f"{keys} need at least {readable(needed)} of memory; {readable(have)} are available. Choose smaller ones."
        )


@contextmanager
def _within_memory(keys: str) -> Iterator[None]:
    """Turns an allocation that failed into a sentence.

    Args:
        keys: What to make smaller.
    """
    try:
        yield
    except WellposedError:
        raise
    except (MemoryError, RuntimeError, ValueError) as error:  # torch: RuntimeError; NumPy: ValueError for absurd sizes
        if not isinstance(error, MemoryError) and not re.search("alloc|too big|overflow|out of memory|maximum", str(error)):
            raise
        raise InvalidArgument(f"There is not enough memory for this configuration: make {keys} smaller.") from error


def _to(device: torch.device, X: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return X.to(device), y.to(device)
