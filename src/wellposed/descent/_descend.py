"""Full-batch gradient descent, exactly as the theorems assume it."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._progress import progress_display
from wellposed.certify import certify
from wellposed.descent._objective import AbstractObjective, objective_of, speeds
from wellposed.descent.history import History, Stop
from wellposed.descent.recorder import PROGRESS_LINE, Callback, Recorder, Travelled, check_callbacks, norm, with_location
from wellposed.errors import DivergedWarning, InvalidArgument, InvalidType, WellposedError, did_you_mean
from wellposed.nn.families import is_theory_network
from wellposed.solve._failure import user_level

#: A loss this many times the larger of the first one and |y|^2/2, that of predicting 0, is called
#: divergence.
EXPLODED = 1e12


def descend(
    model: nn.Module,
    X: Any,
    y: Tensor,
    *,
    step_size: str | float | Mapping[str, float] = "certified",
    steps: int = 1000,
    stop_loss: float | None = None,
    callbacks: Iterable[Callback] = (),
    record_every: int = 1,
    warm_start: bool = True,
    progress: bool = False,
) -> History:
    r"""theta <- theta - eta grad |y_hat - y|^2/2 on all samples, in place.

    No momentum, no batches, and a sum instead of a mean, as in the theorems of [ling2022],
    [gao2022] and [nguyen2022]. Theory networks use their closed-form gradient, and every
    solve starts at the linear extrapolation of the last two; other modules use autograd.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, dtype=torch.float64)
        >>> X, y = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
        >>> history = wp.descend(model, X, y, step_size=1e-3, steps=20)
        >>> bool(history.loss[-1] < history.loss[0])
        True

    Args:
        model: A theory network, or any module whose output has the shape of y.
        X: (n, d) inputs, finite; for other modules their input.
        y: (n,) targets, finite, of the dtype of the predictions.
        step_size: eta. A number; or one for each trained parameter by name (0 for the others); or
            "certified": those of `certify(model, X, y, theorem="radius", dynamics="descent")`,
            refused unless CERTIFIED.
        steps: Most steps. The point after the last step is evaluated too and has a row.
        stop_loss: Stop at a loss of at most this.
        callbacks: Objects with `on_step(state)`, called at every point; True stops the descent.
        record_every: Steps between rows of the history; the first and the last point have a row.
        warm_start: Whether solves start at the solutions before; False starts all at zero.
        progress: Whether to show a progress display.

    Returns:
        The history. If the loss becomes NaN or infinite, or exceeds 1e12 times the larger of the
        first loss and |y|^2/2, the parameters of the last good point are restored with a
        `DivergedWarning`; after a KeyboardInterrupt they are those of the last row. Errors, such as
        `IllPosed` by the policy of the model, do the same, name the step, and have the history as
        `error.history`.
    """
    callbacks = check_callbacks(callbacks)
    check_positive_integer("descend", "record_every", record_every)
    if not isinstance(steps, int) or steps < 0:
        raise InvalidArgument(f"steps must be an integer at least 0; got {steps!r}.")
    objective = objective_of(model, X, y, warm_start=warm_start, extrapolate=True)
    certificate = _certified(objective, step_size) if isinstance(step_size, str) else None
    sizes = speeds("step_size", step_size if certificate is None else certificate.step_size, model, default=0.0)
    history = History("descent", sizes, certificate=None if certificate is None else certificate.to_dict())
    with progress_display("descent", steps, show=progress, line=PROGRESS_LINE) as bar, torch.no_grad():
        recorder = Recorder(objective, history, callbacks, stop_loss=stop_loss, progress=bar)
        _run(objective, sizes, recorder, steps, record_every)
    if history.stop in (Stop.NOT_FINITE, Stop.DIVERGED):
        last = history.rows[-1]
        became = "became NaN or infinite" if history.stop is Stop.NOT_FINITE else "exploded"
        warnings.warn(
            f"descend: the loss {became} at step {last['step'] + 1}, after {last['loss']:.3g} at step {last['step']}, to "
            f"which the parameters went back. Take smaller steps than {step_size}.",
            DivergedWarning,
            stacklevel=user_level(),
        )
    return history


def _run(objective: AbstractObjective, sizes: dict[str, float], recorder: Recorder, steps: int, record_every: int) -> None:
    history, safe, travelled = recorder.history, _Backup(recorder.parameters), Travelled(dict.fromkeys(sizes, 0.0))
    limit = math.inf
    try:
        for step in itertools.count():
            with with_location(f"step {step} of descend"):
                now = objective.evaluate()
            recorder.count(now)
            if not math.isfinite(now.loss):
                _refuse_start(step, now.loss)
                history.stop = Stop.NOT_FINITE
                break
            if step == 0:
                limit = EXPLODED * max(now.loss, norm(objective.y.double()) ** 2 / 2)
            elif now.loss > limit:
                history.stop = Stop.DIVERGED
                break
            safe.settled()
            history.stop = recorder.visit(now, travelled, {"step": step}, last=step == steps, record=step % record_every == 0)
            if history.stop is not None:
                break
            travelled = _after(travelled, sizes, now.gradients)
            if not math.isfinite(travelled.total):  # the step itself: it would put NaN into the parameters
                history.stop = Stop.NOT_FINITE
                break
            safe.keep()
            for name, parameter in recorder.parameters.items():
                if sizes[name] > 0:  # 0 holds a parameter fixed, whatever its gradient is
                    parameter.add_(now.gradients[name], alpha=-sizes[name])
    except KeyboardInterrupt:
        history.stop = Stop.INTERRUPTED
    except Exception as error:
        history.stop = Stop.ERROR
        error.history = history  # type: ignore[attr-defined]
        raise
    finally:
        safe.restore()
        recorder.flush()


class _Backup:
    """The parameters of the last point with a finite loss, while the model has moved on."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._living = list(parameters.values())
        self._kept = [torch.empty_like(parameter) for parameter in self._living]
        self._away = False

    def keep(self) -> None:
        """Before the parameters move."""
        torch._foreach_copy_(self._kept, self._living)
        self._away = True

    def settled(self) -> None:
        """The parameters are good where they are."""
        self._away = False

    def restore(self) -> None:
        """Restores the kept parameters if the present ones are not settled."""
        if self._away:
            torch._foreach_copy_(self._living, self._kept)
            self._away = False


