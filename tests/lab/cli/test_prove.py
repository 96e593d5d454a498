"""`wellposed prove`, `wellposed verify`, `wellposed train --prove`, and the page of a proof."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wellposed as wp
from wellposed_lab.cli.commands import app
from wellposed_lab.runs import proving
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import prepare

SMALL = "data: {n: 3, n_test: 10}\nmodel: {width: 60}\nrun: {epochs: 1, certify_every: 0, tensorboard: false}\n"


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(SMALL)


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("proofs")
    (folder / "c.yaml").write_text(SMALL)
    result = call("prove", folder / "c.yaml", "-q", "--json", "--out", folder / "proof")
    assert result.exit_code == 0, result.output
    return folder / "proof", json.loads(result.stdout)


@pytest.mark.parametrize("command", ["prove", "verify"])
def test_help_has_an_example(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0 and f"wellposed {command} runs/first" in result.stdout


def test_a_proof_is_saved_and_verified(proved: tuple[Path, Any]) -> None:
    folder, said = proved
    assert said["verdict"] == "proved" and said["folder"] == str(folder) and said["sizes"]["n"] == 3
    assert 0 < said["rate"] < 1 and said["num_steps"] > 0
    result = call("verify", folder, "-q", "--steps", 3, "--seed", 0)
    assert result.exit_code == 0 and "VERIFIED: plain gradient descent" in result.stdout
    listed = json.loads(call("verify", folder, "-q", "--steps", 3, "--json").stdout)
    assert listed["ok"] and all(check["ok"] for check in listed["checks"]) and len(listed["steps"]) >= 3


def test_a_network_without_a_proof_gets_its_reason_and_no_folder() -> None:
    result = call("prove", "c.yaml", "-q", "--set", "model.name=monotone", "--out", "proof")
    assert result.exit_code == 1 and "undecided" in result.stdout.lower() and "nothing was saved" in result.stdout
    assert not Path("proof").exists()
    result = call("prove", "c.yaml", "-q", "--step-size", "1e9", "--out", "proof")
    assert result.exit_code == 2 and not Path("proof").exists()


def test_a_changed_proof_is_rejected(proved: tuple[Path, Any], tmp_path: Path) -> None:
    for name in proving.FILES:
        (tmp_path / name).write_bytes((proved[0] / name).read_bytes())
    text = (tmp_path / "proof.json").read_text()
    (tmp_path / "proof.json").write_text(text.replace('"rate": 0.', '"rate": 0.1'))
    result = call("verify", tmp_path, "-q")
    assert result.exit_code == 1 and "REJECTED" in result.stdout and "FAILS" in result.stdout


def test_the_page_of_a_proof_has_loss_delta_masks_and_tail(proved: tuple[Path, Any], tmp_path: Path) -> None:
    result = call("report", proved[0], "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert result.exit_code == 0
    for part in ("Loss of descent, computed and proved", "mask ratio", "Tail from step", "kappa", "not about the optimizer"):
        assert part in page


def test_the_page_of_a_proof_has_its_numbers(proved: tuple[Path, Any], tmp_path: Path) -> None:
    """Those of proof.json: of the first and the last step, the largest delta, the least ratio, and the whole tail."""
    assert call("report", proved[0], "--out", tmp_path / "page.html").exit_code == 0
    page, document = (tmp_path / "page.html").read_text(), json.loads((proved[0] / "proof.json").read_text())
    K, loss, delta, tail = document["num_steps"], document["steps"]["loss"], document["delta"], document["tail"]
    least = min(ratio for ratio in document["steps"]["mask_ratio"] if ratio is not None)
    for said in (
        f"loss {loss[0]:.4g} at step 0, {loss[-1]:.4g} at step {K - 1}.",
        f"loss at most {tail['residual'] ** 2 / 2:.4g} from step {K} on, falling.",
        f"grows to {delta:.4g}.",
        f"is at least {least:.4g}, and must stay above 1.",
    ):
        assert said in page, said
    rows = dict(re.findall(r"<th[^>]*>(\w+)</th>\s*<td[^>]*>([^<]*)</td>", page[page.index(f"Tail from step {K}") :]))
    expected = {name: f"{value:.4g}" for name, value in {**tail, "radius": document["radius"]}.items() if value is not None}
    assert {name: rows.get(name) for name in expected} == expected


def test_training_ends_with_a_proof_about_the_same_start(tmp_path: Path) -> None:
    result = call("train", "c.yaml", "-q", "--prove", 2, "--out", "run")
    assert result.exit_code == 0 and "PROVED: plain gradient descent" in result.stdout and "not of adam" in result.stdout
    page = Path("run/report.html").read_text()
    assert "Tail from step" in page and "wellposed verify run/proof" in page
    proof = wp.Proof.load("run/proof")
    problem = prepare(read_config(Path("run")))
    assert proof._problem is not None
    index = proving.different_samples(problem.model, problem.parts.train[0], 2)
    assert (proof._problem.start["W"] == problem.model.W).all()
    assert (proof._problem.X == problem.parts.train[0][index]).all() and len(index) == 2
    again = call("prove", "run", "-q")
    assert again.exit_code == 3 and "run/proof holds a proof already" in again.stderr
    assert call("verify", "run", "-q", "--steps", 2).exit_code == 0


def test_an_undecided_proof_can_be_continued(proved: tuple[Path, Any]) -> None:
    result = call("prove", "c.yaml", "-q", "--max-steps", 5, "--out", "p")
    assert result.exit_code == 1 and "UNDECIDED at step 5" in result.stdout
    assert call("verify", "p", "-q").exit_code == 1
    result = call("prove", "c.yaml", "-q", "--json", "--out", "p", "--resume")
    assert result.exit_code == 0, result.output
    again = json.loads(result.stdout)
    assert again["num_steps"] == proved[1]["num_steps"] and again["rate"] == pytest.approx(proved[1]["rate"], rel=1e-2)
    assert call("verify", "p", "-q", "--steps", 3).exit_code == 0


def test_ctrl_c_saves_the_steps_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting:
        def __init__(self, folder: Path) -> None: ...

        def on_step(self, state: Any) -> None:
            if state.step == 4:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(proving, "_Saver", Interrupting)
        result = call("prove", "c.yaml", "-q", "--out", "p")
    assert result.exit_code == 130 and "--resume" in result.stderr
    assert wp.Proof.load("p").num_steps == 4
    assert call("prove", "c.yaml", "-q", "--out", "p", "--resume").exit_code == 0


def test_a_long_proof_is_saved_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr(proving, "SAVE_EVERY", -1.0)
    monkeypatch.setattr(wp.Proof, "save", lambda proof, folder: saved.append(proof.num_steps))
    assert call("prove", "c.yaml", "-q", "--max-steps", 3, "--out", "p").exit_code == 1
    assert saved[:3] == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["verify", "nowhere"], 2, "nowhere is not a folder"),
        (["verify", "."], 3, "holds no proof.json"),
        (["prove", "nowhere"], 2, "nowhere does not exist"),
        (["prove", "c.yaml", "--samples", "50"], 2, "there are 3 training samples"),
        (["prove", "c.yaml", "--samples", "0"], 2, "there are 3 training samples"),
        (["prove", "c.yaml", "--step-size", "ten"], 2, "--step-size must be auto or a positive number"),
        (["prove", "c.yaml", "--step-size", "10"], 2, "above 2/lambda_max"),
        (["prove", "c.yaml", "--max-steps", "0"], 2, "max_steps"),
        (["prove", "c.yaml", "--resume"], 2, "name the folder with --out"),
        (["prove", "c.yaml", "--resume", "--out", "p"], 3, "holds no proof to continue"),
        (["prove", "c.yaml", "--set", "run.dtype=float32"], 2, "set run.dtype=float64"),
        (["prove", "c.yaml", "--set", "model.name=dense"], 2, "there are proofs for"),
        (["prove", "c.yaml", "--set", "model.width=2"], 2, "at least as many units as samples"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], code: int, says: str) -> None:
    result = call(*words)
    assert result.exit_code == code and says in result.stderr, result.output
    assert result.stdout == "" and "Traceback" not in result.output and result.stderr.count("error:") == 1


def test_samples_that_are_nearly_equal_are_not_chosen_together() -> None:
    generator = torch.Generator().manual_seed(0)
    model = wp.GaussianDEQ(4, 60, generator=generator, dtype=torch.float64)
    X = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    X = torch.cat([X, X + 1e-3])
    X = X / X.norm(dim=1, keepdim=True)
    index = proving.different_samples(model, X, 3)
    assert sorted(int(i) % 3 for i in index) == [0, 1, 2] and list(index) == sorted(index)
