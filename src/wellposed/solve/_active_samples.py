"""The samples that are still being solved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Rows"]


@dataclass
class Rows:
    """Active samples: where they stand, and the best point each has seen."""

    index: Tensor  # (rows,) which samples of the whole batch
    z: Tensor
    fz: Tensor
    evaluations: Tensor  # (rows,)
    first_r: Tensor  # (rows,) |f(z) - z| and |f(z)| at the very start
    first_s: Tensor
    worst_r: Tensor  # (rows,) the largest |f(z) - z| seen
    best_z: Tensor
    best_r: Tensor  # (rows,) |f(z) - z| and |f(z)| there
    best_s: Tensor
    best_f: Tensor | None  # f(best_z), if it is kept

    def take(self, rows: Tensor) -> Rows:
        taken: dict[int, Any] = {id(None): None}  # what is the same tensor before is the same tensor after, copied once
        parts: dict[str, Any] = {}
        for name, value in vars(self).items():
            if id(value) not in taken:
                taken[id(value)] = value.index_select(0, rows)
            parts[name] = taken[id(value)]
        return Rows(**parts)

    @staticmethod
    def cat(parts: list[Rows]) -> Rows:
        columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
        whole: dict[str, Any] = {name: None if v[0] is None else torch.cat(v) for name, v in columns.items()}
        return Rows(**whole)
