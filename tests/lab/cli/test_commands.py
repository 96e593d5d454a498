"""The commands, in this process: output, JSON, exit codes, sentences about mistakes."""

from __future__ import annotations

import importlib.machinery
import json
import math
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import wellposed as wp
from wellposed_lab.cli.commands import app
from wellposed_lab.cli.train import _certificate
from wellposed_lab.runs.config import RunConfig

SMALL = [
    "data.n=12", "data.n_test=10", "model.width=40", "run.epochs=2", "run.batch_size=5", "run.tensorboard=false",
]  # fmt: skip


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def changes(*more: str) -> list[str]:
    return [word for change in [*SMALL, *more] for word in ("--set", change)]


def failed(result: Any, code: int, *says: str) -> None:
    """One sentence on stderr, nothing on stdout, no traceback."""
    assert result.exit_code == code, result.output
    for part in says:
        assert part in result.stderr
    assert "Traceback" not in result.output and result.stdout == ""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    result = call("train", "-q", "--no-report", "--out", folder, *changes())
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("command", [[], ["train"], ["certify"], ["data"], ["data", "show"], ["data", "list"], ["bench"]])
def test_help_has_an_example(command: list[str]) -> None:
    result = call(*command, "--help")
    assert result.exit_code == 0
    assert ("Exit codes" if not command else f"wellposed {' '.join(command)}") in result.output


def test_version() -> None:
    assert call("--version").stdout.strip() == wp.__version__


def test_train_prints_a_table_and_the_directory(tmp_path: Path) -> None:
    result = call("train", "--no-report", *changes("run.certify_every=2"))
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert result.stdout.splitlines()[-1] == f"runs/{folder.name}"
    for words in ("gaussian on digits", "12 train, 10 test", "2 epochs, 6 steps", "certificate", "all found"):
        assert words in result.stdout
    assert folder.name.endswith("-gaussian-digits")
    assert (folder / "metrics.parquet").exists() and (folder / "summary.json").exists()
    certificate = json.loads((folder / "summary.json").read_text())["certificate"]
    saved = json.loads((folder / "certificates" / certificate.pop("file")).read_text())
    assert certificate.pop("as_recorded") is False
    assert certificate["dynamics"] and certificate.items() <= saved.items()


def test_train_says_what_is_proved_and_of_which_dynamics(tmp_path: Path) -> None:
    result = call("train", "-q", "--no-report", "--out", tmp_path / "run", *changes("run.certify_every=2"))
    assert result.exit_code == 0, result.output
    path = sorted((tmp_path / "run" / "certificates").glob("*.json"))[-1]
    certificate = wp.Certificate.from_json(path.read_text())
    assert certificate.certified and certificate.dynamics == "descent" and isinstance(certificate.step_size, dict)
    h = certificate.step_size["W"] / certificate.step_size["a"]
    said = " ".join(result.stdout.replace("│", " ").split())
    assert (
        h < 1e-3
        and f"with the licensed steps, read-out only (hidden steps are {h:.2g} times as large), ends at zero loss" in said
    )
    halved = re.search(r"\|r\| halves within ([\d,]+) steps", said)
    assert halved and certificate.rate ** int(halved[1].replace(",", "")) <= 0.5
    assert f"factor {certificate.rate:.10g} per step" in said and "not for adam" in said
    assert "plain gradient flow: UNDECIDED" in said


def test_the_certificate_of_a_run_in_words() -> None:
    verdict, certified = wp.Verdict.CERTIFIED, {"rate": 0.25, "rates": {"a": 1.0, "W": 0.5}}
    flow = _certificate(wp.Certificate("radius", verdict, dynamics="flow", **certified), 3, "sgd")
    assert "first at epoch 3: the gradient flow from here, all parameters, hidden speeds 0.5 of the read-out's" in flow
    assert "exp(-0.25 t)" in flow and "plain gradient flow: not tried" in flow
    plain = _certificate(wp.Certificate("radius", verdict, dynamics="flow", rate=0.25, rates={"A": 1.0}), 3, "sgd")
    assert "flow from here, all parameters with equal speeds, ends" in plain and plain.endswith("not for sgd")
    assert "plain" not in plain
    step = _certificate(wp.Certificate("ling2022", verdict, dynamics="descent", rate=0.5, step_size=0.1), 0, "adam")
    assert "with the licensed steps, all parameters with equal steps, ends at zero loss" in step and "0.5 per step" in step
    alone = _certificate(wp.Certificate("contraction", verdict), 0, "adam")
    assert alone.endswith("exactly one equilibrium for every input; nothing about training")
    assert "says why" in _certificate(wp.Certificate("radius", wp.Verdict.UNDECIDED), None, "adam")


