"""The page of one run."""

from __future__ import annotations

import os
from pathlib import Path

from wellposed._io import write_whole, writing
from wellposed.errors import InvalidArgument
from wellposed_lab.report._html import Html, el
from wellposed_lab.report._loss_charts import losses, margin, measure, norm_lines
from wellposed_lab.report._network import parameter_table, predictions, spectrum
from wellposed_lab.report._page import Section, page
from wellposed_lab.report._read import RunFiles, read_run
from wellposed_lab.report._sections import certificate_parts, configuration, environment, glance, log_part
from wellposed_lab.report._state import NetworkState, network_state

__all__ = ["described", "save", "write"]


def write(run_dir: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Writes the page of a run: losses measured and certified, kernel spectrum, norms, margins, certificates, predictions,
    configuration, environment.

    What is missing or damaged in the run becomes a sentence on the page. The network is loaded from its last checkpoint to
    compute spectrum and predictions; the run is not changed. Without plotly the figures are tables.

    Args:
        run_dir: The run directory.
        out: The file; report.html in the run directory if not given.

    Returns:
        The path of the file.
    """
    folder = Path(run_dir)
    run = read_run(folder)
    state = network_state(folder)
    return save(
        page(run.name, described(run), _sections(run, state), run.remarks), folder / "report.html" if out is None else out
    )


def _sections(run: RunFiles, state: NetworkState) -> list[Section]:
    shown = predictions(state)
    moment = "at the start" if state.epoch is None else f"after epoch {state.epoch}"
    about = el("p", f"The network {moment}.") if state.parameters else None
    unknown: list[Html] = [el("p", remark, class_="missing") for remark in state.remarks]
    return [
        Section("glance", "At a glance", [glance(run)]),
        Section(
            "training",
            "Training",
            [losses([run]), *(measure([run], name) for name in ("accuracy", "miou", "equilibrium_steps"))],
        ),
        Section("certificates", "Certificates", [margin([run]), *certificate_parts(run)]),
        Section(
            "network", "Network", [about, *unknown, spectrum({run.name: state}), norm_lines([run]), parameter_table(state)]
        ),
        Section("outputs", "Predictions", [shown] if isinstance(shown, str) else shown),
        Section("configuration", "Configuration", configuration(run)),
        Section("environment", "Environment", environment(run)),
        Section("log", "Log", log_part(run)),
    ]


def described(run: RunFiles) -> str:
    """What was trained on what, in a line."""
    model, data, width = run.key("model", "name"), run.key("data", "name"), run.key("model", "width")
    if model is None or data is None:
        return "A training run."
    started = run.sessions[0].get("started") if run.sessions else None
    return f"{model} of width {width} on {data}" + (f", started {started}" if started else "")


def save(text: str, out: str | os.PathLike[str]) -> Path:
    """Writes the file whole or not at all."""
    path = Path(out)
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; give the name of a file, such as {path / 'report.html'}.")
    with writing(path, begun=False):
        path.parent.mkdir(parents=True, exist_ok=True)
    # text from a run may hold lone surrogates, which UTF-8 cannot
    write_whole(path, text.encode("utf-8", errors="replace"), begun=False)
    return path
