"""The configuration of a training run: sections, a YAML file, and changes by `section.key=value`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed_lab.runs._fingerprint import fingerprints
from wellposed_lab.runs.config_yaml import parse, parse_value

__all__ = ["Config", "DataSection", "LossSection", "ModelSection", "OptimizerSection", "RunSection", "read", "resolve"]


#: The most of anything that is counted, and the largest seed: beyond them torch and NumPy overflow.
COUNT, SEED = 2**31 - 1, 2**63 - 1

#: Characters of a wrong value that are shown.
SHOWN = 200


class _Section(BaseModel):
    """Unknown keys are errors, and nothing is converted that could be a mistake (`true` is no number)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class DataSection(_Section):
    """What is learned; the keys are those of `wellposed.data.load`, with `validation` added."""

    name: str = Field(
        default="digits",
        description="sphere, moons, digits, mnist, fashion_mnist, cifar10, svhn, camvid, or a file: .csv, .parquet, .npz",
    )
    target: str | None = Field(default=None, description="column of a table to learn; target, y or label if null")
    columns: list[str] | None = Field(default=None, description="columns of a table to learn from; null for all others")
    standardize: bool | None = Field(
        default=None,
        description="files: inputs and numbers to learn get mean 0 and standard deviation 1; null does so for tables",
    )
    sha256: str | None = Field(default=None, description="of the file; a run fills it in, and refuses another file")
    n: int | None = Field(default=100, ge=1, le=COUNT, description="training samples; null for all, as for files if not said")
    n_test: int | None = Field(default=None, ge=1, le=COUNT, description="test samples; null for all")
    classes: list[int] | Literal["auto"] | None = Field(
        default="auto",
        description="which classes; null for all; auto is [0, 1] for networks with one output, and null for classifiers and "
        "for data without classes to choose from",
    )
    paper: str | None = Field(default=None, description="preprocessing of ling2022, gao2022 or gao2023")
    norm: Literal["unit", "sqrt_d"] | None = Field(
        default="sqrt_d", description="norm of every sample; null leaves it, as for files if not said"
    )
    grey: bool = Field(default=False, description="colours to luminance")
    size: int | None = Field(default=None, ge=1, le=COUNT, description="images resized to this height and width")
    flatten: bool | Literal["auto"] = Field(default="auto", description="rows, not images; auto asks the network")
    features: int = Field(default=50, ge=1, le=COUNT, description="dimension of sphere")
    noise: float = Field(default=0.1, ge=0, description="standard deviation of moons")
    validation: float = Field(default=0.0, ge=0, lt=1, description="part of the training samples kept apart for early stopping")
    seed: int = Field(default=0, ge=0, le=SEED, description="of every draw of data")

    @field_validator("classes", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        """3,8 as [3, 8], as `wellposed data show --classes` takes it."""
        listed = isinstance(value, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", value)
        return [int(part) for part in value.split(",")] if listed else value

    @field_validator("columns", mode="before")
    @classmethod
    def _names_with_commas(cls, value: Any) -> Any:
        """age,income as ["age", "income"]."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class ModelSection(_Section):
    """Which network. Keys after `width` belong to some networks only; null takes the network's default."""

    name: str = Field(
        default="auto",
        description="gaussian, skip, implicit_only, monotone, dense, ...: see `wellposed train --help`; auto is gaussian, "
        "dense for more than two classes, and segmenter for pixels",
    )
    width: int = Field(
        default=256, ge=1, le=COUNT, description="units of the equilibrium; for networks of images channels, 32 if not said"
    )
    weight_variance: float | None = Field(default=None, description="gaussian")
    gamma: float | None = Field(default=None, description="skip")
    gamma0: float | None = Field(default=None, description="implicit_only")
    init: str | None = Field(default=None, description="implicit_only")
    margin: float | None = Field(default=None, description="monotone, monotone_classifier, monotone_conv, segmenter")
    grid: int | None = Field(
        default=None, ge=1, le=COUNT, description="monotone_conv: regions per side that the read-out averages over"
    )
    bound: float | None = Field(default=None, description="dense: the recurrent matrix keeps a spectral norm of at most this")
    rtol: float | None = Field(default=None, gt=0, lt=1, description="tolerance of the equilibrium")
    max_steps: int | None = Field(default=None, ge=1, le=COUNT, description="evaluations that an equilibrium may take")
    on_failure: Literal["raise", "warn", "ignore"] = Field(default="warn", description="when an equilibrium is not found")


class OptimizerSection(_Section):
    """How parameters move."""

    name: Literal["sgd", "adam", "adamw"] = Field(default="adam", description="sgd, adam or adamw")
    lr: float = Field(default=5e-4, gt=0, description="step size at the start")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="sgd")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="adam, adamw")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="adam, adamw")
    weight_decay: float = Field(default=0.0, ge=0, description="added to the gradient; decoupled for adamw")
    clip: float | None = Field(default=None, gt=0, description="largest norm of the gradient of all parameters together")
    schedule: Literal["constant", "step", "cosine"] = Field(default="cosine", description="constant, step or cosine")
    warmup: int = Field(default=0, ge=0, le=COUNT, description="epochs over which the step size grows from 0")
    step_every: int = Field(default=30, ge=1, le=COUNT, description="step: epochs between falls")
    step_factor: float = Field(default=0.1, gt=0, le=1, description="step: what each fall multiplies with")


