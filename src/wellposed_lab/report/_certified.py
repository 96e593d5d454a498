"""Lines out of certificates: margins, norms, and the loss that they promise."""

from __future__ import annotations

import math

from wellposed.certify import Certificate
from wellposed_lab.report._read import RunFiles, as_number
from wellposed_lab.runs.records import each

__all__ = ["Promise", "margins", "norms", "promise"]

#: Theorems about existence and uniqueness alone.
WELL_POSED = ("contraction", "monotone", "perron_frobenius")

#: A sentence on what was drawn or why nothing was, and the points of the line.
Promise = tuple[str, list[tuple[float, float | None]]]


def margins(run: RunFiles) -> dict[str, list[tuple[float, float]]]:
    """By condition of well-posedness: (epoch, margin). Positive is proved."""
    found: dict[str, list[tuple[float, float]]] = {}
    for epoch, certificate in run.certificates:
        for one in each(certificate):
            for hypothesis in one.hypotheses if one.theorem in WELL_POSED else ():
                margin = as_number(hypothesis.margin)
                if margin is not None:
                    found.setdefault(f"{one.theorem}: {hypothesis.name}", []).append((epoch, margin))
    return found


def norms(run: RunFiles) -> dict[str, list[tuple[float, float]]]:
    """By name: (epoch, norm), of everything measured whose name is that of a norm, |W| or |X|_F.

    Theorems have different letters for the same matrix: lines that are equal are one, "|R|, |W|".
    """
    found: dict[str, dict[float, float]] = {}
    for epoch, certificate in run.certificates:
        for one in each(certificate):
            for name, value in one.measured.items():
                norm, name = as_number(value), name.split(" < ")[0]  # a hypothesis, "|W| < 1", names its left side
                if norm is not None and name.startswith("|") and name.endswith(("|", "|_F")):
                    found.setdefault(name, {}).setdefault(epoch, norm)
    names: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in found.items():
        names.setdefault(tuple(sorted(points.items())), []).append(name)
    return {", ".join(same): list(points) for points, same in names.items()}


def promise(run: RunFiles) -> Promise:
    r"""What certificates promise about the training loss, from each on to the next.

    A descent: |r_k| <= q^k |r_0|, so the loss, |r|^2 over a constant, is at most q^(2k) times that at the certificate. A flow:
    |r(t)| <= exp(-s t) |r_0|; steps of plain descent on the mean over n samples with rate lr are lr/n of its time each.

    Returns:
        A sentence about the line, and its points, broken between certificates.
    """
    held = [(epoch, c) for epoch, c in run.certificates if c.certified and as_number(c.rate) is not None]
    if not run.certificates:
        return "No certificate was made, so there is no certified loss.", []
    if not held:
        return "No certificate with a rate holds, so there is no certified loss.", []
    rows = {row["epoch"]: row for row in run.rows if as_number(row.get("step")) is not None}
    flow_step = _flow_step(run)
    points: list[tuple[float, float | None]] = []
    for index, (epoch, certificate) in enumerate(held):
        start = as_number(rows.get(epoch, {}).get("train_loss"))
        flow = certificate.dynamics == "flow"
        if start is None or (flow and flow_step is None):
            continue
        end = held[index + 1][0] if index + 1 < len(held) else max(rows)
        taken = {e: float(row["step"]) - float(rows[epoch]["step"]) for e, row in rows.items()}
        bound = [(e, _bound(certificate, start, steps, flow_step)) for e, steps in taken.items() if steps >= 0]
        points += [(e, value) for e, value in bound if epoch <= e <= end] + [(end, None)]
    if not points:
        return (
            "The certificates are about gradient flow, in time; the steps of this optimizer have no place on it, so nothing is "
            "drawn. Their rates are in the table of certificates.",
            [],
        )
    last = held[-1][1]
    what = "gradient flow, whose time is the step size times the steps" if last.dynamics == "flow" else "gradient descent"
    name = run.key("optimizer", "name") or "its own optimizer"
    return (
        f"The dashed line is proved for full-batch {what} with the certified steps, started at the parameters of each "
        f"certificate. This run took steps of {name} instead, to which it is a comparison and not a bound.",
        points,
    )


def _bound(certificate: Certificate, start: float, steps: float, flow_step: float | None) -> float:
    rate = certificate.rate or 0.0
    if certificate.dynamics == "flow":
        return start * math.exp(-2 * rate * (flow_step or 0.0) * steps)
    return start * rate ** (2 * steps)


def _flow_step(run: RunFiles) -> float | None:
    """Time of the flow that one step is; None for all but plain full-batch descent with one step size."""
    samples = run.summary.get("samples")
    n = as_number(samples.get("train")) if isinstance(samples, dict) else None
    size, batch = as_number(run.key("optimizer", "lr")), as_number(run.key("run", "batch_size"))
    is_plain = (
        run.key("optimizer", "name") == "sgd"
        and run.key("optimizer", "schedule") == "constant"
        and not any(run.key("optimizer", name) for name in ("momentum", "weight_decay", "clip", "warmup"))
    )
    if n is None or size is None or not (n > 0 and size > 0 and is_plain) or (batch is not None and batch < n):
        return None
    return size / n
