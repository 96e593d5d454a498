"""A forged tail that denies the switches in its ball is rejected."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from exact_descent import problem
from stored_proofs import Stored
from wellposed.prove.seal import seal

ETA = 0.01


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """A proof that needs g and g0."""
    folder = wp.prove(*problem(4, 40, 3, 2), max_steps=50).save(tmp_path_factory.mktemp("honest"))
    assert wp.verify(folder, steps=1, seed=0).ok
    found = Stored(folder)
    assert found.document["tail"]["g"] is not None
    return found


def quotient(x: float, s: float, L: float, f: float, e0: float, g: float, g0: float) -> float:
    """Of `format`."""
    A1, A2 = 1 - ETA * L * L / 2 - ETA * s * s / 2, ETA * L * L * s * s / 2
    h, E = math.sqrt(max(0.0, (s * s + L * L) * (x * x - s * s) + s**4)), f * x + e0
    return (A1 * x * x + A2 - min(f * f, g * x * x + g0) - ETA * h * E - ETA * E * E / 2) / (x + f)


def six(x: float) -> float:
    """With six digits, which bounds in a proof have."""
    return float(f"{x:.5e}")


@pytest.mark.parametrize(
    ("f", "e0", "share"), [(0.0, 0.0, "none"), (0.6, 0.4, "none"), (0.6, 0.4, "all"), (0.6, 0.4, "of the largest")]
)
def test_a_tail_without_the_switch_of_its_only_unit_is_rejected(f: float, e0: float, share: str, tmp_path: Path) -> None:
    """One unit, which descent switches off: the loss ends at 0.02, and all other inequalities of the forged tail hold. The
    second forger admits the size of the jump, and says that no residual feels it (g = g0 = 0). The third admits that too
    (g0 = f^2), and says that J stays as large as it is. To the fourth only the largest N feels a jump (g s^2 + g0 = 0)."""
    model = wp.GaussianDEQ(1, 1, dtype=torch.float64)
    W, U, a, x = 0.01, 0.05, 0.1, 10.0
    with torch.no_grad():
        model.W.fill_(W), model.U.fill_(U), model.a.fill_(a)
    X, y = torch.tensor([[x]]).double(), torch.tensor([-0.2]).double()
    file = wp.prove(model, X, y, step_size=ETA, max_steps=1).save(tmp_path) / "proof.json"
    document: dict[str, Any] = json.loads(file.read_text())
    squares, residuals, points = [], [], []
    for _ in range(4):  # plain descent
        z, q = U * x / (1 - W), a / (1 - W)
        r, J = a * z + 0.2, (z, q * z, q * x)
        squares.append(sum(t * t for t in J)), residuals.append(r), points.append((W, U, a))
        a, W, U = a - ETA * r * J[0], W - ETA * r * J[1], U - ETA * r * J[2]
    s, L, delta = six(math.sqrt(min(squares[1:])) - 1e-5), six(math.sqrt(max(squares)) + 1e-5), document["delta"]
    e = six((residuals[1] + L * delta) * (1 + 1e-5))
    g = six(0.25 / (L * L - s * s) * 1.0001) if share == "of the largest" else 0.0
    g0 = {"none": 0.0, "all": six(f * f), "of the largest": six(-g * s * s * (1 - 1e-5))}[share]
    kappa = min(quotient(s + (L - s) * j / 40000, s, L, f, e0, g, g0) for j in range(40001)) * (1 - 1e-7)
    radius = e / kappa * (1 + 1e-9)
    document |= {"verdict": "proved", "reason": "", "radius": radius, "rate": 1 - ETA * kappa * (s + f) * (1 - 1e-9)}
    document["distance"] = six((math.dist(points[1], points[0]) + delta + radius) * (1 + 1e-5))
    document["tail"] = {"residual": e, "s": s, "L": L, "f": f, "e0": e0, "g": g, "g0": g0, "kappa": kappa}
    document["tail"] |= {"switches": 1, "omega": six(points[1][0] + 1e-6)}
    document["seal"] = seal(document)
    file.write_text(json.dumps(document))
    found = wp.verify(tmp_path)
    assert not found.ok
    assert [check.name for check in found.checks if not check.ok] == ["tail"] and "a switch needs" in str(found)


@pytest.mark.parametrize(
    ("name", "value"), [("g", 0.5), ("g", 0.9), ("g0", 0.5), ("g0", 1.1), ("e0", 0.5), ("e0", 0.9), ("switches", 2 / 3)]
)
def test_a_number_of_a_tail_that_the_others_contradict_is_rejected(
    name: str, value: float, stored: Stored, tmp_path: Path
) -> None:
    """kappa is the least quotient that follows from g, g0 and e0, and switches are counted again."""
    changed = stored.copy()
    number = changed.document["tail"][name] * value
    changed.document["tail"][name] = round(number) if name == "switches" else six(number)
    found = wp.verify(changed.write(tmp_path, sealed=True), steps=1, seed=0)
    assert [check.name for check in found.checks if not check.ok] == ["tail"]
