"""Checkpoints: all that training needs to go on with the same numbers, as safetensors and JSON (no pickle)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._io import write_whole
from wellposed._reading import files_in, read_bytes, read_text
from wellposed.errors import CheckpointRefused, MissingPackage, how_to_install
from wellposed.kernel._memory import available_memory
from wellposed.nn.maps.operator import OperatorCache, TunedValue
from wellposed_lab.runs._checkpoint_record import WrongRecord, check_optimizer, check_progress, check_record
from wellposed_lab.runs._random_state import capture_random_state, restore_random_state

__all__ = ["Checkpoint", "Progress", "capture", "check_point", "find", "load", "newest", "prune", "restore", "save", "tidy"]

FORMAT, VERSION = "wellposed-checkpoint", 2
#: Ends the name of a checkpoint that an interruption made, out of turn.
INTERRUPTED = "-interrupted"
_NAME = re.compile(rf"step-[0-9]{{9,19}}({INTERRUPTED})?")
#: Bytes of a record, which has about 10,000, and of tensors, as far as there is memory for them.
RECORD, TENSORS = 1 << 24, 1 << 40


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
            name: {key: asdict(habit) for key, habit in memory.tuned.items()}
            for name, memory in _memories(model).items()
            if memory.tuned
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
    if _kinds(own) != _kinds(saved):
        odd = sorted(n for n in own.keys() | saved.keys() if _kinds(own).get(n) != _kinds(saved).get(n))
        more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise CheckpointRefused(
            f"The checkpoint is of another model: {', '.join(odd[:5])}{more} differ in name, shape or dtype."
        )
    where = checkpoint.record["progress"]
    progress = Progress(**{**where, "order": checkpoint.tensors["order"]})
    if optimizer is None:
        model.load_state_dict(saved)
        return progress
    slots: dict[int, dict[str, Any]] = {int(i): dict(part) for i, part in checkpoint.record["optimizer"]["scalars"].items()}
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("optimizer/"):
            _, index, slot = name.split("/")
            slots.setdefault(int(index), {})[slot] = tensor
    groups = checkpoint.record["optimizer"]["groups"]
    try:
        check_optimizer(optimizer, groups, slots)
        model.load_state_dict(saved)
        optimizer.load_state_dict({"state": slots, "param_groups": groups})
        restore_random_state(checkpoint.tensors, checkpoint.record["random"])
    except (WrongRecord, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointRefused(f"The checkpoint does not fit this run: {' '.join(str(error).split())}.") from error
    for name, memory in _memories(model).items():
        known = checkpoint.record["habits"].get(name, {})
        memory.tuned = {key: TunedValue(**{**plain, "sizes": tuple(plain["sizes"])}) for key, plain in known.items()}
    return progress


def check_point(checkpoint: Checkpoint, *, samples: int, batches: int, totals: int) -> None:
    """Raises `CheckpointRefused` unless the checkpoint is at a point that training on these samples comes to.

    Args:
        checkpoint: From `load`.
        samples, batches: Of an epoch.
        totals: Sums that are kept within an epoch.
    """
    try:
        check_progress(checkpoint.record, checkpoint.tensors["order"], samples, batches, totals)
    except WrongRecord as error:
        raise CheckpointRefused(f"The checkpoint does not fit this run: {error}.") from None


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def forget_habits(model: nn.Module) -> None:
    """Makes the next solve that of a new process: what solvers found before must not be lost with one."""
    for module in model.modules():
        if isinstance(getattr(module, "_cache", None), OperatorCache):
            setattr(module, "_cache", OperatorCache())  # noqa: B010 (a plain assignment is typed as a parameter)


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
    """Reads a checkpoint, or raises `CheckpointRefused` that says what is wrong with it.

    Nothing of it is trusted: links are not followed, and what agrees with its checksums is still checked field by field.
    """
    folder = path.parent
    text = read_text(path, limit=RECORD, error=CheckpointRefused, within=folder)
    if text is None:
        raise CheckpointRefused(f"{path} cannot be read (No such file or directory).")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointRefused(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CheckpointRefused(f"{path} is no checkpoint of wellposed.")
    if record.get("version") != VERSION:
        raise CheckpointRefused(f"{path} has version {record.get('version')!r:.40}; this wellposed reads version {VERSION}.")
    if record.pop("sha256", None) != _checksum(record):
        raise CheckpointRefused(f"{path} was changed or damaged after it was written: its checksum differs.")
    tensors = _load_tensors(path.with_suffix(".safetensors"), record)
    try:
        check_record(record, tensors)
    except WrongRecord as error:
        raise CheckpointRefused(f"{path} is no checkpoint of wellposed: {error}.") from None
    return Checkpoint(tensors, record)


def _load_tensors(binary: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors beside a record, which must have the size and checksum that it states."""
    expected = record.get("tensors")
    if not isinstance(expected, dict) or {type(expected.get("bytes")), type(expected.get("sha256"))} != {int, str}:
        raise CheckpointRefused(f"{binary.with_suffix('.json')} does not state the size and the checksum of its tensors.")
    limit = available_memory(torch.device("cpu")) or TENSORS
    content = read_bytes(binary, limit=min(limit, TENSORS), error=CheckpointRefused, within=binary.parent)
    if content is None:
        raise CheckpointRefused(f"{binary} cannot be read (No such file or directory).")
    if len(content) != expected["bytes"]:
        raise CheckpointRefused(f"{binary} is truncated: {len(content)} of {expected['bytes']} bytes are there.")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise CheckpointRefused(f"{binary} is damaged: its checksum is not the one in {binary.with_suffix('.json').name}.")
    try:
        tensors: dict[str, Tensor] = _safetensors().load(content)
    except MissingPackage:
        raise
    except Exception as error:  # SafetensorError and more: whatever it is, these are not tensors
        raise CheckpointRefused(f"{binary} does not hold tensors ({' '.join(str(error).split())}).") from error
    return tensors


