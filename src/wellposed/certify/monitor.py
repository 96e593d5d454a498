"""CertificateMonitor: re-certifies along training, cheaply because little changes from one point to
the next."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed.certify._dispatch import OwnTheorem, certificate_by, check_theorem
from wellposed.certify._gate import check_data
from wellposed.certify.certificate import Certificate
from wellposed.certify.measurement import Measurement, features_of, measure
from wellposed.certify.radius_certificate import check_radius_options, radius_at
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_singular_value_lower
from wellposed.linalg.directed import down, up, vector_norm_upper
from wellposed.linalg.verified_cholesky import norm_upper_by_test
from wellposed.nn.families import AbstractNetwork, NormBound, is_theory_network

_log = logging.getLogger(__name__)
#: How much of sigma_min, and of 1 - |R|, may be lost to the distance from the reference before it is decomposed again.
_LOSS = 0.05


@dataclass
class CertificateMonitor:
    """A callback of `descend` and `flow` that evaluates the radius certificate, or your own
    theorem, at the present point.

    The radius certificate is cheap here: norms and singular values are updated by their change
    (rigorously). They are decomposed again only when the updated bounds are too loose. While no
    proof of the plain flow is in sight they are not decomposed (then `s_min` is 0, a trivial bound,
    and `s_min_estimate` a guess). What it records, as events "certificate" of the history: step,
    loss, sigma_min of the features, norms, the distance travelled, the certified rate, and the rate
    measured since the evaluation before.

    Args:
        every: Steps between evaluations.
        dynamics: "flow" or "descent".
        hidden_rate: As in `certify(..., theorem="radius")`.
        sharpen: Sharpenings to use; none is the cheapest. See docs/certificates.md.
        stop: Whether training stops as soon as the verdict is CERTIFIED.
        theorem: "radius", or a callable (model, X, y) -> Certificate, called without options:
            `dynamics`, `hidden_rate` and `sharpen` are options of "radius" alone, and the features
            are not measured.

    Attributes:
        first: (step, loss) at which the verdict was first CERTIFIED, or None.
        certificate: The certificate of the last evaluation.
        records: What was recorded, one dict an evaluation.

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> monitor = wp.CertificateMonitor(every=10)
        >>> history = wp.descend(model, X, y, step_size=1e-3, steps=20, callbacks=[monitor])
        >>> [record["step"] for record in monitor.records]
        [0, 10, 20]
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
        """Evaluates at the start and whenever `every` steps have passed: a flow is seen at its rows
        only."""
        if state.step == 0:
            self._start = None  # a new run
        elif self.records and state.step - self.records[-1]["step"] < self.every:
            return None
        if self._start is None:
            self._begin(state)
        point, self.certificate = self._evaluate(state)
        self._record(state, point, self.certificate)
        if self.certificate.certified and self.first is None:
            self.first = (state.step, state.loss)
            if self.theorem == "radius":
                _log.info("Convergence to zero loss is proved from step %d on, at loss %.3g.", state.step, state.loss)
            else:
                _log.info("%s is CERTIFIED at step %d, at loss %.3g.", self.certificate.theorem, state.step, state.loss)
        state.status = "certified" if self.first is not None else "not certified"
        return bool(self.stop and self.first is not None)

    def _begin(self, state: Any) -> None:
        """A new run: nothing of an earlier one is kept."""
        if isinstance(self.theorem, str):
            if not is_theory_network(state.model):
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
        point = self._measure(state.model, state.point)
        return point, radius_at(point, self.dynamics, self._rate, tuple(self.sharpen))

    def _record(self, state: Any, point: Measurement | str, certificate: Certificate) -> None:
        assert self._start is not None
        residual = math.sqrt(2 * state.loss)
        record: dict[str, Any] = {"step": state.step, "time": state.time, "loss": state.loss, "residual_norm": residual}
        record |= {"verdict": certificate.verdict.value, "certified_rate": certificate.rate}
        record["measured_rate"] = self._measured_rate(state, residual)
        parameters = dict(state.model.named_parameters())
        record["distance"] = {name: float((parameters[name].detach() - start).norm()) for name, start in self._start.items()}
        if isinstance(point, Measurement):
            record |= {"s_min": point.F_least, "lambda_min": point.F_least**2, "contraction": point.contraction}
            record |= {"feature_norm": point.F_norm, "z_error": point.z_error_F}
            if "F_least_estimate" in point.known:  # far from a proof nothing is decomposed, and the bounds are loose
                record["s_min_estimate"] = point.known["F_least_estimate"]
        self.records.append(record)
        state.record("certificate", record)

    def _measured_rate(self, state: Any, residual: float) -> float | None:
        """Descent: the mean factor of |r| per step since the last record. Flow: -d log|r|/dt over
        that time."""
        if not self.records or residual == 0 or self.records[-1]["residual_norm"] == 0:
            return None
        before = self.records[-1]
        change = math.log(residual / before["residual_norm"])
        if state.time is None:
            return math.exp(change / max(1, state.step - before["step"]))
        elapsed = state.time - before["time"]
        return -change / elapsed if elapsed > 0 else None


