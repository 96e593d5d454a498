"""`wp.prove`: its arguments, its answer, interruption, and what is stored."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from exact_descent import problem
from wellposed import _progress
from wellposed.prove._network import read_network
from wellposed.prove._run import ProofRun, predicted_end
from wellposed.prove.format import sha256

TINY = (2, 16, 4, 1)


@pytest.fixture(scope="module")
def proved() -> tuple[Any, torch.Tensor, torch.Tensor, wp.Proof]:
    model, X, y = problem(*TINY)
    return model, X, y, wp.prove(model, X, y)


def test_a_proof_has_the_fields_that_are_promised(proved: Any) -> None:
    model, X, y, proof = proved
    assert proof.verdict is wp.Verdict.CERTIFIED and proof.reason == ""
    assert 0 < proof.delta < 1e-12 and 0 < proof.rate < 1 and 0 < proof.radius <= proof.distance
    assert proof.num_steps == len(proof.steps["loss"]) == len(proof.steps["delta"]) - 1
    assert proof.steps["delta"][0] == 0.0 and proof.steps["delta"][-1] == proof.delta
    K = torch.linalg.eigvalsh(wp.tangent_kernel(model, X))
    assert proof.step_size == pytest.approx(1 / float(K[-1]), rel=1e-9)
    with pytest.raises(TypeError, match="compare"):
        bool(proof)


def test_a_proof_can_be_printed(proved: Any) -> None:
    text = str(proved[3])
    assert text.startswith("proved: plain gradient descent from this start ends at zero loss")
    assert "IEEE float64" in text and f"{proved[3].num_steps}, exact descent within" in text


def test_the_stored_numbers_satisfy_the_inequalities(proved: Any) -> None:
    steps, eta = proved[3].steps, proved[3].step_size
    for k in range(proved[3].num_steps):
        assert (steps["expansion"][k] is None) == (k == 0)  # delta is 0 there
        assert steps["delta"][k + 1] >= (1 + eta * (steps["expansion"][k] or 0.0)) * steps["delta"][k] + steps["error"][k]
        assert eta * steps["jacobian"][k] ** 2 <= 2 and steps["omega"][k] + steps["delta"][k] < 1
        assert steps["mask_ratio"][k] is None or steps["mask_ratio"][k] > 1


def test_descent_does_what_is_proved(proved: Any) -> None:
    """Plain descent of the library from the same start: the losses are below the proved bounds, and near them at first."""
    _, X, y, proof = proved
    model, X, y = problem(*TINY)
    steps = proof.num_steps + 30
    history = wp.descend(model, X, y, step_size=proof.step_size, steps=steps)
    for k, loss in enumerate(history.loss):
        assert loss <= proof.loss_bound(k) * (1 + 1e-6) + 1e-20
    assert history.loss[3] == pytest.approx(proof.loss_bound(3), rel=2e-5)  # |r| has six digits, rounded up
    assert history.loss[proof.num_steps] == pytest.approx(proof.loss, rel=1e-5)


def test_the_model_is_not_changed() -> None:
    model, X, y = problem(*TINY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wp.prove(model, X, y, max_steps=3)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_saved_proof_is_read_back(proved: Any, tmp_path: Path) -> None:
    proof = proved[3]
    proof.save(tmp_path / "proof")
    read = wp.Proof.load(tmp_path / "proof")
    assert str(read) == str(proof) and read.steps == proof.steps and read.tail == proof.tail
    record = json.loads((tmp_path / "proof" / "proof.json").read_text())
    assert record["format"] == "wellposed-proof" and record["verdict"] == "proved"
    assert record["hashes"]["X"] == sha256(proved[1]) and record["hashes"]["start.W"] == sha256(proved[0].W)
    assert {0, proof.num_steps} <= set(record["checkpoints"]) and len(record["checkpoints"]) >= min(20, proof.num_steps)


@pytest.mark.parametrize("kind", ["relu", "tanh"])
def test_defaults_of_the_caller_do_not_matter(kind: str) -> None:
    model, X, y = problem(*TINY, kind=kind)
    expected = wp.prove(model, X, y)
    for dtype in (torch.float16, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                proof = wp.prove(model, X, y)
        finally:
            torch.set_default_dtype(torch.float32)
        assert (proof.verdict, proof.num_steps, proof.delta) == (expected.verdict, expected.num_steps, expected.delta)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"format": "other"}',
        '{"format": "wellposed-proof", "version": 1}',
        '{"format": "wellposed-proof", "version": 2}',
    ],
)
def test_a_damaged_proof_ends_in_one_sentence(proved: Any, tmp_path: Path, content: str) -> None:
    proved[3].save(tmp_path)
    (tmp_path / "proof.json").write_text(content)
    with pytest.raises(wp.RunError):
        wp.Proof.load(tmp_path)
    with pytest.raises(wp.RunError, match="no stored proof"):
        wp.Proof.load(tmp_path / "nothing")


class Stop:
    def __init__(self, at: int, how: str = "answer") -> None:
        self.at, self.how, self.seen = at, how, []

    def on_step(self, state: Any) -> bool:
        self.seen.append((state.step, state.loss, state.delta))
        if state.step == self.at and self.how == "interrupt":
            raise KeyboardInterrupt
        return state.step == self.at


@pytest.mark.parametrize("how", ["answer", "interrupt"])
@pytest.mark.parametrize("stored", [False, True])
def test_a_stopped_proof_is_continued(proved: Any, tmp_path: Path, how: str, stored: bool) -> None:
    model, X, y, whole = proved
    stop = Stop(5, how)
    part = wp.prove(model, X, y, callbacks=[stop])
    assert part.verdict is wp.Verdict.UNDECIDED and part.num_steps == 5
    assert ("interrupted" if how == "interrupt" else "callback") in part.reason and "UNDECIDED at step 5" in str(part)
    assert [step for step, *_ in stop.seen] == [1, 2, 3, 4, 5]
    with pytest.raises(wp.InvalidArgument, match="from 0 to 4"):
        part.loss_bound(6)
    rest = wp.prove(model, X, y, resume=part.save(tmp_path) if stored else part)
    assert rest.verdict is wp.Verdict.CERTIFIED and rest.steps["delta"][:6] == part.steps["delta"]
    assert rest.num_steps == whole.num_steps and rest.loss == pytest.approx(whole.loss, rel=1e-9)


def test_a_proof_of_another_problem_is_not_continued(proved: Any) -> None:
    model, X, y, _ = proved
    part = wp.prove(model, X, y, max_steps=2)
    assert part.reason == "max_steps = 2 steps did not suffice"
    with pytest.raises(wp.InvalidArgument, match="another network, another start or other data"):
        wp.prove(model, X, y + 1, resume=part)
    with pytest.raises(wp.InvalidArgument, match="leave step_size out"):
        wp.prove(model, X, y, resume=part, step_size=1e-3)


def test_a_pre_activation_of_zero_ends_undecided() -> None:
    """Whatever the slope there is said to be, nothing is claimed."""
    model, X, y = problem(2, 12, 4, 5)
    with torch.no_grad():
        model.W[0] = 0.0
        model.U[0] = 0.0
    proof = wp.prove(model, X, y, max_steps=30)
    assert proof.verdict is wp.Verdict.UNDECIDED and proof.num_steps == 0 and "may be 0" in proof.reason


@pytest.mark.parametrize(("delta", "steps"), [(1e-13, 0), (1e-18, 1)])
def test_a_planted_pre_activation_of_1e_13_ends_undecided_if_delta_can_change_its_sign(delta: float, steps: int) -> None:
    model, X, y = problem(2, 12, 4, 5)
    for _ in range(8):  # its own equilibrium moves with it
        V = _pre_activation(wp.prove(model, X, y, max_steps=1), 0, 0)
        with torch.no_grad():
            model.U[0] -= X[0] * (V - 1e-13) / X[0].square().sum()
    assert _pre_activation(wp.prove(model, X, y, max_steps=1), 0, 0) == pytest.approx(1e-13, rel=0.05)
    found = read_network(model, X, y)
    assert found is not None
    run = ProofRun(*found, "auto")
    run._now = replace(run._now, delta=delta)
    run.advance(10)
    assert run.step == steps and (run.result is None or "may be 0" in run.result)


def _pre_activation(proof: wp.Proof, i: int, u: int) -> float:
    """Of the first point."""
    kept, X = proof._checkpoints[0], proof._problem.X
    return float(kept["R"][u] @ kept["Z"][i] + kept["U"][u] @ X[i])


def bad(**changes: Any) -> Any:
    model, X, y = problem(3, 8, 4, 0, variance=0.01)
    return changes.get("model", lambda m: m)(model), changes.get("X", lambda a: a)(X), changes.get("y", lambda a: a)(y)


def duplicated(X: torch.Tensor) -> torch.Tensor:
    return torch.stack([X[0], X[1], X[0]])


def multiple(factor: float) -> Any:
    return lambda X: torch.stack([X[0], X[1], factor * X[0]])


def activated(activation: Any) -> Any:
    return lambda model: wp.GaussianDEQ(4, 8, activation=activation, weight_variance=0.01, dtype=torch.float64)


def frozen(model: Any) -> Any:
    model.U.requires_grad_(False)
    return model


def infinite(model: Any) -> Any:
    with torch.no_grad():
        model.a[0] = torch.inf
    return model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda m: m.float()}, "is torch.float32, and a proof follows descent in float64"),
        ({"X": lambda X: X.float()}, "X is torch.float32"),
        ({"X": duplicated}, "rows 0 and 2 of X are equal"),
        ({"X": lambda X: X * torch.tensor([[1.0], [0.0], [1.0]])}, "row 1 of X is 0"),
        ({"X": multiple(4.0)}, "rows 0 and 2 of X are multiples of each other"),
        ({"X": multiple(-1.0), "model": activated(wp.nn.Tanh())}, "rows 0 and 2 of X are opposite"),
        (
            {"X": lambda X: X.repeat(3, 1) * torch.arange(1, 10.0).double()[:, None], "y": lambda y: y.repeat(3)},
            "9 samples and 8 units",
        ),
        ({"X": lambda X: X * torch.nan}, "X has NaN"),
        ({"X": lambda X: X.to_sparse()}, "X is stored as torch.sparse_coo; a proof needs a dense tensor"),
        ({"y": lambda y: y.to("meta")}, "y is on the device 'meta'"),
        ({"model": lambda m: m.to("meta")}, "W of GaussianDEQ is on the device 'meta'"),
        ({"y": lambda y: y / 0}, "y has NaN or infinite"),
        ({"y": lambda y: y[:2]}, "one target for each of the 3 rows"),
        ({"X": lambda X: X[:, :2]}, r"shape \(n, 4\)"),
        ({"model": frozen}, "U of GaussianDEQ is held fixed"),
        ({"model": infinite}, "a of GaussianDEQ has NaN or infinite"),
        ({"model": lambda m: wp.GaussianDEQ(4, 8, activation=wp.nn.Sigmoid(), dtype=torch.float64)}, "ReLU, Tanh and Softplus"),
        ({"model": lambda m: wp.GaussianDEQ(4, 8, weight_variance=9.0, dtype=torch.float64)}, "must be below 1"),
    ],
)
def test_bad_input_ends_in_one_sentence_before_the_first_step(changes: Any, message: str) -> None:
    with pytest.raises(wp.InvalidArgument, match=message):
        wp.prove(*bad(**changes))


@pytest.mark.parametrize(
    ("factor", "activation"),
    [(-1.0, None), (4.0 + 1e-9, wp.nn.Tanh()), (4.0, wp.nn.Tanh()), (-1.0, wp.nn.Softplus()), (0.0, wp.nn.Softplus())],
    ids=str,
)
def test_rows_on_one_line_are_followed_where_their_predictions_are_independent(factor: float, activation: Any) -> None:
    model, X, y = bad(X=multiple(factor), model=activated(activation))
    assert wp.prove(model, X, y, max_steps=1).num_steps == 1


def test_a_multiple_is_compared_without_rounding() -> None:
    model, X, y = bad(X=multiple(1.0))
    X[2] = 4 * X[0]
    X[2, 3] *= 1 + 2**-52
    assert wp.prove(model, X, y, max_steps=1).num_steps == 1


def test_other_objects_are_refused() -> None:
    model, X, y = bad()
    with pytest.raises(wp.InvalidType, match="there are proofs for GaussianDEQ"):
        wp.prove(torch.nn.Linear(4, 1), X, y)
    with pytest.raises(wp.InvalidType, match="must be a network"):
        wp.prove("model", X, y)
    with pytest.raises(wp.InvalidType, match="X must be a tensor"):
        wp.prove(model, X.numpy(), y)
    with pytest.raises(wp.InvalidArgument, match="'auto' or a positive number"):
        wp.prove(model, X, y, step_size="largest")
    with pytest.raises(wp.InvalidArgument, match="positive finite"):
        wp.prove(model, X, y, step_size=-1.0)
    with pytest.raises(wp.InvalidArgument, match="above 2/lambda_max"):
        wp.prove(model, X, y, step_size=1e3)
    with pytest.raises(wp.InvalidType, match="on_step"):
        wp.prove(model, X, y, callbacks=[print])
    with pytest.raises(wp.InvalidType, match="activation of GaussianDEQ"):
        wp.GaussianDEQ(3, 4, activation=torch.tanh)


def test_certificates_for_relu_refuse_other_activations() -> None:
    model, X, y = problem(2, 8, 3, 0, kind="tanh")
    with pytest.raises(wp.InvalidArgument, match="are for ReLU; this one has Tanh"):
        wp.certify(model, X, y)


@pytest.mark.parametrize("kind", ["tanh", "softplus", "skip", "implicit_only"])
def test_other_networks_are_proved(kind: str, tmp_path: Path) -> None:
    sizes = {"implicit_only": (2, 120, 10, 0), "skip": (3, 60, 10, 0)}.get(kind, (3, 60, 10, 0))
    model, X, y = problem(*sizes, kind=kind)
    proof = wp.prove(model, X, y, max_steps=400)
    assert proof.verdict is wp.Verdict.CERTIFIED, proof
    read = wp.Proof.load(proof.save(tmp_path))
    assert str(read) == str(proof)
    for part, value in proof._at.parts().items():  # to the last bit, also what a scale made of the start
        assert torch.equal(read._at.parts()[part].high, value.high) and torch.equal(read._at.parts()[part].low, value.low)
    start = read_network(model, X, y)[1].R
    assert torch.equal(read._checkpoints[0]["R"], start.high)
    assert torch.equal(read._checkpoints[0].get("R.low", torch.zeros(1)).double().expand_as(start.low), start.low)
    history = wp.descend(model, X, y, step_size=proof.step_size, steps=proof.num_steps)
    assert history.loss[-1] == pytest.approx(proof.loss, rel=1e-5)


def test_a_monotone_network_is_undecided_with_the_number_that_fails() -> None:
    _, X, y = problem(*TINY)
    model = wp.MonotoneDEQ(4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proof = wp.prove(model, X, y)
    assert proof.verdict is wp.Verdict.UNDECIDED and proof.num_steps == 0 and "1 + eta M" in proof.reason
    assert "UNDECIDED at step 0" in str(proof)


def test_a_network_that_computes_something_else_is_refused() -> None:
    model, X, y = problem(*TINY)
    model.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(wp.InvalidArgument, match="hook"):
        wp.prove(model, X, y)


def test_the_end_is_predicted_from_the_last_attempts() -> None:
    def attempt(step: int, shortfall: float | None) -> dict[str, Any]:
        return {"step": step, "loss": 1.0, "reason": "", "shortfall": shortfall}

    assert predicted_end([]) is None and predicted_end([attempt(3, 2.0)]) is None
    assert predicted_end([attempt(0, 8.0), attempt(10, None), attempt(20, 2.0)]) == 30
    assert predicted_end([attempt(0, 2.0), attempt(10, 4.0)]) is None


@pytest.mark.parametrize("kind", ["relu", "tanh"])
def test_progress_is_a_table_of_80_columns(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", -1.0)
    proof = wp.prove(*problem(*TINY, kind=kind), progress=True)
    first, second, names, *rows = capsys.readouterr().err.splitlines()
    assert first.startswith("prove: plain descent is followed") and "within delta" in second
    assert ("mask ratio" in names) is ("mask ratios" in second) is (kind == "relu")
    assert len(rows) == proof.num_steps + 1 and max(map(len, [first, second, names, *rows])) <= 80
    ends = [match.end() for match in re.finditer(r"step|loss|delta|least mask ratio|predicted end", names)]
    for k, row in enumerate(rows[:-1]):
        assert [row[: ends[0]].strip(), row[ends[0] : ends[1]].strip()] == [str(k + 1), f"{proof_loss(proof, k + 1):.1e}"]
        assert all(row[end - 1] != " " and (end == len(row) or row[end] == " ") for end in ends)
    ratios = [ratio for ratio in proof.steps["mask_ratio"] if ratio is not None]
    assert kind == "tanh" or f"{min(ratios):.1e}" in rows[-1]


def proof_loss(proof: wp.Proof, k: int) -> float:
    return proof.loss if k == proof.num_steps else proof.steps["loss"][k]


class Snapshots:
    def on_step(self, state: Any) -> None:
        state.proof()  # keeps a checkpoint


def test_the_first_and_the_last_checkpoint_are_always_kept(proved: Any, tmp_path: Path) -> None:
    model, X, y, whole = proved
    proof = wp.prove(model, X, y, step_size=whole.step_size / 8, max_steps=101, callbacks=[Snapshots()])
    assert proof.num_steps > 41 and {0, proof.num_steps} <= set(proof._checkpoints) and 20 <= len(proof._checkpoints) <= 41
    assert wp.Proof.load(proof.save(tmp_path)).num_steps == proof.num_steps


def test_every_checkpoint_but_the_last_has_the_step_that_begins_there(proved: Any) -> None:
    """Also the one at which a proof was stopped, between two that it keeps anyway."""
    model, X, y, whole = proved
    eta = whole.step_size / 16
    part = wp.prove(model, X, y, step_size=eta, max_steps=43)
    rest = wp.prove(model, X, y, max_steps=47, resume=part)
    for proof in (part, rest):
        made = [step for step, kept in proof._checkpoints.items() if {"Z", "P", "r"} <= set(kept)]
        assert made == [step for step in proof._checkpoints if step < proof.num_steps]
        assert set(proof._checkpoints[proof.num_steps]) <= {"R", "U", "w", "R.low", "U.low", "w.low"}
    assert 43 in rest._checkpoints and 42 in rest._checkpoints and 41 not in rest._checkpoints
