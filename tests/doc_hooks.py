"""The build steps of the documentation (docs/_hooks), for tests: they are scripts beside the pages, not a package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOOKS = DOCS / "_hooks"
BIBLIOGRAPHY = ROOT / "src" / "wellposed" / "references.bib"


def load(name: str) -> ModuleType:
    """The module of a hook, loaded as mkdocs loads it."""
    spec = importlib.util.spec_from_file_location(f"doc_hook_{name}", HOOKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(HOOKS))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(HOOKS))
    return module


def build(folder: Path, **environment: str) -> Path:
    """The site, built into a folder as `make docs` builds it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    around = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder
