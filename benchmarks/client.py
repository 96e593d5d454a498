"""The near end of worker.py: starts a worker, asks it questions, notices when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
THREADS = 2


class WorkerFailed(Exception):
    """The worker is gone, or could not do what it was asked; the message is the reason."""


class Client:
    """A worker process for one module of contenders, run by the interpreter `python`."""

    def __init__(self, module: str, python: str, log: Path, *, timeout: float = 300.0) -> None:
        self.module, self.log, self.timeout = module, log, timeout
        environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONUNBUFFERED="1")
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[variable] = str(THREADS)
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [python, str(HERE / "worker.py"), module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self.contenders: list[str] = self._receive()["contenders"]

    def ask(self, **request: Any) -> dict[str, Any]:
        try:
            self.requests.write((json.dumps(request) + "\n").encode())
            self.requests.flush()
        except BrokenPipeError:
            raise WorkerFailed(self._last_words()) from None
        return self._receive()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.requests.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def _receive(self) -> dict[str, Any]:
        with selectors.DefaultSelector() as selector:
            selector.register(self.replies, selectors.EVENT_READ)
            if not selector.select(self.timeout):
                self.process.kill()
                raise WorkerFailed(f"no answer in {self.timeout:.0f} s")
        line = self.replies.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerFailed(reply["error"])
        return reply

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return f"exit code {self.process.wait(timeout=10)}" + (f", {lines[-1][:160]}" if lines else "")
