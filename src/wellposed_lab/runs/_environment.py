"""What a run ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from wellposed_lab.runs._distributed import world_size
from wellposed_lab.runs._git_head import git_head

__all__ = ["environment"]

PACKAGES = ("wellposed", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyarrow")


def environment(seed: int, threads: int | str) -> dict[str, Any]:
    """Versions, machine, threads, seed, command line and git commits, as plain Python; no other program is run."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "platform": _platform(),
        "processors": os.cpu_count(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "threads": threads,
        "processes": world_size(),
        "seed": seed,
        "command": sys.argv,
        "git": {"source": _commit(Path(__file__).parent), "working_directory": _commit(Path())},
    }


def _commit(folder: Path) -> dict[str, str] | None:
    commit = git_head(folder)
    return None if commit is None else {"commit": commit}


def _platform() -> str:
    """System, release, machine and C library; `platform.platform` runs `uname`, or `cmd` on Windows."""
    if not hasattr(os, "uname"):
        return sysconfig.get_platform()
    name = os.uname()
    return "-".join(part for part in (name.sysname, name.release, name.machine, "".join(platform.libc_ver())) if part)
