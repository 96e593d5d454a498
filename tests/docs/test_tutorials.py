"""Every tutorial is a script in percent format that runs to its end, and a page with a title."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import doc_hooks
import wellposed

SCRIPTS = sorted((doc_hooks.DOCS / "tutorials").glob("*.py"))


def test_there_are_tutorials_in_order() -> None:
    assert SCRIPTS
    assert [script.name[:2] for script in SCRIPTS] == [f"{i:02}" for i in range(1, len(SCRIPTS) + 1)]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_names_of_wellposed_exist(script: Path) -> None:
    """What a run would find out in minutes, in no time: every `wp.name` and every import is there."""
    tree = ast.parse(script.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wellposed"):
            module = importlib.import_module(node.module or "")
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"wp(\.\w+)+", ast.unparse(node)):
            owner: object = wellposed
            for name in ast.unparse(node).split(".")[1:]:
                if not isinstance(owner, ModuleType):
                    break  # attributes of classes may be those of instances
                assert hasattr(owner, name), f"{script.name}, line {node.lineno}: {ast.unparse(node)} does not exist"
                owner = getattr(owner, name)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_begins_with_a_title_and_shows_no_window(script: Path) -> None:
    source = script.read_text()
    assert re.match(r"# %% \[markdown\]\n# # \S.*\n", source), f"{script.name} must begin with '# # Title'"
    assert "plt.show(" not in source and ".savefig(" not in source


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_cells_are_well_formed(script: Path) -> None:
    """A mark opens a cell of code or of text, and every line of text is a comment."""
    text = False
    for number, line in enumerate(script.read_text().splitlines(), start=1):
        if line.startswith("# %%"):
            assert line in ("# %%", "# %% [markdown]"), f"{script.name}, line {number}: {line}"
            text = line != "# %%"
        else:
            assert not text or not line or line.startswith("#"), f"{script.name}, line {number}: code in a cell of text"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_links_lead_somewhere(script: Path) -> None:
    for target in re.findall(r"^#.*\]\((?!http)([^)#]+)", script.read_text(), flags=re.MULTILINE):
        page = script.parent / target
        generated = page.with_suffix(".py") if page.parent == script.parent else page
        assert page.exists() or generated.exists(), f"{script.name} links to {target}, which does not exist"


@pytest.mark.slow  # each takes ten seconds and more
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_runs(script: Path) -> None:
    pytest.importorskip("matplotlib", reason="tutorials draw with matplotlib, which is optional and not installed")
    around = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run([sys.executable, "-W", "error", str(script)], capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    pytest.importorskip("mkdocs", reason="the hooks of the site need mkdocs, which is optional and not installed")
    return doc_hooks.load("tutorials")


def test_opening_of_a_script(hook: ModuleType) -> None:
    script = "# %% [markdown]\n# # Title\n#\n# Words\n# and words.\n#\n# More.\n\n# %%\nx = 1\n"
    assert hook.opening(script) == ("Title", "Words\nand words.")


def test_links_of_a_tutorial_lead_to_pages_of_the_site(hook: ModuleType) -> None:
    content = (
        '<a href="../solving.md#x">a</a> <a href="02_certified_training.md">b</a> [xie2021, Section 5] <code>[xie2021]</code>'
    )
    linked = hook.with_links(content, doc_hooks.DOCS, ["xie2021"], "01_equilibrium_layer.py")
    assert 'href="../solving.html#x"' in linked and 'href="02_certified_training.html"' in linked
    assert '<a href="../references.html#xie2021">[xie2021, Section 5]</a>' in linked and "<code>[xie2021]</code>" in linked
    with pytest.raises(Exception, match="nowhere.md, which does not exist"):
        hook.with_links('<a href="../nowhere.md">a</a>', doc_hooks.DOCS, ["xie2021"], "01_equilibrium_layer.py")


def test_colab_opens_the_notebook_of_the_published_site(hook: ModuleType) -> None:
    place = "https://colab.research.google.com/github/someone/wellposed/blob/gh-pages/tutorials/01_a.ipynb"
    assert hook.colab("https://github.com/someone/wellposed", "01_a.ipynb") == place
    assert hook.colab("", "01_a.ipynb") is None  # a repository that is not published
    with pytest.raises(Exception, match="expected https://github.com/OWNER/NAME"):
        hook.colab("https://example.org/wellposed", "01_a.ipynb")
