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

from wellposed.errors import InvalidArgument, WellposedWarning, did_you_mean
from wellposed.kernel._matrix import check_kernel, check_like, kernels_of_new
from wellposed.kernel.wide_limits import check_positive

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
        check_kernel(H)
        n = H.shape[0]
        f0 = torch.zeros_like(y) if f0 is None and isinstance(y, Tensor) else f0
        for name, value in (("y", y), ("f0", f0)):
            check_like(value, H, f"KernelMachine: {name}")
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
        threshold = self._threshold = (
            n * torch.finfo(H.dtype).eps if rtol is None else rtol
        ) * eigenvalues.detach().abs().max()
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
        self._y = y
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

    def posterior(
        self, cross: Tensor | None = None, diagonal: Tensor | None = None, *, noise: float | Tensor, f0: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the Gaussian process with the covariance H, given y with noise.

        mean = f0(x) + k(x) (H + noise I)^(-1) (y - f0),  variance = k(x, x) - k(x) (H + noise
        I)^(-1) k(x)^T.

        Args:
            cross: As in `predict`.
            diagonal: (p,) kernel of each new input with itself; with `cross` only.
            noise: The variance of the noise of y, at least 0; a tensor of one number for its
                gradient. With 0, or with less than what freezes a direction, the frozen ones take
                no part.
            f0: (p,) or (p, outputs) the prior mean of the new inputs; 0 if None.

        Returns:
            The mean, shaped as one of `predict`, and the variance (p,) without the noise.
        """
        gain = self._regularized(noise, least=float(self._threshold))
        mean = self._predict(torch.where(gain > 0, noise * gain, 1.0), gain, cross, f0)
        return mean, self._explained(gain, cross, diagonal)

    def variance(
        self,
        t: Times,
        cross: Tensor | None = None,
        diagonal: Tensor | None = None,
        *,
        start: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Variance of the predictions at the time t of gradient flow, over random starts f0: that
        of the whole ensemble of trained models [lee2019].

        If the covariance of the starts is H (a linear model with standard normal weights), it is
        k(x, x) - k(x) H^(-1) (I - e^(-2 H t)) k(x)^T, at t = inf the variance of `posterior`
        without noise. Networks start with another one, at infinite width the Gram matrix of their
        equilibria, which `start` gives.

        Args:
            t, cross: As in `predict`, whose value with f0 = 0 is the mean.
            diagonal: (p,) variance of the starts of the new inputs; with `cross` only.
            start: Covariances of the starts, (n, n) of the training inputs and (p, n) of new with
                training inputs; H and `cross` if None.

        Returns:
            (p,), or (times, p).
        """
        if start is None:
            return self._explained(self._flow(2 * torch.as_tensor(t, dtype=self._V.dtype))[1], cross, diagonal)
        K, K_cross = start
        for value in start:
            check_like(value, self._V, "KernelMachine: start")
        cross, diagonal = kernels_of_new(cross, diagonal, self.eigenvalues, self._V)
        if K.shape != self._V.shape or K_cross.shape != cross.shape:
            raise InvalidArgument(
                f"KernelMachine: start must be of shapes {tuple(self._V.shape)} and {tuple(cross.shape)}, as H and cross are;"
                f" got {tuple(K.shape)} and {tuple(K_cross.shape)}."
            )
        A = ((cross @ self._V) * self._flow(t)[1][..., None, :]) @ self._V.T  # f_t(x) = f_0(x) + A (y - f_0)
        return (diagonal + ((A @ K - 2 * K_cross) * A).sum(dim=-1)).clamp(min=0.0)

    def log_likelihood(self, noise: float | Tensor) -> Tensor:
        """log p(y) under the Gaussian process of `posterior`, summed over outputs; a scalar with a
        gradient by `noise`, which must be above 0."""
        check_positive(noise, "KernelMachine", "noise")
        n, outputs = self._residual.shape
        gain = self._regularized(noise)
        return -(gain[:, None] * self._residual**2).sum() / 2 + outputs * (gain.log().sum() - n * math.log(2 * math.pi)) / 2

    def _regularized(self, noise: float | Tensor, least: float = 0.0) -> Tensor:
        """1/(lambda + noise); 0 for frozen directions if the noise is at most `least`: it would
        multiply their rounding errors."""
        alone = check_positive(noise, "KernelMachine", "noise", or_zero=True) <= least
        gain = 1 / torch.where(self._active, self.eigenvalues + noise, 1.0 if alone else noise)
        return torch.where(self._active, gain, 0.0) if alone else gain

    def _explained(self, gain: Tensor, cross: Tensor | None, diagonal: Tensor | None) -> Tensor:
        """k(x, x) - sum_i gain_i (k(x) v_i)^2, at least 0."""
        cross, diagonal = kernels_of_new(cross, diagonal, self.eigenvalues, self._V)
        return (diagonal - ((cross @ self._V) ** 2 * gain[..., None, :]).sum(dim=-1)).clamp(min=0.0)

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
        check_like(cross, self._V, "KernelMachine: cross")
        if cross.ndim != 2 or cross.shape[1] != n:
            raise InvalidArgument(
                f"KernelMachine: cross must be (p, {n}), new by training inputs; got {tuple(cross.shape)}. Is it transposed?"
            )
        learnt = (cross @ self._V) @ (gain[..., None] * self._residual)
        learnt = learnt.reshape(*decay.shape[:-1], cross.shape[0], *outputs)
        if f0 is None:
            return learnt
        check_like(f0, self._V, "KernelMachine: f0")
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
