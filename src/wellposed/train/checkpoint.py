"""Checkpoints: all that training needs to go on with the same numbers, as safetensors and JSON (no pickle)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._files import write_whole
from wellposed.errors import CheckpointRefused, MissingPackage, how_to_install
from wellposed.nn.operator import Habit, Memory
from wellposed.train._random_state import capture_random_state, restore_random_state

__all__ = ["Checkpoint", "Progress", "capture", "find", "load", "newest", "prune", "restore", "save", "tidy"]

FORMAT, VERSION = "wellposed-checkpoint", 2
#: Ends the name of a checkpoint that an interruption made, out of turn.
INTERRUPTED = "-interrupted"


@dataclass
class Progress:
    """Where a training run is.

    Attributes:
        epoch: Epochs that are complete.
        step: Steps of the optimizer.
        batch: Batches of the present epoch that are done.
        order: (n,) the samples of the present epoch, in the order in which they come; empty between epochs.
        totals: Sums over the batches of the present epoch.
        best: Least validation loss so far. best_epoch: When that was.
        stop: Why it is over, or None.
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
    """What `save` writes: tensors by name, and a record that JSON can hold."""

    tensors: dict[str, Tensor]
    record: dict[str, Any]

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return int(self.record["progress"]["epoch"])


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress, *, fingerprint: str) -> Checkpoint:
    """The present state. The tensors are copies: training may go on.

    Args:
        model, optimizer, progress: The run.
        fingerprint: Of the configuration; `restore` asks for the same one.
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
    random_tensors, random_record = capture_random_state()
    tensors |= {f"random/{name}": tensor for name, tensor in random_tensors.items()}
    where = asdict(progress)
    del where["order"]
    record = {
        "fingerprint": fingerprint,
        "progress": where,
        "optimizer": {"groups": state["param_groups"], "scalars": scalars},
        "random": random_record,
        # step sizes that solvers found and begin with at the next parameters
        "habits": {
            name: {key: asdict(habit) for key, habit in memory.habits.items()}
            for name, memory in _memories(model).items()
            if memory.habits
        },
    }
    return Checkpoint(tensors, record)


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Progress:
    """Puts model, optimizer and random generators where they were.

    Args:
        checkpoint: From `load`.
        model: Of the same shapes.
        optimizer: Of the same kind on the same parameters; None restores the model alone.
    """
    own = model.state_dict()
    saved = {name.removeprefix("model/"): t for name, t in checkpoint.tensors.items() if name.startswith("model/")}
    if {name: tuple(t.shape) for name, t in own.items()} != {name: tuple(t.shape) for name, t in saved.items()}:
        odd = sorted(n for n in own.keys() | saved.keys() if n not in own or n not in saved or own[n].shape != saved[n].shape)
        raise CheckpointRefused(f"The checkpoint is of another model: {', '.join(odd)} differ in name or shape.")
    model.load_state_dict(saved)
    where = checkpoint.record["progress"]
    progress = Progress(**{**where, "order": checkpoint.tensors["order"]})
    if optimizer is None:
        return progress
    slots: dict[int, dict[str, Any]] = {int(i): dict(part) for i, part in checkpoint.record["optimizer"]["scalars"].items()}
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("optimizer/"):
            _, index, slot = name.split("/")
            slots.setdefault(int(index), {})[slot] = tensor
    optimizer.load_state_dict({"state": slots, "param_groups": checkpoint.record["optimizer"]["groups"]})
    restore_random_state(checkpoint.tensors, checkpoint.record["random"])
    for name, memory in _memories(model).items():
        known = checkpoint.record["habits"].get(name, {})
        memory.habits = {key: Habit(**{**plain, "sizes": tuple(plain["sizes"])}) for key, plain in known.items()}
    return progress


def forget_habits(model: nn.Module) -> None:
    """Makes the next solve that of a new process: what solvers found before must not be lost with one."""
    for module in model.modules():
        if isinstance(getattr(module, "_memory", None), Memory):
            setattr(module, "_memory", Memory())  # noqa: B010 (a plain assignment is typed as a parameter)


def save(checkpoint: Checkpoint, folder: Path, name: str | None = None, *, interrupted: bool = False) -> Path:
    """Writes `name`.safetensors and then `name`.json, each whole or not at all; only with both is there a checkpoint.

    Args:
        checkpoint: From `capture`.
        folder: Where.
        name: By default made of the step.
        interrupted: Whether it is out of turn; the name says so.
    """
    name = _name(checkpoint) + INTERRUPTED * interrupted if name is None else name
    content = _safetensors().save(checkpoint.tensors)
    path = folder / f"{name}.json"
    write_whole(folder / f"{name}.safetensors", content)
    record = {"format": FORMAT, "version": VERSION, **checkpoint.record}
    record["tensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record["sha256"] = _checksum(record)
    write_whole(path, json.dumps(record, indent=1).encode())
    return path


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint, or raises `CheckpointRefused` that says what is wrong with it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointRefused(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointRefused(f"{path} is no checkpoint of wellposed.")
    if record.get("version") != VERSION:
        raise CheckpointRefused(f"{path} has version {record.get('version')!r}; this wellposed reads version {VERSION}.")
    if record.pop("sha256", None) != _checksum(record):
        raise CheckpointRefused(f"{path} was changed or damaged after it was written: its checksum differs.")
    binary = path.with_suffix(".safetensors")
    try:
        content = binary.read_bytes()
    except OSError as error:
        raise CheckpointRefused(f"{binary} cannot be read ({error.strerror}).") from error
    expected = record["tensors"]
    if len(content) != expected["bytes"]:
        raise CheckpointRefused(f"{binary} is truncated: {len(content)} of {expected['bytes']} bytes are there.")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise CheckpointRefused(f"{binary} is damaged: its checksum is not the one in {path.name}.")
    return Checkpoint(_safetensors().load(content), record)


def find(folder: Path) -> list[Path]:
    """The records of the checkpoints in a folder, the newest first."""
    return sorted(folder.glob("step-*.json"), reverse=True)


def newest(folder: Path, *, fingerprint: str, say: Callable[[str], None], earlier: Collection[str] = ()) -> Checkpoint | None:
    """The newest checkpoint that is whole and of this configuration; None if there is none at all.

    A run repeats the same numbers from any of its checkpoints, so one that is refused costs time and nothing else.

    Args:
        folder: Of the checkpoints.
        fingerprint: Of the configuration.
        say: Told of every checkpoint that is refused, and why.
        earlier: Fingerprints of the shorter runs that this one continues.
    """
    refused = []
    for path in find(folder):
        try:
            checkpoint = load(path)
            if checkpoint.record["fingerprint"] not in (fingerprint, *earlier):
                raise CheckpointRefused(f"{path} was made with another configuration.")
        except CheckpointRefused as error:
            refused.append(str(error))
            say(f"A checkpoint is refused: {error}")
        else:
            return checkpoint
    if refused:
        raise CheckpointRefused(f"No checkpoint is usable. {' '.join(refused)} Start a new run, or put a good copy back.")
    return None


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest checkpoints; the record first, so that no half of one is left that looks whole.

    One that an interruption made does not count, and is kept until a newer one is there: what is kept of a run at its end does
    not depend on where it was interrupted.
    """
    found = find(folder)
    regular = [path.stem for path in found if not path.stem.endswith(INTERRUPTED)][:keep]
    kept = {*regular, *(path.stem for path in found[:1])}
    for path in found:
        if path.stem not in kept:
            path.unlink(missing_ok=True)
    for path in folder.glob("step-*.safetensors"):
        # also those whose record is gone already: a process was killed here, or between the two writes of a checkpoint
        limit = max(kept, default="") if path.stem.endswith(INTERRUPTED) else min(regular, default="")
        if path.stem not in kept and path.stem.removesuffix(INTERRUPTED) <= limit:
            path.unlink(missing_ok=True)


def tidy(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Before training goes on from a checkpoint: newer ones, which were refused, are set aside, and too old ones removed."""
    for path in find(folder):
        if path.stem.removesuffix(INTERRUPTED) > _name(checkpoint):
            for part in (path, path.with_suffix(".safetensors")):
                if part.exists():
                    part.replace(part.with_name(f"{part.name}.refused"))
    prune(folder, keep)


def _name(checkpoint: Checkpoint) -> str:
    return f"step-{checkpoint.record['progress']['step']:09d}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _memories(model: nn.Module) -> dict[str, Memory]:
    found = {name: getattr(module, "_memory", None) for name, module in model.named_modules()}
    return {name: memory for name, memory in found.items() if isinstance(memory, Memory)}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingPackage(f"Checkpoints need safetensors; install it with: {how_to_install('runs')}.") from None
    return safetensors.torch