class LossSection(_Section):
    """What is minimised, a mean over samples (over pixels for segmentation)."""

    name: Literal["auto", "squared", "cross_entropy", "segmentation"] = Field(
        default="auto", description="auto follows the network"
    )
    ignore_index: int | None = Field(
        default=None, description="segmentation: label that does not count; null is void of camvid"
    )


class RunSection(_Section):
    """Everything else."""

    epochs: int = Field(default=20, ge=1, le=COUNT, description="passes through the training samples")
    batch_size: int | None = Field(default=25, ge=1, le=COUNT, description="of all processes together; null for all samples")
    seed: int = Field(default=0, ge=0, le=SEED, description="of initialization and of the order of samples")
    device: str = Field(default="cpu", description="cpu, cuda, cuda:1, ...")
    dtype: Literal["float32", "float64"] = Field(default="float64", description="of parameters and inputs")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default="auto",
        description="of torch; auto is 1 for small products and torch's number for large ones, and is remembered",
    )
    evaluate_every: int = Field(default=1, ge=1, le=COUNT, description="epochs between evaluations")
    certify_every: int = Field(default=5, ge=0, le=COUNT, description="epochs between certificates; 0 for none")
    theorem: str = Field(default="auto", description="of the certificates")
    patience: int | None = Field(
        default=None, ge=1, le=COUNT, description="epochs without a better validation loss before it stops"
    )
    stop_loss: float | None = Field(default=None, ge=0, description="stops at a training loss of at most this")
    checkpoint_every: int = Field(default=1, ge=1, le=COUNT, description="epochs between checkpoints")
    keep: int = Field(default=2, ge=1, le=COUNT, description="checkpoints that are kept")
    tensorboard: bool = Field(default=True, description="events for TensorBoard, if it is installed")
    extended: list[int] = Field(
        default=[], description="lengths in epochs before --resume raised run.epochs; up to each the cosine schedule is its own"
    )

    @field_validator("extended")
    @classmethod
    def _longer_each_time(cls, value: list[int], info: ValidationInfo) -> list[int]:
        lengths = [0, *value, info.data.get("epochs", math.inf)]
        if any(later <= earlier for earlier, later in zip(lengths, lengths[1:], strict=False)):
            raise ValueError(f"the lengths must rise, below epochs={lengths[-1]}; --resume writes them")
        return value

    @field_validator("threads", mode="before")
    @classmethod
    def _null_is_auto(cls, value: Any) -> Any:
        """As configurations printed by earlier versions have it."""
        return "auto" if value is None else value


class Config(_Section):
    """All sections."""

    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    optimizer: OptimizerSection = OptimizerSection()
    loss: LossSection = LossSection()
    run: RunSection = RunSection()

    def to_yaml(self) -> str:
        """Every key with its value, as a YAML file."""
        import yaml

        text: str = yaml.safe_dump(self.model_dump(), sort_keys=False)
        return text

    def fingerprint(self) -> str:
        """Equal for configurations whose runs go through the same numbers, as far as both go.

        What only decides how long a run is and what is kept of it does not count; the length does under a cosine schedule.
        """
        return fingerprints(self)[-1]

    def earlier_fingerprints(self) -> list[str]:
        """Of the shorter runs that this one continues: their checkpoints are checkpoints of this one."""
        return fingerprints(self)[:-1]


