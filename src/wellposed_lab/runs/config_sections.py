"""The sections of a configuration with their keys, and which configurations are equivalent."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from wellposed.errors import InvalidArgument

__all__ = ["DataSection", "LossSection", "ModelSection", "OptimizerSection", "RunConfig", "RunSection", "extended"]

#: The largest count, and the largest seed: beyond them torch and NumPy overflow.
COUNT, SEED = 2**31 - 1, 2**63 - 1
#: The longest text, in characters: no path and no name is longer, and a message that quotes one stays readable.
LONGEST_TEXT = 1000
#: Keys that decide only how long a run is and what is kept of it.
FREE = {"devices", "strategy", "keep", "checkpoint_every", "tensorboard", "stop_loss", "patience"}
#: Keys that earlier runs do not have. With these values they change nothing, so checkpoints of those runs stay usable.
ADDED: dict[str, dict[str, Any]] = {
    "data": {**dict.fromkeys(("target", "columns", "standardize", "sha256", "givens", "words")), "length": 48},
    "model": dict.fromkeys(("class", "arguments", "heads", "gradient_steps")),
    "loss": {"penalty": 0.0, "residual": None},
    "run": {"precision": "full", "accumulate": 1},
}


class _Section(BaseModel):
    """Unknown keys are errors, and no value is converted (`true` is not a number)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, str_max_length=LONGEST_TEXT)

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """By the names of the file: `class` is not a name of Python."""
        return super().model_dump(**{"by_alias": True, **options})


class DataSection(_Section):
    """What is learned; the keys are those of `wellposed.data.load`, with `validation` added."""

    name: str = Field(
        default="digits",
        description="sphere, moons, digits, chains, sudoku, mazes, deblurring_leaves, deblurring, mnist, fashion_mnist, "
        "cifar10, svhn, camvid, natural64, cbsd68, wikitext2, or a file: .csv, .parquet, .npz, .txt",
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
    size: int | None = Field(
        default=None, ge=1, le=COUNT, description="images resized to this height and width; nodes of chains, side of mazes"
    )
    flatten: bool | Literal["auto"] = Field(default="auto", description="rows, not images; auto asks the network")
    features: int = Field(default=50, ge=1, le=COUNT, description="dimension of sphere")
    noise: float = Field(default=0.1, ge=0, description="standard deviation of moons and chains, and of images to restore")
    givens: list[int] | None = Field(default=None, description="sudoku: numbers of given cells; null is 6 to 10")
    words: int | None = Field(
        default=None, ge=2, le=COUNT, description="texts: size of the vocabulary of words; null for characters"
    )
    length: int = Field(default=48, ge=1, le=COUNT, description="texts: tokens of a window")
    validation: float = Field(default=0.0, ge=0, lt=1, description="part of the training samples kept apart for early stopping")
    seed: int = Field(default=0, ge=0, le=SEED, description="of every draw of data")

    @field_validator("classes", mode="before")
    @classmethod
    def _with_commas(cls, value: Any) -> Any:
        """3,8 as [3, 8], as `wellposed data show --classes` takes it."""
        if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)+", value):
            return [int(part) for part in value.split(",")]
        names = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
        if any(isinstance(name, str) and not name.strip().isdigit() and name != "auto" for name in names):
            raise ValueError("classes are given by number; labels that are words are numbered from 0 in sorted order")
        return value

    @field_validator("columns", mode="before")
    @classmethod
    def _names_with_commas(cls, value: Any) -> Any:
        """age,income as ["age", "income"]."""
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


