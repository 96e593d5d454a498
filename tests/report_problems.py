"""Run directories for the tests of pages, and a reader of pages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import yaml

from wellposed.certify import Certificate, Hypothesis, Verdict

VOID = {"meta", "br"}


def train_tiny(folder: Path, *changes: str) -> Path:
    """A real run: digits 0 and 1, a narrow network, a few epochs."""
    from wellposed_lab.runs.config import resolve
    from wellposed_lab.runs.training import train

    small = ["data.n=12", "data.n_test=10", "model.width=16", "run.epochs=4", "run.batch_size=6", "run.certify_every=2"]
    train(resolve({}, [*small, "run.tensorboard=false", *changes]), folder)
    return folder


def certificate(rate: float | None, *, dynamics: str = "descent", note: str = "") -> Certificate:
    """A certificate that holds if it has a rate, with one of well-posedness beside it."""
    holds = Hypothesis.compare("the map contracts", "|W| < 1", 0.75, "<", 1.0)
    beside = Certificate("contraction", Verdict.CERTIFIED, (holds,), licenses=("One equilibrium.",))
    verdict = Verdict.UNDECIDED if rate is None else Verdict.CERTIFIED
    measured = {"|W|": 0.75, "|R|": 0.75, "|X|_F": 3.0, "loss": 1.0}
    licensed: dict[str, Any] = {"rate": rate, "step_size": 0.5 if dynamics == "descent" and rate is not None else None}
    return Certificate("radius", verdict, (holds,), dynamics, **licensed, measured=measured, note=note, others=(beside,))


def write_by_hand(
    folder: Path,
    losses: list[float],
    *,
    certificates: dict[int, Certificate] | None = None,
    config: dict[str, Any] | None = None,
    steps_per_epoch: int = 3,
) -> Path:
    """A run directory without a network: files only."""
    (folder / "certificates").mkdir(parents=True)
    rows = [{"epoch": k, "step": k * steps_per_epoch, "train_loss": loss} for k, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"model": {"name": "foreign", "width": 3}}))
    (folder / "summary.json").write_text(json.dumps({"stop_message": "all epochs are done", "samples": {"train": 5}}))
    session = {"started": "2026-01-01T00:00:00+0000", "versions": {"python": "3.11.7"}, "command": ["wellposed", "train"]}
    (folder / "environment.json").write_text(json.dumps({"sessions": [session]}))
    (folder / "log.txt").write_text("2026-01-01 00:00:00 Finished: epochs.\n")
    for epoch, one in (certificates or {}).items():
        (folder / "certificates" / f"epoch-{epoch:05d}.json").write_text(one.to_json())
    return folder


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def find(self, tag: str | None = None, **attributes: str) -> list[Element]:
        """Those within of this tag and these attributes, in order."""
        found = []
        for child in self.children:
            fits = all(child.attributes.get(name.rstrip("_").replace("_", "-")) == value for name, value in attributes.items())
            if (tag is None or child.tag == tag) and fits:
                found.append(child)
            found += child.find(tag, **attributes)
        return found

    def words(self) -> str:
        """All text within, scripts and styles left out."""
        if self.tag in ("script", "style"):
            return ""
        return self.text + "".join(" " + child.words() for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("page", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of {tag} stands twice"
        element = Element(tag, dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> ends <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].text += data

    def close(self) -> None:
        super().close()
        assert self._open == [self.root], "an element is not ended"


def parse(text: str) -> Element:
    """The elements of a page, whose tags must match."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader.root


def parse_file(path: Path) -> Element:
    return parse(path.read_text(encoding="utf-8"))


def figures(page: Element) -> dict[str, dict[str, Any]]:
    """What Plotly is given, by the key of the figure."""
    (script,) = page.find("script", id="figures")
    return {figure["id"].removeprefix("plot-"): figure for figure in json.loads(script.text)}


def trace(page: Element, figure: str, name: str) -> dict[str, Any]:
    """A line of a figure."""
    (found,) = [one for one in figures(page)[figure]["data"] if one["name"] == name]
    result: dict[str, Any] = found
    return result
