"""The commit that a folder is at, read from the files of git. Git itself is never run: it runs what a repository's own
configuration names (`core.fsmonitor`), and a run directory of unknown origin may hold such a repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from wellposed._io import open_plain

__all__ = ["git_head"]

#: Bytes that are read of a file; packed references of a large repository have some hundred kilobytes.
_LONGEST = 4 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REFERENCE = re.compile(r"refs(/[A-Za-z0-9_+@-][A-Za-z0-9_.+@-]*)+")


def git_head(folder: Path) -> str | None:
    """The commit of the repository that a folder is in; None without one, or if its files are not as expected."""
    try:
        repository = _repository(folder.absolute())
        if repository is None:
            return None
        head = _text(repository / "HEAD").strip()
        if head.startswith("ref: "):
            head = _commit_of(repository, head.removeprefix("ref: "))
    except (OSError, ValueError):  # ValueError: no text, or no path
        return None
    return head if _COMMIT.fullmatch(head) else None


def _repository(folder: Path) -> Path | None:
    """The folder with HEAD: `.git` here or above, or what a file of that name says (as in a worktree)."""
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_dir():
            return git
        if git.is_file():
            said = _text(git).strip()
            return place / said.removeprefix("gitdir: ") if said.startswith("gitdir: ") else None
    return None


def _commit_of(repository: Path, reference: str) -> str:
    """What a branch points to, as far as it is a plain one; else an empty text."""
    if not _REFERENCE.fullmatch(reference):
        return ""
    common = repository
    if (repository / "commondir").is_file():  # of a worktree
        common = repository / _text(repository / "commondir").strip()
    for place in (repository, common):
        if (place / reference).is_file():
            return _text(place / reference).strip()
    for line in _text(common / "packed-refs").splitlines():
        commit, _, name = line.partition(" ")
        if name == reference:
            return commit
    return ""


def _text(path: Path) -> str:
    """A regular file of an acceptable size; links are not followed, and pipes not waited for."""
    with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
        content = file.read(_LONGEST + 1)
    return content.decode("ascii") if len(content) <= _LONGEST else ""
