"""The page of a run: what is on it is what was measured, what is missing is said, and no text becomes HTML."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from report_problems import Element, certificate, figures, parse, parse_file, trace, train_tiny, write_by_hand
from wellposed.certify import Certificate
from wellposed.errors import InvalidArgument
from wellposed_lab import report
from wellposed_lab.cli.commands import app
from wellposed_lab.report import _page
from wellposed_lab.report._read import read_run
from wellposed_lab.runs.training import load_run

EVIL = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=1">&amp;\'\u2028'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def page(run: Path) -> Element:
    path = report.write(run)
    assert path == run / "report.html"
    return parse_file(path)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_header_names_a_data_file_without_its_folder(tmp_path: Path) -> None:
    for name, shown in (("/home/me/private/mine.csv", "mine"), ("digits", "digits")):
        config = {"model": {"name": "gaussian", "width": 4}, "data": {"name": name}}
        page = report.write(write_by_hand(tmp_path / shown, [1.0], config=config)).read_text(encoding="utf-8")
        assert f"gaussian of width 4 on {shown}, started" in page


def test_every_part_is_there_and_reachable(page: Element) -> None:
    identifiers = [element.attributes["id"] for element in page.find() if "id" in element.attributes]
    assert len(identifiers) == len(set(identifiers))
    (nav,) = page.find("nav")
    targets = [link.attributes["href"] for link in nav.find("a")]
    parts = ["glance", "training", "certificates", "network", "outputs", "configuration", "environment", "log"]
    assert targets == [f"#{part}" for part in parts]
    assert set(parts) <= set(identifiers)
    assert [heading.tag for heading in page.find("h1")] == ["h1"]
    assert set(figures(page)) == {"loss", "accuracy", "equilibrium-steps", "margin", "spectrum", "norms", "predictions"}
    assert not page.find("p", class_="missing")


def test_nothing_comes_from_elsewhere(page: Element) -> None:
    for element in page.find():
        assert "src" not in element.attributes
        assert element.attributes.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in element.attributes)
    assert not page.find("link") and not page.find("iframe")
    assert "@import" not in page.find("style")[0].text and "url(" not in page.find("style")[0].text


def test_only_the_scripts_of_the_page_may_run(page: Element) -> None:
    (policy,) = [
        e.attributes["content"] for e in page.find("meta") if e.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    scripts = [element.text for element in page.find("script") if "type" not in element.attributes]
    assert len(scripts) == 2 and policy.startswith("default-src 'none'")
    for text in scripts:
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


def test_every_figure_has_words_and_a_table(page: Element) -> None:
    drawn = page.find("figure")
    assert len(drawn) == len(figures(page))
    for figure in drawn:
        (plot,) = figure.find("div", role="img")
        assert plot.attributes["id"] == f"plot-{figure.attributes['id']}"
        assert any(character.isdigit() for character in plot.attributes["aria-label"] or "")
        assert figure.find("figcaption")[0].text.strip()
        (table,) = figure.find("table")
        assert len(table.find("tr")) > 1 and table.find("th", scope="col") and table.find("caption")
        for button in figure.find("button"):
            assert button.text.strip() and button.attributes["type"] == "button"


def test_losses_are_those_of_the_metrics(run: Path, page: Element) -> None:
    for part in ("train", "test"):
        line = trace(page, "loss", part)
        assert line["x"] == [row["epoch"] for row in rows(run)]
        assert line["y"] == [row[f"{part}_loss"] for row in rows(run)]
    assert figures(page)["loss"]["layout"]["yaxis"]["type"] == "log"
    assert trace(page, "accuracy", "test")["y"] == [row["test_accuracy"] for row in rows(run)]


def test_spectrum_is_that_of_the_derivatives(run: Path, page: Element) -> None:
    _, problem, checkpoint = load_run(run)
    assert checkpoint is not None
    X, model = problem.parts.train[0], problem.model
    J = []
    for x in X:
        model.zero_grad()
        model(x[None]).sum().backward()
        J.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    wanted = torch.linalg.svdvals(torch.stack(J)) ** 2
    drawn = torch.tensor(trace(page, "spectrum", f"after epoch {checkpoint.epoch}")["y"], dtype=torch.float64)
    torch.testing.assert_close(drawn, wanted, rtol=1e-6, atol=0.0)
    assert figures(page)["spectrum"]["layout"]["yaxis"]["type"] == "log"


def test_margin_and_norms_are_those_of_the_matrix(run: Path, page: Element) -> None:
    _, problem, _ = load_run(run)
    norm = float(torch.linalg.matrix_norm(problem.model.get_parameter("W").detach(), ord=2))
    margin = trace(page, "margin", "contraction: the map contracts")
    assert margin["x"] == [0, 2, 4] and margin["y"][-1] == pytest.approx(1 - norm, rel=1e-6)
    assert trace(page, "norms", "|R|, |W|")["y"][-1] == pytest.approx(norm, rel=1e-6)
    names = [row.find("th")[0].text for table in page.find("table") for row in table.find("tr")[1:] if "now" in table.words()]
    assert names == ["W", "U", "a"]


def test_predictions_are_those_of_the_network(run: Path, page: Element) -> None:
    _, problem, _ = load_run(run)
    assert problem.parts.test is not None
    X, y = problem.parts.test
    with torch.no_grad():
        y_hat = problem.model(X)
    for target in (-1, 1):
        bars = trace(page, "predictions", f"test, target {target:+d}")
        assert sum(bars["y"]) == int((y == target).sum())
        mean = sum(x * count for x, count in zip(bars["x"], bars["y"], strict=True)) / sum(bars["y"])
        assert mean == pytest.approx(float(y_hat[y == target].mean()), abs=bars["width"])


def test_configuration_and_environment_are_shown(run: Path, page: Element) -> None:
    text = " ".join(page.words().split())
    assert "batch_size 6" in text and "weight_variance –" in text
    assert f"versions.torch {torch.__version__}" in text
    assert "Finished: epochs." in text


def test_certified_descent_is_a_power_of_its_rate(tmp_path: Path) -> None:
    losses = [4.0, 2.0, 1.5, 1.0]
    made = {0: certificate(None), 1: certificate(0.9), 3: certificate(0.8)}
    folder = write_by_hand(tmp_path / "run", losses, certificates=made)
    line = trace(parse_file(report.write(folder)), "loss", "certified")
    assert line["x"] == [1, 2, 3, 3, 3, 3]
    assert line["y"] == [2.0, pytest.approx(2.0 * 0.9**6), pytest.approx(2.0 * 0.9**12), None, 1.0, None]


def test_certified_flow_needs_an_optimizer_that_follows_it(tmp_path: Path) -> None:
    made = {0: certificate(2.0, dynamics="flow")}
    optimizer = {"name": "sgd", "lr": 0.5, "schedule": "constant", "momentum": 0.0}
    for name, change, follows in (
        ("plain", {}, True),
        ("momentum", {"momentum": 0.9}, False),
        ("adam", {"name": "adam"}, False),
    ):
        config = {"optimizer": optimizer | change, "run": {"batch_size": None}}
        page = parse_file(report.write(write_by_hand(tmp_path / name, [4.0, 2.0], certificates=made, config=config)))
        names = [one["name"] for one in figures(page)["loss"]["data"]]
        assert ("certified" in names) == follows
        assert ("in time; the steps of this optimizer have no place on it" in page.words()) != follows
        if follows:  # 3 steps of 0.5 on a mean of 5 samples are a time of 0.3
            assert trace(page, "loss", "certified")["y"][:2] == [4.0, pytest.approx(4.0 * math.exp(-2 * 2.0 * 0.3))]


def test_no_certified_line_without_a_certificate_that_holds(tmp_path: Path) -> None:
    page = parse_file(report.write(write_by_hand(tmp_path / "run", [2.0, 1.0], certificates={0: certificate(None)})))
    assert [one["name"] for one in figures(page)["loss"]["data"]] == ["train"]
    assert "No certificate with a rate holds" in page.words()


def test_classes_give_a_confusion_matrix(tmp_path: Path) -> None:
    folder = train_tiny(tmp_path / "run", "data.classes=[0, 1, 2]", "model.name=dense", "run.epochs=2")
    page = parse_file(report.write(folder))
    counts = [[int(cell) for cell in row] for row in figures(page)["predictions"]["data"][0]["text"]]
    assert len(counts) == 3 and sum(map(sum, counts)) == 10
    right = sum(counts[k][k] for k in range(3))
    assert right / 10 == pytest.approx(rows(folder)[-1]["test_accuracy"])
    assert "norms" in figures(page) and "margin" in figures(page)


def test_numbers_give_a_scatter(tmp_path: Path) -> None:
    folder = train_tiny(tmp_path / "run", "data.name=sphere", "data.classes=null", "data.features=5", "run.epochs=1")
    page = parse_file(report.write(folder))
    line = trace(page, "predictions", "train")
    loss = sum((a - b) ** 2 for a, b in zip(line["x"], line["y"], strict=True)) / 2 / len(line["x"])
    assert loss == pytest.approx(rows(folder)[-1]["train_loss"], rel=1e-6)


def test_a_truncated_line_is_left_out_and_said(tmp_path: Path) -> None:
    folder = write_by_hand(tmp_path / "run", [3.0, 2.0, 1.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "train_lo')
    page = parse_file(report.write(folder))
    assert trace(page, "loss", "train")["y"] == [3.0, 2.0, 1.0]
    assert "metrics.jsonl: 1 line is cut off or damaged and is omitted." in page.words()


def test_null_losses_and_foreign_rows_do_not_matter(tmp_path: Path) -> None:
    folder = write_by_hand(tmp_path / "run", [3.0, 2.0])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"epoch": 2, "step": 6, "train_loss": null}\n[1]\n"text"\n{"epoch": "x"}\n{"epoch": 3, "train_loss": "1"}\n'
        )
    page = parse_file(report.write(folder))
    assert trace(page, "loss", "train")["y"] == [3.0, 2.0]
    assert "metrics.jsonl: 2 lines are" in page.words()


@pytest.mark.parametrize(
    ("removed", "says"),
    [
        ("metrics.jsonl", "metrics.jsonl holds no losses"),
        ("certificates", "No certificate was made"),
        ("config.yaml", "config.yaml is missing, so the configuration is not known."),
        ("environment.json", "environment.json is missing or empty"),
        ("checkpoints", "There is no checkpoint; the network is shown as it was at the start."),
        ("log.txt", "log.txt is missing or empty."),
        ("summary.json", "it has not ended"),
    ],
)
def test_a_missing_part_gives_a_sentence(run: Path, tmp_path: Path, removed: str, says: str) -> None:
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    if (folder / removed).is_dir():
        shutil.rmtree(folder / removed)
    else:
        (folder / removed).unlink()
    assert says in " ".join(parse_file(report.write(folder)).words().split())


def test_a_run_with_nothing_readable_but_its_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "certificates").mkdir(parents=True)
    (folder / "config.yaml").write_text("a: [1\n")
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    (folder / "environment.json").write_text('{"sessions": [1, {}]}')
    (folder / "summary.json").write_text("[")
    (folder / "certificates" / "epoch-00000.json").write_text('{"theorem": "radius"}')
    (folder / "certificates" / "epoch-00001.json").write_text("[1]")
    (folder / "certificates" / "epoch-x.json").write_text(certificate(0.5).to_json())
    page = parse_file(report.write(folder))
    words = " ".join(page.words().split())
    for name in ("epoch-00000.json", "epoch-00001.json", "epoch-x.json"):
        assert f"certificates/{name} is not a certificate and is omitted." in words
    assert "config.yaml is not a YAML file" in words and "a: [1" in words
    assert figures(page) == {}


def test_malicious_text_stays_text(tmp_path: Path) -> None:
    folder = tmp_path / "<img src=x onerror=alert(1)> & <b>run"
    config = {"model": {"name": EVIL, EVIL: "v"}, EVIL: {"k": EVIL}, "data": {"name": EVIL}}
    write_by_hand(folder, [2.0, 1.0], certificates={0: certificate(0.5, note=EVIL)}, config=config)
    (folder / "log.txt").write_text(EVIL + "\n")
    (folder / "environment.json").write_text(json.dumps({"sessions": [{"started": EVIL, "command": [EVIL], EVIL: EVIL}]}))
    (folder / "summary.json").write_text(json.dumps({"stop_message": EVIL}))
    path = report.write(folder)
    page = parse_file(path)
    assert not page.find("img") and not page.find("b")
    assert len(page.find("script")) == 3
    assert page.find("title")[0].text == folder.name and page.find("h1")[0].text == folder.name
    (pre,) = page.find("pre")
    assert pre.text.rstrip() == EVIL.rstrip("\u2028")  # a line end, where the log is cut into lines
    assert page.words().count("window.pwned") > 8
    # names of lines go through Plotly, which knows a few tags
    both = parse_file(report.compare([folder, folder], tmp_path / "both.html"))
    assert len(both.find("script")) == 3 and not both.find("img")
    assert all("<" not in one["name"] for figure in figures(both).values() for one in figure["data"])


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    losses = [1.0 / (k + 1) for k in range(30_000)]
    path = report.write(write_by_hand(tmp_path / "run", losses, certificates={0: certificate(0.999999)}))
    assert path.stat().st_size < 5_500_000  # Plotly has 4.8 million bytes
    line = trace(parse_file(path), "loss", "train")
    assert len(line["y"]) == 1000 and line["y"][0] == losses[0] and line["y"][-1] == losses[-1]


def test_without_plotly_there_are_tables(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "_plotly", lambda: None)
    page = parse_file(report.write(run, tmp_path / "page.html"))
    assert figures(page) == {} and len(page.find("figure")) == 7
    assert all("open" in details.attributes for figure in page.find("figure") for details in figure.find("details"))
    assert "plotly is not installed" in page.words()
    result = CliRunner().invoke(app, ["report", str(run), "--out", str(tmp_path / "other.html")])
    assert result.exit_code == 0 and "plotly is missing" in result.stderr


def test_writing_a_page_leaves_the_random_state_alone(run: Path, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    report.write(run, tmp_path / "page.html")
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a run directory"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(InvalidArgument, match="holds no config.yaml"):
        report.write(tmp_path)
    folder = write_by_hand(tmp_path / "run", [1.0])
    with pytest.raises(InvalidArgument, match="is a folder"):
        report.write(folder, tmp_path)


def test_the_command_prints_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    write_by_hand(tmp_path / "a", [2.0, 1.0])
    write_by_hand(tmp_path / "b", [2.0, 1.5])
    result = CliRunner().invoke(app, ["report", "a"])
    assert result.exit_code == 0 and result.stdout.strip() == "a/report.html" and (tmp_path / "a" / "report.html").is_file()
    result = CliRunner().invoke(app, ["report", "a", "b", "--json"])
    assert json.loads(result.stdout) == {"report": "comparison.html"} and (tmp_path / "comparison.html").is_file()
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) is None)
    CliRunner().invoke(app, ["report", "a", "--out", "new/page.html", "--open"])
    assert opened == [(tmp_path / "new" / "page.html").as_uri()]
    result = CliRunner().invoke(app, ["report", "nowhere"])
    assert result.exit_code == 2 and result.stdout == "" and "is not a run directory" in result.stderr


@example(EVIL)
@settings(deadline=None, max_examples=25)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0")))
def test_text_comes_back_as_it_was(text: str) -> None:
    parts = _page.templates().get_template("parts.html")
    made = parse(parts.make_module({"drawn": True}).table(_page.table(text, [text], [[1, text]])))
    (region,), (caption,), (cell,) = made.find("div"), made.find("caption"), made.find("td")
    assert region.attributes["aria-label"] == text == caption.text == cell.text and not cell.children
    embedded = _page.templates().from_string("<script>{{ value|tojson }}</script>")
    (script,) = parse(embedded.render(value=_page.finite({"a": text, "b": math.nan}))).children
    assert json.loads(script.text) == {"a": text, "b": None}


def hold(folder: Path, **changes: Any) -> Path:
    """A run by hand whose one certificate was changed afterwards."""
    good = Certificate.from_dict(certificate(0.5).to_dict() | {"step_size": {"W": 0.1}})
    write_by_hand(folder, [1.0, 0.5], certificates={0: good})
    path = folder / "certificates" / "epoch-00000.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def test_a_certificate_is_shown_as_recorded(tmp_path: Path) -> None:
    page = parse_file(report.write(hold(tmp_path / "run")))
    words = " ".join(page.words().split())
    assert "CERTIFIED as recorded" in words and "CERTIFIED" not in words.replace("CERTIFIED as recorded", "")
    assert "wellposed certify RUN computes them again" in words
    other = hold(tmp_path / "other")
    page = parse_file(report.compare([tmp_path / "run", other], tmp_path / "both.html"))
    assert "CERTIFIED as recorded" in " ".join(page.words().split())


FALSE = {"name": "contracts", "equation": "", "value": 7.0, "bound": 1.0, "relation": "<", "holds": True, "note": ""}


@pytest.mark.parametrize(
    "changes",
    [
        {"hypotheses": []},
        {"hypotheses": [FALSE]},
        {"hypotheses": [FALSE | {"value": "nan"}]},
        {"hypotheses": [FALSE | {"value": None}]},
        {"hypotheses": [FALSE | {"value": 0.5, "holds": None}]},
        {"hypotheses": [FALSE | {"value": 1.0}]},
        {"rate": 1.0},
        {"rate": "nan"},
        {"rate": None},
        {"rate": -0.5},
        {"rate": 0.0, "dynamics": "flow"},
        {"rate": 0.5, "dynamics": ""},
        {"step_size": {"W": "nan"}},
        {"step_size": {"W": 0.0}},
        {"step_size": {}},
        {"step_size": -1.0},
        {"dynamics": "magic"},
    ],
)
def test_a_forged_certificate_is_not_shown_as_certified(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = hold(tmp_path / "run", **changes, others=[])
    words = " ".join(parse_file(report.write(folder)).words().split())
    assert "CERTIFIED as recorded" not in words
    assert "certificates/epoch-00000.json contradicts itself (radius: " in words and "so it is not shown as CERTIFIED" in words
    assert "No certificate with a rate holds" in words


def test_nothing_in_a_run_is_followed(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "file").write_text("SECRET: 1\n")
    (private / "epoch-00000.json").write_text(certificate(0.5, note="SECRET").to_json())
    for name in ("config.yaml", "metrics.jsonl", "times.jsonl", "environment.json", "summary.json", "log.txt", "certificates"):
        folder = write_by_hand(tmp_path / f"run-{name}", [1.0], certificates={0: certificate(0.5)})
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(private if name == "certificates" else private / "file")
        page = report.write(folder, tmp_path / "page.html")
        assert "SECRET" not in page.read_text()
        assert f"{name} is a link, and links in a run directory are not followed" in parse_file(page).words()


def test_pipes_and_endless_files_do_not_hang(tmp_path: Path) -> None:
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "environment.json",
        "summary.json",
        "log.txt",
        "certificates/epoch-00000.json",
    ):
        for kind in ("pipe", "endless"):
            folder = write_by_hand(tmp_path / kind / name.replace("/", "-"), [1.0], certificates={0: certificate(0.5)})
            (folder / name).unlink()
            os.mkfifo(folder / name) if kind == "pipe" else (folder / name).symlink_to("/dev/zero")
            run = read_run(folder)  # it would wait here for a writer, or for the end
            assert any(name in remark for remark in run.remarks)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"epoch": 0, "step": 1e300, "train_loss": 1}\n{"epoch": 1, "step": -1e300, "train_loss": 1}\n'),
        ("summary.json", '{"samples": {"train": 0}, "stop_message": {"a": []}}'),
        ("config.yaml", "optimizer: {name: sgd, schedule: constant, lr: -1.0e+300}\nrun: {batch_size: many}\n"),
    ],
)
def test_absurd_numbers_do_not_end_the_page(name: str, text: str, tmp_path: Path) -> None:
    config = {"optimizer": {"name": "sgd", "schedule": "constant", "lr": 0.5}, "run": {"batch_size": None}}
    for dynamics in ("descent", "flow"):
        held = {0: certificate(0.5, dynamics=dynamics), 1: certificate(0.5, dynamics=dynamics)}
        folder = write_by_hand(tmp_path / dynamics, [1.0, 0.5], certificates=held, config=config)
        (folder / name).write_text(text)
        assert "certified" in parse_file(report.write(folder)).words()
