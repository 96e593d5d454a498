"""`wp.verify` accepts true proofs and rejects changed ones."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from exact_descent import problem
from stored_proofs import NETWORKS, Stored, proved
from wellposed.errors import RunError, WellposedError
from wellposed.prove.seal import seal

PACKAGE = Path(wp.__file__).parent / "prove"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: proved(kind).save(tmp_path_factory.mktemp(kind)) for kind in NETWORKS}


def accepted(folder: Path, seed: int = 0) -> bool:
    try:
        return wp.verify(folder, steps=100, seed=seed).ok
    except WellposedError:
        return False


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_proof_is_verified(kind: str, folders: dict[str, Path]) -> None:
    proof = Stored(folders[kind]).document
    found = wp.verify(folders[kind], steps=4, seed=1)
    assert found.ok, found
    assert len(found.steps) >= 4 and set(found.steps) <= set(range(proof["num_steps"]))
    assert str(found).startswith("VERIFIED: plain gradient descent") and "FAILS" not in str(found)
    K = proof["num_steps"]
    assert found.tail_points[-3:] == [K, K + 1, K + 2] and set(found.tail_points[:-3]) <= set(proof["checkpoints"])
    assert f"constants of the tail were bounded again: {len(found.tail_points)}." in str(found)
    assert "They are about a whole ball, which these points sample." in str(found)
    assert {"delta", "expansion", "gradient", "digits", "tail", "hashes"} <= {check.name for check in found.checks}


def test_at_least_twenty_steps_are_computed_again(folders: dict[str, Path]) -> None:
    assert len(wp.verify(folders["implicit_only"]).steps) >= 20


def test_of_100_changes_of_one_number_100_are_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(100):
        changed = Stored(folders[draw.choice(list(NETWORKS))])
        if number % 4:
            path = draw.choice(changed.numbers())
            value = changed.at(path)
            factor = draw.choice([0.0, 0.5, 1 - 1e-12, 1 + 1e-12, 2.0, -1.0])
            changed.put(path, value + draw.choice([-1, 1]) if isinstance(value, int) or value == 0 else value * factor)
            what: Any = path
        else:
            what = draw.choice(sorted(changed.tensors))
            values = changed.tensors[what].reshape(-1)
            values[draw.randrange(values.size)] += draw.choice([1e-9, -1.0])
        assert not accepted(changed.write(tmp_path / "forged", sealed=False)), what


@pytest.mark.parametrize("digit", [0, 63])
def test_a_changed_hash_is_rejected(digit: int, folders: dict[str, Path], tmp_path: Path) -> None:
    for name in ("X", "start.W", "checkpoint.3.R"):
        changed = Stored(folders["relu"])
        text = changed.document["hashes"][name]
        other = "0" if text[digit] != "0" else "1"
        changed.document["hashes"][name] = text[:digit] + other + text[digit + 1 :]
        changed.document["seal"] = seal(changed.document)
        assert not accepted(changed.write(tmp_path / name, sealed=False))


#: Column of `steps`, and factors that make it false, or contradict the others.
COLUMNS = {
    "delta": (0.5, 1 - 1e-9, 1.001, 2.0),
    "loss": (0.5, 0.99, 1.01),
    "expansion": (0.01, 0.5, 1.5, 3.0),
    "jacobian": (0.5, 0.99, 1.01, 10.0),
    "omega": (0.5, 0.9, 1.1, 2.0),
    "error": (0.5, 0.999, 1.001, 2.0),
    "mask_ratio": (0.0, 0.5, 0.99, 1.01, 2.0),
}


@pytest.mark.parametrize("column", COLUMNS)
def test_a_forger_who_computes_the_checksums_is_rejected_in_steps(
    column: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    genuine = Stored(folders["relu"])
    for factor in COLUMNS[column]:
        changed, k = genuine.copy(), random.Random(factor).randrange(2, genuine.document["num_steps"])
        changed.document["steps"][column][k] *= factor
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), (column, k, factor)


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_larger_omega_is_rejected(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    changed = Stored(folders[kind]).copy()
    changed.document["steps"]["omega"][3] *= 1.1
    assert not accepted(changed.write(tmp_path / "forged", sealed=True))


def test_an_error_of_a_step_is_checked_between_checkpoints_too(folders: dict[str, Path], tmp_path: Path) -> None:
    genuine = Stored(folders["implicit_only"])
    between = [k for k in range(genuine.document["num_steps"]) if k not in genuine.document["checkpoints"]]
    for k in between[:: max(1, len(between) // 3)]:
        changed = genuine.copy()
        changed.document["steps"]["error"][k] = float(f"{1e-3 * changed.document['steps']['error'][k]:.5e}")
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), k


@pytest.mark.parametrize(("column", "factor"), [("loss", 2.0), ("loss", 0.5), ("residual", 0.9), ("residual", 1.5)])
def test_a_loss_and_its_residual_agree_at_steps_that_are_not_computed_again(
    column: str, factor: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    changed = Stored(folders["implicit_only"])
    drawn = wp.verify(folders["implicit_only"], steps=1, seed=0).steps
    k = next(k for k in range(changed.document["num_steps"]) if k not in drawn)
    changed.document["steps"][column][k] = float(f"{changed.document['steps'][column][k] * factor:.5e}")
    found = wp.verify(changed.write(tmp_path, sealed=True), steps=1, seed=0)
    assert [check.name for check in found.checks if not check.ok] == ["residual"]


def test_a_thousandth_of_all_errors_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    """A forger who makes every delta fit: only gradients and points in more digits contradict."""
    changed = Stored(folders["relu"])
    steps, eta = changed.document["steps"], changed.document["step_size"]
    steps["error"] = [float(f"{1e-3 * error:.5e}") for error in steps["error"]]
    for k, (M, error) in enumerate(zip(steps["expansion"], steps["error"], strict=True)):
        steps["delta"][k + 1] = ((1 + eta * (M or 0.0)) * steps["delta"][k] + error) * (1 + 1e-12)
    changed.document["delta"] = steps["delta"][-1]
    found = wp.verify(changed.write(tmp_path, sealed=True), steps=100, seed=0)
    assert {"gradient", "error"} <= {check.name for check in found.checks if not check.ok}


#: Scalars, and numbers of the tail.
SCALARS = {
    "relu": {
        ("step_size",): (0.5, 1 + 1e-9),
        ("delta",): (0.5, 2.0),
        ("loss",): (0.99, 1.01),
        ("radius",): (0.5,),
        ("rate",): (0.9, 1.01),
        ("distance",): (0.99, 1.01),
        ("scales", "R"): (0.5, 2.0),
        ("tail", "residual"): (0.99, 1.01),
        ("tail", "s"): (0.8, 1.2),
        ("tail", "L"): (0.8, 1.2),
        ("tail", "f"): (0.5, 1.5),
        ("tail", "e0"): (10.0,),
        ("tail", "kappa"): (0.9, 1.1),
        ("tail", "omega"): (0.5, 2.0),
    },
    "tanh": {
        ("rate",): (0.9, 1.01),
        ("radius",): (0.5, 2.0),
        ("tail", "residual"): (0.99, 1.01),
        ("tail", "s0"): (0.99, 1.01),
        ("tail", "L"): (0.9, 1.1),
        ("tail", "Lambda"): (0.1, 0.9, 1.1),
        ("tail", "c"): (0.9, 1.1),
        ("tail", "slope"): (0.9, 1.1),
        ("tail", "s1"): (0.9, 1.1),
    },
}


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in SCALARS.items() for path in paths], ids=str)
def test_a_forger_who_computes_the_checksums_is_rejected_in_scalars(
    kind: str, path: tuple[str, ...], folders: dict[str, Path], tmp_path: Path
) -> None:
    for factor in SCALARS[kind][path]:
        changed = Stored(folders[kind])
        changed.put(path, changed.at(path) * factor)
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), factor


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3, 5])
def test_of_100_changes_with_new_checksums_100_are_rejected(seed: int, folders: dict[str, Path], tmp_path: Path) -> None:
    """By a forger who knows the format: columns at any step, scalars, and tensors of any network."""
    draw, genuine = random.Random(seed), {kind: Stored(folder) for kind, folder in folders.items()}
    for number in range(100):
        kind = draw.choice(list(SCALARS) if number % 3 == 1 else list(NETWORKS))
        changed = genuine[kind].copy()
        if number % 3 == 0:
            smooth = kind in ("tanh", "softplus")
            column = draw.choice([name for name in COLUMNS if not (smooth and name == "mask_ratio")])
            k, factor = draw.randrange(2, changed.document["num_steps"]), draw.choice(COLUMNS[column])
            changed.document["steps"][column][k] *= factor
            what: Any = (kind, column, k, factor)
        elif number % 3 == 1:
            path = draw.choice(list(SCALARS[kind]))
            factor = draw.choice(SCALARS[kind][path])
            changed.put(path, changed.at(path) * factor)
            what = (kind, path, factor)
        else:
            name = draw.choice(sorted(name for name in changed.tensors if "low" not in name))
            values = changed.tensors[name].reshape(-1)
            i = int(abs(values).argmax())
            values[i] += draw.choice([1e-6, -1e-3, 1.0])
            what = (kind, name, i)
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), what


@pytest.mark.parametrize("kind", ["relu", "skip"])
def test_a_forger_who_computes_the_checksums_is_rejected_in_tensors(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    genuine = Stored(folders[kind])
    used = {"X", "y", *(f"start.{name}" for name in {"relu": "WUa", "skip": "AWuv"}[kind])}
    K = genuine.document["num_steps"]
    used |= {name for k in (0, K) for name in genuine.tensors if name.startswith(f"checkpoint.{k}.") and "low" not in name}
    for name in sorted(used):
        changed = genuine.copy()
        values = changed.tensors[name].reshape(-1)
        values[values.size // 2] += 1e-7
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), name


def test_a_proof_of_other_data_is_rejected(folders: dict[str, Path], tmp_path: Path) -> None:
    one, other = Stored(folders["relu"]), Stored(folders["tanh"])
    one.document["activation"] = other.document["activation"]
    assert not accepted(one.write(tmp_path / "forged", sealed=True))


def test_an_undecided_proof_is_not_ok(tmp_path: Path) -> None:
    model = NETWORKS["relu"](generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = torch.eye(2, 4, dtype=torch.float64)
    proof = wp.prove(model, X, torch.ones(2, dtype=torch.float64), max_steps=1)
    found = wp.verify(proof.save(tmp_path))
    assert not found.ok and "does not claim a proof" in str(found)


def test_what_is_not_a_proof_is_refused_in_one_sentence(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(wp.InvalidArgument, match="is not a folder"):
        wp.verify(tmp_path / "nothing")
    with pytest.raises(RunError, match="holds no proof.json"):
        wp.verify(tmp_path)
    for change, said in (
        (("format",), "format in proof.json is a dict"),
        (("family",), "family in proof.json .* known are"),
        (("sizes", "m"), "sizes.m"),
        (("steps", "delta"), "steps.delta"),
        (("tail", "s"), "tail.s"),
        (("checkpoints",), "checkpoints"),
        (("num_steps",), "num_steps"),
    ):
        changed = Stored(folders["relu"])
        changed.put(change, {"a": 10**400})
        with pytest.raises(RunError, match=said) as refusal:
            wp.verify(changed.write(tmp_path / "forged", sealed=True))
        assert str(refusal.value).count(". ") == 0
    for value in (float("nan"), float("inf"), -1.0, True, "1", None):
        changed = Stored(folders["relu"])
        changed.document["steps"]["error"][3] = value
        with pytest.raises(RunError, match="steps.error"):
            wp.verify(changed.write(tmp_path / "forged", sealed=True))


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (b"\xff" * 8, "impossible length"),
        (b"\x04" + 7 * b"\x00" + b"nope", "is not JSON"),
        (b"\x02" + 7 * b"\x00" + b"[]", "the header"),
        (b"", "impossible length"),
    ],
)
def test_a_damaged_tensor_file_is_refused(header: bytes, said: str, folders: dict[str, Path], tmp_path: Path) -> None:
    Stored(folders["relu"]).write(tmp_path, sealed=True)
    (tmp_path / "proof.safetensors").write_bytes(header)
    with pytest.raises(RunError, match=said):
        wp.verify(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [1 << 30, 1 << 30], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [1], "data_offsets": [8, 0]},
        {"dtype": "F64", "shape": [1], "data_offsets": [1 << 60, (1 << 60) + 8]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": 1, "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [1], "data_offsets": [0]},
        [],
    ],
)
def test_a_tensor_with_impossible_sizes_is_refused(entry: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    Stored(folders["relu"]).write(tmp_path, sealed=True)
    text = json.dumps({"X": entry}).encode()
    (tmp_path / "proof.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(RunError, match="cannot be checked"):
        wp.verify(tmp_path)


def test_a_missing_or_infinite_tensor_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    changed = Stored(folders["relu"])
    changed.tensors["X"][0, 0] = float("inf")
    with pytest.raises(RunError, match="X has entries that are not finite"):
        wp.verify(changed.write(tmp_path / "infinite", sealed=True))
    changed = Stored(folders["relu"])
    del changed.tensors["y"]
    with pytest.raises(RunError, match="has no y"):
        wp.verify(changed.write(tmp_path / "missing", sealed=True))
    changed = Stored(folders["relu"])
    changed.tensors["start.W"][0, 0] = 1e200
    with pytest.raises(RunError, match="numbers below"):
        wp.verify(changed.write(tmp_path / "large", sealed=True))


def test_nothing_numerical_is_shared_with_the_prover() -> None:
    allowed = {"wellposed.errors", "wellposed._reading", "wellposed._progress", "wellposed.prove.seal"}
    files = [*PACKAGE.glob("verify_*.py"), PACKAGE / "verification.py", PACKAGE / "seal.py"]
    assert len(files) > 8
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("wellposed"):
                assert module in allowed or module.startswith("wellposed.prove.verify_"), f"{path.name} imports {module}"
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [module or ""]
            assert not any(name.split(".")[0] in ("torch", "scipy") for name in names), path.name


@pytest.mark.parametrize("kind", ["relu", "softplus"])
@pytest.mark.parametrize("value", [0.0, 5e-324, 1e-300, 2e299])
def test_numbers_at_the_ends_of_float64_are_rejected_or_refused(
    kind: str, value: float, folders: dict[str, Path], tmp_path: Path
) -> None:
    genuine = Stored(folders[kind])
    for name in genuine.document["tail"]:
        changed = genuine.copy()
        changed.document["tail"][name] = value
        changed.document["radius"] = max(value, 1e-300)
        assert not accepted(changed.write(tmp_path / "forged", sealed=True)), name


@pytest.mark.parametrize(("kind", "weights", "labels"), [("tanh", 1e3, 1.0), ("softplus", 1e-11, 0.0)])
def test_saturated_networks_and_equilibria_near_0_are_verified(
    kind: str, weights: float, labels: float, tmp_path: Path
) -> None:
    model, X, y = problem(2, 3, 4, 2, kind=kind, variance=0.02)
    with torch.no_grad():
        model.U *= weights
    proof = wp.prove(model, X, labels * y)
    assert proof.verdict is wp.Verdict.CERTIFIED, proof
    found = wp.verify(proof.save(tmp_path), steps=100, seed=0)
    assert found.ok, found


@pytest.mark.parametrize("seed", [1, 4])
def test_numbers_below_the_digits_of_the_check_are_said_to_be(seed: int, tmp_path: Path) -> None:
    model, X, y = problem(1, 3, 2, seed, kind="skip")
    proof = wp.prove(model, 1e-12 * X, 1e-12 * y)
    assert proof.verdict is wp.Verdict.CERTIFIED, proof
    with pytest.raises(RunError, match="the check has numbers to .* only"):
        wp.verify(proof.save(tmp_path), steps=100, seed=0)


def test_the_first_point_is_the_start_to_the_last_digit(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its low part is what a scale leaves beyond float64; one entry is changed in the seventh digit of that."""
    changed = Stored(folders["skip"])
    low = changed.tensors["checkpoint.0.R.low"].reshape(-1)
    low[0] += 1e-7 * abs(low).max()
    found = wp.verify(changed.write(tmp_path, sealed=True), steps=1, seed=0)
    assert [check.name for check in found.checks if not check.ok] == ["start"]


@pytest.mark.parametrize("what", ["step_size", "tensor"])
def test_a_damaged_proof_is_not_loaded_to_be_continued(what: str, folders: dict[str, Path], tmp_path: Path) -> None:
    stored = Stored(folders["tanh"])
    if what == "step_size":
        stored.document["step_size"] *= 0.9
    else:
        stored.tensors[f"checkpoint.{stored.document['num_steps']}.w"][0] += 0.05
    with pytest.raises(wp.errors.RunError, match="was changed|is not the one"):
        wp.Proof.load(stored.write(tmp_path / "damaged", sealed=False))
