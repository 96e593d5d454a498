"""The state of a training run as tensors and JSON: captured, checked field by field, restored."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.errors import CheckpointRefused
from wellposed.nn.maps.operator import OperatorCache, TunedValue

__all__ = [
    "Checkpoint",
    "Progress",
    "WrongRecord",
    "capture",
    "check_reachable",
    "forget_tuned_values",
    "need",
    "restore",
    "seed_everything",
]


@dataclass
class Progress:
    """Where a training run is.

    Attributes:
        epoch: Complete epochs.
        step: Steps of the optimizer.
        batch: Complete batches of the present epoch.
        order: (n,) the samples of the present epoch in their order; empty between epochs.
        totals: Sums over the batches of the present epoch.
        best: Least validation loss so far. best_epoch: Its epoch.
        stop: Why the run is over, or None.
    """

    epoch: int = 0
    step: int = 0
    batch: int = 0
    order: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    totals: list[float] = field(default_factory=list)
    best: float | None = None
    best_epoch: int | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run: tensors by name, and a record that JSON can hold."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]

    @property
    def epoch(self) -> int:
        """Complete epochs."""
        return int(self.record["progress"]["epoch"])


def seed_everything(seed: int) -> None:
    """Seeds the global generators of torch, NumPy and Python."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, *, fingerprint: str) -> Checkpoint:
    """The present state, as copies.

    Args:
        model, optimizer, progress: The run.
        fingerprint: Of the configuration; `newest` asks for the same one.
    """
    tensors = {f"model/{name}": _copy(tensor) for name, tensor in model.state_dict().items()}
    state = optimizer.state_dict()
    scalars: dict[str, dict[str, Any]] = {}
    for index, slots in state["state"].items():
        for name, value in slots.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{index}/{name}"] = _copy(value)
            else:
                scalars.setdefault(str(index), {})[name] = value
    tensors["order"] = _copy(progress.order)
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    tensors["random/torch"] = torch.get_rng_state()
    tensors["random/numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    if torch.cuda.is_available():
        tensors |= {f"random/cuda{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    where = asdict(progress)
    del where["order"]
    record = {
        "fingerprint": fingerprint,
        "progress": where,
        "optimizer": {"groups": state["param_groups"], "scalars": scalars},
        "random": {
            "numpy": {"name": str(name), "position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)},
            "python": {"version": version, "words": list(words), "gauss": python_gauss},
        },
        # step sizes that solvers found, with which they begin at the next parameters
        "habits": {
            name: {key: asdict(habit) for key, habit in memory.tuned.items()}
            for name, memory in _memories(model).items()
            if memory.tuned
        },
    }
    return Checkpoint(tensors, record)


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Restores model, optimizer and random generators.

    Args:
        checkpoint: From `load`.
        model: Of the same shapes.
        optimizer: Of the same kind on the same parameters; None restores the model alone.
    """
    tensors, record = checkpoint.tensors, checkpoint.record
    own = model.state_dict()
    saved = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    if _kinds(own) != _kinds(saved):
        odd = sorted(n for n in own.keys() | saved.keys() if _kinds(own).get(n) != _kinds(saved).get(n))
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise CheckpointRefused(
            f"The checkpoint is of another model: {', '.join(odd[:5])}{more} differ in name, shape or dtype."
        )
    progress = Progress(**{**record["progress"], "order": tensors["order"]})
    if optimizer is None:
        model.load_state_dict(saved)
        return progress
    slots: dict[int, dict[str, Any]] = {int(i): dict(part) for i, part in record["optimizer"]["scalars"].items()}
    for name, tensor in tensors.items():
        if name.startswith("optimizer/"):
            _, index, slot = name.split("/")
            slots.setdefault(int(index), {})[slot] = tensor
    groups = record["optimizer"]["groups"]
    try:
        _check_optimizer(optimizer, groups, slots, progress.step)
        model.load_state_dict(saved)
        optimizer.load_state_dict({"state": slots, "param_groups": groups})
        _restore_random_state(tensors, record["random"])
    except (WrongRecord, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointRefused(f"The checkpoint does not fit this run: {' '.join(str(error).split())}.") from error
    for name, memory in _memories(model).items():
        known = record["habits"].get(name, {})
        memory.tuned = {key: TunedValue(**{**plain, "sizes": tuple(plain["sizes"])}) for key, plain in known.items()}
    return progress


def _restore_random_state(tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["random/torch"])
    keys, numpy, python = tensors["random/numpy"].numpy().astype(np.uint32), record["numpy"], record["python"]
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
    random.setstate((python["version"], tuple(python["words"]), python["gauss"]))
    for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if f"random/cuda{i}" in tensors:
            torch.cuda.set_rng_state(tensors[f"random/cuda{i}"], i)


def forget_tuned_values(model: nn.Module) -> None:
    """Makes the next solve equal to that of a new process, such as one that resumes the run."""
    for module in model.modules():
        if isinstance(getattr(module, "_cache", None), OperatorCache):
            setattr(module, "_cache", OperatorCache())  # noqa: B010 (a plain assignment is typed as a parameter)


def _memories(model: nn.Module) -> dict[str, OperatorCache]:
    found = {name: getattr(module, "_cache", None) for name, module in model.named_modules()}
    return {name: memory for name, memory in found.items() if isinstance(memory, OperatorCache)}


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class WrongRecord(Exception):
    """The mistake in a record, in words."""


def check_reachable(checkpoint: Checkpoint, *, samples: int, batches: int, totals: int) -> None:
    """Raises `CheckpointRefused` unless training on these samples reaches the checkpoint.

    Args:
        checkpoint: From `load`.
        samples, batches: Of an epoch.
        totals: The number of sums within an epoch.
    """
    progress, order = checkpoint.record["progress"], checkpoint.tensors["order"]
    begun = progress["batch"] > 0
    try:
        need(progress["batch"] < batches, "progress.batch")
        need(len(order) == (samples if begun else 0), "order")
        need(len(progress["totals"]) == (totals if begun else 0), "progress.totals")
    except WrongRecord as error:
        raise CheckpointRefused(f"The checkpoint does not fit this run: {error}.") from None


def _check_optimizer(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], slots: dict[int, dict[str, Any]], steps: int
) -> None:
    """Raises `WrongRecord` unless options and values by parameter are those of this optimizer.

    A parameter that never had a gradient has no values; all others have those that one step on a
    small parameter makes. Of the options only the step size changes along a run.

    Args:
        optimizer: The one that is to be restored.
        groups: Its options, from the record.
        slots: Its numbers and tensors by parameter.
        steps: The number of steps taken.
    """
    own = optimizer.state_dict()["param_groups"]
    need(len(groups) == len(own), "optimizer.groups")
    for group, mine in zip(groups, own, strict=True):
        need(set(group) == set(mine) and group["params"] == mine["params"], "optimizer.groups")
        for name, value in mine.items():
            new = group[name]
            good = _is_number(new) and 0 <= new < math.inf if name == "lr" else _equals(new, value)
            need(good, f"optimizer.groups.{name}")
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in slots.items():
        need(index < len(parameters), f"optimizer/{index}")
        parameter, group = parameters[index]
        expected = _slots(optimizer, group, parameter)
        for name in sorted(values.keys() | expected.keys()):
            good = name in values and name in expected and _fits(values[name], expected[name], parameter)
            need(good and _is_in_range(name, values[name]), f"optimizer/{index}/{name}")
    stateless = all(not _slots(optimizer, group, parameter) for parameter, group in parameters)
    need(slots or steps == 0 or stateless, "optimizer")


def _slots(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """What one step of such an optimizer keeps about a parameter of shape (2,), by name."""
    small = torch.zeros(2, dtype=parameter.dtype, requires_grad=True)
    small.grad = torch.zeros_like(small)
    twin = type(optimizer)([{**group, "params": [small]}])  # type: ignore[call-arg]  # the abstract class wants defaults, its kinds have them
    twin.step()
    return dict(twin.state[small])


def _fits(value: Any, expected: Any, parameter: Tensor) -> bool:
    """Whether `value` can be of the parameter, as `expected` is of a small one."""
    if not isinstance(expected, Tensor):
        return _is_number(value)
    shape = parameter.shape if expected.dim() else expected.shape
    return isinstance(value, Tensor) and value.shape == shape and value.is_floating_point()


def _is_in_range(name: str, value: Any) -> bool:
    if name == "step":
        count = float(value)
        return math.isfinite(count) and count >= 0 and count == int(count)
    return name != "exp_avg_sq" or not bool((value < 0).any())


def _equals(value: Any, own: Any) -> bool:
    """Whether an option is the optimizer's own; JSON makes lists of tuples."""
    if isinstance(own, (tuple, list)):
        return isinstance(value, (tuple, list)) and len(value) == len(own) and all(map(_equals, value, own))
    if isinstance(own, float):
        return _is_number(value) and value == own
    return type(value) is type(own) and value == own


def _is_number(value: Any) -> bool:
    """A number that a float can hold; JSON of Python has NaN and infinities."""
    return type(value) is float or (type(value) is int and value.bit_length() < 1024)


def need(holds: Any, name: str) -> None:
    """Raises `WrongRecord` about the entry `name` unless `holds`."""
    if not holds:
        raise WrongRecord(f"{name!r:.60} is missing, or is not what training writes there")
