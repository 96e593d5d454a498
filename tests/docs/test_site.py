"""The whole site, built as `make docs` builds it: warnings are errors, every public name has its place, nothing is loaded."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

import browser
import doc_hooks

pytestmark = pytest.mark.slow
for package in ("mkdocs", "material", "mkdocs_jupyter", "mkdocstrings_handlers.python", "matplotlib"):
    pytest.importorskip(package, reason=f"the site needs {package}; `make docs` installs it")

CHECKED = ("index.html", "choosing.html", "notation.html", "reference/solve.html", "tutorials/index.html")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doc_hooks.build(tmp_path_factory.mktemp("site"))


def test_every_public_name_has_an_anchor(site: Path) -> None:
    for page in (doc_hooks.DOCS / "reference").glob("*.md"):
        built = (site / "reference" / f"{page.stem}.html").read_text()
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text(), flags=re.MULTILINE):
            assert f'id="{path}"' in built, f"{path} is not on its page"


def test_signatures_are_broken_into_lines(site: Path) -> None:
    """Without a formatter in its environment mkdocstrings leaves a signature in one line, which the page cuts off."""
    for page in (site / "reference").glob("*.html"):
        for signature in re.findall(r'<div class="doc-signature highlight">.*?</div>', page.read_text(), flags=re.DOTALL):
            lines = html.unescape(re.sub(r"<[^>]+>", "", signature)).splitlines()
            assert max(map(len, lines)) <= 100, f"{page.name}: {max(lines, key=len)}"


def test_formulas_survive(site: Path) -> None:
    """`<x, y>` is no tag, a page's formula is marked for KaTeX, and a citation is a link in pages and in docstrings."""
    assert "K_ij = <df(x_i)/dtheta, df(x'_j)/dtheta>" in html.unescape((site / "reference" / "kernel.html").read_text())
    kernel = r"H_{ij} = \Bigl\langle \frac{\partial f(x_i)}{\partial \theta},"
    assert f'<div class="arithmatex">\\[\n{kernel}\n' in html.unescape((site / "notation.html").read_text())
    for page in ("findings.html", "reference/certify.html"):
        assert re.search(r'<a [^>]*href="[^"]*references\.html#\w+"[^>]*>\[\w+2022', (site / page).read_text())


def test_tutorials_are_pages_with_figures_and_their_script(site: Path) -> None:
    for script in (doc_hooks.DOCS / "tutorials").glob("*.py"):
        page = (site / "tutorials" / f"{script.stem}.html").read_text()
        assert 'src="data:image/png;base64,' in page and "all of it was executed" in page
        assert not re.search(r'href="(?!https?:)[^"]*\.md[#"]', page)
        assert not re.search(r"&lt;\S+ at 0x|Text\([\d.]+, ", page), "a part of a figure is printed beside it"
        assert (site / "tutorials" / script.name).read_text() == script.read_text()


def test_pages_open_without_errors_and_load_nothing(site: Path, tmp_path: Path) -> None:
    program = browser.find()
    if program is None:
        pytest.skip("there is no Chromium to look at the pages with")
    with browser.running(program, tmp_path) as chromium:
        for page in CHECKED:
            chromium.open(site / page)
            assert not chromium.problems(), page
            assert all(url.startswith(("file:", "data:", "blob:")) for url in chromium.requests()), page
