"""The page of one run, the page of a comparison, and their tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from wellposed._io import write_whole, writing
from wellposed.certify import Certificate, Hypothesis, Verdict
from wellposed.errors import InvalidArgument
from wellposed_lab.report._charts import losses, margin, margins, measure, norm_lines
from wellposed_lab.report._network import NetworkState, network_state, parameter_table, predictions, spectrum
from wellposed_lab.report._page import Part, Section, number, page, table
from wellposed_lab.report._proof import is_proof, proof_section
from wellposed_lab.report._read import RunData, as_number, read_run
from wellposed_lab.runs.records import each, licence, moves

__all__ = ["compare", "write"]

#: Not by colour alone.
_SIGNS = {Verdict.CERTIFIED: "✓", Verdict.VIOLATED: "✗", Verdict.UNDECIDED: "?"}
_HOLDS = {True: "✓ holds", False: "✗ fails", None: "? undecided"}
_MEASURES = ("accuracy", "miou", "equilibrium_steps")
#: Sessions and entries of environment.json on the page; a session has about 20.
SESSIONS, ENTRIES = 10, 200
_NO_WRAP = Markup('<span class="nowrap">{}</span>')

AS_RECORDED = (
    "Verdicts are shown as recorded in certificates/. This page checks that each agrees with its own numbers, not that the "
    "numbers are those of the network: wellposed certify RUN computes them again."
)


def write(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Writes the page of a run: losses measured and certified, kernel spectrum, norms, margins,
    certificates, predictions, configuration, environment.

    What is missing or damaged in the run becomes a sentence on the page. The network is loaded from
    its last checkpoint to compute spectrum and predictions; the run is not changed. Without plotly
    the figures are tables.

    Args:
        run_dir: The run directory, or the folder of a proof.
        out: The file; report.html in the run directory if not given.

    Returns:
        The path of the file.
    """
    folder = Path(run_dir)
    if is_proof(folder):
        proof = [part for part in [proof_section(folder, inside="")] if part is not None]
        return _save(page(folder.resolve().name, "A stored proof.", proof), folder / "report.html" if out is None else out)
    run, state, proved = read_run(folder), network_state(folder), proof_section(folder)
    shown = predictions(state)
    moment = "at the start" if state.epoch is None else f"after epoch {state.epoch}"
    about = {"kind": "paragraph", "text": f"The network {moment}."} if state.parameters else None
    sections = [
        Section("glance", "At a glance", [_glance(run)]),
        Section("training", "Training", [losses([run]), *(measure([run], name) for name in _MEASURES)]),
        *([] if proved is None else [proved]),
        Section("certificates", "Certificates", [margin([run]), *_certificates(run)]),
        Section(
            "network",
            "Network",
            [about, *state.remarks, spectrum({run.name: state}), norm_lines([run]), parameter_table(state)],
        ),
        Section("outputs", "Predictions", [shown] if isinstance(shown, str) else shown),
        Section("configuration", "Configuration", [_configuration(run)]),
        Section("environment", "Environment", _environment(run)),
        Section("log", "Log", [_log(run)]),
    ]
    return _save(page(run.name, run.described, sections, run.remarks), folder / "report.html" if out is None else out)


