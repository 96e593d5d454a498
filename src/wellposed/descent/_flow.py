"""Gradient flow, integrated with error control."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._progress import progress_display
from wellposed.descent._objective import AbstractObjective, Evaluation, objective_of, speeds
from wellposed.descent.history import History, Stop
from wellposed.descent.recorder import PROGRESS_LINE, Callback, Recorder, Travelled, check_callbacks, norm, with_location
from wellposed.errors import DivergedWarning, InvalidArgument, InvalidType, WellposedError, did_you_mean, required
from wellposed.solve._failure import user_level

#: Explicit Runge-Kutta pairs of torchdiffeq, which control their error.
METHODS = ("dopri5", "dopri8", "bosh3", "adaptive_heun", "fehlberg2")
#: Rows, if no times are given.
INTERVALS = 50


def flow(
    model: nn.Module,
    X: Any,
    y: Tensor,
    *,
    t_end: float | None = None,
    times: Sequence[float] | Tensor | None = None,
    rates: float | Mapping[str, float] = 1.0,
    rtol: float = 1e-4,
    atol: float | None = None,
    method: str = "dopri5",
    stop_loss: float | None = None,
    callbacks: Iterable[Callback] = (),
    progress: bool = False,
) -> History:
    r"""theta'(t) = -rate grad |y_hat - y|^2/2 from the present parameters to time t_end, in place.

    The limit of `descend` for small steps, as in the flow theorems. An explicit Runge-Kutta pair of
    torchdiffeq chooses its steps so that the local error of every parameter, root mean square over
    its entries, stays below atol + rtol |theta|. The state is float64; gradients have the dtype of
    the model, so in float32 they are exact to about 1e-6 whatever rtol is. The flow is stiff when
    the kernel is ill-conditioned: stability alone needs about t_end/3.3 times the largest
    eigenvalue of the tangent kernel in steps.

    Args:
        model, X, y: As in `descend`.
        t_end: The end, with rows at 51 equidistant times; or give `times`.
        times: Of the rows: increasing, positive and finite; 0 has a row in any case. The integrator
            steps exactly onto them. If `t_end` is given too it must be the last of them.
        rates: By parameter, 1 for those that are not named; 0 holds one fixed. Or one number for
            all.
        rtol, atol: Of the integrator, as above; atol is rtol/1000 if not given. The default
            suffices for pictures and rates: errors of single steps add up. To compare with a proof
            or a closed form take 1e-5 to 1e-9. A smaller default would be expensive: the gradient
            jumps where a ReLU switches, and steps shrink until the jump times the step is below the
            tolerance.
        method: "dopri5", "dopri8", "bosh3", "adaptive_heun" or "fehlberg2".
        stop_loss: Stop at the first row with a loss of at most this.
        callbacks: Objects with `on_step(state)`, called at every row; True stops the flow.
        progress: As in `descend`.

    Returns:
        The history. Failures and interruptions are handled as in `descend`; the parameters are then
        those of the last row.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> X, y = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        >>> history = wp.flow(model, X, y, times=[0.1, 0.2], rates={"W": 0.1})
        >>> history["time"].tolist(), bool(history["loss"][-1] < history["loss"][0])
        ([0.0, 0.1, 0.2], True)
    """
    _odeint()
    callbacks = check_callbacks(callbacks)
    grid = _grid(t_end, times)
    _check_tolerances(rtol, atol, method)
    objective = objective_of(model, X, y, warm_start=True, extrapolate=False)  # stages are not equidistant in time
    chosen = speeds("rates", rates, model, default=1.0)
    history = History("flow", chosen)
    atol = rtol / 1000 if atol is None else atol
    with progress_display("flow", grid[-1], show=progress, line=PROGRESS_LINE) as bar, torch.no_grad():
        recorder = Recorder(objective, history, callbacks, stop_loss=stop_loss, progress=bar)
        field = _Field(objective, chosen, recorder)
        _run(field, recorder, grid, {"rtol": rtol, "atol": atol, "method": method})
    if history.stop is Stop.NOT_FINITE:
        last = history.rows[-1]
        warnings.warn(
            f"flow: the loss became NaN or infinite after time {last['time']:.6g}, where it is {last['loss']:.3g}; the "
            "parameters went back there.",
            DivergedWarning,
            stacklevel=user_level(),
        )
    return history


class _NotFinite(Exception):
    """The right-hand side met a loss that is NaN or infinite."""


class _Field:
    """The right-hand side as a function of (theta_1, ..., theta_k, path_1, ..., path_k, path).

    The thetas are the parameters that move; the lengths are integrated along with them:
    path_i' = |theta_i'|.

    Attributes:
        count: k.
        steps: Accepted so far.
        proposed: The step that the integrator would take next.
    """

    def __init__(self, objective: AbstractObjective, rates: dict[str, float], recorder: Recorder) -> None:
        self._objective, self._recorder = objective, recorder
        self._rates = {name: rate for name, rate in rates.items() if rate > 0}
        self._still = [name for name, rate in rates.items() if rate == 0]
        self._moving = [recorder.parameters[name] for name in self._rates]
        self.count = len(self._moving)
        self.steps = 0
        self.proposed: float | None = None

    def start(self) -> tuple[Tensor, ...]:
        theta = [parameter.detach().to(torch.float64, copy=True) for parameter in self._moving]
        return *theta, *(theta[0].new_zeros(()) for _ in range(self.count + 1))

    def load(self, state: Sequence[Tensor]) -> None:
        """Puts the parameters of a state into the model."""
        for parameter, value in zip(self._moving, state[: self.count], strict=True):
            parameter.copy_(value)

    def travelled(self, state: Sequence[Tensor]) -> Travelled:
        lengths = dict(zip(self._rates, map(float, state[self.count : -1]), strict=True))
        return Travelled(lengths | dict.fromkeys(self._still, 0.0), float(state[-1]))

    def evaluate(self, state: Sequence[Tensor]) -> Evaluation:
        self.load(state)
        rows = self._recorder.history.rows
        with with_location(f"time {rows[-1]['time']:.6g} of flow, or soon after" if rows else "time 0 of flow"):
            now = self._objective.evaluate()
        self._recorder.count(now)
        if not math.isfinite(now.loss):
            raise _NotFinite
        return now

    def __call__(self, t: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        gradients = self.evaluate(state).gradients
        velocity = [-rate * gradients[name].double() for name, rate in self._rates.items()]
        speed = [norm(part) for part in velocity]
        return *velocity, *(state[-1].new_tensor(part) for part in (*speed, math.hypot(*speed)))

    # torchdiffeq calls these by their names.

    def callback_step(self, t0: Tensor, state: Sequence[Tensor], dt: Tensor) -> None:
        self.proposed = float(dt)  # before it is cut at the end of an interval

    def callback_accept_step(self, t0: Tensor, state: Sequence[Tensor], dt: Tensor) -> None:
        self.steps += 1


def _run(field: _Field, recorder: Recorder, grid: list[float], options: dict[str, Any]) -> None:
    history = recorder.history
    state = good = field.start()

    def error_norm(parts: Sequence[Tensor]) -> Tensor:
        # the worst parameter; the lengths follow from them and must not choose the steps
        return torch.stack([part.square().mean().sqrt() for part in parts[: field.count]]).amax()

    try:
        for i, t in enumerate(grid):
            if i > 0:
                state = _integrate(field, state, grid[i - 1], t, error_norm, options)
            now = field.evaluate(state)
            good = state
            where = {"step": i, "time": t, "integrator_steps": field.steps}
            history.stop = recorder.visit(now, field.travelled(state), where, last=i == len(grid) - 1, record=True)
            if history.stop is not None:
                break
    except KeyboardInterrupt:
        history.stop = Stop.INTERRUPTED
    except _NotFinite:
        history.stop = Stop.NOT_FINITE
        if not history.rows:
            raise InvalidArgument(
                "The loss at the start is NaN or infinite: a parameter has NaN or infinite entries, or X or y too large ones."
            ) from None
    except Exception as error:
        history.stop = Stop.ERROR
        error.history = history  # type: ignore[attr-defined]
        raise
    finally:
        field.load(good)


def _integrate(
    field: _Field, state: tuple[Tensor, ...], t0: float, t1: float, error_norm: Any, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """From t0 to t1, the last step cut so that it ends there."""
    odeint = _odeint()
    own = {"norm": error_norm, "step_t": [t1]}
    if field.proposed is not None:
        own["first_step"] = field.proposed
    span = torch.tensor([t0, t1], dtype=torch.float64, device=state[0].device)
    try:
        solution = odeint(field, state, span, options=own, **options)
    except AssertionError as failure:
        if "underflow in dt" not in str(failure):
            raise
        raise WellposedError(
            f"flow: no step from time {t0:.6g} is small enough for rtol={options['rtol']:.0e}, atol={options['atol']:.0e}. "
            "Loosen them, or train in float64: gradients in float32 are exact to about 1e-6."
        ) from None
    return tuple(part[-1] for part in solution)


def _odeint() -> Any:
    return required("torchdiffeq", "flow integrates with torchdiffeq, which is not installed", extra="flow").odeint


def _grid(t_end: float | None, times: Sequence[float] | Tensor | None) -> list[float]:
    """0 and the times of the other rows."""
    if times is None:
        if t_end is None or not 0.0 < float(t_end) < math.inf:
            raise InvalidArgument(f"flow needs a positive finite t_end, or times; got t_end={t_end!r}.")
        return [float(t_end) * i / INTERVALS for i in range(INTERVALS)] + [float(t_end)]
    given = [float(t) for t in times]
    grid = given[1:] if given and given[0] == 0.0 else given
    if not grid or not all(a < b < math.inf for a, b in zip([0.0, *grid], grid, strict=False)):
        raise InvalidArgument(f"times must be increasing, positive and finite (a 0 may come first); got {given}.")
    if t_end is not None and not math.isclose(grid[-1], float(t_end), rel_tol=1e-6):  # times may be rounded to float32
        raise InvalidArgument(f"times end at {grid[-1]:g}, but t_end={t_end:g}; omit t_end, or let times end there.")
    return [0.0, *grid]


def _check_tolerances(rtol: float, atol: float | None, method: str) -> None:
    for name, value in (("rtol", rtol), ("atol", rtol if atol is None else atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidType(f"{name} of flow must be a number; got {value!r}.")
        if not 0.0 < value < 1.0:
            raise InvalidArgument(f"{name} of flow must be in (0, 1); got {value!r}.")
    if method not in METHODS:
        raise InvalidArgument(
            f"method must be one of {', '.join(METHODS)}; got {method!r}.{did_you_mean(str(method), METHODS)}"
        )