def test_train_as_json(tmp_path: Path) -> None:
    result = call("train", "-q", "--no-report", "--json", "--out", tmp_path / "run", *changes("run.certify_every=0"))
    summary = json.loads(result.stdout)
    assert summary["run"] == str(tmp_path / "run") and summary["stop"] == "epochs" and summary["steps"] == 6
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert summary["last"]["train_loss"] == rows[-1]["train_loss"] and len(rows) == 3


def test_the_configuration_printed_is_the_configuration_used(tmp_path: Path) -> None:
    shown = call("train", "--show-config", "--set", "model.width=7")
    (tmp_path / "config.yaml").write_text(shown.stdout)
    again = call("train", tmp_path / "config.yaml", "--show-config")
    assert again.stdout == shown.stdout and yaml.safe_load(shown.stdout)["model"]["width"] == 7
    assert set(yaml.safe_load(shown.stdout)) == set(RunConfig.model_fields)
    assert not (tmp_path / "runs").exists()


def test_resume_of_a_finished_run_changes_nothing(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    result = call("train", "-q", "--no-report", "--resume", run)
    assert result.exit_code == 0 and "2 epochs, 6 steps" in result.stdout
    assert (run / "metrics.jsonl").read_bytes() == before
    assert result.stderr.startswith(f"Nothing was trained: {run} was finished before, after epoch 2 (all epochs are done).")
    assert f"wellposed train --resume {run} --set run.epochs=4" in result.stderr


def test_resume_with_fewer_epochs_than_are_done_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    constant = changes("run.certify_every=0", "optimizer.schedule=constant")
    assert call("train", "-q", "--no-report", "--out", folder, *constant).exit_code == 0
    result = call("train", "-q", "--no-report", "--resume", folder, "--set", "run.epochs=1")
    assert result.exit_code == 0 and "2 epochs, 6 steps" in result.stdout
    assert result.stderr == f"Nothing was trained: run.epochs=1 is less than the 2 epochs that {folder} has done.\n"


def test_a_run_that_stopped_early_is_not_offered_more_epochs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    early = changes("run.certify_every=0", "run.stop_loss=1e9")
    result = call("train", "-q", "--no-report", "--out", folder, *early)
    assert result.exit_code == 0 and "Nothing was trained" not in result.stderr
    result = call("train", "-q", "--no-report", "--resume", folder)
    assert "after epoch 0 (the training loss is small enough)." in result.stderr and "--set" not in result.stderr


def test_a_refused_extension_says_only_why(run: Path, tmp_path: Path) -> None:
    """The paragraph about the cosine schedule is for runs that train."""
    lost = tmp_path / "lost"
    shutil.copytree(run, lost)
    shutil.rmtree(lost / "checkpoints")
    result = call("train", "-q", "--no-report", "--resume", lost, "--set", "run.epochs=6")
    failed(result, 3, "no checkpoint to continue from")
    assert "cosine" not in result.stderr


def test_an_interrupted_report_names_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("wellposed_lab.report.write", interrupt)
    result = call("train", "-q", "--resume", run)
    assert result.exit_code == 130 and f"Continue with: wellposed train --resume {run}" in result.stderr


def test_resume_for_more_epochs_is_the_longer_run(tmp_path: Path) -> None:
    constant = "optimizer.schedule=constant"
    quiet = ["train", "-q", "--no-report"]
    assert call(*quiet, "--out", tmp_path / "a", *changes(constant, "run.certify_every=0")).exit_code == 0
    assert call(*quiet, "--resume", tmp_path / "a", "--set", "run.epochs=4").exit_code == 0
    assert call(*quiet, "--out", tmp_path / "b", *changes(constant, "run.certify_every=0", "run.epochs=4")).exit_code == 0
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == (tmp_path / "b" / "metrics.jsonl").read_bytes()
    assert yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())["run"]["epochs"] == 4


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["train", "--set", "optimizer.lrr=3"], ["Unknown key 'optimizer.lrr'", "Did you mean 'lr'?"]),
        (["train", "--set", "model.name=gausian"], ["Unknown model.name 'gausian'", "Did you mean 'gaussian'?"]),
        (["train", "--set", "model.gamma=0.2"], ["model.gamma is not for 'gaussian', which has weight_variance"]),
        (["train", "--set", "data.name=digit"], ["Unknown data set 'digit'", "Did you mean 'digits'?"]),
        (
            ["train", "--set", "data.classes=null", "--set", "model.name=skip"],
            ["is for regression", "dense, monotone_classifier", "data.classes=[0, 1]"],
        ),
        (
            ["train", "--set", "model.name=dense", "--set", "data.name=sphere"],
            ["is for classification", "targets of sphere are numbers", "choose model.name from gaussian"],
        ),
        (["train", "--set", "data.name=sphere", "--set", "data.classes=[0, 1]"], ["sphere has no classes to choose from"]),
        (["train", "--set", "model.width"], ["got 'model.width'. It has no value: write for example 'model.width=256'"]),
        (["train", "--set", "run.device=gpu"], ["run.device='gpu' cannot be used"]),
        (["train", "--set", "run.patience=3"], ["data.validation=0.2"]),
        (["train", "--set", "data.validation=0.001"], ["leaves a part empty"]),
        (["train", "nothing.yaml"], ["nothing.yaml cannot be read"]),
        (["train", "--resume", "nowhere"], ["nowhere does not exist"]),
        (["train", "a.yaml", "--resume", "b"], ["omit CONFIG and --out"]),
        (["certify", "nowhere"], ["nowhere does not exist"]),
        (["prove", "nothing.yaml"], ["nothing.yaml cannot be read", "wellposed train --show-config > nothing.yaml"]),
        (["prove", "nothing.yml", "--set", "model.width=8"], ["nothing.yml cannot be read"]),
        (["prove", "nowhere"], ["nowhere does not exist", "Start a run there"]),
        (["data", "show", "digts"], ["Did you mean 'digits'?"]),
        (["data", "show", "digits", "--classes", "a,b"], ["such as 0,1; got 'a,b'"]),
        (["data", "check", "minst"], ["Did you mean 'mnist'?"]),
    ],
)
def test_mistakes(words: list[str], says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    failed(call(*words), 2, *says)
    assert not (tmp_path / "runs").exists()  # found before a run directory is made


@pytest.mark.parametrize(
    ("words", "says"),
    [(["trian"], "Did you mean 'train'?"), (["train", "--sett", "a=b"], "--set"), (["data", "lst"], "Did you mean 'list'?")],
)
def test_commands_and_options_that_are_not(words: list[str], says: str) -> None:
    failed(call(*words), 2, says)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def last_tensors(folder: Path) -> bytes:
    return sorted((folder / "checkpoints").glob("step-*.safetensors"))[-1].read_bytes()


def test_extended_by_resume_it_is_the_longer_run_with_its_extra_evaluation(tmp_path: Path) -> None:
    """With the defaults of certificates: the last epoch of the shorter run has one, and is else the same."""
    step, quiet = ["optimizer.schedule=step", "optimizer.step_every=2"], ["train", "-q", "--no-report"]
    assert call(*quiet, "--out", tmp_path / "a", *changes(*step, "run.epochs=3")).exit_code == 0
    result = call(*quiet, "--resume", tmp_path / "a", "--set", "run.epochs=6")
    assert result.exit_code == 0 and "cosine" not in result.stderr
    assert call(*quiet, "--out", tmp_path / "b", *changes(*step, "run.epochs=6")).exit_code == 0
    longer, whole = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert whole[3].items() <= longer[3].items() and longer[3].keys() - whole[3].keys() >= {"certified"}
    assert longer[:3] + longer[4:] == whole[:3] + whole[4:]
    assert last_tensors(tmp_path / "a") == last_tensors(tmp_path / "b")


def test_a_cosine_run_is_extended_and_says_what_becomes_of_the_schedule(tmp_path: Path) -> None:
    quiet = ["train", "-q", "--no-report"]
    small = changes("run.certify_every=0", "run.epochs=3")
    assert call(*quiet, "--out", tmp_path / "a", *small).exit_code == 0
    before = rows_of(tmp_path / "a")
    result = call(*quiet, "--resume", tmp_path / "a", "--set", "run.epochs=6")
    assert result.exit_code == 0, result.output
    assert "up to epoch 3 it stays that of 3 epochs, after it that of 6" in result.stderr and "0.00025 there" in result.stderr
    rows = rows_of(tmp_path / "a")
    assert rows[:4] == before and len(rows) == 7
    # 3 batches an epoch; a row has the rate of its last step: step 3 * epoch - 1 of 9, and then of 18
    rates = [5e-4 * (1 + math.cos(math.pi * (3 * e - 1) / (9 if e <= 3 else 18))) / 2 for e in range(1, 7)]
    assert [row["learning_rate"] for row in rows[1:]] == pytest.approx(rates, rel=1e-14)
    # from any earlier checkpoint the same numbers follow: those of the longer run are dropped, and made again
    bits, lines = last_tensors(tmp_path / "a"), (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert call(*quiet, "--resume", tmp_path / "a").exit_code == 0
    for path in (tmp_path / "a" / "checkpoints").glob("step-000000018.*"):
        path.unlink()
    assert call(*quiet, "--resume", tmp_path / "a").exit_code == 0
    assert last_tensors(tmp_path / "a") == bits and (tmp_path / "a" / "metrics.jsonl").read_bytes() == lines
    failed(call(*quiet, "--resume", tmp_path / "a", "--set", "run.epochs=5"), 2, "can be raised and not lowered", "of 6 epochs")
    # a configuration that was edited by hand so that the numbers would be others is found out
    config = tmp_path / "a" / "config.yaml"
    config.write_text(config.read_text().replace("epochs: 6", "epochs: 9"))
    failed(call(*quiet, "--resume", tmp_path / "a"), 3, "was made with another configuration")


def test_resume_may_not_change_numbers(run: Path) -> None:
    failed(call("train", "--resume", run, "--set", "optimizer.lr=1"), 2, "may not change what they depend on", "config.yaml")


def test_a_run_is_not_overwritten(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    failed(call("train", "-q", "--out", run, *changes()), 2, "holds a run already", f"--resume {run}")
    assert (run / "metrics.jsonl").read_bytes() == before


def test_an_ill_posed_run_ends_with_one_sentence(tmp_path: Path) -> None:
    result = call("train", "-q", "--out", tmp_path / "run", *changes("optimizer.lr=10", "run.certify_every=0"))
    failed(result, 1, "the contraction factor is only known to be at most")
    assert "Ended by an error" in (tmp_path / "run" / "log.txt").read_text()


def test_debug_shows_the_error_itself() -> None:
    assert isinstance(call("--debug", "train", "nothing.yaml").exception, wp.InvalidArgument)


def test_an_unforeseen_error_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("wellposed_lab.cli.data.load", broken)
    failed(call("data", "show", "digits"), 4, "Unforeseen ZeroDivisionError: by zero", "--debug")


def test_certify_a_run_is_what_the_library_says(run: Path) -> None:
    from wellposed_lab.runs.training import load_run

    result = call("certify", run, "--theorem", "contraction", "--json")
    said = json.loads(result.stdout)
    assert said.pop("at") == "after epoch 2" and result.exit_code == 0
    _, problem, _ = load_run(run)
    assert wp.Certificate.from_dict(said) == wp.certify.contraction(problem.model)
    saved = sorted((run / "certificates").glob("*.json"))[-1]
    again = call("certify", run, "--json")
    assert json.loads(again.stdout)["verdict"] == json.loads(saved.read_text())["verdict"]
    assert again.exit_code == (0 if json.loads(saved.read_text())["verdict"] == "certified" else 1)


def test_certify_a_configuration_and_exit_codes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {n: 12}\nmodel: {width: 20}\n")
    result = call("certify", "c.yaml", "--theorem", "contraction")
    assert result.exit_code == 0 and "contraction: CERTIFIED" in result.stdout and "at the start" in result.stdout
    result = call("certify", "c.yaml", "--theorem", "ling2022")
    assert result.exit_code == 1 and "ling2022 (descent): VIOLATED" in result.stdout
    failed(call("certify", "c.yaml", "--theorem", "radus"), 2, "Did you mean 'radius'?")
    failed(call("certify", "c.yaml", "--at", "first"), 2, "--at must be last or best")


def test_data_list_and_show() -> None:
    names = {row["name"]: row for row in json.loads(call("data", "list", "--json").stdout)}
    assert names["digits"]["available"] and {"sphere", "mnist", "camvid"} <= names.keys()
    assert "digits" in call("data", "list").stdout
    facts = json.loads(call("data", "show", "digits", "--n", 20, "--classes", "3,8", "--json").stdout)
    assert facts["parts"]["train"] == {"X": [20, 64], "least": 0.0, "largest": 1.0, "targets": "-1, 1"}
    assert "targets -1, 1" in call("data", "show", "digits", "--n", 20, "--classes", "3,8").stdout


@pytest.mark.parametrize("words", [["data", "list"], ["certify", "c.yaml", "--theorem", "ling2022"], ["certify", "c.yaml"]])
def test_eighty_columns_are_enough(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.yaml").write_text("data: {n: 12}\nmodel: {width: 20}\n")
    wide = call(*words).stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = call(*words).stdout
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines()))
    assert "…" not in narrow
    if words[0] == "certify":
        assert set(wide.split()) - set(narrow.split()) <= {"hypothesis", "source", "value", "bound", "holds", "fails"} | {
            word for word in wide.split() if set(word) == {"-"}
        }


def table_of(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    rows = [(a, b, a - 2 * b, "north" if a > 0 else "south") for a, b in rng.standard_normal((40, 2))]
    lines = ["size,rooms,price,town", *(f"{a:.6f},{b:.6f},{c:.6f},{d}" for a, b, c, d in rows)]
    (folder / "houses.csv").write_text("\n".join(lines))
    return folder / "houses.csv"


def test_own_data_are_trained_certified_and_shown(tmp_path: Path) -> None:
    table_of(tmp_path)
    own = ["data.name=houses.csv", "data.target=price", "data.columns=size,rooms"]
    small = [word for change in [*own, *SMALL[2:], "run.certify_every=2"] for word in ("--set", change)]
    result = call("train", "-q", "--no-report", "--json", *small)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["samples"] == {"train": 32, "test": 8} and summary["run"].endswith("-gaussian-houses")
    config = yaml.safe_load(Path(summary["run"], "config.yaml").read_text())["data"]
    assert config["n"] is None and config["norm"] is None and config["name"] == str(tmp_path / "houses.csv")
    assert call("certify", summary["run"], "--theorem", "contraction").exit_code == 0
    shown = json.loads(call("data", "show", "houses.csv", "--target", "price", "--columns", "size,rooms", "--json").stdout)
    assert shown["parts"]["train"]["X"] == [32, 2]
    assert all(part["targets"].startswith("numbers in [") for part in shown["parts"].values()), "8 numbers are not 8 classes"
    classes = [*own[:1], "data.target=town", "data.columns=size", "model.name=dense", *SMALL[2:]]
    result = call("train", "-q", "--no-report", "--json", *(word for change in classes for word in ("--set", change)))
    assert result.exit_code == 0 and "test_accuracy" in json.loads(result.stdout)["last"], result.output
    # a run goes on with the file that it began with
    with (tmp_path / "houses.csv").open("a") as file:
        file.write("\n1,2,3,north")
    failed(call("train", "--resume", summary["run"]), 2, "houses.csv has changed since this configuration was made")
    failed(call("certify", summary["run"]), 2, "has changed")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (["data.name=house.csv"], "cannot be read: No such file or directory. Did you mean 'houses.csv'?"),
        (["data.name=houses.csv"], "data.target must name the column of houses.csv to learn; it has size, rooms, price, town."),
        (["data.name=houses.csv", "data.target=prize"], "Did you mean 'price'?"),
        (["data.name=houses.csv", "data.target=price"], "Column 'town' of houses.csv holds text"),
        (["data.name=houses.csv", "data.target=town", "data.columns=size"], "choose model.name=dense"),
        (["data.name=houses.csv", "data.target=price", "data.columns=size", "data.n=40"], "too few for data.n=40"),
        (["data.name=houses.tsv"], "files are read if they end with .csv, .parquet, .npz"),
        (["data.target=price"], "data.target is for files"),
        (["data.name=houses.csv", "data.target=price", "data.columns=size", "model.name=dense"], "Choose model.name=gaussian"),
        (["data.name=houses.csv", "data.target=town", "data.columns=size", "model.name=monotone_conv"], "images"),
    ],
)
def test_mistakes_about_own_data_are_found_before_a_run_is_made(own: list[str], says: str, tmp_path: Path) -> None:
    table_of(tmp_path)
    (tmp_path / "houses.tsv").write_text("x")
    failed(call("train", "-q", *(word for change in own for word in ("--set", change))), 2, says)
    assert not (tmp_path / "runs").exists()


def test_data_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WELLPOSED_DATA", raising=False)
    failed(call("data", "check"), 2, "WELLPOSED_DATA is not set")
    monkeypatch.setenv("WELLPOSED_DATA", str(tmp_path))
    failed(call("data", "check"), 2, "holds none of mnist.npz")
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (30, 28, 28), dtype=np.uint8), np.arange(30, dtype=np.uint8) % 10
    np.savez(tmp_path / "mnist.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    good = call("data", "check")
    assert good.exit_code == 0 and "mnist: good" in good.stdout and "checksum unknown" in good.stdout
    (tmp_path / "svhn.npz").write_bytes((tmp_path / "mnist.npz").read_bytes()[:500])
    bad = call("data", "check", "--json")
    rows = {row["name"]: row for row in json.loads(bad.stdout)}
    assert bad.exit_code == 1 and rows["mnist"]["good"] and not rows["svhn"]["good"]


def test_bench_calls_the_script_or_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    class Done:
        returncode = 0

    monkeypatch.setattr("wellposed_lab.cli.bench.subprocess.run", lambda words, **_: called.append(words) or Done())
    assert call("bench").exit_code == 0 and called[0][1].endswith("run.py") and called[0][2:] == ["--quick"]
    assert call("bench", "--full", "--", "--rounds", "5").exit_code == 0 and called[1][2:] == ["--rounds", "5"]
    monkeypatch.setattr("wellposed_lab.cli.bench.__file__", str(tmp_path / "a" / "b" / "c" / "d" / "bench.py"))
    failed(call("bench"), 2, "get the source checkout")


def test_a_report_that_fails_does_not_spoil_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> Path:
        raise RuntimeError("no ink")

    def writes(folder: Path) -> Path:
        (folder / "page.html").write_text("x")
        return folder / "page.html"

    name = "wellposed_lab.report"
    page: Any = types.ModuleType(name)
    page.__spec__ = importlib.machinery.ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, page)
    page.write = fails
    result = call("train", "-q", "--out", tmp_path / "run", *changes("run.certify_every=0"))
    assert result.exit_code == 0 and "The report could not be made (RuntimeError: no ink)." in result.stderr
    page.write = writes
    result = call("train", "-q", "--out", tmp_path / "other", *changes("run.certify_every=0"))
    assert result.stdout.splitlines()[-1] == str(tmp_path / "other" / "page.html")
    result = call("train", "-q", "--json", "--out", tmp_path / "third", *changes("run.certify_every=0"))
    assert json.loads(result.stdout)["report"] == str(tmp_path / "third" / "page.html")


