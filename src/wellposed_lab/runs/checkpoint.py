"""Checkpoints on the disk, as safetensors and JSON (no pickle); nothing in them is trusted."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from wellposed._io import remove, set_aside, write_whole
from wellposed._memory import available_memory
from wellposed._reading import files_in, read_bytes, read_text
from wellposed.errors import CheckpointRefused, MissingPackage, how_to_install
from wellposed_lab.runs.training_state import Checkpoint, WrongRecord, need

__all__ = ["find", "load", "newest", "prune", "save", "tidy"]

FORMAT, VERSION = "wellposed-checkpoint", 2
#: The end of the name of a checkpoint that an interruption made.
INTERRUPTED = "-interrupted"
_NAME = re.compile(rf"step-[0-9]{{9,19}}({INTERRUPTED})?")
#: Largest sizes in bytes of a record, which has about 10,000, and of tensors, if the memory suffices.
RECORD, TENSORS = 1 << 24, 1 << 40
#: Words of the Mersenne twister, the generator of Python, NumPy and torch.
_WORDS = 624
#: Bytes of torch's state: seed, words left, whether it is seeded, the next word, the words; then a normal number.
_TORCH_BYTES = 5056


def save(checkpoint: Checkpoint, folder: Path, name: str | None = None, *, interrupted: bool = False) -> Path:
    """Writes `name`.safetensors and then `name`.json, each atomically; a checkpoint has both.

    Args:
        checkpoint: From `capture`.
        folder: Where.
        name: By default the step.
        interrupted: Whether an interruption made it; its name says so.
    """
    if name is None:
        name = f"step-{checkpoint.record['progress']['step']:09d}" + INTERRUPTED * interrupted
    content = _safetensors().save(checkpoint.tensors)
    path = folder / f"{name}.json"
    write_whole(folder / f"{name}.safetensors", content)
    record = {"format": FORMAT, "version": VERSION, **checkpoint.record}
    record["tensors"] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record["sha256"] = _checksum(record)
    write_whole(path, json.dumps(record, indent=1).encode())
    return path


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint, or raises `CheckpointRefused` with the reason.

    Links are not followed, and what agrees with its checksums is still checked field by field.
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
        raise CheckpointRefused(f"{path} is not a checkpoint of wellposed.")
    if record.get("version") != VERSION:
        raise CheckpointRefused(f"{path} has version {record.get('version')!r:.40}; this wellposed reads version {VERSION}.")
    if record.pop("sha256", None) != _checksum(record):
        raise CheckpointRefused(f"{path} was changed or damaged after it was written: its checksum differs.")
    tensors = _load_tensors(path.with_suffix(".safetensors"), record)
    try:
        _check_record(record, tensors)
    except WrongRecord as error:
        raise CheckpointRefused(f"{path} is not a checkpoint of wellposed: {error}.") from None
    return Checkpoint(tensors, record)


def _load_tensors(binary: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors beside a record, which must have the size and checksum stated there."""
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


def newest(folder: Path, fingerprints: Collection[str], *, log: Callable[[str], None]) -> Checkpoint | None:
    """The newest sound checkpoint of this configuration; None if the folder has no checkpoints.

    A run repeats the same numbers from any of its checkpoints, so a refused one costs time only.

    Args:
        folder: Of the checkpoints.
        fingerprints: Of the configuration.
        log: Called with the reason for every refused checkpoint.
    """
    refused = []
    for path in find(folder):
        try:
            checkpoint = load(path)
            if checkpoint.record["fingerprint"] not in fingerprints:
                raise CheckpointRefused(f"{path} was made with another configuration.")
        except CheckpointRefused as error:
            refused.append(str(error))
            log(f"A checkpoint is refused: {error}")
        else:
            return checkpoint
    if refused:
        raise CheckpointRefused(f"No checkpoint is usable. {' '.join(refused)} Start a new run, or put a good copy back.")
    return None


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints; the record first, so that no half looks whole.

    One that an interruption made does not count, and is kept until a newer one exists: what a run
    keeps at its end does not depend on where it was interrupted.
    """
    found = find(folder)
    regular = [path for path in found if not _is_interrupted(path)][:keep]
    kept = {path.stem for path in (*regular, *found[:1])}
    for path in found:
        if path.stem not in kept:
            remove(path)
    for path in folder.glob("step-*.safetensors"):
        # also those without a record: a process was killed here, or between the two writes of a checkpoint
        oldest = found[:1] if _is_interrupted(path) else regular[-1:]
        if _NAME.fullmatch(path.stem) and path.stem not in kept and oldest and _step(path) <= _step(oldest[0]):
            remove(path)


def tidy(folder: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Before a run continues from a checkpoint: renames newer ones (refused), removes old ones."""
    for path in find(folder):
        if _step(path) > checkpoint.record["progress"]["step"]:
            for part in (path, path.with_suffix(".safetensors")):
                if part.exists():
                    set_aside(part)
    prune(folder, keep)


