"""What to say where a run is asked for and there is none."""

from __future__ import annotations

import difflib
from pathlib import Path

__all__ = ["no_run"]


def no_run(folder: Path) -> str:
    """Why there is no run, and what to do in this case."""
    if folder.is_file():
        beside = f" Give the folder that it is in: {folder.parent}." if (folder.parent / "config.yaml").is_file() else ""
        return f"{folder} is a file; a run is a directory with a config.yaml.{beside}"
    if not folder.is_dir():
        start = f"Start a run there with: wellposed train --out {folder}"
        return f"{folder} does not exist, so there is no run.{_near(folder.parent, folder.name) or f' {start}.'}"
    inside = sorted(path.parent for path in folder.glob("*/config.yaml"))
    if inside:
        return f"{folder} is no run, but holds {len(inside)} of them: give one, such as {inside[-1]}."
    if any(folder.iterdir()):
        return f"{folder} is no run: it holds other files and no config.yaml. Give the directory of a run."
    return f"{folder} is no run: it is empty. Start one there with: wellposed train --out {folder}."


def _near(parent: Path, name: str) -> str:
    """` Did you mean 'runs/first'?` if a run of nearly this name lies beside."""
    names = [path.parent.name for path in parent.glob("*/config.yaml")] if parent.is_dir() else []
    near = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {str(parent / near[0])!r}?" if near else ""
