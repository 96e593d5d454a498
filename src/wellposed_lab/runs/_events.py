"""TensorBoard events, if it is installed."""

from __future__ import annotations

from typing import Any

from wellposed.errors import how_to_install
from wellposed_lab.runs.run import Run

__all__ = ["Events"]


class Events:
    """Writes the numbers of every row to `tensorboard/` of a run.

    Args:
        run: Where; None writes nothing.
        enabled: Whether to write at all.
        after: The epoch that a resumed run goes on from: what was written about later ones does not count.
    """

    def __init__(self, run: Run | None, *, enabled: bool, after: int) -> None:
        self._writer: Any = None
        if run is None or not enabled:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            run.log(f"No events are written: TensorBoard is not installed; {how_to_install('runs')}.")
            return
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=after + 1 if after else None)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, row: dict[str, Any]) -> None:
        """One scalar for every number of the row."""
        if self._writer is None:
            return
        for name, value in row.items():
            if name != "epoch" and isinstance(value, (int, float)):
                part, _, measure = name.partition("_")
                tag = f"{measure}/{part}" if part in ("train", "validation", "test") else name
                self._writer.add_scalar(tag, float(value), row["epoch"])
        self._writer.flush()