def _step(path: Path) -> int:
    return int(path.stem.removeprefix("step-").removesuffix(INTERRUPTED))


def _is_interrupted(path: Path) -> bool:
    return path.stem.endswith(INTERRUPTED)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingPackage(f"Checkpoints need safetensors; install it with: {how_to_install('runs')}.") from None
    return safetensors.torch


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Word = Annotated[int, Field(ge=0, lt=2**32)]
_Index = Annotated[str, Field(pattern="^[0-9]{1,8}$")]


class _StrictRecord(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class _ProgressRecord(_StrictRecord):
    epoch: _Count
    step: _Count
    batch: _Count
    totals: Annotated[list[float], Field(max_length=99)]
    best: float | None
    best_epoch: _Count | None
    stop: Literal["patience", "stop_loss", "not_finite"] | None


class _OptimizerRecord(_StrictRecord):
    groups: list[dict[str, Any]]
    scalars: dict[_Index, dict[str, float]]


class _NumpyRecord(_StrictRecord):
    name: Literal["MT19937"]
    position: Annotated[int, Field(ge=0, le=_WORDS)]  # NumPy takes another one, and reads memory there
    has_gauss: Literal[0, 1]
    gauss: float


class _PythonRecord(_StrictRecord):
    version: Literal[3]
    words: Annotated[list[_Word], Field(min_length=_WORDS + 1, max_length=_WORDS + 1)]
    gauss: float | None

    @field_validator("words")
    @classmethod
    def _position_is_a_word(cls, words: list[int]) -> list[int]:
        if words[-1] > _WORDS:
            raise ValueError("position")
        return words


class _RandomRecord(_StrictRecord):
    numpy: _NumpyRecord
    python: _PythonRecord


class _TunedRecord(_StrictRecord):
    value: float
    sizes: list[float]
    rest: _Count
    patience: _Count


class _Record(BaseModel):
    model_config = ConfigDict(strict=True)

    fingerprint: str
    progress: _ProgressRecord
    optimizer: _OptimizerRecord
    random: _RandomRecord
    habits: dict[str, dict[str, _TunedRecord]]


def _check_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises `WrongRecord` unless `capture` may have made this record (JSON) and these tensors."""
    try:
        _Record.model_validate(record)
    except ValidationError as error:
        place = [str(part) for part in error.errors()[0]["loc"] if not isinstance(part, int)]
        need(False, ".".join(place[: 1 if place[:1] == ["habits"] else 3]))
    order = tensors.get("order")
    need(order is not None and order.dim() == 1 and order.dtype == torch.int64, "order")
    need(order is not None and torch.equal(order.sort().values, torch.arange(len(order))), "order")
    for name in tensors:
        need(not name.startswith("optimizer") or re.fullmatch("optimizer/[0-9]{1,8}/[^/]*", name), name)
    words = tensors.get("random/numpy")
    need(words is not None and words.shape == (_WORDS,) and words.dtype == torch.int64, "random/numpy")
    need(words is not None and bool(((words >= 0) & (words < 2**32)).all()), "random/numpy")
    state = tensors.get("random/torch")
    need(state is not None and state.dim() == 1 and state.dtype == torch.uint8, "random/torch")
    if state is not None and len(state) == _TORCH_BYTES:  # torch takes a position outside its words, and reads memory there
        head = bytes(state[:24].tolist())
        left, following = int.from_bytes(head[8:12], "little"), int.from_bytes(head[16:24], "little")
        need((left, following) == (1, 0) or (left > 0 and left + following == _WORDS + 1), "random/torch")
