"""The step that executes a tutorial: cells, output, figures, and failures that are not hidden."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import doc_hooks

pytest.importorskip("matplotlib", reason="tutorials draw with matplotlib, which is optional and not installed")
percent = doc_hooks.load("percent")

SCRIPT = """\
# slow

# %% [markdown]
# # A title
#
# Some `text`.

# %%
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

x = 2
print("x is", x)

# %% [markdown]
# More text.

# %%
fig, ax = plt.subplots()
bound = Figure()

# %%
Figure()

# %%
x + 1
"""


def test_cells() -> None:
    cells = percent.cells_of(SCRIPT)
    assert [cell.is_markdown for cell in cells] == [True, False, True, False, False, False]
    assert cells[0].text == "# A title\n\nSome `text`."
    assert cells[1].text.endswith('print("x is", x)')
    assert SCRIPT.splitlines()[cells[1].first_line - 1] == "import matplotlib.pyplot as plt"


@pytest.mark.parametrize("bad", ["# %% [markdown]\nplain", "# %% [raw]\n# x"])
def test_what_is_no_cell_is_refused(bad: str) -> None:
    with pytest.raises(SyntaxError, match="line [12]"):
        percent.cells_of(bad)


def test_page_has_text_code_output_and_every_figure_once(tmp_path: Path) -> None:
    script = tmp_path / "01_sample.py"
    script.write_text(SCRIPT)
    page = percent.run(script, tmp_path)
    assert page.startswith("# A title\n")
    assert "```python\nimport matplotlib" in page and "```text\nx is 2\n```" in page
    assert "slow" not in page
    assert [page.count(f"![Figure {i}](01_sample-{i}.png)") for i in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert all((tmp_path / f"01_sample-{i}.png").stat().st_size > 0 for i in (1, 2, 3))
    assert page.index("01_sample-2.png") < page.index("```python\nFigure()") < page.index("01_sample-3.png")


@pytest.mark.parametrize(
    ("code", "error"),
    [("1 / 0", ZeroDivisionError), ("import warnings\nwarnings.warn('beware')", UserWarning)],
)
def test_errors_and_warnings_end_the_run(tmp_path: Path, code: str, error: type[Exception]) -> None:
    script = tmp_path / "01_bad.py"
    script.write_text(f"# %%\n{code}\n")
    with pytest.raises(error):
        percent.run(script, tmp_path)


def test_program_fails_with_the_line_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "01_bad.py"
    script.write_text("# %% [markdown]\n# # Title\n\n# %%\nx = 0\n1 / x\n")
    program = [sys.executable, str(doc_hooks.HOOKS / "percent.py"), str(script), str(tmp_path / "out")]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode != 0
    assert "line 6, in <module>\n    1 / x" in done.stderr and not (tmp_path / "out" / "page.md").exists()
