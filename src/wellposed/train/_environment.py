"""What a run ran on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment"]

PACKAGES = ("wellposed", "torch", "numpy", "scipy", "scikit-learn", "safetensors", "pyarrow")


def environment(seed: int, threads: int | str) -> dict[str, Any]:
    """Versions, machine, threads, seed, command line and git state, as plain Python."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "platform": platform.platform(),
        "processors": os.cpu_count(),
        "cuda": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "threads": threads,
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "seed": seed,
        "command": sys.argv,
        "git": {"source": _git(Path(__file__).parent), "working_directory": _git(Path.cwd())},
    }


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it; None where there is no repository, or no git."""

    def ask(*words: str) -> str:
        answer = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "changed": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
