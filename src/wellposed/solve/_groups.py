"""Rows in groups, such as the nodes of several graphs: each group is one sample of a solve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.solve._whole_batch import RegroupedMap
from wellposed.solve.map import AbstractMap


@dataclass(frozen=True)
class Groups:
    """Which rows belong together.

    To a solver a group is one row: its rows one after another, then zeros up to the size of the
    largest group, which stay zero and add nothing to a norm or product.

    Attributes:
        places: (rows,) the place of each row among (groups * largest) ones.
        count: Number of groups. largest: Rows of the largest group.
    """

    places: Tensor
    count: int
    largest: int

    @classmethod
    def of(cls, groups: Any, rows: int, device: torch.device) -> Groups:
        """From the index of the group of each row, as the batch vector of PyTorch Geometric."""
        if not isinstance(groups, Tensor) or groups.dtype not in (torch.int64, torch.int32):
            seen = groups.dtype if isinstance(groups, Tensor) else type(groups).__name__
            raise InvalidType(f"groups must be a tensor of integers, the index of the group of each row; got {seen}.")
        if groups.shape != (rows,):
            raise InvalidArgument(f"groups must have one index for each of the {rows} rows; got shape {tuple(groups.shape)}.")
        index = groups.to(device=device, dtype=torch.int64)
        if rows == 0:
            return cls(index, 0, 0)
        steps = index.diff()
        if bool((index < 0).any()):
            raise InvalidArgument(f"groups must be numbered 0, 1, 2, ...; got the index {int(index.min())}.")
        if bool((steps < 0).any()):
            i = int((steps < 0).nonzero()[0])
            raise InvalidArgument(
                f"groups must be sorted, so that the rows of a group stand together; row {i + 1} is in group "
                f"{int(index[i + 1])}, after a row of group {int(index[i])}. Sort the rows by groups.argsort(stable=True)."
            )
        if int(index[0]) != 0 or bool((steps > 1).any()):
            missing = 0 if int(index[0]) != 0 else int(index[:-1][steps > 1][0]) + 1
            raise InvalidArgument(
                f"groups must be numbered 0, 1, 2, ... without gaps; group {missing} has no row. Number them by "
                "groups.unique(return_inverse=True)[1]."
            )
        return cls._from_sizes(index.bincount())

    @classmethod
    def _from_sizes(cls, sizes: Tensor) -> Groups:
        count, largest = sizes.shape[0], int(sizes.max())
        inside = torch.arange(largest, device=sizes.device) < sizes.unsqueeze(1)
        return cls(inside.flatten().nonzero().squeeze(1), count, largest)

    @property
    def of_rows(self) -> Tensor:
        """(rows,) the group of each row."""
        return self.places // max(self.largest, 1)

    def pad(self, rows: Tensor) -> Tensor:
        """(groups, largest * features) of (rows, features)."""
        if rows.shape[0] != self.count * self.largest:
            rows = rows.new_zeros(self.count * self.largest, rows.shape[1]).index_copy(0, self.places, rows)
        return rows.reshape(self.count, self.largest * rows.shape[1])

    def unpad(self, z: Tensor) -> Tensor:
        """(rows, features) of (groups, largest * features)."""
        if self.count == 0:
            return z.reshape(0, z.shape[1])
        z = z.reshape(self.count * self.largest, z.shape[1] // self.largest)
        return z if self.places.shape[0] == z.shape[0] else z.index_select(0, self.places)

    def take(self, groups: Tensor) -> tuple[Tensor, Groups]:
        """(rows,) those of some groups, in order; and these groups, numbered anew."""
        new = torch.full((self.count,), -1, dtype=torch.int64, device=groups.device)
        new[groups] = torch.arange(groups.shape[0], device=groups.device)
        of_rows = new[self.of_rows]
        rows = (of_rows >= 0).nonzero().squeeze(1)
        order = of_rows[rows].argsort(stable=True)
        rows = rows[order]
        places = of_rows[rows] * self.largest + self.places[rows] % self.largest
        return rows, Groups(places, groups.shape[0], self.largest)


class GroupedMap(RegroupedMap):
    """A map of rows as a map of groups; rows of different groups do not depend on each other.

    Args:
        f: The map of rows.
        groups: Which rows belong together.
    """

    def __init__(self, f: AbstractMap, groups: Groups) -> None:
        super().__init__(f)
        self.groups = groups

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self.groups.pad(self._f(self.groups.unpad(z)))

    def tracked(self, z: Tensor) -> Tensor:
        return self.groups.pad(self._f.tracked(self.groups.unpad(z)))

    def rows(self, z: Tensor) -> Tensor:
        return self._f.rows(self.groups.unpad(z))

    def inputs(self) -> tuple[Tensor, ...]:
        return self._f.inputs()

    def with_inputs(self, *inputs: Tensor) -> GroupedMap:
        return GroupedMap(self._f.with_inputs(*inputs), self.groups)

    def take(self, rows: Tensor) -> AbstractMap:
        nodes, groups = self.groups.take(rows)
        return GroupedMap(self._f.take(nodes), groups)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        pad, unpad = self.groups.pad, self.groups.unpad
        inner = self._f.jacobian(unpad(z))
        value = None if inner.value is None else pad(inner.value)
        return ProductJacobian(
            z, lambda u: pad(inner.mv(unpad(u))), lambda u: pad(inner.rmv(unpad(u))), value=value, setup=inner.setup
        )

    def forget(self) -> None:
        self._f.forget()
