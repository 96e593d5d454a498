"""Which configurations go through the same numbers, and how a run may be continued with another length."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from wellposed.errors import InvalidArgument

if TYPE_CHECKING:
    from wellposed_lab.runs.config import Config

__all__ = ["extended", "fingerprints"]

#: What only decides how long a run is and what is kept of it.
FREE = {"keep", "checkpoint_every", "tensorboard", "stop_loss", "patience"}
#: Keys that earlier runs do not have; with these values they change nothing, so checkpoints of those runs stay usable.
ADDED: dict[str, dict[str, Any]] = {"data": dict.fromkeys(("target", "columns", "standardize", "sha256"))}


def fingerprints(config: Config) -> list[str]:
    """One for each length that the run had, the present one last; checkpoints of all of them fit.

    Only a cosine schedule depends on the length: under another one all lengths have the same fingerprint.
    """
    plain = config.model_dump()
    lengths = [*plain["run"].pop("extended"), plain["run"].pop("epochs")]
    for key in FREE:
        del plain["run"][key]
    if plain["run"]["threads"] == "auto":
        plain["run"]["threads"] = None  # as earlier runs have it
    for section, keys in ADDED.items():
        for key, value in keys.items():
            if plain[section].get(key) == value:
                del plain[section][key]
    if config.optimizer.schedule != "cosine":
        return [_hash(plain)]
    found = []
    for count in range(1, len(lengths) + 1):
        plain["run"]["epochs"] = lengths[count - 1]
        if count > 1:
            plain["run"]["extended"] = lengths[: count - 1]
        found.append(_hash(plain))
    return found


def extended(before: Config, after: Config) -> Config:
    """The configuration with which a run continues; under a cosine schedule it remembers the length that the run had.

    Args:
        before: Of the run.
        after: The same with changes.

    Raises:
        InvalidArgument: The numbers that are already there depend on what was changed.
    """
    old, new = before.run.epochs, after.run.epochs
    if before.optimizer.schedule == "cosine" and new != old:
        if new < old:
            raise InvalidArgument(
                f"run.epochs can be raised and not lowered under the cosine schedule; got {new} for a run of {old} epochs."
            )
        after = after.model_copy(update={"run": after.run.model_copy(update={"extended": [*before.run.extended, old]})})
    if before.fingerprint() not in fingerprints(after):
        raise InvalidArgument(
            "--resume continues with the same numbers, so --set may not change what they depend on (run.epochs may be raised)."
        )
    return after


def _hash(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
