"""Every number of a stored proof is checked: each one is changed alone, and the proof is rejected.

A change keeps the checksums right, as a forger would. What may be changed unnoticed is not part of
the proof: `NOT_PROVED`, and last digits of points that a proof holds for as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wellposed as wp
from exact_descent import problem
from stored_proofs import Stored
from wellposed.errors import WellposedError
from wellposed.prove.verify_reading import NOT_PROVED

#: n, m, d and the seed of problems with short proofs.
PROBLEMS = {
    "relu": (2, 12, 3, 10),
    "relu with g": (4, 40, 3, 2),
    "tanh": (2, 6, 3, 8),
    "softplus": (2, 6, 3, 8),
    "skip": (2, 12, 3, 10),
    "implicit_only": (2, 12, 3, 2),
}
QUICK = ("tanh", "skip")


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the stored proof of a problem."""
    known: dict[str, Stored] = {}

    def stored(kind: str) -> Stored:
        if kind not in known:
            proof = wp.prove(*problem(*PROBLEMS[kind], kind=kind.split()[0]), max_steps=50)
            assert proof.verdict is wp.Verdict.CERTIFIED, proof
            folder = proof.save(tmp_path_factory.mktemp("honest"))
            assert accepted(folder)
            known[kind] = Stored(folder)
        return known[kind]

    return stored


def accepted(folder: Path) -> bool:
    try:
        return wp.verify(folder, steps=100, seed=0).ok
    except WellposedError:
        return False


def changes(value: float) -> Iterator[float]:
    """Sign, size, and a little more or less; of a whole number its neighbours."""
    if isinstance(value, int):
        yield from {value + 1, value - 1, 2 * value, -value} - {value}
    else:
        yield from {-value, 2 * value, value / 2, value + 1, value * (1 + 1e-6), value * (1 - 1e-6)} - {value}
        if value == 0:
            yield from (1e-6, -1e-6)


def survivors(stored: Stored, paths: list[tuple[Any, ...]], folder: Path) -> list[Any]:
    """The changes of numbers of proof.json that are accepted."""
    found = []
    for path in paths:
        for value in changes(stored.at(path)):
            changed = stored.copy()
            changed.put(path, value)
            if accepted(changed.write(folder, sealed=True)):
                found.append((path, stored.at(path), value))
    return found


def test_what_is_not_proved_is_named(genuine: Any, tmp_path: Path) -> None:
    stored = genuine("tanh").copy()
    assert NOT_PROVED == ("seconds", "attempts")
    stored.document["seconds"], stored.document["attempts"] = -1.0, [{"step": -5}]
    found = wp.verify(stored.write(tmp_path / "other", sealed=True), steps=1, seed=0)
    assert found.ok and "Not part of the proof, and not checked: seconds, attempts." in str(found)
    assert "-1" not in found.claim
    for place in ((), ("tail",), ("steps",), ("sizes",), ("scales",), ("activation",)):
        stored = genuine("tanh").copy()
        stored.at(place)["other"] = 1.0
        with pytest.raises(WellposedError, match="'other', which a proof does not have"):
            wp.verify(stored.write(tmp_path / "more", sealed=True))
    last = f"checkpoint.{stored.document['num_steps']}"
    for name in ("other", "start.V", "checkpoint.0.V", "checkpoint.99.R", "checkpoint.0.Q", f"{last}.Z", f"{last}.r.low"):
        stored = genuine("tanh").copy()
        stored.tensors[name] = np.ones(2)
        with pytest.raises(WellposedError, match="which this proof does not have"):
            wp.verify(stored.write(tmp_path / "more", sealed=True))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in PROBLEMS if kind != "relu with g"]
)
def test_no_number_of_the_document_can_be_changed(kind: str, genuine: Any, tmp_path: Path) -> None:
    paths = [path for path in genuine(kind).numbers() if path[0] not in NOT_PROVED]
    assert len(paths) > 30
    assert survivors(genuine(kind), paths, tmp_path) == []


