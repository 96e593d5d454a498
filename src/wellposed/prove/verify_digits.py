r"""Arrays of numbers with 120 binary digits after the point, in integers.

A number is sum_j limb_j 2^(20 (1 - j)), j = 0, ..., 7, with limbs of at most 2^19 in absolute
value: it is below 2^39, and a multiple of 2^-120. Sums are exact. A product of matrices is made of
products of limbs, each an integer below 2^53 in every partial sum, so that float64 has them without
rounding, whatever the order of summation; only what is below 2^-120 is lost, at most `LOST` per
entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import RunError

_BITS, _LIMBS, _WHOLE = 20, 8, 2
#: Binary digits after the point.
PLACES = _BITS * (_LIMBS - _WHOLE)
#: What one operation, or the conversion of a float64 number, can lose per entry.
LOST = 2.0 ** (1 - PLACES)
#: Levels below the last limb that a product computes before it cuts them off.
_GUARD = 2
#: Most terms of a sum in a product: 2^19 2^19 2^15 = 2^53.
_MOST_TERMS = 1 << 15

Floats = NDArray[np.float64]
Limbs = NDArray[np.int64]


class Digits:
    """An array of these numbers; `limbs` has the shape of the array after a first axis of 8."""

    def __init__(self, limbs: Limbs) -> None:
        self.limbs = limbs

    @classmethod
    def of(cls, values: Any) -> Digits:
        """The nearest numbers to those of a float64 array."""
        rest = np.array(values, dtype=np.float64)
        if rest.size and not np.abs(rest).max() < 2.0 ** (_BITS * _WHOLE - 2):
            raise RunError(f"A number of this proof is {np.abs(rest).max():.3g} in size; the check reads numbers below 2.7e11.")
        limbs = np.empty((_LIMBS, *rest.shape), dtype=np.int64)
        for j in range(_LIMBS):
            unit = 2.0 ** (_BITS * (_WHOLE - 1 - j))
            digit = np.rint(rest / unit)
            limbs[j] = digit
            rest -= digit * unit  # exact: the rest has no more digits than before
        return cls(_carried(limbs))

    @classmethod
    def zeros(cls, *shape: int) -> Digits:
        """Zeros."""
        return cls(np.zeros((_LIMBS, *shape), dtype=np.int64))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.limbs.shape[1:]

    @property
    def T(self) -> Digits:
        """The transposed matrix."""
        return Digits(self.limbs.transpose(0, 2, 1))

    def as_row(self) -> Digits:
        """A vector as a matrix of one row."""
        return Digits(self.limbs[:, None, :])

    def as_column(self) -> Digits:
        """A vector as a matrix of one column."""
        return Digits(self.limbs[:, :, None])

    def floats(self) -> Floats:
        """Rounded to float64, with a relative error below 2^-50."""
        total = np.zeros(self.shape)
        for j in reversed(range(_LIMBS)):
            total += self.limbs[j] * 2.0 ** (_BITS * (_WHOLE - 1 - j))
        return total

    def integers(self) -> NDArray[np.object_]:
        """Times 2^120, as whole numbers without limit of size."""
        total = self.limbs[0].astype(object)
        for j in range(1, _LIMBS):
            total = total * (1 << _BITS) + self.limbs[j].astype(object)
        return np.asarray(total, dtype=object)

    @classmethod
    def from_integers(cls, values: NDArray[np.object_]) -> Digits:
        """The opposite of `integers`."""
        limbs = np.empty((_LIMBS, *values.shape), dtype=np.int64)
        rest = values
        for j in reversed(range(_LIMBS)):
            limbs[j] = (rest % (1 << _BITS)).astype(np.int64) if j else rest.astype(np.int64)
            rest = rest // (1 << _BITS)
        return cls(_carried(limbs))

    def signs(self) -> NDArray[np.int64]:
        """-1, 0 or 1 for each number: the sign of its first limb that is not 0."""
        found = np.zeros(self.shape, dtype=np.int64)
        for j in range(_LIMBS):
            found = np.where(found == 0, np.sign(self.limbs[j]), found)
        return found

    def where(self, kept: Any) -> Digits:
        """These where `kept`, else 0."""
        return Digits(self.limbs * np.asarray(kept, dtype=np.int64))

    def __add__(self, other: Digits) -> Digits:
        return Digits(_carried(self.limbs + other.limbs))

    def __sub__(self, other: Digits) -> Digits:
        return Digits(_carried(self.limbs - other.limbs))

    def __mul__(self, other: Digits) -> Digits:
        """Entry by entry, as arrays of NumPy; loses at most `LOST` per entry."""
        return _product(self, other, lambda a, b: a * b)

    def __matmul__(self, other: Digits) -> Digits:
        """Of two matrices, or of a matrix and a vector; loses at most `LOST` per entry."""
        if self.shape[-1] > _MOST_TERMS:
            raise RunError(f"A sum of this proof has {self.shape[-1]} terms; the check adds up at most {_MOST_TERMS}.")

        def times(a: Any, b: Any) -> Any:
            return (a.astype(np.float64) @ b.astype(np.float64)).astype(np.int64)

        return _product(self, other, times)


def _product(A: Digits, B: Digits, times: Any) -> Digits:
    """Sums of products of limbs, level by level of their weight 2^(20 (2 - a - b))."""
    first = [a for a in range(_LIMBS) if A.limbs[a].any()]
    second = [b for b in range(_LIMBS) if B.limbs[b].any()]
    levels: Limbs | None = None
    for a in first:
        for b in second:
            if a + b < _WHOLE - 1 + _LIMBS + _GUARD:
                found = times(A.limbs[a], B.limbs[b])
                if levels is None:
                    levels = np.zeros((_WHOLE - 1 + _LIMBS + _GUARD, *found.shape), dtype=np.int64)
                levels[a + b] += found
    if levels is None:
        return Digits.zeros(*times(A.limbs[0], B.limbs[0]).shape)
    levels = _carried(levels, keep=_WHOLE - 1)
    return Digits(levels[_WHOLE - 1 : _WHOLE - 1 + _LIMBS])


def _carried(limbs: Limbs, keep: int = 0) -> Limbs:
    """The same numbers with limbs of at most 2^19; the first `keep` limbs must become 0."""
    half = 1 << (_BITS - 1)
    for j in range(len(limbs) - 1, 0, -1):
        carry = (limbs[j] + half) >> _BITS
        limbs[j] -= carry << _BITS
        limbs[j - 1] += carry
    if limbs[:keep].any() or (limbs.size and np.abs(limbs[keep]).max() > half):
        raise RunError("A number of this proof grows beyond 2.7e11 in the check, which ends here.")
    return limbs