def compare(run_dirs: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Writes one page about several runs: their curves in the same figures, and where their
    configurations differ.

    Args:
        run_dirs: Two or more run directories.
        out: The file.

    Returns:
        The path of the file.
    """
    folders = [Path(folder) for folder in run_dirs]
    if len(folders) < 2:
        raise InvalidArgument(f"A comparison needs two or more run directories; got {len(folders)}. For one, use report.write.")
    runs = _named([read_run(folder) for folder in folders])
    states = {run.name: network_state(run.folder) for run in runs}
    remarks = [f"{run.name}: {remark}" for run in runs for remark in (*run.remarks, *states[run.name].remarks)]
    sections = [
        Section("glance", "At a glance", [_overview(runs)]),
        Section("differences", "What differs", [_differences(runs)]),
        Section("training", "Training", [losses(runs), *(measure(runs, name) for name in _MEASURES)]),
        Section("certificates", "Certificates", [margin(runs)]),
        Section("network", "Networks", [spectrum(states), norm_lines(runs), _parameters(states)]),
    ]
    return _save(page(f"Comparison of {len(runs)} runs", ", ".join(run.name for run in runs), sections, remarks), out)


def _save(text: str, out: str | os.PathLike[str]) -> Path:
    path = Path(out)
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give the name of a file, such as {path / 'report.html'}.")
    with writing(path, begun=False):
        path.parent.mkdir(parents=True, exist_ok=True)
    # text from a run may hold lone surrogates, which UTF-8 cannot
    write_whole(path, text.encode("utf-8", errors="replace"), begun=False)
    return path


def _badge(verdict: Verdict) -> Markup:
    """A verdict as a mark and a word; "as recorded", because only a file supports it."""
    return Markup('<span class="badge {}">{} {} as recorded</span>').format(verdict.value, _SIGNS[verdict], str(verdict))


def _glance(run: RunData) -> Part:
    """The most important numbers."""
    tiles: list[tuple[str, str, str]] = []
    for part in ("train", "validation", "test"):
        accuracy = as_number(run.last(f"{part}_accuracy"))
        if (loss := run.last(f"{part}_loss")) is not None:
            tiles.append((f"{part} loss", number(loss), "" if accuracy is None else f"accuracy {accuracy:.2%}"))
    if run.certificates:
        epoch, certificate = run.certificates[-1]
        said = f"; {licence(certificate)}" if licence(certificate) else ""
        kind = f"{certificate.theorem} ({certificate.dynamics})" if certificate.dynamics else certificate.theorem
        tiles.append(("certificate", _badge(certificate.verdict), f"{kind}, epoch {epoch}{said}"))
    for label, points in list(margins(run).items())[:1]:
        tiles.append(("well-posedness margin", number(points[-1][1]), label))
    epochs, steps = run.last("epoch"), run.last("step")
    why = run.summary.get("stop_message") or ("it has not ended" if run.rows else "nothing was recorded")
    tiles.append(("trained", "–" if epochs is None else _counted(epochs, "epoch"), f"{_counted(steps, 'step')}; {why}"))
    if run.seconds is not None:
        tiles.append(("time", f"{run.seconds:.1f} s", "all epochs together"))
    return {"kind": "tiles", "tiles": tiles}


def _counted(count: Any, noun: str) -> str:
    return f"{number(count)} {noun}{'' if count == 1 else 's'}"


def _certificates(run: RunData) -> list[Part]:
    """A row for every certificate, and the last one in full."""
    if not run.certificates:
        return ["No certificate was made: certificates/ is empty (run.certify_every, or no theorem for this network)."]
    rows = []
    for epoch, certificate in run.certificates:
        failed = [h.name for h in certificate.hypotheses if not h.holds]
        why = "; ".join(certificate.licenses) if certificate.certified else certificate.note or "; ".join(failed)
        rate = _NO_WRAP.format("–" if certificate.rate is None else f"{certificate.rate:.10g}")
        dynamics, said = certificate.dynamics or "–", licence(certificate) or "–"
        rows.append((epoch, certificate.theorem, dynamics, _badge(certificate.verdict), rate, said, why))
    header = ("epoch", "theorem", "dynamics", "verdict", "rate", "what moves, how fast", "licenses, or why not")
    parts: list[Part] = [{"kind": "paragraph", "text": AS_RECORDED}, table("Certificates along training", header, rows)]
    epoch, last = run.certificates[-1]
    for index, one in enumerate(each(last)):
        title = Markup("Epoch {}: {} {} {}").format(epoch, one.theorem, one.dynamics, _badge(one.verdict))
        parts.append({"kind": "details", "title": title, "parts": _certificate(one), "open": index == 0})
    return parts


def _certificate(certificate: Certificate) -> list[Part]:
    title = f"{certificate.theorem}{f' ({certificate.dynamics})' if certificate.dynamics else ''}"
    parts: list[Part] = [{"kind": "paragraph", "text": certificate.note}] if certificate.note else []
    if certificate.hypotheses:
        rows = [(h.name, h.equation, h.value, h.relation, h.bound, h.margin, _holds(h)) for h in certificate.hypotheses]
        header = ("hypothesis", "source", "value", "", "bound", "margin", "verdict")
        parts.append(table(f"Hypotheses of {title}", header, rows))
    if certificate.licenses:
        parts.append({"kind": "list", "entries": certificate.licenses})
    numbers: list[tuple[str, str, Any]] = []
    for label in ("step_size", "rates", "radii", "measured", "errors"):
        value = getattr(certificate, label)
        pairs = value.items() if isinstance(value, Mapping) else [] if value is None else [("all", value)]
        numbers += [(label.replace("_", " "), str(name), entry) for name, entry in pairs]
    if numbers:
        parts.append(table(f"Numbers of {title}", ("what", "name", "value"), numbers))
    return parts


def _holds(hypothesis: Hypothesis) -> Markup:
    note = Markup('<div class="note">{}</div>').format(hypothesis.note) if hypothesis.note else ""
    return Markup("<div>{}{}</div>").format(_NO_WRAP.format(_HOLDS[hypothesis.holds]), note)


def _configuration(run: RunData) -> Part:
    """The resolved configuration, by sections."""
    if not run.config_text:
        return "config.yaml is missing, so the configuration is not known."
    if not run.config:
        return {"kind": "pre", "text": run.config_text, "label": ""}
    tables = []
    for section, keys in run.config.items():
        pairs = keys.items() if isinstance(keys, dict) else [("", keys)]
        tables.append(table(section, ("key", "value"), [(str(key), _text(value)) for key, value in pairs]))
    return {"kind": "columns", "tables": tables}


def _environment(run: RunData) -> list[Part]:
    """The machine, a column for every session."""
    if not run.sessions:
        return ["environment.json is missing or empty, so the environment is not known."]
    count = len(run.sessions)
    flat = [dict(_flat(session)) for session in run.sessions[-SESSIONS:]]
    names = list(dict.fromkeys(name for session in flat for name in session))
    header = ("", *(f"session {index}" for index in range(count - len(flat) + 1, count + 1))) if count > 1 else ("", "value")
    rows = [(name, *(_text(session.get(name)) for session in flat)) for name in names[:ENTRIES]]
    shown = [f"the last {SESSIONS} of {count} sessions"] if count > SESSIONS else []
    shown += [f"the first {ENTRIES} of {len(names)} entries"] if len(names) > ENTRIES else []
    said = {"kind": "paragraph", "text": f"Shown are {' and '.join(shown)}; environment.json holds all."} if shown else None
    return [said, table("Environment", header, rows)]


def _log(run: RunData) -> Part:
    """The end of the log."""
    return {"kind": "pre", "text": "\n".join(run.log), "label": "Log"} if run.log else "log.txt is missing or empty."


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


def _named(runs: Sequence[RunData]) -> list[RunData]:
    """Runs with different names: equal names get a number."""
    names: list[str] = []
    for run in runs:
        name, count = run.name, 2
        while name in names:
            name, count = f"{run.name} ({count})", count + 1
        names.append(name)
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _overview(runs: Sequence[RunData]) -> Part:
    columns = ["train_loss", "validation_loss", "test_loss", "train_accuracy", "test_accuracy", "test_miou"]
    columns = [name for name in columns if any(run.last(name) is not None for run in runs)]
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        last = run.certificates[-1][1] if run.certificates else None
        least = [min(value for _, value in points) for points in margins(run).values()]
        moved = f", {moves(last)}" if last is not None and last.certified and last.rate is not None else ""
        verdict = "none" if last is None else Markup("<span>{} {}{}</span>").format(_badge(last.verdict), last.theorem, moved)
        rows.append(
            (run.name, run.described, *(run.last(name) for name in columns), verdict, min(least, default=None), run.seconds)
        )
    header = ("run", "what", *(name.replace("_", " ") for name in columns), "last certificate", "least margin", "seconds")
    return table("Runs", header, rows)


def _differences(runs: Sequence[RunData]) -> Part:
    flat = [
        {
            f"{section}.{key}": value
            for section, keys in run.config.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        for run in runs
    ]
    names = dict.fromkeys(name for config in flat for name in config)
    texts = {name: [json.dumps(config[name], default=str) if name in config else "–" for config in flat] for name in names}
    rows = [(name, *values) for name, values in texts.items() if len(set(values)) > 1]
    if not rows:
        return "The configurations are equal, as far as they can be read."
    return table("Keys of the configuration that differ", ("key", *(run.name for run in runs)), rows)


def _parameters(states: dict[str, NetworkState]) -> Part:
    rows = [(name, p.name, p.start, p.now, p.distance) for name, state in states.items() for p in state.parameters]
    header = ("run", "parameter", "at the start", "now", "distance")
    return table("Frobenius norms of the parameters", header, rows) if rows else None
