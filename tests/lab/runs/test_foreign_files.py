"""A run directory of unknown origin: nothing in it leads out of it, and what happens to it meanwhile is noticed."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path

import pytest

from wellposed import _io as _files
from wellposed._io import Temporary, append_line, sweep, write_whole
from wellposed.certify import Certificate, Verdict
from wellposed.errors import RunError, RunLocked
from wellposed_lab.runs.config import RunConfig
from wellposed_lab.runs.records import read_metrics
from wellposed_lab.runs.run import Run

FILES = ["lock", "log.txt", "metrics.jsonl", "times.jsonl", "environment.json", "summary.json", "report.html"]
IN_FOLDERS = ["certificates/epoch-00001.json", "checkpoints/step-000000001.json", "figures/landscape.png", "tensorboard/events"]
FOLDERS = ["certificates", "checkpoints", "figures", "tensorboard"]


def finished(folder: Path) -> Path:
    """A run with rows and certificates of two epochs."""
    with Run.create(folder, RunConfig()) as run:
        for epoch in (0, 1):
            run.append({"epoch": epoch, "loss": 1 / (3 + epoch)}, 0.25)
            run.add_certificate(epoch, Certificate("radius", Verdict.UNDECIDED))
    return folder


def listing(folder: Path) -> dict[str, bytes | None]:
    """Every name under a folder, with the content of files; links are not followed."""
    names = sorted(folder.rglob("*"))
    return {str(name): name.read_bytes() if name.is_file() and not name.is_symlink() else None for name in names}


def replace_by(path: Path, make: object, *args: object) -> None:
    """Puts what `make` makes of (*args, path) in the place of a file or folder."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    make(*args, path)  # type: ignore[operator]


@pytest.mark.parametrize("name", [*FILES, *IN_FOLDERS, *FOLDERS])
def test_links_are_refused_and_nothing_is_touched(name: str, tmp_path: Path) -> None:
    run, victim = finished(tmp_path / "run"), tmp_path / "victim"
    if name in FOLDERS:
        shutil.copytree(run / "certificates", victim)
        (victim / ".old.123.tmp").write_text("mine")
    else:
        victim.write_text("mine")
    replace_by(run / name, os.symlink, victim)
    before = listing(tmp_path)
    with pytest.raises(RunError, match=f"{name} is a link, and nothing in a run is followed"):
        Run.open(run, RunConfig())
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", ["lock", "log.txt"])
def test_a_second_name_of_a_file_is_a_link_too(name: str, tmp_path: Path) -> None:
    run, victim = finished(tmp_path / "run"), tmp_path / "victim"
    victim.write_text("mine")
    replace_by(run / name, os.link, victim)
    with pytest.raises(RunError, match=f"{name} is a link"):
        Run.open(run, RunConfig())
    assert victim.read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize("name", ["lock", "log.txt", "metrics.jsonl", "checkpoints/x"])