def _after(travelled: Travelled, sizes: dict[str, float], gradients: dict[str, Tensor]) -> Travelled:
    """The path lengths after one more step."""
    moved = {name: size * norm(gradients[name]) if size > 0 else 0.0 for name, size in sizes.items()}
    way = {name: travelled.by_parameter[name] + part for name, part in moved.items()}
    return Travelled(way, travelled.total + math.hypot(*moved.values()))


def _refuse_start(step: int, loss: float) -> None:
    if step == 0:
        raise InvalidArgument(
            f"The loss at the start is {loss}: a parameter has NaN or infinite entries, or X or y too large ones."
        )


def _certified(objective: AbstractObjective, step_size: str) -> Any:
    """The certificate of the step sizes; raises with the reason and a remedy if there is none."""
    if step_size != "certified":
        hint = did_you_mean(step_size, ["certified"])
        raise InvalidArgument(
            f"step_size must be 'certified', a number, or a number for each parameter by name; got {step_size!r}.{hint}"
        )
    if not is_theory_network(objective.model):
        raise InvalidType(
            f"step_size='certified' needs a network that the certificate knows, such as wp.GaussianDEQ; "
            f"{type(objective.model).__name__} is not one. Give step_size a number."
        )
    certificate = certify(objective.model, objective.X, objective.y, theorem="radius", dynamics="descent")
    if not certificate.certified or certificate.step_size is None:
        reason = certificate.note or "; ".join(h.name for h in certificate.hypotheses if not h.holds)
        raise WellposedError(
            f"No step size is certified for {type(objective.model).__name__} on these data ({certificate.verdict}: {reason}). "
            "wp.suggest(model, X, y) lists changes that would help, if it finds any; or give step_size a number, which is not "
            "proved but may well converge, and watch it with wp.CertificateMonitor()."
        )
    return certificate
