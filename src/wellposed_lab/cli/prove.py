"""wellposed prove and wellposed verify."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from wellposed import Proof, verify
from wellposed._progress import progress_display
from wellposed.certify import Verdict
from wellposed.data._load import short_name
from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ExitCode, app, guarded, print_message, print_plain, print_wrapped
from wellposed_lab.runs.config import RunConfig, read
from wellposed_lab.runs.proving import FILES, FOLDER, prove_start
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import resolve_auto

__all__ = ["prove", "verify_command"]

PROVE = (
    "[bold]Examples[/]\n\n"
    "  wellposed prove runs/first --samples 10\n\n"
    "  wellposed prove config.yaml --set data.name=sphere --set data.n=10 --out proofs/sphere\n\n"
    "  wellposed prove config.yaml --out proofs/sphere --resume\n\n"
    "A proof is about plain descent on all samples at once, with one step size, from the start of the network; not about "
    "the optimizer of a run. The exit code is 0 if and only if it is proved; 1 if it is undecided."
)
VERIFY = (
    "[bold]Examples[/]\n\n"
    "  wellposed verify runs/first/proof\n\n"
    "  wellposed verify proofs/sphere --steps 100 --json\n\n"
    "The folder may come from a stranger: nothing in it is executed. The exit code is 0 if and only if every check holds."
)


@app.command(epilog=PROVE)
@guarded
def prove(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run directory, or a YAML file.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of a configuration.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="So many training samples, those that differ most; all if not given.")
    ] = None,
    step_size: Annotated[str, typer.Option("--step-size", help="auto (1/lambda_max), or a number.")] = "auto",
    max_steps: Annotated[int, typer.Option("--max-steps", help="Most steps to follow.")] = 10_000,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Where the proof is saved; RUN/proof, or proofs/DATE-MODEL-DATA.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the proof in its folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Prove that plain gradient descent from the start of a network ends at zero loss."""
    config, folder = _source(source, list(changes or []), folder, resume)
    proof = prove_start(
        config, folder, samples=samples, step_size=_step_size(step_size), max_steps=max_steps, resume=resume, progress=not quiet
    )
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **_summary(proof)}, indent=2))
    else:
        print_wrapped(str(proof), indent=4)
        print_wrapped(
            f"This is about plain descent on all {proof.sizes['n']} samples at once, not about {config.optimizer.name}."
        )
        print_plain(str(folder) if proof.can_be_saved else "No step was followed, so nothing was saved.")
    if proof.reason.startswith("interrupted"):
        print_message("Interrupted; the steps so far are saved. Continue with the same command and --resume.")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if proof.verdict is not Verdict.CERTIFIED:
        raise typer.Exit(ExitCode.NEGATIVE)


def _source(source: Path, changes: list[str], folder: Path | None, resume: bool) -> tuple[RunConfig, Path]:
    """The configuration, and the folder of the proof."""
    if not source.is_file() and (source.is_dir() or source.suffix not in (".yaml", ".yml")):
        if changes:
            raise InvalidArgument("--set changes a configuration; a run stays what it was. Give its config.yaml instead.")
        return read_config(source), folder or source / FOLDER
    config = resolve_auto(read(source, changes))
    if folder is None and resume:
        raise InvalidArgument("--resume continues a proof in its folder; name the folder with --out.")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.model.name}-{short_name(config.data.name)}"
    return config, folder or Path("proofs") / name


def _step_size(text: str) -> str | float:
    if text == "auto":
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"--step-size must be auto or a positive number; got {text!r}.") from None


def _summary(proof: Proof) -> dict[str, Any]:
    names = ("reason", "step_size", "num_steps", "delta", "loss", "radius", "rate", "distance", "seconds", "sizes", "tail")
    verdict = "proved" if proof.verdict is Verdict.CERTIFIED else "undecided"
    return {"verdict": verdict, **{name: getattr(proof, name) for name in names}, "assumptions": list(proof.assumptions)}


@app.command("verify", epilog=VERIFY)
@guarded
def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a proof, or a run directory that holds one.")],
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to compute again in more digits, at least.")] = 20,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the choice of these steps; a new one if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Check a stored proof anew, in another way than it was made."""
    if not (folder / FILES[0]).exists() and (folder / FOLDER / FILES[0]).exists():
        folder = folder / FOLDER
    with progress_display("verifying", show=not quiet, line="verify: {percent} %, {text}") as display:
        found = verify(folder, steps=steps, seed=seed, display=display)
    if as_json:
        checks = [{"name": check.name, "ok": check.ok, "count": check.count, "note": check.note} for check in found.checks]
        typer.echo(json.dumps({"ok": found.ok, "claim": found.claim, "steps": found.steps, "checks": checks}, indent=2))
    else:
        print_wrapped(f"{folder}\n{found}", indent=23)
    if not found.ok:
        raise typer.Exit(ExitCode.NEGATIVE)
