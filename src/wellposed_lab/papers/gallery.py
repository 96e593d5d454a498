"""Pages from records: the claims in docs/reproduce.md, and docs/gallery.md with its pictures.

`python -m wellposed_lab.papers.gallery records docs` writes both anew, and the table of
docs/tasks/segmentation.md.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from wellposed_lab.papers.claims import ClaimCheck, ClaimOutcome
from wellposed_lab.papers.record import Record
from wellposed_lab.papers.registry import EXPERIMENTS
from wellposed_lab.papers.storage import path_of, stored
from wellposed_lab.papers.xie2021.segmentation_table import segmentation_table

__all__ = ["MARKER", "causes_of", "claims_table", "gallery", "shown_in", "write_pages"]

#: Where the generated part of docs/reproduce.md begins.
MARKER = "<!-- Generated from records/ by `make gallery`: what follows is not edited by hand. -->\n"
#: Folders of records: the large runs, and those of --quick.
LARGE, QUICK = "", "quick"


def records_in(folder: Path) -> dict[str, Record]:
    """By the names of the experiments, in their order."""
    return {name: stored(name, folder) for name in EXPERIMENTS if path_of(name, folder).is_file()}


def shown_in(folder: Path) -> dict[str, Record]:
    """What the gallery shows: the large run of an experiment, and that of --quick where there is
    none."""
    large, quick = records_in(folder), records_in(folder / QUICK)
    return {name: large.get(name) or quick[name] for name in EXPERIMENTS if name in large or name in quick}


def causes_of(folder: Path) -> dict[str, dict[str, str]]:
    """Experiment -> claim -> why it is not reproduced, or why --quick decides otherwise."""
    path = folder / "causes.json"
    found: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def claims_table(folder: Path) -> str:
    """Every claim with its rule and its verdicts, in the order of the experiments."""
    large, quick, causes = records_in(folder), records_in(folder / QUICK), causes_of(folder)
    lines = [
        "| experiment | claim | decided by | large run | `--quick` | cause |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, experiment in EXPERIMENTS.items():
        for i, claim in enumerate(experiment.claims):
            verdicts = [_verdict(records.get(name), claim.key) for records in (large, quick)]
            cause = causes.get(name, {}).get(claim.key, "")
            cells = [f"`{name}`" if i == 0 else "", f"{claim.text} {claim.source}", claim.decided_by, *verdicts, cause]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _verdict(record: Record | None, key: str) -> str:
    if record is None:
        return "not run"
    found = [check.outcome.value for check in record.checks if check.claim.key == key]
    return found[0] if found else "not run"


def gallery(folder: Path) -> str:
    """The page: for each record its picture, the claims with what was measured, seeds, time and
    departures."""
    causes = causes_of(folder)
    parts = [
        "# Gallery\n",
        _thumbnails(folder),
        "## The figures and tables of the papers\n",
        _wrapped(
            "One section for each record in the folder `records` of the repository: what the paper says, what we measured, and "
            "where we differ from the print. Where no large run is stored yet, the section shows that of `--quick`. "
            "`wellposed reproduce NAME --compare` runs a small part of a record anew. The rules of the verdicts are on the "
            "page about [reproduction](reproduce.md).\n"
        )
        + "\n",
        MARKER,
    ]
    for name, record in shown_in(folder).items():
        parts.append(_section(name, record, causes.get(name, {})))
    return "\n".join(parts)


#: Pictures of other pages: the page, the picture, what it shows.
ELSEWHERE = {
    "Tasks": [
        ("tasks/imaging.md", "thumbnail_imaging.png", "an image, half blurred and half restored"),
        ("tasks/graphs.md", "thumbnail_graphs.png", "accuracy along a chain"),
        ("tasks/reasoning.md", "thumbnail_reasoning.png", "a maze and its way"),
        ("tasks/segmentation.md", "thumbnail_segmentation.png", "a street, half as classes"),
        ("tasks/language.md", "thumbnail_language.png", "held-out loss by step"),
    ],
    "Proofs and uncertainty": [
        ("certificates.md#proof-from-the-start", "proof_from_the_start.png", "loss and proved bound"),
        ("gaussian_processes.md", "gaussian_process.png", "a Gaussian process and its calibration"),
    ],
}
#: Experiments whose pictures are surfaces of the loss.
LANDSCAPES = ("nguyen2022/figure4.4", "nguyen2022/figure4.5")


def _thumbnails(folder: Path) -> str:
    """All pictures in small, each a link to its page or section."""
    shown = shown_in(folder)
    groups = {title: [(page, f"images/{file}", text) for page, file, text in rows] for title, rows in ELSEWHERE.items()}
    for title, some in (("Landscapes", True), ("Papers", False)):
        names = [name for name in shown if (name in LANDSCAPES) is some]
        groups[title] = [(_anchor(name, shown[name]), _picture(name), name) for name in names]
    parts = []
    for title, rows in groups.items():
        links = "\n".join(f"[![{text}]({picture})\n{text}]({target})" for target, picture, text in rows)
        parts.append(f'**{title}**\n\n<div class="thumbnails" markdown>\n\n{links}\n\n</div>\n')
    return "\n".join(parts)


def _anchor(name: str, record: Record) -> str:
    """The link to the section of a record: the heading as Markdown makes an anchor of it."""
    kept = re.sub(r"[^\w\s-]", "", f"{name}: {record.title}").strip().lower()
    return "#" + re.sub(r"[-\s]+", "-", kept)


def _picture(name: str) -> str:
    return f"images/papers/{name.replace('/', '-')}.png"


def _section(name: str, record: Record, causes: dict[str, str]) -> str:
    seeds = ", ".join(map(str, record.config["seeds"]))
    seconds = sum(result.seconds for result in record.results)
    unit, name_of = next((u, n) for u, n in ((3600, "hours"), (60, "minutes"), (1, "seconds")) if seconds >= 2 * u or u == 1)
    time = f"{seconds / unit:.1f} {name_of}"
    commits = ", ".join(dict.fromkeys(str(result.commit)[:10] for result in record.results))
    facts = f"Size: {record.size}. Seeds: {seeds}. CPU time: {time}. Measured at commit {commits}."
    paper = name.partition("/")[0]
    lines = [f"## {name}: {record.title}\n", f"![{name}: {record.title}]({_picture(name)})\n", _wrapped(facts) + "\n"]
    lines += [_wrapped(f"What [{paper}] says, with our verdict and what we measured:") + "\n"]
    lines += [_wrapped(_check(check, causes.get(check.claim.key))) for check in record.checks]
    lines += [_wrapped(f"- Note: {_plain(note)}") for note in record.notes]
    lines += [_wrapped(f"- Departure: {_plain(departure)}") for departure in record.departures]
    return "\n".join(lines) + "\n"


def _check(check: ClaimCheck, cause: str | None) -> str:
    claim = check.claim
    source = "(our question)" if claim.ours else claim.source
    text = f"- **{check.outcome.value}**: {_plain(claim.text)} {source}. Measured: {_plain(check.finding.measured)}."
    if cause is None:
        return text
    return f"{text} {'Why `--quick` differs' if check.outcome is ClaimOutcome.REPRODUCED else 'Cause'}: {cause}"


def _wrapped(text: str) -> str:
    """In lines of 100 columns; those of a list are indented."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _plain(text: str) -> str:
    """Without the marks that Markdown would read."""
    return text.replace("*", "\\*").replace("_", "\\_").replace("<", "&lt;")