def find(folder: Path) -> list[Path]:
    """The records of the checkpoints in a folder, the newest first."""
    found = files_in(folder, "step-", ".json", error=CheckpointRefused, within=folder.parent)
    own = (path for path in found if _NAME.fullmatch(path.stem))
    return sorted(own, key=lambda path: (_step(path), not _is_interrupted(path)), reverse=True)


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
    regular = [path for path in found if not _is_interrupted(path)][:keep]
    kept = {path.stem for path in (*regular, *found[:1])}
    for path in found:
        if path.stem not in kept:
            path.unlink(missing_ok=True)
    for path in folder.glob("step-*.safetensors"):
        # also those whose record is gone already: a process was killed here, or between the two writes of a checkpoint
        oldest = found[:1] if _is_interrupted(path) else regular[-1:]
        if _NAME.fullmatch(path.stem) and path.stem not in kept and oldest and _step(path) <= _step(oldest[0]):
            path.unlink(missing_ok=True)


def tidy(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Before training goes on from a checkpoint: newer ones, which were refused, are set aside, and too old ones removed."""
    for path in find(folder):
        if _step(path) > checkpoint.record["progress"]["step"]:
            for part in (path, path.with_suffix(".safetensors")):
                if part.exists():
                    part.replace(part.with_name(f"{part.name}.refused"))
    prune(folder, keep)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-").removesuffix(INTERRUPTED))


def _is_interrupted(path: Path) -> bool:
    return path.stem.endswith(INTERRUPTED)


def _name(checkpoint: Checkpoint) -> str:
    return f"step-{checkpoint.record['progress']['step']:09d}"


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _memories(model: nn.Module) -> dict[str, OperatorCache]:
    found = {name: getattr(module, "_cache", None) for name, module in model.named_modules()}
    return {name: memory for name, memory in found.items() if isinstance(memory, OperatorCache)}


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingPackage(f"Checkpoints need safetensors; install it with: {how_to_install('runs')}.") from None
    return safetensors.torch
