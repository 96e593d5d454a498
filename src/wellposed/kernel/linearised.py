r"""Training with a frozen kernel: gradient flow and gradient descent in closed form.

If the tangent kernel H does not change, gradient flow on |f - y|^2/2 moves the predictions f on the
training inputs by f' = -H (f - y), and on any other input x by f'(x) = -k(x) (f - y), k(x) being
the kernel of x with the training inputs. Hence

    f_t    = y + e^(-H t) (f_0 - y)                                                                             (1)
    f_t(x) = f_0(x) + k(x) H^(-1) (I - e^(-H t)) (y - f_0)                                                        (2)

the kernel machine of [gao2023, Section 4]; k steps of gradient descent have (I - step_size H)^k for
e^(-H t).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType, WellposedWarning, did_you_mean

Times = float | Sequence[float] | Tensor
Steps = int | Sequence[int] | Tensor


class KernelMachine:
    r"""Predictions of a model with the constant tangent kernel H, at any time, from one
    eigendecomposition.

    Directions whose eigenvalue is at most `rtol` times the largest are noise: H^(-1) would blow
    them up. They are *frozen* at every time: the residual keeps its part in them, and predictions
    get nothing from them, so that t = inf is regression with the pseudo-inverse. `num_frozen` says
    how many; a warning says how much of the residual they hold.

    Args:
        H: (n, n) kernel matrix of the training inputs, symmetric and positive semi-definite up to
            rounding.
        y: (n,) or (n, outputs) targets.
        f0: Predictions at t = 0 on the training inputs, shaped as y; 0 if None.
        rtol: Part of the largest eigenvalue up to which one counts as 0; n times the machine
            precision if None.
        on_failure: What a frozen direction calls for: "warn", "raise" or "ignore".

    Attributes:
        eigenvalues: (n,) of H, ascending, with 0 for the frozen ones.
        num_frozen: How many directions are frozen.

    Example:
        >>> import torch
        >>> from wellposed.kernel import KernelMachine
        >>> machine = KernelMachine(torch.tensor([[2.0]]), torch.tensor([1.0]))
        >>> machine.predict([0.0, 0.5, float("inf")]).squeeze(1)
        tensor([0.0000, 0.6321, 1.0000])
    """

    def __init__(
        self, H: Tensor, y: Tensor, f0: Tensor | None = None, *, rtol: float | None = None, on_failure: str = "warn"
    ) -> None:
        _check_kernel(H)
        n = H.shape[0]
        f0 = torch.zeros_like(y) if f0 is None and isinstance(y, Tensor) else f0
        for name, value in (("y", y), ("f0", f0)):
            _check_like(value, H, f"KernelMachine: {name}")
            if value.ndim not in (1, 2) or value.shape[0] != n or value.shape != y.shape:
                raise InvalidArgument(
                    f"KernelMachine: y and f0 must both be ({n},) or ({n}, outputs), as H is {tuple(H.shape)};"
                    f" got {name} of shape {tuple(value.shape)}."
                )
        if rtol is not None and not 0 <= rtol < 1:
            raise InvalidArgument(f"KernelMachine: 'rtol' must be in [0, 1) or None, got {rtol!r}.")
        if on_failure not in (known := ("warn", "raise", "ignore")):
            raise InvalidArgument(
                f"KernelMachine: 'on_failure' must be one of {known}, got {on_failure!r}.{did_you_mean(str(on_failure), known)}"
            )
        eigenvalues, self._V = torch.linalg.eigh((H + H.T) / 2)
        threshold = (n * torch.finfo(H.dtype).eps if rtol is None else rtol) * eigenvalues.detach().abs().max()
        # Rounding in H itself may make eigenvalues negative by more than eigh's own error.
        least, largest = float(eigenvalues[0].detach()), float(eigenvalues[-1].detach())
        if least < -max(10 * threshold, math.sqrt(torch.finfo(H.dtype).eps) * eigenvalues.detach().abs().max()):
            raise InvalidArgument(
                f"KernelMachine: H must be positive semi-definite, and has eigenvalues from {least:.3e} to {largest:.3e}."
                " The kernel of the training inputs with themselves was expected."
            )
        self._active = eigenvalues > threshold
        self.eigenvalues = torch.where(self._active, eigenvalues, 0.0)
        self.num_frozen = int((~self._active).sum())
        self._y, self._f0 = y, f0
        self._residual = self._V.T @ (y - f0).reshape(n, -1)  # of y - f0, in the basis of eigenvectors
        if self.num_frozen and on_failure != "ignore":
            self._report(float(threshold), on_failure)

    def _report(self, threshold: float, on_failure: str) -> None:
        held = self._residual.detach()[~self._active].norm() / self._residual.detach().norm().clamp(min=torch.finfo().tiny)
        message = (
            f"KernelMachine: {self.num_frozen} of {len(self.eigenvalues)} directions have eigenvalues up to {threshold:.1e}"
            f" and are frozen; they hold {float(held):.1e} of the norm of y - f0, which is never fitted. Equal inputs do this;"
            ' remove them, or pass on_failure="ignore".'
        )
        if on_failure == "raise":
            raise InvalidArgument(message)
        warnings.warn(message, WellposedWarning, stacklevel=3)

    @property
    def max_step_size(self) -> float:
        """2/(largest eigenvalue): gradient descent with any step size below converges; inf if H =
        0."""
        largest = float(self.eigenvalues[-1].detach())
        return 2 / largest if largest > 0 else math.inf

    @property
    def norm(self) -> Tensor:
        """sqrt((y - f0)^T H^+ (y - f0)) per output: the norm of what is learnt, the B of [gao2023,
        Lemma 4.2]."""
        inverse = torch.where(self._active, 1 / torch.where(self._active, self.eigenvalues, 1.0), 0.0)
        return (inverse[:, None] * self._residual**2).sum(dim=0).sqrt().reshape(self._y.shape[1:])

    def predict(self, t: Times, cross: Tensor | None = None, f0: Tensor | None = None) -> Tensor:
        """Predictions after gradient flow for the time t: (1), or (2) if `cross` is given.

        Args:
            t: One time or several, at least 0; `math.inf` is the end of training.
            cross: (p, n) kernel between new inputs (rows) and the training inputs; None predicts on
                the training inputs.
            f0: (p,) or (p, outputs) predictions on the new inputs at t = 0; 0 if None.

        Returns:
            Shaped as y, with p for n if `cross` is given; in front of it the number of times, if t
            is not a single number.
        """
        return self._predict(*self._flow(t), cross, f0)

    def predict_descent(
        self, num_steps: Steps, step_size: float, cross: Tensor | None = None, *, f0: Tensor | None = None
    ) -> Tensor:
        """Predictions after steps of gradient descent; as `predict`. Diverges above
        `max_step_size`, as it should."""
        return self._predict(*self._descent(num_steps, step_size), cross, f0)

    def loss(self, t: Times) -> Tensor:
        """|f_t - y|^2/2 along gradient flow: a scalar, or (times,)."""
        return self._loss(self._flow(t)[0])

    def loss_descent(self, num_steps: Steps, step_size: float) -> Tensor:
        """|f - y|^2/2 after steps of gradient descent: a scalar, or (numbers of steps,)."""
        return self._loss(self._descent(num_steps, step_size)[0])

    def _loss(self, decay: Tensor) -> Tensor:
        return ((decay[..., None] * self._residual) ** 2).sum(dim=(-2, -1)) / 2

    def _predict(self, decay: Tensor, gain: Tensor, cross: Tensor | None, f0: Tensor | None) -> Tensor:
        """From the factors (times, n) of the residual and of H^(-1)(I - decay), per eigenvector."""
        outputs = self._y.shape[1:]
        if cross is None:
            if f0 is not None:
                raise InvalidArgument(
                    "KernelMachine: f0 of the training inputs was given at construction; pass it here only with cross."
                )
            moved = self._V @ (decay[..., None] * self._residual)
            return self._y - moved.reshape(*decay.shape[:-1], *self._y.shape)
        n = len(self.eigenvalues)
        _check_like(cross, self._V, "KernelMachine: cross")
        if cross.ndim != 2 or cross.shape[1] != n:
            raise InvalidArgument(
                f"KernelMachine: cross must be (p, {n}), new by training inputs; got {tuple(cross.shape)}. Is it transposed?"
            )
        learnt = (cross @ self._V) @ (gain[..., None] * self._residual)
        learnt = learnt.reshape(*decay.shape[:-1], cross.shape[0], *outputs)
        if f0 is None:
            return learnt
        _check_like(f0, self._V, "KernelMachine: f0")
        if f0.shape != (cross.shape[0], *outputs):
            raise InvalidArgument(
                f"KernelMachine: f0 must be {(cross.shape[0], *outputs)}, as cross and y are; got {tuple(f0.shape)}."
            )
        return f0 + learnt

    def _flow(self, t: Times) -> tuple[Tensor, Tensor]:
        """e^(-lambda t) and (1 - e^(-lambda t))/lambda, the latter 0 for frozen directions."""
        times = torch.as_tensor(t, dtype=self._V.dtype, device=self._V.device)
        if times.ndim > 1 or not (times >= 0).all():
            raise InvalidArgument(f"KernelMachine: t must be a number or a sequence of numbers, each at least 0, got {t!r}.")
        rate = torch.where(self._active, self.eigenvalues, 1.0)
        # The end is set apart: through exp(-inf) autograd would find inf * 0.
        ended = torch.isinf(times)[..., None]
        exponent = -rate * torch.where(ended, 0.0, times[..., None])
        decay = torch.where(ended, 0.0, torch.exp(exponent))
        gain = torch.where(ended, 1.0, -torch.expm1(exponent)) / rate
        return torch.where(self._active, decay, 1.0), torch.where(self._active, gain, 0.0)

    def _descent(self, num_steps: Steps, step_size: float) -> tuple[Tensor, Tensor]:
        """(1 - step_size lambda)^k and (1 - (1 - step_size lambda)^k)/lambda."""
        steps = torch.as_tensor(num_steps, device=self._V.device)
        if steps.ndim > 1 or steps.is_floating_point() or steps.dtype == torch.bool or not (steps >= 0).all():
            raise InvalidArgument(
                f"KernelMachine: num_steps must be an integer or several, each at least 0, got {num_steps!r}."
            )
        if not (isinstance(step_size, (int, float)) and 0 < step_size < math.inf):
            raise InvalidArgument(f"KernelMachine: step_size must be a finite number above 0, got {step_size!r}.")
        steps = steps[..., None]
        rate = torch.where(self._active, self.eigenvalues, 1.0)
        small = step_size * rate < 0.5
        # Near 1 the power is taken through its logarithm: 1 - (1 - e)^k keeps its digits for small e.
        exponent = steps * torch.log1p(-torch.where(small, step_size * rate, 0.0))
        power = (1 - step_size * rate) ** steps
        decay = torch.where(small, torch.exp(exponent), power)
        gain = torch.where(small, -torch.expm1(exponent), 1 - power) / rate
        return torch.where(self._active, decay, 1.0), torch.where(self._active, gain, 0.0)


def _check_kernel(H: Tensor) -> None:
    if not isinstance(H, Tensor):
        raise InvalidType(f"KernelMachine: H must be a tensor, got {type(H).__name__}.")
    if H.ndim != 2 or H.shape[0] != H.shape[1] or H.numel() == 0:
        raise InvalidArgument(f"KernelMachine: H must be (n, n) with n >= 1, got {tuple(H.shape)}.")
    if H.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"KernelMachine: H must be float32 or float64, got {H.dtype}. Use H.double().")
    _check_like(H, H, "KernelMachine: H")
    asymmetry, size = float((H - H.T).detach().abs().max()), float(H.detach().abs().max())
    if asymmetry > math.sqrt(torch.finfo(H.dtype).eps) * size:
        raise InvalidArgument(
            f"KernelMachine: H must be symmetric, and max |H - H^T| = {asymmetry:.1e} next to entries of up to {size:.1e}."
        )


def _check_like(value: object, H: Tensor, what: str) -> None:
    if not isinstance(value, Tensor):
        raise InvalidType(f"{what} must be a tensor, got {type(value).__name__}.")
    if value.dtype != H.dtype or value.device != H.device:
        raise InvalidArgument(
            f"{what} must have the dtype and device of H ({H.dtype}, {H.device}), got {value.dtype}, {value.device}."
        )
    if not torch.isfinite(value).all():
        raise InvalidArgument(f"{what} has {int((~torch.isfinite(value)).sum())} entries that are NaN or infinite.")
