"""The site as `make docs-fast` builds it, served as files: no tutorial is run, and the search finds things."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser
import doc_hooks

pytestmark = pytest.mark.slow
for package in ("mkdocs", "material", "mkdocs_jupyter", "mkdocstrings_handlers.python"):
    pytest.importorskip(package, reason=f"the site needs {package}; `make docs` installs it")

#: What a reader would look for, and a page that must be found.
SEARCHED = {"PeacemanRachford": "reference/solve.html", "trajectories": "landscapes.html", "own data": "tool.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return doc_hooks.build(tmp_path_factory.mktemp("site"), WELLPOSED_DOCS_EXECUTE="false")


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_tutorials_have_their_code_and_say_that_it_was_not_run(site: Path) -> None:
    for script in (doc_hooks.DOCS / "tutorials").glob("*.py"):
        page = (site / "tutorials" / f"{script.stem}.html").read_text()
        assert "This page was not executed" in page and 'src="data:image/png;base64,' not in page


def test_the_index_of_the_search_has_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {page.relative_to(doc_hooks.DOCS).with_suffix(".html").as_posix() for page in doc_hooks.DOCS.rglob("*.md")}
    assert pages <= found
    for word, place in SEARCHED.items():
        assert any(
            entry["location"].startswith(place) and word.split()[0] in entry["text"] + entry["title"] for entry in index["docs"]
        )


def _search(chromium: browser.Browser, page: str, word: str, place: str) -> None:
    """Types a word into the search of a page as a reader does, and waits until it finds a place."""
    chromium.visit(page)
    chromium.value("document.querySelector('label[for=__search]').click()")
    chromium.value("document.querySelector('.md-search__input').focus()")
    chromium.ask("Input.insertText", text=word)
    chromium.press("End", 35)  # the search reads what was typed when a key is released
    links: list[str] = []
    end = time.monotonic() + browser.SECONDS
    while not any(place in link for link in links):
        assert time.monotonic() < end, f"the search for {word!r} found {links} and not {place}"
        time.sleep(0.2)
        links = chromium.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    assert not chromium.problems()


def test_the_search_works_from_a_static_server(address: str, tmp_path: Path) -> None:
    program = browser.find()
    if program is None:
        pytest.skip("there is no Chromium to search with")
    with browser.running(program, tmp_path) as chromium:
        for word, place in SEARCHED.items():
            _search(chromium, f"{address}/index.html", word, place)
            assert all(url.startswith((address, "data:", "blob:")) for url in chromium.requests())


def test_the_search_works_from_the_disk(site: Path, tmp_path: Path) -> None:
    """Of a page in a folder too: what the search finds is a file that exists, and nothing is loaded from elsewhere."""
    program = browser.find()
    if program is None:
        pytest.skip("there is no Chromium to search with")
    with browser.running(program, tmp_path) as chromium:
        for page in (site / "index.html", site / "reference" / "nn.html"):
            for word, place in SEARCHED.items():
                _search(chromium, page.as_uri(), word, place)
                found = chromium.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.pathname)")
                assert found and all(Path(urllib.parse.unquote(path)).is_file() for path in found)
                assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in chromium.requests())


def test_every_formula_is_typeset(site: Path, tmp_path: Path) -> None:
    program = browser.find()
    if program is None:
        pytest.skip("there is no Chromium to look at the formulas with")
    pages = [page for page in sorted(site.rglob("*.html")) if 'class="arithmatex"' in page.read_text()]
    assert pages
    with browser.running(program, tmp_path) as chromium:
        for page in pages:
            chromium.open(page)
            wrong = "[...document.querySelectorAll('.katex-error')].map(formula => formula.textContent)"
            raw = "[...document.querySelectorAll('.arithmatex:not(:has(.katex))')].map(formula => formula.textContent)"
            assert not chromium.value(wrong) + chromium.value(raw), page.name
            assert not chromium.problems(), page.name


def test_tutorials_can_be_downloaded_as_notebooks(site: Path) -> None:
    for script in (doc_hooks.DOCS / "tutorials").glob("*.py"):
        notebook = json.loads((site / "tutorials" / f"{script.stem}.ipynb").read_text())
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"  # or Jupyter asks for it
        code = "".join("".join(cell["source"]) + "\n" for cell in notebook["cells"] if cell["cell_type"] == "code")
        assert "import wellposed as wp" in code and compile(code, script.name, "exec")
        assert f'href="{script.stem}.ipynb"' in (site / "tutorials" / f"{script.stem}.html").read_text()


#: Images without a text or that do not load, tables of options that scroll, how far the page is wider than the window.
LOOKS = """({
    silent: [...document.images].filter(image => !image.alt).map(image => image.src.slice(-60)),
    broken: [...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src.slice(-60)),
    cut: [...document.querySelectorAll('.options .md-typeset__scrollwrap')].filter(e => e.scrollWidth > e.clientWidth).length,
    beyond: document.documentElement.scrollWidth - window.innerWidth,
})"""


@pytest.mark.parametrize("width", [390, 1280])
def test_every_page_fits_a_phone_and_a_desk(site: Path, tmp_path: Path, width: int) -> None:
    program = browser.find()
    if program is None:
        pytest.skip("there is no Chromium to look at the pages with")
    with browser.running(program, tmp_path) as chromium:
        chromium.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
        for page in sorted(set(site.rglob("*.html")) - {site / "404.html"}):  # which has the addresses of a server
            chromium.open(page)
            found = chromium.value(LOOKS)
            assert not found["silent"] and not found["broken"] and not found["cut"] and found["beyond"] <= 1, (page.name, found)
            assert not chromium.problems(), page.name