@pytest.mark.parametrize("names", [("tail", "radius", "rate"), pytest.param(("steps", "delta"), marks=pytest.mark.slow)])
def test_no_number_of_a_tail_with_g_can_be_changed(names: tuple[str, ...], genuine: Any, tmp_path: Path) -> None:
    stored = genuine("relu with g")
    assert stored.document["tail"]["g"] is not None
    paths = [path for path in stored.numbers() if path[0] in names]
    assert survivors(stored, paths[:: 1 if "tail" in names else 10], tmp_path) == []


def moved(stored: Stored, name: str, entry: int, change: float) -> float:
    """How far a change of an entry of a checkpoint moves its point, or the step that is made there:
    the gradient is linear in each of Z, P, Q, C and r."""
    _, step, part = name.split(".", 2)
    part, scales, tensors = part.removesuffix(".low"), stored.document["scales"], stored.tensors
    if part in scales:
        return abs(change) / scales[part] if scales[part] else np.inf
    value = {key: tensors[f"checkpoint.{step}.{key}"] for key in "ZPQCr" if f"checkpoint.{step}.{key}" in tensors}
    one = np.zeros_like(value[part])
    one.reshape(-1)[entry] = change
    linear = {"R": ("P", "Z"), "U": ("Q" if "Q" in value else "P", "X"), "w": ("", "Z"), "v": ("", "C")}
    sizes = []
    for matrix, factors in linear.items():
        if part in (*factors, "r") and scales.get(matrix, 0) > 0:
            left, right, r = (
                one if key == part else {"X": tensors["X"], "": np.ones((len(one), 1))}.get(key, value.get(key))
                for key in (*factors, "r")
            )
            sizes.append(scales[matrix] * np.linalg.norm((left * r[:, None]).T @ right))
    return float(stored.document["step_size"] * np.linalg.norm(sizes))


def tensor_survivors(stored: Stored, chosen: Iterator[tuple[str, int, float]], folder: Path) -> list[Any]:
    """Changes of entries that are accepted, but for those by which a point or its step moves less
    than eps: that is another computed point, and the proof holds for it too."""
    found = []
    error, K = stored.document["steps"]["error"], stored.document["num_steps"]
    for name, entry, change in chosen:
        changed = stored.copy()
        values = changed.tensors[name].reshape(-1)
        before = float(values[entry])
        values[entry] += change
        change = float(values[entry]) - before
        if change and accepted(changed.write(folder, sealed=True)):
            step = int(name.split(".")[1]) if name.startswith("checkpoint") else 0
            point = name.removesuffix(".low").rpartition(".")[2] in stored.document["scales"]
            least = error[step - 1] if point and step else 0.0 if point else error[min(step, K - 1)]
            if not name.startswith("checkpoint") or moved(stored, name, entry, change) > least:
                found.append((name, entry, change))
    return found


def test_no_tensor_can_be_changed(genuine: Any, tmp_path: Path) -> None:
    """The largest entry of each, in the sixth digit; that of a low part also by 1."""
    stored = genuine("tanh")

    def chosen() -> Iterator[tuple[str, int, float]]:
        for name, values in stored.tensors.items():
            entry = int(np.abs(values).argmax())
            yield name, entry, 1e-6 * float(values.reshape(-1)[entry])
            if name.endswith(".low"):
                yield name, entry, 1.0

    assert tensor_survivors(stored, chosen(), tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["tanh", "relu", "skip"])
def test_no_entry_of_a_tensor_can_be_changed(kind: str, genuine: Any, tmp_path: Path) -> None:
    """Each entry of those that a family trains or reads, by one of several changes."""
    stored, draw = genuine(kind), random.Random(0)

    def chosen() -> Iterator[tuple[str, int, float]]:
        for name, values in stored.tensors.items():
            largest = float(np.abs(values).max())
            for entry, value in enumerate(values.reshape(-1).tolist()):
                sizes = [1e-6 * largest, -1e-6 * largest, largest, 1.0]
                yield name, entry, draw.choice(sizes + ([-2 * value, value] if abs(value) > 1e-3 * largest else []))

    assert tensor_survivors(stored, chosen(), tmp_path) == []
