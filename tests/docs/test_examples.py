"""Every public name has an example, in its docstring or on its page of the reference, and all examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import doc_hooks
import wellposed
import wellposed_lab
from wellposed.errors import MissingPackage

REFERENCE = doc_hooks.DOCS / "reference"
OWN = ("wellposed", "wellposed_lab")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PACKAGES = sorted(
    {f"wellposed.{info.name}" for info in pkgutil.iter_modules(wellposed.__path__) if info.ispkg and info.name[0] != "_"}
    | {"wellposed.errors"}
)


def public() -> dict[str, Any]:
    """Each public object once, by its path: that in its package, or in `wellposed` if it has none there."""
    found: dict[int, tuple[str, Any]] = {}
    for package in (*PACKAGES, "wellposed"):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            found.setdefault(id(value), (f"{package}.{name}", value))
    return dict(found.values())


PUBLIC = public()


class Runner(doctest.DocTestRunner):
    """Skips an example that needs an optional package that is not installed."""

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, exc_info: Any) -> None:
        error = exc_info[1]
        foreign = isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] not in OWN
        if foreign or isinstance(error, MissingPackage):
            pytest.skip(str(error))
        super().report_unexpected_exception(out, test, example, exc_info)


def docstring(value: Any) -> str:
    """Its own, not that of a class it inherits from or is an instance of."""
    if inspect.isclass(value):
        return inspect.cleandoc(vars(value).get("__doc__") or "")
    return inspect.getdoc(value) or "" if inspect.isroutine(value) or inspect.ismodule(value) else ""


def on_its_page(path: str) -> str:
    """The examples below the entry of a name, up to the next entry or heading."""
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    entry = re.search(rf"^::: {re.escape(path)}\n(.*?)(?=^(?::::|#)|\Z)", pages, flags=re.MULTILINE | re.DOTALL)
    return "".join(re.findall(r"^```pycon\n(.*?)^```", entry[1], flags=re.MULTILINE | re.DOTALL)) if entry else ""


def run(test: doctest.DocTest) -> None:
    report = io.StringIO()
    Runner(optionflags=FLAGS).run(test, out=report.write)
    assert not report.getvalue(), report.getvalue()


@pytest.fixture(autouse=True)
def a_place_for_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize("path", PUBLIC)
def test_a_public_name_has_an_example_that_runs(path: str) -> None:
    text = docstring(PUBLIC[path]) + "\n\n" + on_its_page(path)
    test = doctest.DocTestParser().get_doctest(text, {"__name__": "example"}, path, None, 0)
    assert test.examples, f"{path} has no example: write one into its docstring, or below ::: {path} in docs/reference/"
    assert not any(example.options.get(doctest.SKIP) for example in test.examples), f"an example of {path} is never run"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        run(test)


def test_an_example_that_prints_something_else_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    with pytest.raises(AssertionError, match="Expected:"):
        run(test)


def test_other_docstring_examples_run() -> None:
    """Those of methods, of names that are not public, and of the laboratory."""
    shown = {f"{getattr(v, '__module__', '')}.{getattr(v, '__qualname__', '')}" for v in PUBLIC.values()}
    shown |= {value.__name__ for value in PUBLIC.values() if inspect.ismodule(value)}
    tried = 0
    for package in (wellposed, wellposed_lab):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for test in doctest.DocTestFinder().find(importlib.import_module(info.name)):
                if test.examples and test.name not in shown:
                    run(test)
                    tried += len(test.examples)
    assert tried > 0
