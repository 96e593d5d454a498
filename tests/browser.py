"""A headless Chromium, spoken to over two pipes: no network, no further packages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def find() -> str | None:
    """The program, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a running Chromium (Chrome DevTools Protocol).

    Attributes:
        events: What it told without being asked, in order: {"method": ..., "params": ...}.
    """

    def __init__(self, read: int, write: int, log: Path) -> None:
        self._log = log
        self._read, self._write, self._rest, self._count = read, write, b"", 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, path: Path) -> None:
        """Loads a file and waits until its scripts ran."""
        self.visit(path.resolve().as_uri())

    def visit(self, url: str) -> None:
        """Loads an address and waits until its scripts ran."""
        self.events.clear()
        self.ask("Page.navigate", url=url)
        end = time.monotonic() + SECONDS
        while self.value("document.readyState") != "complete":
            assert time.monotonic() < end, "the page did not load"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, promises awaited."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def problems(self) -> list[str]:
        """Errors and warnings of the console, and exceptions, since the page was opened."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(json.dumps(params["args"]))
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        asked = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    def picture(self) -> bytes:
        """PNG of the whole page."""
        return base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, f"the browser ended: {self._log.read_text(errors='replace')[-2000:]}"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextmanager
def running(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with an empty page; it is ended with the context.

    Args:
        program: From `find`.
        profile: An empty folder for its files.
    """
    to_browser, from_browser = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-extensions", "--disable-background-networking", "--remote-debugging-pipe"]
    options += [f"--user-data-dir={profile}", "about:blank"]
    # above 9, so that neither is 3 or 4 already, which is where the browser reads and writes
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser[0], from_browser[1])]
    plumbing = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
    log = profile / "stderr.txt"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", plumbing, *map(str, ends), program, *options],
            pass_fds=ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    for end in (*ends, to_browser[0], from_browser[1]):
        os.close(end)
    try:
        browser = Browser(from_browser[0], to_browser[1], log)
        target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        browser.session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            browser.ask(f"{domain}.enable")
        yield browser
    finally:
        os.close(to_browser[1])
        os.close(from_browser[0])
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