class IncrementalMeasure:
    r"""Rigorous bounds with a singular value decomposition only now and then.

    By Weyl's inequality sigma_min(F) >= sigma_min(F_0) - |F - F_0|_F and |F| <= |F_0| + |F -
    F_0|_F, where F_0 are the features that were last decomposed; likewise for the recurrent matrix.
    The equilibria are those that training has found anyway; how far they may be from the exact ones
    is measured and bounded.

    Args:
        X: (n, d). y: (n,).
        plain_flow: Whether the plain gradient flow is all that will be asked about. That needs
            about e |F| <= sigma_min(F)^2, so nothing is decomposed while it is far from true; the
            bounds given then are loose, and still bounds.
    """

    def __init__(self, model: AbstractNetwork, X: Tensor, y: Tensor, *, plain_flow: bool = False) -> None:
        self._X, self._y = check_data(model, X, y)
        self._plain_flow = plain_flow
        self._R, self._F, self._least = NormBound(norm_upper_by_test), NormBound(norm_upper_by_test), 0.0
        self._X_norm = norm_upper_by_test(self._X)

    @property
    def decompositions(self) -> int:
        """How often the features or the recurrent matrix were decomposed."""
        return self._R.decompositions + self._F.decompositions

    def __call__(self, model: AbstractNetwork, point: Any) -> Measurement | str:
        """The measurement at the present parameters.

        Args:
            model: The network.
            point: The `Linearised` that training has found there, or None to solve for it.
        """
        vectors = None if point is None else (point.value, point.adjoint)
        by_margin = model.theory.margin is not None
        norm_upper = partial(self._recurrent_norm, by_margin=by_margin)
        return measure(model, self._X, self._y, point=vectors, known=self._known, norm_upper=norm_upper)

    def _recurrent_norm(self, R: Tensor, by_margin: bool) -> float:
        """Upper bound of |R|. What a contraction divides by is 1 - |R|, so that decides how much
        may be lost."""
        drift = self._R.drift(R)
        if math.isinf(drift) or drift > _LOSS * (self._R.bound if by_margin else 1.0 - self._R.bound):
            self._R.renew(R)
            drift = 0.0
        return up(self._R.bound + drift)

    def _known(self, twin: AbstractNetwork, Z: Tensor, C: Tensor, z_error: float) -> dict[str, float]:
        skip, F = twin.theory.skip, features_of(twin, Z, C)
        error = 2 * z_error if skip else z_error
        drift = self._F.drift(F)
        if self._plain_flow:
            estimate = _least_estimate(F)
            if self._is_far(twin, Z, C, F, estimate):
                loose = up(vector_norm_upper(F) + error)
                bounds = {"F_least": 0.0, "Z_least": 0.0, "F_norm": loose, "Z_norm": loose, "X_norm": self._X_norm}
                return bounds | {"F_least_estimate": estimate}
        if drift > _LOSS * self._least:
            self._F.renew(F)
            self._least = least_singular_value_lower(F) if F.shape[0] <= F.shape[1] else 0.0
            drift = 0.0
        least = max(0.0, down(self._least - drift - error))
        norm = up(self._F.bound + drift + error)
        bounds = {"F_least": least, "F_norm": norm, "Z_norm": norm, "X_norm": self._X_norm}  # |Z| <= |F|
        return bounds if skip else bounds | {"Z_least": least}

    def _is_far(self, twin: AbstractNetwork, Z: Tensor, C: Tensor, F: Tensor, estimate: float) -> bool:
        """Whether no certificate is in sight. A guess that decides about cost alone.

        With R >= e/s, the bound on how far features move is at least R |F| (times k for a network
        with a skip path, whose parameters are 1/k larger), and must stay below s.
        """
        e = float(torch.linalg.vector_norm(twin.readout(Z, C) - self._y))
        reach = float(torch.linalg.vector_norm(F)) / math.sqrt(min(F.shape))  # at most |F|
        scale = abs(twin.theory.recurrent_scale) if twin.theory.skip else 1.0
        return e * reach * scale > estimate**2


def _least_estimate(F: Tensor) -> float:
    """sigma_min(F) from the eigenvalues of F F^T: cheap, and right only down to about 1e-8 |F|."""
    if F.shape[0] > F.shape[1]:
        return 0.0
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(F @ F.t())[0])))
