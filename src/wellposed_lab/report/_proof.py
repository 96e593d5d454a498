"""What the page of a run says of its proof: loss, delta and mask ratio by step, and the tail."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from wellposed.errors import RunError
from wellposed.prove.verify_reading import StoredProof
from wellposed_lab.report._charts import Lines, axes
from wellposed_lab.report._page import Figure, Part, Section, number, table
from wellposed_lab.runs.proving import FILES, FOLDER

__all__ = ["is_proof", "proof_section"]

AS_RECORDED = (
    "As recorded in {folder}; this page does not check it, and wellposed verify {folder} does. The proof is about plain "
    "gradient descent on these samples all at once, from the start of the network, in exact arithmetic; it is not about the "
    "optimizer of the run."
)
#: Numbers of the tail in words.
MEANINGS = {
    "residual": "|r| at the exact iterate K, at most",
    "s": "singular values of the mean of Jacobian and secant, at least",
    "s0": "least singular value of the Jacobian at point K, at least",
    "s1": "the same at the edge of the ball, at least",
    "L": "norm of the Jacobian in the ball, at most",
    "f": "half the difference of Jacobian and secant, at most",
    "e0": "product of the secant and that difference, at most",
    "g": "square of that difference by the mean, both applied to |r|, at most",
    "g0": "what is left of that square, at most",
    "kappa": "fall of |r| per length of path, at least",
    "slope": "fall of |r| per length of path at the edge of the ball, at least",
    "c": "share of it that the step size leaves",
    "Lambda": "Lipschitz constant of the Jacobian, at most",
    "switches": "pairs (sample, unit) that may switch on or off",
    "omega": "largest eigenvalue of the symmetric part of the recurrent matrix, at most",
}


def is_proof(folder: Path) -> bool:
    """Whether this is the folder of a proof, and not a run."""
    return (folder / FILES[0]).is_file() and not (folder / "config.yaml").exists()


def proof_section(folder: Path, *, inside: str = FOLDER) -> Section | None:
    """The proof in this folder of a run; None if there is none."""
    place = folder / inside
    if not (place / FILES[0]).exists():
        return None
    if inside and place.is_symlink():
        return Section("proof", "Proof", [f"{inside} is a link, and links in a run directory are not followed."])
    try:
        proof = StoredProof(place)
    except RunError as error:
        return Section("proof", "Proof", [str(error)])
    said: Part = {"kind": "paragraph", "text": AS_RECORDED.format(folder=place)}
    return Section("proof", "Proof", [_glance(proof), said, _descent(proof), _distances(proof), _tail(proof), _attempts(proof)])


def _glance(proof: StoredProof) -> Part:
    document, proved = proof.document, proof.tail is not None
    verdict = "proved" if proved else "undecided"
    note = "zero loss is reached, from the start" if proved else str(document.get("reason", ""))
    network = f"{proof.family} of width {proof.m}, {proof.activation}"
    tiles = [
        ("verdict, as recorded", verdict, note),
        ("about", f"{proof.n} samples", network),
        ("steps followed", f"{proof.K:,}", f"step size {number(proof.step_size)}"),
        ("delta", number(proof.steps["delta"][-1]), "distance of exact and computed descent, at most"),
    ]
    if proved:
        rate = proof.number("rate", document.get("rate"))
        halving = math.ceil(math.log(0.5) / math.log(rate)) if 0 < rate < 1 else 1
        tiles.append(("rate", f"{rate:.8g}", f"|r| halves within {halving:,} steps after step {proof.K:,}"))
        tiles.append(("parameters move", number(document.get("distance")), "from the start, at most"))
    return {"kind": "tiles", "tiles": tiles}


def _descent(proof: StoredProof) -> Figure | str:
    """The loss at the computed points, and what is proved of it after them."""
    losses = [(k, loss) for k, loss in enumerate(proof.steps["loss"]) if loss > 0]
    if not losses:
        return "The proof follows no steps, so there is no figure of its loss."
    lines = Lines()
    lines.add(
        "computed", losses, 0, f" loss {number(losses[0][1])} at step 0, {number(losses[-1][1])} at step {losses[-1][0]}."
    )
    rate = proof.document.get("rate")
    if proof.tail is not None and isinstance(rate, float) and 0 < rate < 1:
        first = proof.tail["residual"] ** 2 / 2
        length = max(10, proof.K)
        bound = [(proof.K + j, first * rate ** (2 * j)) for j in range(length + 1)]
        drawn = [(k, value) for k, value in bound if value > 1e-300]
        lines.add(
            "proved", drawn, 4, f" loss at most {number(first)} from step {proof.K} on, falling.", line={"dash": "dashdot"}
        )
    caption = "|r|^2/2 at the computed points; the dashed line is proved for all later steps of exact descent."
    layout = axes("step", "loss |r|^2/2", log=True, hovermode="x unified", showlegend=True)
    return lines.figure(
        "proof-loss", "Loss of descent, computed and proved", layout, caption, ("line", "step", "loss"), toggles=True
    )


def _distances(proof: StoredProof) -> Figure | None:
    """delta, and by how much masks are unambiguous."""
    lines = Lines()
    delta = [(k, value) for k, value in enumerate(proof.steps["delta"]) if value > 0]
    if delta:
        lines.add("delta", delta, 1, f" grows to {number(delta[-1][1])}.")
    ratio = [(k, value) for k, value in enumerate(proof.steps["mask_ratio"]) if value is not None]
    if ratio:
        least = min(value for _, value in ratio)
        lines.add("mask ratio", ratio, 2, f" is at least {number(least)}, and must stay above 1.")
    if not lines.traces:
        return None
    caption = (
        "delta bounds the distance of exact and computed descent. The mask ratio is the least pre-activation over its largest "
        "change within delta; above 1, every unit is known to be on or off."
    )
    layout = axes("step", "delta; mask ratio", log=True, hovermode="x unified", showlegend=True)
    return lines.figure("proof-delta", "Distance of exact descent, and masks", layout, caption, ("line", "step", "value"))


def _tail(proof: StoredProof) -> Part:
    if proof.tail is None:
        return "The tail was not reached: nothing is proved beyond the last step."
    rows: list[tuple[Any, ...]] = [(name, value, MEANINGS.get(name, "")) for name, value in proof.tail.items()]
    rows.append(("radius", proof.document.get("radius"), "distance of all later iterates from iterate K, at most"))
    return table(f"Tail from step {proof.K}", ("name", "value", "meaning"), rows)


def _attempts(proof: StoredProof) -> Part:
    tried = proof.document.get("attempts")
    rows = [
        (one.get("step"), one.get("loss"), str(one.get("reason"))[:200])
        for one in (tried if isinstance(tried, list) else [])[-20:]
        if isinstance(one, dict)
    ]
    return table("Where the tail was tried before", ("step", "loss", "why it did not hold"), rows) if rows else None
