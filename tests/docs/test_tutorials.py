"""Every tutorial is a script that runs to its end, and a page with a title."""

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

percent = doc_hooks.load("percent")
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
    cells = percent.cells_of(script.read_text())
    assert cells[0].is_markdown and re.match(r"# \S", cells[0].text), f"{script.name} must begin with a title, '# # Title'"
    assert not any("plt.show(" in cell.text or ".savefig(" in cell.text for cell in cells)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_links_lead_somewhere(script: Path) -> None:
    for cell in percent.cells_of(script.read_text()):
        for target in re.findall(r"\]\((?!http)([^)#]+)", cell.text) if cell.is_markdown else []:
            page = script.parent / target
            generated = page.with_suffix(".py") if page.parent == script.parent else page
            assert page.exists() or generated.exists(), f"{script.name} links to {target}, which does not exist"


def test_a_page_can_be_made_without_running_its_script(tmp_path: Path) -> None:
    script = tmp_path / "01_fails.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nraise SystemExit('it was run')\n")
    page = percent.unexecuted(script)
    assert page == "# Title\n\nWords.\n\n```python\nraise SystemExit('it was run')\n```\n"


@pytest.mark.slow  # each takes ten seconds and more
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_runs(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="tutorials draw with matplotlib, which is optional and not installed")
    program = [sys.executable, str(doc_hooks.HOOKS / "percent.py"), str(script), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.md").read_text().count("```python") >= 2
