"""The parts of a page that are not figures: numbers at a glance, certificates, configuration, environment."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed_lab.report._certified import margins
from wellposed_lab.report._html import Html, el, number, table
from wellposed_lab.report._read import RunFiles, as_number
from wellposed_lab.runs._licence import each, licence

__all__ = ["badge", "certificate_parts", "configuration", "environment", "glance", "log_part", "sentence"]

#: Not by colour alone.
_SIGNS = {Verdict.CERTIFIED: "✓", Verdict.VIOLATED: "✗", Verdict.UNDECIDED: "?"}
_HOLDS = {True: "✓ holds", False: "✗ fails", None: "? undecided"}

#: Sessions and entries of environment.json on the page; a session has about 20.
SESSIONS, ENTRIES = 10, 200

AS_RECORDED = (
    "Verdicts are shown as recorded in certificates/. This page checks that each agrees with its own numbers, not that the "
    "numbers are those of the network: wellposed certify RUN computes them again."
)


def sentence(text: str) -> Html:
    """What stands in the place of a part that is missing."""
    return el("p", text, class_="missing")


def badge(verdict: Verdict) -> Html:
    """A verdict as a mark and a word, and that a file is all that stands behind it."""
    return el("span", f"{_SIGNS[verdict]} {verdict} as recorded", class_=f"badge {verdict.value}")


def glance(run: RunFiles) -> Html:
    """The most important numbers."""
    tiles: list[tuple[str, Any, str]] = []
    for part in ("train", "validation", "test"):
        parts = []
        if (accuracy := as_number(run.last(f"{part}_accuracy"))) is not None:
            parts.append(f"accuracy {accuracy:.2%}")
        if (loss := run.last(f"{part}_loss")) is not None:
            tiles.append((f"{part} loss", number(loss), ", ".join(parts)))
    if run.certificates:
        epoch, certificate = run.certificates[-1]
        said = f"; {licence(certificate)}" if licence(certificate) else ""
        kind = f"{certificate.theorem} ({certificate.dynamics})" if certificate.dynamics else certificate.theorem
        tiles.append(("certificate", badge(certificate.verdict), f"{kind}, epoch {epoch}{said}"))
    for label, points in list(margins(run).items())[:1]:
        tiles.append(("well-posedness margin", number(points[-1][1]), label))
    epochs, steps = run.last("epoch"), run.last("step")
    why = run.summary.get("stop_message") or ("it has not ended" if run.rows else "nothing was recorded")
    tiles.append(("trained", "–" if epochs is None else f"{number(epochs)} epochs", f"{number(steps)} steps; {why}"))
    if run.seconds is not None:
        tiles.append(("time", f"{run.seconds:.1f} s", "all epochs together"))
    items = [
        el("div", el("dt", name), el("dd", value, class_="big"), el("dd", note) if note else None)
        for name, value, note in tiles
    ]
    return el("dl", *items, class_="glance")


def certificate_parts(run: RunFiles) -> list[Html]:
    """A row for every certificate, and the last one in full."""
    if not run.certificates:
        return [
            sentence("No certificate was made: certificates/ is empty (run.certify_every, or no theorem for this network).")
        ]
    rows = []
    for epoch, certificate in run.certificates:
        failed = [h.name for h in certificate.hypotheses if not h.holds]
        why = "; ".join(certificate.licenses) if certificate.certified else certificate.note or "; ".join(failed)
        dynamics, said = certificate.dynamics or "–", licence(certificate) or "–"
        rows.append((epoch, certificate.theorem, dynamics, badge(certificate.verdict), _rate(certificate), said, why))
    header = ("epoch", "theorem", "dynamics", "verdict", "rate", "what moves, how fast", "licenses, or why not")
    parts = [el("p", AS_RECORDED), table("Certificates along training", header, rows)]
    epoch, last = run.certificates[-1]
    for index, one in enumerate(each(last)):
        body = _certificate(one, f"{one.theorem}{f' ({one.dynamics})' if one.dynamics else ''}")
        title = el("summary", f"Epoch {epoch}: {one.theorem} {one.dynamics} ", badge(one.verdict))
        parts.append(el("details", title, *body, open=index == 0))
    return parts


def _rate(certificate: Certificate) -> Html:
    return el("span", "–" if certificate.rate is None else f"{certificate.rate:.10g}", class_="nowrap")


def _holds(hypothesis: Hypothesis) -> Html:
    note = el("div", hypothesis.note, class_="note") if hypothesis.note else None
    return el("div", el("span", _HOLDS[hypothesis.holds], class_="nowrap"), note)


def _certificate(certificate: Certificate, title: str) -> list[Html]:
    parts = [el("p", certificate.note)] if certificate.note else []
    if certificate.hypotheses:
        rows = [(h.name, h.equation, h.value, h.relation, h.bound, h.margin, _holds(h)) for h in certificate.hypotheses]
        header = ("hypothesis", "source", "value", "", "bound", "margin", "verdict")
        parts.append(table(f"Hypotheses of {title}", header, rows))
    if certificate.licenses:
        parts.append(el("ul", *(el("li", text) for text in certificate.licenses)))
    numbers: list[tuple[str, str, Any]] = []
    for label in ("step_size", "rates", "radii", "measured", "errors"):
        value = getattr(certificate, label)
        what = label.replace("_", " ")
        pairs = value.items() if isinstance(value, Mapping) else [] if value is None else [("all", value)]
        numbers += [(what, str(name), entry) for name, entry in pairs]
    if numbers:
        parts.append(table(f"Numbers of {title}", ("what", "name", "value"), numbers))
    return parts


def configuration(run: RunFiles) -> list[Html]:
    """The resolved configuration, by sections."""
    if not run.config_text:
        return [sentence("config.yaml is missing, so the configuration is not known.")]
    if not run.config:
        return [el("pre", run.config_text, tabindex="0")]
    tables = []
    for section, keys in run.config.items():
        pairs = keys.items() if isinstance(keys, dict) else [("", keys)]
        tables.append(table(section, ("key", "value"), [(str(key), _text(value)) for key, value in pairs]))
    return [el("div", *tables, class_="columns")]


def environment(run: RunFiles) -> list[Html]:
    """What it ran on, a column for every session."""
    if not run.sessions:
        return [sentence("environment.json is missing or empty, so the environment is not known.")]
    count = len(run.sessions)
    flat = [dict(_flat(session)) for session in run.sessions[-SESSIONS:]]
    names = list(dict.fromkeys(name for session in flat for name in session))
    header = ("", *(f"session {index}" for index in range(count - len(flat) + 1, count + 1))) if count > 1 else ("", "value")
    rows = [(name, *(_text(session.get(name)) for session in flat)) for name in names[:ENTRIES]]
    shown = [f"the last {SESSIONS} of {count} sessions"] if count > SESSIONS else []
    shown += [f"the first {ENTRIES} of {len(names)} entries"] if len(names) > ENTRIES else []
    said = [el("p", f"Shown are {' and '.join(shown)}; environment.json holds all.")] if shown else []
    return [*said, table("Environment", header, rows)]


def log_part(run: RunFiles) -> list[Html]:
    """The end of the log."""
    if not run.log:
        return [sentence("log.txt is missing or empty.")]
    return [el("pre", "\n".join(run.log), tabindex="0", role="region", aria_label="Log")]


def _flat(value: Mapping[Any, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for key, part in value.items():
        if isinstance(part, Mapping) and part:
            yield from _flat(part, f"{before}{key}.")
        else:
            yield f"{before}{key}", part


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return " ".join(value) or "–"
    return value if isinstance(value, str) else json.dumps(value, default=str)
