"""The page in a real browser: nothing goes wrong, figures are drawn, keys lead through it, it prints."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import browser as chromium
from report_problems import certificate, train_tiny, write_by_hand
from wellposed_lab import report

PROGRAM = chromium.find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason=f"no browser was found: none of {', '.join(chromium.NAMES)} is on the path"
)

KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " ")}
FOCUSABLE = "a[href], button, summary, [tabindex='0']"
HERE = "e => e.tagName + ':' + (e.getAttribute('aria-label') || e.textContent).slice(0, 60)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    assert PROGRAM is not None
    with chromium.running(PROGRAM, tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(train_tiny(tmp_path_factory.mktemp("runs") / "tiny"))


def press(browser: chromium.Browser, key: str) -> None:
    code, text = KEYS[key]
    browser.press(key, code, text)


def prefer(browser: chromium.Browser, scheme: str) -> None:
    browser.ask("Emulation.setEmulatedMedia", media="", features=[{"name": "prefers-color-scheme", "value": scheme}])


def brightness(browser: chromium.Browser) -> float:
    """Of the background, from 0 to 255."""
    numbers = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    return sum(numbers[:3]) / 3


def test_figures_are_drawn_and_nothing_goes_wrong(browser: chromium.Browser, page: Path) -> None:
    browser.open(page)
    assert browser.value("document.documentElement.dataset.drawn") == "7"
    drawn = browser.value(
        "[...document.querySelectorAll('.plot')].map(e => e.querySelectorAll('.main-svg .trace, .main-svg .bars').length)"
    )
    assert len(drawn) == 7 and all(count > 0 for count in drawn)
    widths = browser.value("[...document.querySelectorAll('.plot')].map(e => e.getBoundingClientRect().width)")
    assert all(width > 300 for width in widths)
    time.sleep(0.2)  # what is reported late is heard by the next question
    assert browser.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.problems() == []
    assert browser.requests() == [page.resolve().as_uri()]


def test_the_browser_would_hear_of_a_problem(browser: chromium.Browser, page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("root.dataset.drawn", "root.missing.drawn"))
    browser.open(broken)
    assert any("Content Security Policy" in problem for problem in browser.problems())  # a changed script does not run
    broken.write_text("<script>console.error('oh'); throw new Error('no')</script><img src='https://example.invalid/a.png'>")
    browser.open(broken)
    time.sleep(0.2)
    browser.value("1")
    assert len(browser.problems()) >= 2 and "https://example.invalid/a.png" in browser.requests()


def test_keys_lead_through_the_page_in_order(browser: chromium.Browser, page: Path) -> None:
    browser.open(page)
    visible = f'[...document.querySelectorAll("{FOCUSABLE}")].filter(e => e.checkVisibility())'
    wanted = browser.value(f"{visible}.map({HERE})")
    assert wanted[0] == "A:Skip to the content" and wanted[1] == "BUTTON:Dark" and len(wanted) > 25
    assert browser.value('document.querySelectorAll(\'[tabindex]:not([tabindex="0"]):not([tabindex="-1"])\').length') == 0
    met = []
    for _ in wanted:
        press(browser, "Tab")
        met.append(browser.value(f"({HERE})(document.activeElement)"))
        assert browser.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert met == wanted
    heights = browser.value(f"{visible}.slice(2).map(e => Math.round(e.getBoundingClientRect().top + scrollY))")
    sections = [height for height, name in zip(heights, wanted[2:], strict=True) if name.startswith("SUMMARY")]
    assert sections == sorted(sections)  # what is seen first is met first


def test_keys_switch_the_theme_and_the_axis(browser: chromium.Browser, page: Path) -> None:
    prefer(browser, "light")
    browser.open(page)
    assert brightness(browser) > 200
    browser.value("document.getElementById('theme').focus()")
    press(browser, "Enter")
    assert brightness(browser) < 60 and browser.value("document.getElementById('theme').textContent") == "Light"
    press(browser, " ")
    assert brightness(browser) > 200
    kind = "document.getElementById('plot-loss')._fullLayout.yaxis.type"
    assert browser.value(kind) == "log"
    browser.value("document.querySelector('[data-axis=loss]').focus()")
    press(browser, "Enter")
    assert browser.value(kind) == "linear" and browser.value("document.activeElement.getAttribute('aria-pressed')") == "true"
    press(browser, "Enter")
    assert browser.value(kind) == "log"
    browser.value("Plotly.relayout('plot-loss', {'xaxis.range': [0, 1]}).then(() => 1)")
    browser.value("document.querySelector('[data-reset=loss]').focus()")
    press(browser, "Enter")
    assert browser.value("document.getElementById('plot-loss')._fullLayout.xaxis.range[1]") > 3
    assert browser.problems() == []


def test_the_preference_for_dark_is_followed(browser: chromium.Browser, page: Path) -> None:
    prefer(browser, "dark")
    browser.open(page)
    assert brightness(browser) < 60
    fill = browser.value("getComputedStyle(document.querySelector('#plot-loss .xtick text')).fill.match(/\\d+/g).map(Number)")
    assert sum(fill[:3]) / 3 > 180  # light text on it
    prefer(browser, "light")


def test_it_prints_on_white_within_the_paper(browser: chromium.Browser, page: Path) -> None:
    prefer(browser, "dark")
    browser.open(page)
    measure = "[...document.querySelectorAll('.plot .main-svg')].map(e => e.getBoundingClientRect().width)"
    browser.value(f"window.widths = []; addEventListener('beforeprint', () => {{ widths = {measure}; }}); 1")
    paper = base64.b64decode(browser.ask("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])
    assert paper.startswith(b"%PDF") and len(paper) > 20_000
    widths = browser.value("widths")
    assert widths and max(widths) <= 660
    browser.ask("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert brightness(browser) == 255
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    prefer(browser, "light")
    assert browser.problems() == []


def test_malicious_text_does_nothing(browser: chromium.Browser, tmp_path: Path) -> None:
    evil = "<img src=x onerror='window.pwned=1'></script><script>window.pwned=1</script><a href='javascript:pwned=1'>a</a>"
    runs = []
    for name in ("<img src=x onerror=pwned=1>", "<svg onload=pwned=1>"):
        config = {"model": {"name": evil}, "data": {"name": evil}}
        runs.append(write_by_hand(tmp_path / name, [2.0, 1.0], certificates={0: certificate(0.9, note=evil)}, config=config))
    for path in (report.write(runs[0], tmp_path / "one.html"), report.compare(runs, tmp_path / "two.html")):
        browser.open(path)
        time.sleep(0.2)
        assert browser.value("typeof window.pwned") == "undefined"
        assert browser.value("document.querySelectorAll('img, main a').length") == 0
        assert browser.problems() == [] and browser.requests() == [path.resolve().as_uri()]
    legend = browser.value("[...document.querySelectorAll('#plot-loss .legendtext')].map(e => e.textContent)")
    assert "<img src=x onerror=pwned=1>: train" in legend and "<svg onload=pwned=1>: train" in legend
