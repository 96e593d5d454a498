"""CertificateMonitor: re-certifies along training, and says when convergence is proved."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from wellposed._checks import check_positive_integer
from wellposed.certify._certificate import Certificate
from wellposed.certify._incremental import IncrementalMeasure
from wellposed.certify._measure import Measurement
from wellposed.certify._own import OwnTheorem, certificate_by, check_theorem
from wellposed.certify.radius_certificate import check_radius_options, radius_at
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import AbstractNetwork

__all__ = ["CertificateMonitor"]

_log = logging.getLogger(__name__)


@dataclass
class CertificateMonitor:
    """A callback of `descend` and `flow` that evaluates the radius certificate, or your own theorem, at the present point.

    The radius certificate is cheap here: norms and singular values are updated by their change (rigorously), and decomposed
    anew only when that loses too much, or not at all while no proof of the plain flow is in sight (then `s_min` is 0, a
    trivial bound, and `s_min_estimate` a guess). What it records, as events "certificate" of the history: step, loss,
    sigma_min of the features, norms, the distance travelled, the certified rate, and the rate measured since the evaluation
    before.

    Args:
        every: Steps between evaluations.
        dynamics: "flow" or "descent".
        hidden_rate: As in `certify(..., theorem="radius")`.
        sharpen: Sharpenings to use; none is the cheapest. See docs/certificates.md.
        stop: Whether training stops as soon as the verdict is CERTIFIED.
        theorem: "radius", or a callable (model, X, y) -> Certificate, which is evaluated as it is: `dynamics`, `hidden_rate`
            and `sharpen` are options of "radius" alone, and the features are not measured.

    Attributes:
        first: (step, loss) at which the verdict was first CERTIFIED, or None.
        certificate: The certificate of the last evaluation.
        records: What was recorded, one dict an evaluation.
    """

    every: int = 50
    dynamics: str = "flow"
    hidden_rate: float | str | None = None
    sharpen: tuple[str, ...] = ()
    stop: bool = False
    theorem: str | OwnTheorem = "radius"
    first: tuple[int, float] | None = field(default=None, init=False)
    certificate: Certificate | None = field(default=None, init=False)
    records: list[dict[str, Any]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_positive_integer("CertificateMonitor", "every", self.every)
        check_theorem(self.theorem)
        if isinstance(self.theorem, str) and self.theorem != "radius":
            raise InvalidArgument(
                "CertificateMonitor: theorem must be 'radius' or a callable (model, X, y) -> Certificate; got "
                f"{self.theorem!r}. For a theorem by name pass functools.partial(wellposed.certify, theorem={self.theorem!r})."
            )
        self._rate = check_radius_options(self.dynamics, self.hidden_rate, self.sharpen)
        if not isinstance(self.theorem, str) and (self.dynamics, self.hidden_rate, tuple(self.sharpen)) != ("flow", None, ()):
            raise InvalidArgument(
                "CertificateMonitor: dynamics, hidden_rate and sharpen are options of theorem='radius'; a callable takes none. "
                "Bind its options with functools.partial."
            )
        self._measure: IncrementalMeasure | None = None
        self._start: dict[str, Any] | None = None

    def on_step(self, state: Any) -> bool | None:
        """Evaluates at the start and whenever `every` steps have passed: a flow is seen at its rows only."""
        if state.step == 0:
            self._start = None  # a new run
        elif self.records and state.step - self.records[-1]["step"] < self.every:
            return None
        if self._start is None:
            self._begin(state)
        at, self.certificate = self._evaluate(state)
        self._record(state, at, self.certificate)
        if self.certificate.certified and self.first is None:
            self.first = (state.step, state.loss)
            if self.theorem == "radius":
                _log.info("Convergence to zero loss is proved from step %d on, at loss %.3g.", state.step, state.loss)
            else:
                _log.info("%s is CERTIFIED at step %d, at loss %.3g.", self.certificate.theorem, state.step, state.loss)
        state.status = "certified" if self.first is not None else "not certified"
        return bool(self.stop and self.first is not None)

    def _begin(self, state: Any) -> None:
        """A new run: nothing of an earlier one is kept but its records were the caller's to read."""
        if isinstance(self.theorem, str):
            if not isinstance(state.model, AbstractNetwork):
                raise InvalidType(
                    f"CertificateMonitor knows the theory networks; got {type(state.model).__name__}. Pass a callable theorem."
                )
            plain_flow = self.dynamics == "flow" and self._rate == 1.0 and "kernel" not in self.sharpen
            self._measure = IncrementalMeasure(state.model, state.X, state.y, plain_flow=plain_flow)
        self._start = {name: p.detach().clone() for name, p in state.model.named_parameters() if p.requires_grad}
        self.first, self.certificate, self.records = None, None, []

    def _evaluate(self, state: Any) -> tuple[Measurement | str, Certificate]:
        """What was measured, or why nothing was; and the certificate."""
        if not isinstance(self.theorem, str):
            return "nothing is measured for a callable", certificate_by(self.theorem, state.model, state.X, state.y, {})
        assert self._measure is not None
        at = self._measure(state.model, state.point)
        return at, radius_at(at, self.dynamics, self._rate, tuple(self.sharpen))

    def _record(self, state: Any, at: Measurement | str, certificate: Certificate) -> None:
        assert self._start is not None
        residual = math.sqrt(2 * state.loss)
        record: dict[str, Any] = {"step": state.step, "time": state.time, "loss": state.loss, "residual_norm": residual}
        record |= {"verdict": certificate.verdict.value, "certified_rate": certificate.rate}
        record["measured_rate"] = self._measured_rate(state, residual)
        parameters = dict(state.model.named_parameters())
        record["distance"] = {name: float((parameters[name].detach() - start).norm()) for name, start in self._start.items()}
        if isinstance(at, Measurement):
            record |= {"s_min": at.F_least, "lambda_min": at.F_least**2, "contraction": at.contraction}
            record |= {"feature_norm": at.F_norm, "z_error": at.z_error_F}
            if "F_least_estimate" in at.known:  # far from a proof nothing is decomposed, and the bounds are loose
                record["s_min_estimate"] = at.known["F_least_estimate"]
        self.records.append(record)
        state.record("certificate", record)

    def _measured_rate(self, state: Any, residual: float) -> float | None:
        """Descent: the mean factor of |r| per step since the last record. Flow: -d log|r|/dt over that time."""
        if not self.records or residual == 0 or self.records[-1]["residual_norm"] == 0:
            return None
        before = self.records[-1]
        change = math.log(residual / before["residual_norm"])
        if state.time is None:
            return math.exp(change / max(1, state.step - before["step"]))
        elapsed = state.time - before["time"]
        return -change / elapsed if elapsed > 0 else None
