"""What a release says of itself: one version everywhere, the requirements of the recipe, the files that people look for."""

from __future__ import annotations

import datetime
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import wellposed
import wellposed_lab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPE = ROOT / "packaging" / "conda" / "meta.yaml"


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("src/wellposed/__init__.py", r'^__version__ = "(.*)"$'),
        ("CITATION.cff", r"^version: (.*)$"),
        ("packaging/conda/meta.yaml", r'set version = "(.*)"'),
    ],
)
def test_one_version_everywhere(file: str, pattern: str) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), flags=re.MULTILINE) == [PROJECT["version"]]


def test_the_changelog_begins_with_the_version_and_its_date() -> None:
    """A development version is unreleased, and has no date."""
    (first, *_) = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    dates = re.findall(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    if ".dev" in PROJECT["version"]:
        assert (first, dates) == ("[Unreleased]", [])
    else:
        (date,) = dates
        assert first == f"[{PROJECT['version']}] - {datetime.date.fromisoformat(date)}"


def test_the_citation_has_the_year_of_the_last_release() -> None:
    (year, *_) = re.findall(r"^## \[.*\] - (\d{4})-", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert f"  year   = {{{year}}},\n" in wellposed.cite()


def test_what_builds_a_release_is_pinned() -> None:
    """`build` installs hatchling in an environment of its own, where only PIP_CONSTRAINT reaches it."""
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert {"build", "hatchling", "twine"} <= set(pinned)
    for file in ("docs/releasing.md", ".github/workflows/release.yml"):
        builds = re.findall(r"^.*python -m build$", (ROOT / file).read_text(), flags=re.MULTILINE)
        assert builds and all("PIP_CONSTRAINT=$PWD/constraints.txt" in line for line in builds)


def test_the_recipe_needs_what_the_package_needs() -> None:
    wanted = {requirement.replace("torch>=", "pytorch>=") for requirement in PROJECT["dependencies"]}
    run = re.search(r"^  run:\n((?:    - .*\n)+)", RECIPE.read_text(), flags=re.MULTILINE)
    assert run is not None
    stated = {line.strip("- ").replace(" ", "") for line in run[1].splitlines()}
    assert stated == wanted | {f"python{PROJECT['requires-python']}"}


def test_the_oldest_python_is_the_one_that_is_tested() -> None:
    tested = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)]
    assert [f">={tested[0]}"] == [PROJECT["requires-python"]]
    assert f"| Python | {', '.join(tested)} |" in (ROOT / "docs" / "install.md").read_text()


def test_the_scheduled_run_has_every_python_of_the_page() -> None:
    """Those that were tested and those that were not; the other workflows run on the one that was."""
    page = (ROOT / "docs" / "install.md").read_text()
    row = re.search(r"^\| Python \| (.*) \| (.*) \|$", page, flags=re.MULTILINE)
    assert row is not None
    workflows = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    scheduled = re.search(r"^ +python: \[(.*)\]$", workflows.pop("matrix"), flags=re.MULTILINE)
    assert scheduled is not None and scheduled[1].replace('"', "") == f"{row[1]}, {row[2]}"
    used = {version for text in workflows.values() for version in re.findall(r'python-version: "([^"]*)"', text)}
    assert used == set(row[1].split(", "))


def test_the_system_that_is_claimed_is_the_tested_one() -> None:
    systems = [name for name in PROJECT["classifiers"] if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert "| system | Linux, x86-64 |" in (ROOT / "docs" / "install.md").read_text()


def test_the_tested_torch_is_the_pinned_one() -> None:
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    assert pinned is not None
    assert f"| torch | {pinned[1]}, CPU build |" in (ROOT / "docs" / "install.md").read_text()
    oldest = next(name for name in PROJECT["dependencies"] if name.startswith("torch"))
    assert oldest == f"torch>={pinned[1].rpartition('.')[0]},<3"


@pytest.mark.parametrize(
    "name", ["LICENSE", "CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md", "CONTRIBUTING.md"]
)
def test_the_files_that_people_look_for_are_there(name: str) -> None:
    assert (ROOT / name).stat().st_size > 200


@pytest.mark.parametrize("package", [wellposed, wellposed_lab])
def test_the_typing_marker_is_part_of_both_packages(package: ModuleType) -> None:
    assert (Path(str(package.__file__)).parent / "py.typed").is_file()
