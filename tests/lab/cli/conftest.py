"""`cli`: commands as real processes, started by a process that has imported everything already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Processes:
    """Starts `wellposed ...` and waits for it."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "output.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "300"}
        words = [sys.executable, str(Path(__file__).parent / "zygote.py")]
        self._zygote = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def _ask(self, order: dict[str, Any]) -> int:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps(order) + "\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline())

    def start(self, *words: object, **options: Any) -> int:
        """The id of the process."""
        self.log.write_text("")
        return self._ask({"run": [str(word) for word in words], "log": str(self.log), **options})

    def wait(self, process: int) -> int:
        """The exit code; minus the number of the signal that ended it."""
        return self._ask({"wait": process})

    def run(self, *words: object, **options: Any) -> int:
        """Both."""
        return self.wait(self.start(*words, **options))

    @property
    def output(self) -> str:
        """What the last one wrote."""
        return self.log.read_text()

    def close(self) -> None:
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.kill()  # its own end would take seconds
        self._zygote.wait(timeout=60)
        self._zygote.stdin.close()
        self._zygote.stdout.close()


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    processes = Processes(tmp_path_factory.mktemp("cli"))
    yield processes
    processes.close()