class ModelSection(_Section):
    """Which network. Keys after `width` belong to some networks only; null is their default."""

    name: str = Field(
        default="auto",
        description="gaussian, skip, implicit_only, monotone, dense, ...: see `wellposed train --help`; auto is gaussian, "
        "dense for more than two classes, segmenter for pixels, and deblurring for images to restore",
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
    bound: float | None = Field(
        default=None, description="dense, node_classifier, deblurring: a Lipschitz constant of at most this"
    )
    heads: int | None = Field(default=None, ge=1, le=COUNT, description="transformer: 4 if null")
    gradient_steps: int | None = Field(
        default=None, ge=1, le=COUNT, description="transformer: recorded steps of an inexact gradient; null is exact"
    )
    rtol: float | None = Field(default=None, gt=0, lt=1, description="tolerance of the equilibrium")
    max_steps: int | None = Field(default=None, ge=1, le=COUNT, description="evaluations that an equilibrium may take")
    on_failure: Literal["raise", "warn", "ignore"] = Field(default="warn", description="when an equilibrium is not found")
    class_: str | None = Field(
        default=None,
        alias="class",
        description="a module of your own by its import path, my_package.MyCell, in place of name; its code is run",
    )
    arguments: dict[str, Any] | None = Field(default=None, description="class: keywords of its constructor")


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

    name: Literal["auto", "squared", "cross_entropy", "segmentation", "reconstruction", "next_token"] = Field(
        default="auto", description="auto follows the network"
    )
    penalty: float = Field(
        default=0.0, ge=0, description="weight of the Jacobian penalty of equilibria in training; not part of reported losses"
    )
    residual: float | None = Field(
        default=None, ge=0, description="weight of the residual after few steps (residual, multiscale): 10 if null; 0 solves"
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
    devices: int = Field(
        default=1, ge=1, le=1024, description="processes on this machine, each with a device; torchrun has its own number"
    )
    strategy: Literal["ddp", "fsdp"] = Field(
        default="ddp",
        description="of several processes: whole copies, or FSDP2, which spreads gradients and the optimizer's state",
    )
    precision: Literal["full", "bf16-mixed"] = Field(
        default="full", description="of training steps; bf16-mixed multiplies in bfloat16 around the equilibria, for float32"
    )
    accumulate: int = Field(
        default=1, ge=1, le=COUNT, description="pieces of a batch, one after the other, whose gradients are added: less memory"
    )
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
        """Earlier versions wrote null."""
        return "auto" if value is None else value


class RunConfig(_Section):
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
        """Equal for configurations whose runs have the same numbers, as far as both go.

        `FREE` keys do not count, nor does the length, except under a cosine schedule.
        """
        return self.fingerprints()[-1]

    def fingerprints(self) -> list[str]:
        """Those of the shorter runs that this one continues, and its own, which is the last.

        Checkpoints of all of them are usable. Only under a cosine schedule there are several.
        """
        plain = self.model_dump()
        lengths = [*plain["run"].pop("extended"), plain["run"].pop("epochs")]
        for key in FREE:
            del plain["run"][key]
        if plain["run"]["threads"] == "auto":
            plain["run"]["threads"] = None  # as in earlier runs
        for section, keys in ADDED.items():
            for key, value in keys.items():
                if plain[section].get(key) == value:
                    del plain[section][key]
        if self.optimizer.schedule != "cosine":
            return [_hash(plain)]
        found = []
        for index, length in enumerate(lengths):
            plain["run"]["epochs"] = length
            if index:
                plain["run"]["extended"] = lengths[:index]
            found.append(_hash(plain))
        return found


def extended(before: RunConfig, after: RunConfig) -> RunConfig:
    """The configuration of a continued run; under a cosine schedule it records the old length.

    Args:
        before: Of the run.
        after: The same with changes.

    Raises:
        InvalidArgument: The existing numbers depend on what was changed.
    """
    old, new = before.run.epochs, after.run.epochs
    if before.optimizer.schedule == "cosine" and new != old:
        if new < old:
            raise InvalidArgument(
                f"run.epochs can be raised and not lowered under the cosine schedule; got {new} for a run of {old} epochs."
            )
        after = after.model_copy(update={"run": after.run.model_copy(update={"extended": [*before.run.extended, old]})})
    if before.fingerprint() not in after.fingerprints():
        raise InvalidArgument(
            "--resume continues with the same numbers, so --set may not change what they depend on (run.epochs may be raised)."
        )
    return after


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
