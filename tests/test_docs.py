"""Every Python block of the README and the docs runs, block after block, in one namespace per page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]
#: Without the pages made of docstrings: docs/test_examples.py runs theirs. Tutorials are run by docs/test_tutorials.py.
#: The gallery is made from records, releases are made by commands; the overview of the tasks is a table of links.
WITHOUT_CODE = {DOCS / "gallery.md", DOCS / "releasing.md", DOCS / "tasks" / "index.md"}
WITH_CODE = [page for page in PAGES if page.parent.name != "reference" and page not in WITHOUT_CODE]
#: Pages that exist in the site only.
GENERATED = {DOCS / "references.md", DOCS / "tutorials" / "index.md"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=name)
def test_python_blocks_run(page: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks, f"{page.name} shows no Python; if that is meant, leave it out of PAGES"
    for package in re.findall(r"^<!-- needs: (\w+) -->$", page.read_text(), flags=re.MULTILINE):
        pytest.importorskip(package, reason=f"{page.name} needs {package}, which is optional and not installed")
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_fences_stand_on_lines_of_their_own(page: Path) -> None:
    """A block whose fence is joined to its first line is shown as prose, and no test runs it."""
    marks = [line.strip() for line in page.read_text().splitlines() if "```" in line]
    wrong = [mark for mark in marks if not re.fullmatch(r"```(\w+( title=\"[^\"]*\")?)?", mark)]
    assert not wrong and len(marks) % 2 == 0, f"{page.name}: {wrong or 'a fence is not closed'}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        path = (page.parent / target).resolve()
        tutorial = path.parent.name == "tutorials" and path.with_suffix(".py").exists()
        assert path.exists() or path in GENERATED or tutorial, f"{page.name} links to {target}, which does not exist"