def read(path: Path, changes: Iterable[str] = (), *, within: Path | None = None) -> Config:
    """The configuration in a YAML file, with changes such as "optimizer.lr=1e-3".

    Args:
        path: The file.
        changes: As in `resolve`.
        within: The run directory that it belongs to, in which links are refused; None follows links.
    """
    plain = parse(path, within=within)
    if plain is not None and not isinstance(plain, dict):
        raise InvalidArgument(f"{path} must hold sections such as 'data:' and 'model:'; got {type(plain).__name__}.")
    return resolve(plain or {}, changes, where=str(path))


def resolve(plain: Mapping[str, Any], changes: Iterable[str] = (), *, where: str = "the configuration") -> Config:
    """A checked configuration from nested dictionaries and changes.

    >>> resolve({"model": {"width": 64}}, ["optimizer.lr=1e-3"]).optimizer.lr
    0.001

    Args:
        plain: Sections with keys; what is missing takes its default.
        changes: Each "section.key=value", the value as in YAML.
        where: Named in messages.
    """
    merged: dict[str, Any] = {section: dict(keys) if isinstance(keys, dict) else keys for section, keys in plain.items()}
    for change in changes:
        key, equals, text = change.partition("=")
        section, dot, name = key.strip().partition(".")
        if not equals or not dot:
            raise InvalidArgument(f"--set needs section.key=value, e.g. optimizer.lr=1e-3; got {change!r}.{_completed(change)}")
        keys = merged.setdefault(section, {})
        if not isinstance(keys, dict):
            raise InvalidArgument(f"'{section}' of {where} must be a section with keys; got {keys!r}.")
        keys[name] = parse_value(text)
    try:
        return Config.model_validate(_numbers(merged))
    except ValidationError as error:
        raise InvalidArgument(_sentence(error, where)) from None


def _numbers(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text (it wants 1.0e-3); people mean the number."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    # a digit has one place in the pattern, so that text that is almost a number takes no longer
    if isinstance(value, str) and len(value) <= SHOWN and re.fullmatch(r"[+-]?(\d+(\.\d*)?|\.\d+)[eE][+-]?\d+", value):
        return float(value)
    return value


def _sentence(error: ValidationError, where: str) -> str:
    """What is wrong, and the nearest key that is known."""
    problems = error.errors()
    first = problems[0]
    place = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        known = list(Config.model_fields)
        if len(place) > 1:
            known = list(type(getattr(Config(), place[0])).model_fields)
        within = f"'{place[0]}' of {where}" if len(place) > 1 else where
        hint = did_you_mean(place[-1], known) or _whole(place[-1])
        text = f"Unknown key {'.'.join(place)!r}: {within} has {', '.join(known)}.{hint}"
    else:
        seen = repr(first["input"])
        seen = seen if len(seen) <= SHOWN else f"{seen[:SHOWN]}..."
        text = f"{'.'.join(place[:2])} of {where} is {seen}: {first['msg'][0].lower()}{first['msg'][1:]}."
    more = len({problem["loc"][:2] for problem in problems}) - 1  # a value of several allowed kinds is wrong once for each
    return text + (f" ({more} more key{'s are' if more > 1 else ' is'} wrong.)" if more else "")


def _whole(leaf: str) -> str:
    """A hint for a key that was given without, or in the wrong, section."""
    near = next((key for key in _defaults() if key.rpartition(".")[2] == leaf.rpartition(".")[2]), None)
    return f" Did you mean {near!r}?" if near else ""


def _completed(change: str) -> str:
    """A hint for a change that is not section.key=value: with its section, and with a value if it has none."""
    key, equals, text = (part.strip() for part in change.partition("="))
    known = _defaults()
    if not equals and key in known:
        default = json.dumps(known[key]).strip('"')
        return f" It has no value: write for example {f'{key}={default}'!r}, which is its default."
    near = [name for name in known if name.rpartition(".")[2] == key]
    if near:
        return " Did you mean " + " or ".join(repr(f"{name}={text}" if equals else name) for name in near) + "?"
    return did_you_mean(key, known)


def _defaults() -> dict[str, Any]:
    """Every section.key with its default."""
    sections = Config().model_dump()
    return {f"{section}.{name}": value for section, keys in sections.items() for name, value in keys.items()}
