"""What the pages say: numbers that were measured, citations that lead somewhere, no link out of the site, nothing loaded."""

from __future__ import annotations

import importlib.util
import re

import pytest

import doc_hooks

bibliography = doc_hooks.load("bibliography")
PAGES = [*doc_hooks.DOCS.glob("**/*.md"), *doc_hooks.DOCS.glob("tutorials/*.py")]


def test_choosing_quotes_what_was_measured() -> None:
    measured = set((doc_hooks.ROOT / "benchmarks" / "results" / "choices.md").read_text().splitlines())
    page = (doc_hooks.DOCS / "choosing.md").read_text()
    tables = re.findall(r"<!-- rows of benchmarks/results/choices\.md -->\n\n((?:\|.*\n)+)", page)
    assert len(tables) == 5
    for table in tables:
        for row in table.splitlines():
            assert row in measured, f"docs/choosing.md: {row!r} is not in benchmarks/results/choices.md"


def test_pages_quote_the_measured_tables() -> None:
    tables = _script("tables")
    places = 0
    for name in tables.PAGES:
        page = (doc_hooks.ROOT / name).read_text()
        assert tables.quoted(page) == page, f"{name} quotes other numbers than benchmarks/results; run `make tables`"
        places += len(tables.PLACE.findall(page))
    assert places == 18


def test_a_table_is_written_anew(tmp_path) -> None:
    (tmp_path / "r.json").write_text('{"rows": [{"a": "x / y", "b": 0.126, "c": 1}, {"a": "z", "b": 2.0, "c": 3}]}')
    page = "before\n\n<!-- table of r.json: rows: a = the name, b -->\n\n| old |\n| --- |\n\nafter\n"
    expected = page.replace("| old |\n| --- |\n", "| the name | b |\n| --- | --- |\n| x / y | 0.13 |\n| z | 2.00 |\n")
    assert _script("tables").quoted(page, tmp_path) == expected


def _script(name: str):
    spec = importlib.util.spec_from_file_location(name, doc_hooks.ROOT / "benchmarks" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_citations_are_in_the_bibliography(page) -> None:
    keys = {entry.key for entry in bibliography.entries(doc_hooks.BIBLIOGRAPHY.read_text())}
    cited = set(re.findall(r"\[([a-z]+[12][0-9]{3}[a-z]?)(?:, [^\]]*)?\](?!\()", page.read_text()))
    assert cited <= keys, f"{page.name} cites {sorted(cited - keys)}, not in src/wellposed/references.bib"


def test_page_of_sources() -> None:
    text = doc_hooks.BIBLIOGRAPHY.read_text()
    page = bibliography.page(text)
    assert len(bibliography.entries(text)) == text.count("\n@")
    for entry in bibliography.entries(text):
        assert f"## {entry.key} {{ #{entry.key} }}" in page
        assert entry.fields["year"] in page
    body = re.sub(r"\{ #\w+ \}", "", page)
    assert not re.search(r"[{}\\]", body), "TeX is left over"
    assert "Zenan Ling, Xingyu Xie" in page


def test_links_out_of_the_site_become_text() -> None:
    pytest.importorskip("mkdocs", reason="the hooks of the site need mkdocs, which is optional and not installed")
    outside = doc_hooks.load("outside")
    text = "[a](../tests/a.py), [b](b.md#c), [c](https://example.org), [d](../../README.md)"
    assert outside.without_outside_links(text, "") == "a, [b](b.md#c), [c](https://example.org), d"
    assert outside.without_outside_links("[a](../solving.md) [b](../../x.py)", "networks") == "[a](../solving.md) b"


@pytest.mark.parametrize(
    ("text", "suffix", "found"),
    [
        ('<a href="https://example.org">x</a><img src="a.png"><link rel="canonical" href="https://example.org">', ".html", 0),
        ('<script src="https://example.org/a.js"></script>', ".html", 1),
        ('<link rel="stylesheet" href="//example.org/a.css">', ".html", 1),
        ('<img src="HTTP://example.org/a.png" style="background: url(https://example.org/b.png)">', ".html", 2),
        ("<style>@import 'https://example.org/a.css';</style>", ".html", 1),
        ("@font-face { src: url('https://example.org/a.woff') } p { background: url(b.png) }", ".css", 1),
    ],
)
def test_loading_from_elsewhere_is_found(text: str, suffix: str, found: int) -> None:
    pytest.importorskip("mkdocs", reason="the hooks of the site need mkdocs, which is optional and not installed")
    assert len(doc_hooks.load("offline").loads_from_elsewhere(text, suffix)) == found


def test_options_and_numbers_are_kept_in_one_line_and_nothing_else_changes() -> None:
    pytest.importorskip("mkdocs", reason="the hooks of the site need mkdocs, which is optional and not installed")
    unbroken = doc_hooks.load("unbroken").unbroken
    assert unbroken("<code>a --full x</code>") == '<code>a <span class="unbroken">--full</span> x</code>'
    assert unbroken("<p>of 1.5e-6,</p>") == '<p>of <span class="unbroken">1.5e-6</span>,</p>'
    page = f'<pre><code>--full 1e-6</code></pre><a title="1e-6" href="--x">well-posed</a><code>{"long-" * 9}</code>'
    assert unbroken(page + "<script>1e-6</script>") == page + "<script>1e-6</script>"
    text = "<table><td><code>--set a=1e-3 &lt;-</code> x &lt; 1e-3 - 2</td></table>\n"
    assert re.sub('<span class="unbroken">|</span>', "", unbroken(text)) == text != unbroken(text)