def test_pipes_and_sockets_are_refused_without_waiting(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished(tmp_path / "run")
    replace_by(run / name, os.mkfifo)
    with pytest.raises(RunError, match=f"{name} is a pipe, a socket or a device"):
        Run.open(run, RunConfig())
    (run / name).unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        monkeypatch.chdir((run / name).parent)  # names of sockets are short
        listening.bind((run / name).name)
        with pytest.raises(RunError, match=f"{name} is a pipe, a socket or a device"):
            Run.open(run, RunConfig())


def test_a_new_run_does_not_begin_beside_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(RunError, match="lock is a link"):
        Run.create(tmp_path / "run", RunConfig())
    assert (tmp_path / "victim").read_text() == "mine"


def test_the_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    finished(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with Run.open(tmp_path / "link", RunConfig()) as run:
        run.append({"epoch": 2}, 0.1)
        with pytest.raises(RunLocked):
            Run.open(tmp_path / "run", RunConfig())
    assert len(read_metrics(str(tmp_path / "run"))) == 3


@pytest.mark.parametrize("portable", [False, True])
def test_a_link_that_comes_later_is_not_followed(portable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if portable:  # as on a system without O_NOFOLLOW
        monkeypatch.setattr(_files, "_NOFOLLOW", 0)
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(RunError, match="it is a link to another file"):
        append_line(link, "more")
    write_whole(link, b"new")
    assert victim.read_text() == "mine" and link.read_text() == "new" and not link.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_that_comes_later_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="it is a pipe, a socket or a device"):
        append_line(tmp_path / "pipe", "more")


def test_only_what_the_dead_were_writing_is_swept(tmp_path: Path) -> None:
    alive = Temporary(tmp_path / "alive")
    (tmp_path / ".dead.123.tmp").write_text("x")
    (tmp_path / ".dead.123-0123abcd.tmp").write_text("x")
    (tmp_path / ".other.tmp").write_text("not ours")
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([alive.path.name, ".other.tmp"])
    alive.commit()
    sweep(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".other.tmp", "alive"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "times.jsonl"])
@pytest.mark.parametrize("what", ["deleted", "replaced", "emptied", "linked"])
def test_rows_are_put_back(name: str, what: str, tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    path = folder / name
    expected = path.read_text()
    with Run.open(folder, RunConfig()) as run:
        run.check()
        if what == "deleted":
            path.unlink()
        elif what == "emptied":
            os.truncate(path, 0)
        elif what == "replaced":
            write_whole(path, b"another\n")
        else:
            (tmp_path / "victim").write_text("mine")
            replace_by(path, os.symlink, tmp_path / "victim")
        run.append({"epoch": 2, "loss": 0.5}, 0.25)
        run.check()
    assert path.read_text().startswith(expected) and len(path.read_text().splitlines()) == 3
    log = (folder / "log.txt").read_text()
    if what == "deleted":
        assert f"{name} was deleted while" in log
    else:
        aside = folder / f"{name}.changed-1"
        assert f"{name} was changed while" in log and aside.name in log
        assert {"emptied": "", "replaced": "another\n", "linked": "mine"}[what] == aside.read_text()


def test_a_file_that_was_only_touched_stays(tmp_path: Path) -> None:
    with Run.open(finished(tmp_path / "run"), RunConfig()) as run:
        run.check()
        os.utime(run.folder / "metrics.jsonl", (1, 1))
        run.append({"epoch": 2}, 0.25)
        assert len(read_metrics(run.folder)) == 3 and not list(run.folder.glob("*.changed*"))


@pytest.mark.skipif(os.name == "nt", reason="folders cannot be locked there")
def test_who_deletes_the_lock_does_not_get_in(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()) as run:
        (run.folder / "lock").unlink()
        with pytest.raises(RunLocked, match="in use by another process"):
            Run.open(run.folder, RunConfig())
        run.append({"epoch": 0}, 0.1)
        assert "The lock file was deleted" in (run.folder / "log.txt").read_text()
        assert json.loads((run.folder / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunLocked, match=f"in use by process {os.getpid()}"):
            Run.open(run.folder, RunConfig())
    with Run.open(tmp_path / "run", RunConfig()):
        pass


@pytest.mark.parametrize("what", ["lock", "directory"])
def test_a_holder_that_is_not_alone_stops(what: str, tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", RunConfig()) as run:
        run.append({"epoch": 0}, 0.1)
        if what == "lock":
            write_whole(run.folder / "lock", b"")
        else:
            shutil.copytree(run.folder, tmp_path / "copy")
            os.rename(run.folder, tmp_path / "moved")
            os.rename(tmp_path / "copy", run.folder)
        with pytest.raises(RunError, match="Another process may be using .* continue with --resume"):
            run.append({"epoch": 1}, 0.1)
        assert len(read_metrics(run.folder)) == 1


def test_results_without_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run")
    before = {name: content for name, content in listing(folder).items() if name.endswith(("jsonl", "json"))}
    with Run.open(folder, RunConfig()) as run:
        with pytest.raises(RunError, match="results up to epoch 1 and no checkpoint to continue from; nothing was changed"):
            run.rewind(-1)
    after = listing(folder)
    assert {name: after[name] for name in before if not name.endswith("environment.json")}.items() <= before.items()
