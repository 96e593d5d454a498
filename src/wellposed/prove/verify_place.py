"""The data and the points of a stored proof, in digits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wellposed.prove.verify_digits import LOST, Digits, Floats
from wellposed.prove.verify_reading import StoredProof

#: Room for the rounding of a few float64 operations on bounds.
ROOM = 1.0 + 1e-12


def row_norms(A: Floats) -> Floats:
    """(n,) upper bounds of the norms of the rows."""
    return np.asarray(np.sqrt(np.square(A).sum(axis=1)) * ROOM)


def norm(A: Floats) -> float:
    """Upper bound of the Euclidean norm of all entries."""
    return math.sqrt(float(np.square(A).sum())) * ROOM


class Data:
    """X and y in digits.

    Attributes:
        XX: (n, n) X X^T. x_norms: (n,) norms of the rows of X.
        lost: Of a row of X by the conversion.
    """

    def __init__(self, proof: StoredProof) -> None:
        X = proof.tensor("X", proof.n, proof.d)
        self.X, self.y = Digits.of(X), Digits.of(proof.tensor("y", proof.n))
        self.XX = (self.X @ self.X.T).floats()
        self.x_norms, self.lost = row_norms(X), math.sqrt(proof.d) * LOST


@dataclass
class Place:
    """Parameters in digits. v is None where c is not read out."""

    R: Digits
    U: Digits
    w: Digits
    v: Digits | None = None

    def parts(self) -> dict[str, Digits]:
        """By name."""
        found = {"R": self.R, "U": self.U, "w": self.w}
        return found if self.v is None else found | {"v": self.v}


def stored_place(proof: StoredProof, k: int) -> Place:
    """The computed point k of a checkpoint; point 0 is the start itself."""
    return checkpoint_place(proof, k) if k else start_place(proof)


def stored_values(proof: StoredProof, k: int, name: str, *shape: int) -> Digits:
    """A tensor of checkpoint k, with its low part if it has one."""
    found = Digits.of(proof.tensor(f"checkpoint.{k}.{name}", *shape))
    low = f"checkpoint.{k}.{name}.low"
    return found + Digits.of(proof.tensor(low, *shape)) if proof.has(low) else found


def checkpoint_place(proof: StoredProof, k: int) -> Place:
    """Checkpoint k; parts that are not trained are those of checkpoint 0."""
    return Place(
        **{part: stored_values(proof, k if proof.scales[part] > 0 else 0, part, *_shape(proof, part)) for part in proof.parts}
    )


def start_place(proof: StoredProof) -> Place:
    """The start of the network, scaled: R = k A and so on."""
    found: dict[str, Digits] = {}
    for part, (name, transposed) in proof.parts.items():
        shape = _shape(proof, part)
        values = proof.tensor(f"start.{name}", *(shape[::-1] if transposed else shape))
        if proof.family == "implicit_only" and part == "w":
            values = values / math.sqrt(proof.m)
        found[part] = Digits.of(values.T if transposed else values)
        if proof.scales[part] not in (0.0, 1.0):
            found[part] = found[part] * Digits.of(np.full(shape, proof.scales[part]))
    return Place(**found)


def _shape(proof: StoredProof, part: str) -> tuple[int, ...]:
    return {"R": (proof.m, proof.m), "U": (proof.m, proof.d)}.get(part, (proof.m,))


def distance_between(proof: StoredProof, one: Place, other: Place) -> float:
    """|theta - theta'|, from above."""
    first, second = one.parts(), other.parts()
    trained = [part for part in proof.parts if proof.scales[part] > 0]
    return math.hypot(*(norm((first[part] - second[part]).floats()) / proof.scales[part] for part in trained)) * ROOM


def entries(proof: StoredProof) -> int:
    """How many numbers a point has."""
    return proof.m * (proof.m + proof.d + 2)