def without_cause(folder: Path) -> list[str]:
    """Claims of papers that the gallery shows as not reproduced and whose cause is not written
    down."""
    causes = causes_of(folder)
    return [
        f"{name}: {check.claim.key}"
        for name, record in shown_in(folder).items()
        for check in record.checks
        if check.outcome is ClaimOutcome.NOT_REPRODUCED and not check.claim.ours
        if check.claim.key not in causes.get(name, {})
    ]


def write_pages(folder: Path, docs: Path) -> None:
    """Writes the pages and one picture for each record.

    Args:
        folder: Of records.
        docs: Of the documentation.
    """
    from wellposed.plot.curves import experiment as picture_of

    page = docs / "reproduce.md"
    written = page.read_text(encoding="utf-8").partition(MARKER)[0]
    page.write_text(f"{written}{MARKER}\n{claims_table(folder)}", encoding="utf-8")
    (docs / "gallery.md").write_text(gallery(folder), encoding="utf-8")
    if (task := docs / "tasks" / "segmentation.md").is_file():
        written = task.read_text(encoding="utf-8").partition(MARKER)[0]
        task.write_text(f"{written}{MARKER}\n{segmentation_table(shown_in(folder))}", encoding="utf-8")
    pictures = docs / "images" / "papers"
    pictures.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"format": "png", "dpi": 80, "metadata": {"Software": None}}
    for name, record in shown_in(folder).items():
        picture_of(record).savefig(docs / _picture(name), **options)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]), Path(sys.argv[2]))
