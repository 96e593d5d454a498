"""CONTRIBUTING.md names only files that exist, and the habits that it describes are set up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
#: In backticks, with a folder or an ending: `src/wellposed/references.bib`, `CHANGELOG.md`; or the first column of the tree.
PATHS = sorted(
    {
        *re.findall(r"`((?:[\w.-]+/)+[\w.-]+|[A-Z]+\.md|\.pre-commit-config\.yaml)`", GUIDE),
        *re.findall(r"^((?:src|tests|docs|benchmarks)[\w./-]*) {2,}\S", GUIDE, flags=re.MULTILINE),
    }
)


def test_the_loop_and_the_layers_are_named() -> None:
    assert {"src/wellposed/solve/loop.py", "tests/test_layers.py", "src/wellposed_lab/papers"} <= set(PATHS)
    assert len(PATHS) >= 25


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert (ROOT / path).exists(), f"CONTRIBUTING.md names {path}, which does not exist"


def test_every_command_of_make_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    workflows = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml"))
    named = set(re.findall(r"`make ([a-z-]+)|^    make ([a-z-]+)$|run: make ([a-z-]+)", GUIDE + workflows, flags=re.MULTILINE))
    wanted = {name for names in named for name in names if name}
    assert {"test", "test-portable", "docs", "coverage", "findings"} <= wanted <= targets


def test_the_matrix_is_the_supported_range() -> None:
    yaml = pytest.importorskip("yaml", reason="reading the workflows needs pyyaml, which comes with the extra cli")
    matrix = yaml.safe_load((ROOT / ".github" / "workflows" / "matrix.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest_python = re.search(r'requires-python = ">=([\d.]+)"', project)
    oldest_torch = re.search(r'"torch>=([\d.]+),<3"', project)
    assert oldest_python and matrix["python"][0] == oldest_python[1] and matrix["python"][-1] == "3.14"
    untested = ", ".join(matrix["python"][1:])
    assert f"| Python | {oldest_python[1]} | {untested} |" in (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert oldest_torch and matrix["torch"][0] == f"{oldest_torch[1]}.*" and matrix["torch"][-1] == "newest"
