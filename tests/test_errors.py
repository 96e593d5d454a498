"""Errors are where users look for them, and say how to install what is missing."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import wellposed as wp
from wellposed.errors import MissingPackage, how_to_install, required

ROOT = Path(__file__).parents[1]


def test_run_errors_are_public() -> None:
    for name in ("CheckpointRefused", "RunError", "RunLocked"):
        assert getattr(wp, name) is getattr(wp.errors, name)
    assert issubclass(wp.errors.RunLocked, wp.errors.RunError) and issubclass(wp.errors.CheckpointRefused, wp.errors.RunError)


def test_every_extra_that_is_advised_exists_and_is_on_the_page() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    advised = {a or b for a, b in re.findall(r"""how_to_install\('(\w+)'\)|required\([^\n]*extra="(\w+)"\)""", sources)}
    known = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), flags=re.MULTILINE))
    page = (ROOT / "docs" / "tool.md").read_text(encoding="utf-8")
    assert len(advised) >= 8 and advised <= known
    assert all(f"| `{extra}` |" in page for extra in advised)
    assert not re.findall(r"pip install [^\n]*\[\w", sources.replace(how_to_install("{extra}"), ""))


def test_the_advice_is_right_from_an_index_and_in_a_clone() -> None:
    advice = how_to_install("plot")
    assert advice.startswith("pip install -c constraints.txt '.[plot]' in the source tree") and "'wellposed[plot]'" in advice
    for page in ("README.md", "docs/install.md", "docs/index.md"):  # the same command, and what `make run` installs
        text, made = ((ROOT / name).read_text(encoding="utf-8") for name in (page, "Makefile"))
        extras = re.findall(r"pip install -c constraints.txt '\.\[([\w,]+)\]'", text)
        assert extras and f"$(PIP) -e '.[{extras[0]}]'" in made, page


def test_an_optional_module_is_imported_or_refused_with_advice() -> None:
    assert required("math", "This needs math", extra="plot") is math
    with pytest.raises(MissingPackage, match=r"^This needs it; install it with: pip install -c constraints\.txt '\.\[plot\]'"):
        required("no_such_module", "This needs it", extra="plot")
