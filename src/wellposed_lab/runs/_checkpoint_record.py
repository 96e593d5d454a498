"""The record of a checkpoint, checked field by field: checksums show damage, not who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["WrongRecord", "check_progress", "check_record", "is_number", "need"]

#: Why a run may be over.
_STOPS = ("patience", "stop_loss", "not_finite")
#: Words of the Mersenne twister, the generator of Python, NumPy and torch.
_WORDS = 624
#: The state of torch's: seed, words that are left, whether it is seeded, the next word, the words; then a normal number.
_TORCH_BYTES = 5056


class WrongRecord(Exception):
    """What is wrong with a record, in words."""


def check_record(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises `WrongRecord` unless this is what `capture` makes of some run.

    Args:
        record: From JSON.
        tensors: From safetensors.
    """
    need(isinstance(record.get("fingerprint"), str), "fingerprint")
    _check_progress(record.get("progress"))
    order = tensors.get("order")
    need(order is not None and order.dim() == 1 and order.dtype == torch.int64, "order")
    need(order is not None and torch.equal(order.sort().values, torch.arange(len(order))), "order")
    optimizer: Any = record.get("optimizer")
    need(isinstance(optimizer, dict), "optimizer")
    groups, scalars = optimizer.get("groups"), optimizer.get("scalars")
    need(isinstance(groups, list) and all(isinstance(group, dict) for group in groups), "optimizer.groups")
    need(isinstance(scalars, dict) and all(map(_is_index, scalars)), "optimizer.scalars")
    need(
        all(isinstance(slots, dict) and all(map(is_number, slots.values())) for slots in scalars.values()), "optimizer.scalars"
    )
    for name in tensors:
        parts = name.split("/")
        need(parts[0] != "optimizer" or (len(parts) == 3 and _is_index(parts[1])), name)
    _check_random(record.get("random"), tensors)
    habits: Any = record.get("habits")
    need(isinstance(habits, dict) and all(isinstance(known, dict) for known in habits.values()), "habits")
    for known in habits.values():
        for habit in known.values():
            _check_habit(habit)


def check_progress(record: Mapping[str, Any], order: Tensor, samples: int, batches: int, totals: int) -> None:
    """Raises `WrongRecord` unless the point of a checkpoint is one that training on these samples comes to.

    Args:
        record: With `progress`.
        order: (n,) the samples of an epoch that has begun, else empty.
        samples, batches: Of an epoch.
        totals: Sums that are kept within an epoch.
    """
    progress = record["progress"]
    begun = progress["batch"] > 0
    need(progress["batch"] < batches, "progress.batch")
    need(len(order) == (samples if begun else 0), "order")
    need(len(progress["totals"]) == (totals if begun else 0), "progress.totals")


def _check_progress(progress: Any) -> None:
    names = {"epoch", "step", "batch", "totals", "best", "best_epoch", "stop"}
    need(isinstance(progress, dict) and set(progress) == names, "progress")
    for name in ("epoch", "step", "batch"):
        need(_is_count(progress[name]), f"progress.{name}")
    totals = progress["totals"]
    need(isinstance(totals, list) and len(totals) < 100 and all(map(is_number, totals)), "progress.totals")
    need(progress["best"] is None or is_number(progress["best"]), "progress.best")
    need(progress["best_epoch"] is None or _is_count(progress["best_epoch"]), "progress.best_epoch")
    need(progress["stop"] is None or progress["stop"] in _STOPS, "progress.stop")


def _check_random(random: Any, tensors: Mapping[str, Tensor]) -> None:
    """NumPy and torch take a position outside their words, and read memory there."""
    need(
        isinstance(random, dict) and isinstance(random.get("numpy"), dict) and isinstance(random.get("python"), dict), "random"
    )
    numpy, python = random["numpy"], random["python"]
    need(numpy.get("name") == "MT19937" and numpy.get("has_gauss") in (0, 1) and is_number(numpy.get("gauss")), "random.numpy")
    need(_is_count(numpy.get("position")) and numpy["position"] <= _WORDS, "random.numpy.position")
    words = tensors.get("random/numpy")
    need(words is not None and words.shape == (_WORDS,) and words.dtype == torch.int64, "random/numpy")
    need(words is not None and bool(((words >= 0) & (words < 2**32)).all()), "random/numpy")
    state = python.get("words")
    need(isinstance(state, list) and len(state) == _WORDS + 1 and all(map(_is_count, state)), "random.python.words")
    need(max(state) < 2**32 and state[-1] <= _WORDS, "random.python.words")
    need(python.get("version") == 3 and (python.get("gauss") is None or is_number(python["gauss"])), "random.python")
    torch_state = tensors.get("random/torch")
    need(torch_state is not None and torch_state.dim() == 1 and torch_state.dtype == torch.uint8, "random/torch")
    if torch_state is not None and len(torch_state) == _TORCH_BYTES:
        head = bytes(torch_state[:24].tolist())
        left, following = int.from_bytes(head[8:12], "little"), int.from_bytes(head[16:24], "little")
        need((left, following) == (1, 0) or (left > 0 and left + following == _WORDS + 1), "random/torch")


def _check_habit(habit: Any) -> None:
    need(isinstance(habit, dict) and set(habit) == {"value", "sizes", "rest", "patience"}, "habits")
    need(isinstance(habit["sizes"], list) and all(map(is_number, habit["sizes"])), "habits")
    need(is_number(habit["value"]) and _is_count(habit["rest"]) and _is_count(habit["patience"]), "habits")


def need(holds: Any, name: str) -> None:
    """Raises `WrongRecord` about a part of a record unless something holds."""
    if not holds:
        raise WrongRecord(f"{name!r:.60} is missing, or is not what training writes there")


def _is_index(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 9


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """A number that a float can hold; JSON of Python has NaN and infinities."""
    return type(value) is float or (type(value) is int and value.bit_length() < 1024)
