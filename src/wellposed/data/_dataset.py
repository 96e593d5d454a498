"""What loading gives: tensors, and what was done to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Dataset"]


@dataclass(frozen=True)
class Dataset:
    """Samples in rows, and the story of where they come from.

    `X, y = load(...)` unpacks the training part.

    Attributes:
        name: Of the data set.
        X: (n, ...) training inputs. y: (n, ...) training targets.
        X_test: (n_test, ...) test inputs. y_test: (n_test, ...) their targets; both None if there is no test part.
        steps: What was done, in order, one sentence each.
    """

    name: str
    X: Tensor
    y: Tensor
    X_test: Tensor | None
    y_test: Tensor | None
    steps: tuple[str, ...]

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.X, self.y))

    def __str__(self) -> str:
        test = "no test part" if self.X_test is None else f"{len(self.X_test)} to test"
        lines = [f"{self.name}: {len(self.X)} samples of shape {tuple(self.X.shape[1:])}, {test}"]
        return "\n".join([*lines, *(f"- {step}" for step in self.steps)])
