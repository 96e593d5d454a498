"""What a certificate is: a theorem, its hypotheses as numbers, a verdict, and what the verdict
licenses."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from wellposed._reading import parse_json
from wellposed.certify._certificate_table import certificate_latex, hidden_ratio, moves, plain_table, short
from wellposed.errors import InvalidArgument

OUT_OF_RANGE = "The numbers leave the range of float64"
RELATIONS = ("<", "<=", ">", ">=")
OWN_SOURCE = "[wellposed, Certificates]"  #: Of theorems of the library: the page of its documentation.
#: The fields of a certificate that hold a number, or numbers by name.
_NUMBERS = ("step_size", "rates", "rate", "radii", "measured", "errors")


class Verdict(enum.Enum):
    """CERTIFIED: every hypothesis holds, so the conclusion is proved. VIOLATED: a hypothesis is
    false, so this theorem says nothing (training may still succeed: the theorems are sufficient,
    not necessary). UNDECIDED: not proved either way.

    Examples:
        >>> import wellposed as wp
        >>> layer = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16, weight=wp.nn.Spectral(0.9)))
        >>> wp.certify(layer).verdict is wp.Verdict.CERTIFIED
        True
    """

    CERTIFIED = "certified"
    VIOLATED = "violated"
    UNDECIDED = "undecided"

    def __str__(self) -> str:
        return self.name

    def __bool__(self) -> bool:
        raise TypeError("A verdict is not a bare yes or no: compare it with Verdict.CERTIFIED.")


@dataclass(frozen=True)
class Hypothesis:
    """One condition of a theorem, evaluated: `value relation bound`.

    Attributes:
        name: What it says in words.
        equation: Where it comes from, e.g. "[ling2022, (7)]".
        value: The left side, bounded from the side that can only harm; None if it could not be
            evaluated.
        bound: The right side, bounded likewise; None if it could not be evaluated.
        relation: "<", "<=", ">" or ">=".
        holds: True, False, or None when nothing is decided.
        note: Why it can never hold, how to make it hold, or what stands in its way.
    """

    name: str
    equation: str
    value: float | None
    bound: float | None
    relation: str = ">="
    holds: bool | None = None
    note: str = ""

    @classmethod
    def compare(
        cls, name: str, equation: str, value: float, relation: str, bound: float, *, refutes: bool = True, note: str = ""
    ) -> Hypothesis:
        """A hypothesis judged by its numbers.

        Args:
            name, equation, note: As above.
            value, relation, bound: The comparison. Both sides are already bounded from the harmful
                side.
            refutes: Whether the comparison failing proves the hypothesis false (both sides exact up
                to rounding); if not, it is left undecided.
        """
        if relation not in RELATIONS:
            raise InvalidArgument(f"relation must be one of {', '.join(RELATIONS)}; got {relation!r}.")
        if math.isnan(value) or math.isnan(bound):
            return cls(name, equation, value, bound, relation, None, note)
        true = {"<": value < bound, "<=": value <= bound, ">": value > bound, ">=": value >= bound}[relation]
        return cls(name, equation, value, bound, relation, True if true else (False if refutes else None), note)

    @property
    def margin(self) -> float | None:
        """By how much it holds (positive) or fails (negative): the difference of the two sides."""
        if self.value is None or self.bound is None:
            return None
        return self.value - self.bound if self.relation.startswith(">") else self.bound - self.value


@dataclass(frozen=True)
class Certificate:
    """A theorem checked on numbers.

    CERTIFIED needs finite positive steps and a rate strictly on the right side, or raises
    `InvalidArgument`.

    Attributes:
        theorem: Which one, e.g. "radius" or "ling2022".
        verdict: CERTIFIED, VIOLATED or UNDECIDED.
        hypotheses: Each with its two sides.
        dynamics: "flow", "descent" or "" (well-posedness alone).
        step_size: What is licensed for descent: one number, or one by parameter; None if nothing
            is.
        rates: Relative speeds by parameter at which the certified flow runs; None if none is
            certified.
        rate: Descent: q with |r_k| <= q^k |r_0|. Flow: s with |r(t)| <= exp(-s t) |r_0|. None if
            nothing is licensed.
        radii: By parameter (or "all"), how far it moves at most, in Frobenius norm; None if nothing
            is licensed.
        licenses: What is proved, in sentences.
        measured: The numbers that went in.
        errors: Numerical errors that were taken into account.
        note: The reason, if not certified; what is special, if it is.
        others: Certificates by other theorems that were tried.
    """

    theorem: str
    verdict: Verdict
    hypotheses: tuple[Hypothesis, ...] = ()
    dynamics: str = ""
    step_size: float | Mapping[str, float] | None = None
    rates: Mapping[str, float] | None = None
    rate: float | None = None
    radii: Mapping[str, float] | None = None
    licenses: tuple[str, ...] = ()
    measured: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    others: tuple[Certificate, ...] = ()

    def __post_init__(self) -> None:
        fault = _license_fault(self.dynamics, self.step_size, self.rates, self.rate, self.radii)
        if self.verdict is Verdict.CERTIFIED and fault:
            raise InvalidArgument(f"A certificate by {self.theorem!r} cannot be CERTIFIED: {fault}.")

    def __bool__(self) -> bool:
        raise TypeError("A certificate is not a bare yes or no: compare `certificate.verdict` with Verdict.CERTIFIED.")

    @property
    def certified(self) -> bool:
        """Whether the verdict is CERTIFIED."""
        return self.verdict is Verdict.CERTIFIED

    def to_dict(self) -> dict[str, Any]:
        """Plain Python for JSON; infinities and NaN become strings."""
        plain: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        plain["verdict"] = self.verdict.value
        plain["hypotheses"] = [
            {**{item.name: _number_out(getattr(h, item.name)) for item in fields(h)}, "margin": _number_out(h.margin)}
            for h in self.hypotheses
        ]
        for name in _NUMBERS:
            plain[name] = _each_number(plain[name], _number_out)
        plain["licenses"] = list(self.licenses)
        plain["others"] = [other.to_dict() for other in self.others]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Certificate:
        """The certificate that `to_dict` wrote; raises `InvalidArgument` for anything else."""
        from wellposed.certify._recorded import check_plain

        check_plain(plain, {item.name for item in fields(cls)})
        values = dict(plain)
        values["verdict"] = Verdict(plain["verdict"])
        sides = ("value", "bound")
        values["hypotheses"] = tuple(
            Hypothesis(**{key: _number_in(h[key]) if key in sides else h[key] for key in h if key != "margin"})
            for h in plain["hypotheses"]
        )
        for name in _NUMBERS:
            values[name] = _each_number(plain[name], _number_in)
        values["licenses"] = tuple(plain["licenses"])
        values["others"] = tuple(cls.from_dict(other) for other in plain["others"])
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Certificate:
        """The certificate that `to_json` wrote; raises `InvalidArgument` for anything else."""
        return cls.from_dict(parse_json(text, "This is not a certificate: its text", error=InvalidArgument))

    @property
    def cited(self) -> str:
        """Where the theorem and its conditions come from, with keys of sources: for `wp.cite`."""
        return " ".join([f"[{self.theorem}]", *(h.equation for h in self.hypotheses)])

    def to_latex(self) -> str:
        """A table of the hypotheses; the caption has the verdict and what it licenses."""
        return certificate_latex(self)

    def _title(self) -> str:
        return f"{self.theorem}{f' ({self.dynamics})' if self.dynamics else ''}: {self.verdict}"

    def __str__(self) -> str:
        title = self._title()
        lines = [title, "=" * len(title)]
        if self.note:
            lines.append(self.note)
        lines += plain_table(self.hypotheses)
        lines += [f"- {sentence}" for sentence in self.licenses]
        for label, table in (("step size", self.step_size), ("relative rates", self.rates), ("radii", self.radii)):
            if isinstance(table, Mapping):
                lines.append(f"{label}: " + ", ".join(f"{key} {value:.3g}" for key, value in table.items()))
            elif table is not None:
                lines.append(f"{label}: {table:.3g}")
        if self.certified and hidden_ratio(self) != 1:
            lines.append(f"trained: {moves(self)}")
        if self.rate is not None:
            lines.append(f"rate: {self.rate:.10g}")
        if self.measured:
            lines.append("measured: " + ", ".join(f"{key} {short(value)}" for key, value in self.measured.items()))
        if self.errors:
            lines.append("errors considered: " + ", ".join(f"{key} {value:.1e}" for key, value in self.errors.items()))
        if self.others:
            lines.append("also tried: " + ", ".join(other._title() for other in self.others))
        return "\n".join(lines)


def _each_number(field_value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(field_value, Mapping):
        return {key: convert(number) for key, number in field_value.items()}
    return convert(field_value)


def _number_out(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number_in(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf", "nan") else value


def finish(theorem: str, verdict: Verdict, hypotheses: tuple[Hypothesis, ...], dynamics: str, **rest: Any) -> Certificate:
    """The certificate; UNDECIDED where it would license numbers that float64 does not hold, which
    its note names."""
    licensed = [rest.get(name) for name in ("step_size", "rates", "rate", "radii")]
    if verdict is Verdict.CERTIFIED and (fault := _license_fault(dynamics, *licensed)):
        kept = {name: rest[name] for name in ("measured", "errors") if name in rest}
        note = f"{OUT_OF_RANGE}: all hypotheses hold, but {fault}."
        return Certificate(theorem, Verdict.UNDECIDED, hypotheses, dynamics, note=note, **kept)
    return Certificate(theorem, verdict, hypotheses, dynamics, **rest)


def in_range(theorem: str, dynamics: str, make: Callable[[], Certificate]) -> Certificate:
    """What `make` returns, or UNDECIDED where its scalars overflow: Python's `**` and `/` raise
    where IEEE has infinities."""
    try:
        return make()
    except ArithmeticError:
        note = f"{OUT_OF_RANGE} in the conditions of the theorem. Rescale the inputs, the labels or the parameters."
        return Certificate(theorem, Verdict.UNDECIDED, dynamics=dynamics, note=note)


def verdict_on(hypotheses: Sequence[Hypothesis]) -> Verdict:
    """CERTIFIED if all hold, VIOLATED if one is false, else UNDECIDED."""
    if any(h.holds is False for h in hypotheses):
        return Verdict.VIOLATED
    return Verdict.CERTIFIED if all(h.holds for h in hypotheses) else Verdict.UNDECIDED


def _license_fault(dynamics: str, step_size: Any, rates: Any, rate: float | None, radii: Any) -> str:
    """Which of the licensed numbers proves nothing, in words; empty if none.

    Steps and relative rates are finite and positive, radii finite and not negative. A rate of
    descent lies in [0, 1) and one of the flow is positive: q = 1 and s = 0 say that the residual
    does not grow, not that it vanishes.
    """
    for name, table in (("step size", step_size), ("relative rate", rates)):
        for key, number in _items(table):
            if not 0 < number < math.inf:
                return f"the {name}{key} would be {number:.3g}, not finite and positive: rescale the inputs and the labels"
    for key, number in _items(radii):
        if not 0 <= number < math.inf:
            return f"the radius{key} would be {number:.3g}, not finite: rescale the inputs and the labels"
    if rate is not None and dynamics == "descent" and not 0 <= rate < 1:
        return f"the rate of descent would be {rate:.17g}: a step gains less than float64 resolves"
    if rate is not None and dynamics == "flow" and not 0 < rate < math.inf:
        return f"the rate of the flow would be {rate:.3g}, not finite and positive: rescale the inputs and the labels"
    return ""


def _items(table: float | Mapping[str, float] | None) -> list[tuple[str, float]]:
    if table is None:
        return []
    return [(f" of {name}", number) for name, number in table.items()] if isinstance(table, Mapping) else [("", table)]