@pytest.mark.parametrize("terminal", ["", "1"])
def test_the_last_line_is_the_page(terminal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a terminal, where a bar is drawn; and longer than a line of it."""
    monkeypatch.setenv("COLUMNS", "40")
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take a pipe for a terminal
    folder = tmp_path / ("a" * 60)
    result = call("train", "--out", folder, *changes("run.certify_every=0"))
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(folder / "report.html") and (folder / "report.html").is_file()
    assert ("training" in result.stderr) is bool(terminal)
    again = call("report", folder)
    assert again.stdout.splitlines()[-1] == str(folder / "report.html")
    assert json.loads(call("report", folder, "--json").stdout)["report"] == str(folder / "report.html")


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("auto", "sphere", "gaussian on sphere"),
        ("monotone_classifier", "digits", "monotone_classifier on digits"),
        ("dense", "moons", "dense on moons"),
    ],
)
def test_data_and_network_alone_are_enough(name: str, data: str, says: str, tmp_path: Path) -> None:
    words = changes(f"model.name={name}", f"data.name={data}", "run.certify_every=0", "run.epochs=1")
    result = call("train", "-q", "--no-report", "--out", tmp_path / "run", *words)
    assert result.exit_code == 0 and says in result.stdout, result.output
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert used["data"]["classes"] is None and used["model"]["name"] != "auto" and used["loss"]["name"] != "auto"
    shown = yaml.safe_load(call("train", "--show-config", *words).stdout)
    del used["run"]["threads"], shown["run"]["threads"]
    assert used == shown


def test_advice_about_an_ill_posed_network_can_be_followed_here(tmp_path: Path) -> None:
    done = call("train", "-q", "--no-report", "--out", tmp_path / "run", *changes("optimizer.lr=1e30", "model.name=gaussian"))
    assert done.exit_code == 1 and "take a smaller optimizer.lr" in done.stderr and "on_ill_posed" not in done.stderr
