"""mkdocs hook: every `docs/tutorials/NN_name.py` becomes a page by being executed, in a process of
its own.

An exception in a tutorial fails the build. The time of each is printed; above a minute a line says
so (it is no error: the machine may be slow). While `mkdocs serve` runs, a tutorial is executed
again only if its text has changed. The list of tutorials, and their place in the navigation, are
made of the files that are there.

With WELLPOSED_DOCS_FAST=1 (`make docs-fast`) nothing is executed: the pages show text and code, and
say so.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import percent
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

LOG = logging.getLogger("mkdocs.hooks.tutorials")
PERCENT = Path(__file__).with_name("percent.py")
SLOW = 60.0  # seconds
HEAVY = 400_000  # bytes of all figures of a page
FAST = "WELLPOSED_DOCS_FAST"
NOT_EXECUTED = "This page was not executed (`make docs-fast`), so outputs and figures are missing; `make docs` has them.\n"

_pages: dict[tuple[str, str], dict[str, bytes]] = {}  # (name, source) -> file name -> content


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for item in config.nav or []:
        if "Tutorials" in item:
            item["Tutorials"] = ["tutorials/index.md", *(f"tutorials/{script.stem}.md" for script in _scripts(config))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    rows = []
    for script in _scripts(config):
        made = _run(script)
        for name, content in made.items():
            uri = f"tutorials/{script.stem}.md" if name == "page.md" else f"tutorials/{name}"
            files.append(File.generated(config, uri, content=content))
        title, summary = opening(made["page.md"].decode())
        rows.append(f"## [{title}]({script.stem}.md)\n\n{summary}\n")
    how = "a script" if os.environ.get(FAST) else "a script that was executed to make it"
    index = f"# Tutorials\n\nEach page is {how}; run it yourself, and change it.\n\n"
    files.append(File.generated(config, "tutorials/index.md", content=index + "\n".join(rows)))
    return files


def opening(page: str) -> tuple[str, str]:
    """The title of a page and its first paragraph."""
    title, _, rest = page.partition("\n")
    return title.removeprefix("# "), rest.strip().partition("\n\n")[0]


def _scripts(config: MkDocsConfig) -> list[Path]:
    return sorted((Path(config.docs_dir) / "tutorials").glob("[0-9][0-9]_*.py"))


def _run(script: Path) -> dict[str, bytes]:
    if os.environ.get(FAST):
        return {"page.md": f"{percent.unexecuted(script)}\n---\n\n{NOT_EXECUTED}".encode()}
    key = (script.name, script.read_text())
    if key not in _pages:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(PERCENT), str(script), folder]
            done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "Agg"})
            if done.returncode != 0:
                raise PluginError(f"The tutorial {script.name} does not run:\n{done.stderr}")
            made = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        seconds, cpu = map(float, done.stdout.split()[-2:])
        size = sum(map(len, made.values()))
        print(f"tutorial {script.name}: {seconds:.1f} s ({cpu:.1f} s of CPU), {len(made) - 1} figures, {size // 1000} kB")
        if min(seconds, cpu) > SLOW:  # wall clock alone would blame a busy machine, CPU alone several threads
            print(f"tutorial {script.name}: more than {SLOW:.0f} s; shorten it.")
        if size > HEAVY:
            print(f"tutorial {script.name}: its figures are heavier than {HEAVY // 1000} kB; draw fewer or smaller ones.")
        download = f"[Download this page as a script]({script.name}): all of it was executed to make the page.\n"
        made["page.md"] = made["page.md"] + f"\n---\n\n{download}".encode()
        _pages[key] = made
    return _pages[key]
