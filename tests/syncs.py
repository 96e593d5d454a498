"""When files are synced and renamed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

import pytest


def synced(monkeypatch: pytest.MonkeyPatch, write: Callable[[], object]) -> list[str]:
    """The syncs and renames while `write` runs, in order: what a loss of power leaves depends on them."""
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace

    def counted_fsync(handle: Any) -> None:
        seen.append("fsync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "fsync file")
        fsync(handle)

    def counted_replace(*args: Any) -> None:
        seen.append("replace")
        replace(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", counted_fsync)
        patch.setattr(os, "replace", counted_replace)
        write()
    return seen
