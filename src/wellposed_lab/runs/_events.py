"""TensorBoard events, if it is installed."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from wellposed._io import writing
from wellposed.errors import RunError, how_to_install
from wellposed_lab.runs.run import Run

__all__ = ["Events"]


class Events:
    """Writes the numbers of every row to `tensorboard/` of a run, as a context.

    Args:
        run: Where; None writes nothing.
        enabled: Whether to write at all.
        after: The epoch that a resumed run goes on from: what was written about later ones does not count.
    """

    def __init__(self, run: Run | None, *, enabled: bool, after: int) -> None:
        self._run, self._after = run if enabled else None, after
        self._writer: Any = None
        self._hook = threading.excepthook

    def __enter__(self) -> Events:
        self._hook, threading.excepthook = threading.excepthook, self._on_thread_error
        try:
            self._writer = self._opened()
        except BaseException:
            self._give_back_hook()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._writer is not None:
                # after another error a full disk is not news
                with contextlib.suppress(RunError) if kind is not None else contextlib.nullcontext(), self._writing():
                    self._writer.close()
        finally:
            self._give_back_hook()

    def _opened(self) -> Any:
        """A writer; None if there cannot be one, which the log says."""
        if self._run is None:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._run.log(f"No events are written: TensorBoard is not installed; {how_to_install('runs')}.")
            return None
        folder = str(self._run.folder / "tensorboard")
        if not _is_utf8(folder):
            self._run.log("No events are written: TensorBoard needs a run directory whose name is UTF-8.")
            return None
        with self._writing():
            return SummaryWriter(folder, purge_step=self._after + 1 if self._after else None)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        assert self._run is not None
        return writing(self._run.folder / "tensorboard")

    def _on_thread_error(self, args: Any) -> None:
        """TensorBoard writes in a thread, whose errors come back by the next call: they are not printed as well."""
        if not (_is_writer(args.thread) and isinstance(args.exc_value, OSError)):
            self._hook(args)

    def _give_back_hook(self) -> None:
        for thread in threading.enumerate():
            if _is_writer(thread) and getattr(thread, "exception", None) is not None:
                thread.join(timeout=5)  # it is about to end, by the hook
        threading.excepthook = self._hook

    def add(self, row: dict[str, Any]) -> None:
        """One scalar for every number of the row."""
        if self._writer is None:
            return
        with self._writing():
            for name, value in row.items():
                if name != "epoch" and isinstance(value, (int, float)):
                    part, _, measure = name.partition("_")
                    tag = f"{measure}/{part}" if part in ("train", "validation", "test") else name
                    self._writer.add_scalar(tag, float(value), row["epoch"])
            self._writer.flush()


def _is_writer(thread: object) -> bool:
    return type(thread).__module__.startswith("tensorboard.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
