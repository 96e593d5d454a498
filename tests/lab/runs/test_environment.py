"""What a run ran on, without running anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from wellposed_lab.runs.processes import environment, git_head

HEAD = "0123456789abcdef0123456789abcdef01234567"


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *author, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_no_program_of_the_working_directory_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`core.fsmonitor` is a command that `git status` runs."""
    if shutil.which("git") is not None:
        git(tmp_path, "init", "-q")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "first")
        git(tmp_path, "config", "core.fsmonitor", f"{sys.executable} -c \"open('{tmp_path / 'harm'}', 'w')\" #")
    monkeypatch.chdir(tmp_path)

    def run(*args: object, **options: object) -> None:
        raise AssertionError(f"{args} is run")

    monkeypatch.setattr(subprocess, "Popen", run)
    found = environment(0, 1)["git"]["working_directory"]
    assert not (tmp_path / "harm").exists()
    if shutil.which("git") is not None:
        monkeypatch.undo()
        assert found == {"commit": git(tmp_path, "rev-parse", "HEAD")}


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_git(tmp_path: Path) -> None:
    folder, tree = tmp_path / "here", tmp_path / "tree"
    (folder / "deep").mkdir(parents=True)
    git(folder, "init", "-q")
    assert git_head(folder) is None  # no commit yet
    for _ in range(2):
        git(folder, "commit", "-q", "--allow-empty", "-m", "more")
        assert git_head(folder / "deep") == git(folder, "rev-parse", "HEAD")
    git(folder, "worktree", "add", "-q", "-b", "feature/new", str(tree), "HEAD~1")
    assert git_head(tree) == git(tree, "rev-parse", "HEAD") != git_head(folder)
    git(folder, "pack-refs", "--all")
    assert git_head(tree) == git(tree, "rev-parse", "HEAD") and git_head(folder) == git(folder, "rev-parse", "HEAD")
    git(folder, "checkout", "-q", "--detach", "HEAD~1")
    assert git_head(folder) == git(folder, "rev-parse", "HEAD")


def hostile(git: Path, kind: str) -> None:
    """A repository that is not one."""
    git.mkdir()
    head, secret = git / "HEAD", git.parent / "secret"
    secret.write_text(HEAD)
    if kind == "file":
        git.rmdir()
        git.write_text("gitdir: \0")
    elif kind == "pipe":
        os.mkfifo(head)
    elif kind == "endless":
        head.symlink_to("/dev/zero")
    elif kind == "huge":
        head.write_text(HEAD)
        os.truncate(head, 10 << 30)  # sparse
    elif kind == "link":
        head.symlink_to(secret)
    elif kind == "outside":
        head.write_text("ref: refs/../../secret")
    elif kind == "absolute":
        head.write_text(f"ref: {secret}")
    elif kind == "text":
        head.write_bytes(b"\xff" * 40)
    elif kind == "folder":
        head.mkdir()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("kind", ["file", "pipe", "endless", "huge", "link", "outside", "absolute", "text", "folder", "empty"])
@pytest.mark.timeout(20)
def test_a_repository_that_is_none_is_left_out(kind: str, tmp_path: Path) -> None:
    hostile(tmp_path / ".git", kind)
    assert git_head(tmp_path) is None
