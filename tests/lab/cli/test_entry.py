"""The entry point: a light `--version`, `python -m`, and a wheel that contains everything it needs."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import wellposed as wp
from wellposed_lab import cli

ROOT = Path(__file__).parents[3]
ENTRY = "import sys; sys.argv = ['wellposed', '--version']; from wellposed_lab.cli import main; main()"


def python(*words: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, env=os.environ | (environment or {}), timeout=300
    )


def seconds(code: str, cache: Path) -> float:
    """The least CPU time of three processes, with compiled modules."""
    resource = pytest.importorskip("resource")

    def used() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = python("-c", code, environment={"PYTHONPYCACHEPREFIX": str(cache), "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    used()
    return min(used() for _ in range(3))


def test_the_version_does_not_import_torch() -> None:
    done = python("-c", f"{ENTRY}; assert 'torch' not in sys.modules and 'wellposed' not in sys.modules")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wp.__version__


def test_alone_it_shows_a_guide_whose_commands_exist() -> None:
    code = ENTRY.replace(", '--version'", "")
    done = python("-c", f"{code}; assert 'torch' not in sys.modules")
    assert done.returncode == 0 and done.stdout == cli.GUIDE, done.stderr
    from wellposed_lab.cli.commands import app

    known = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    named = set(re.findall(r"^  wellposed (\w+)", cli.GUIDE, re.MULTILINE))
    assert {"doctor", "train", "certify"} <= named <= known
    assert all(len(line) <= 100 for line in cli.GUIDE.splitlines())


@pytest.mark.slow
def test_the_version_costs_no_more_than_importing_torch(tmp_path: Path) -> None:
    assert seconds(ENTRY, tmp_path) <= seconds("import torch", tmp_path)


@pytest.mark.parametrize("package", ["wellposed", "wellposed_lab"])
def test_packages_run_as_modules(package: str) -> None:
    done = python("-m", package, "--version")
    assert (done.returncode, done.stdout.strip()) == (0, wp.__version__), done.stderr


def test_a_missing_package_of_the_command_line_is_one_sentence() -> None:
    done = python("-c", f"import sys; sys.modules['yaml'] = None; {ENTRY.replace('--version', 'data')}")
    assert done.returncode == 2 and "The command line needs yaml; install it with: pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling, which builds the wheel, is not installed")
def test_the_wheel_contains_every_file_of_both_packages(tmp_path: Path) -> None:
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (scripts,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    source = [path for path in (ROOT / "src").rglob("*") if path.is_file() and path.suffix not in (".pyc", ".pyo")]
    assert {path.relative_to(ROOT / "src").as_posix() for path in source} <= names
    report = {f"wellposed_lab/report/{name}" for name in ("page.css", "page.js", "page.html", "parts.html")}
    assert report | {"wellposed/py.typed", "wellposed_lab/py.typed", "wellposed_lab/runs/__init__.py"} <= names
    assert "wellposed = wellposed_lab.cli:main" in scripts


def test_an_interruption_while_modules_are_imported_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> None:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "wellposed_lab.cli._app", Interrupted())
    monkeypatch.setattr(sys, "argv", ["wellposed", "train"])
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130 and capsys.readouterr().err == "Interrupted before anything was done.\n"
