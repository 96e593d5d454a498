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
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, WellposedWarning, did_you_mean
from wellposed.kernel._factor import NoisyFactor
from wellposed.kernel._matrix import check_cross, check_kernel, check_like, check_new, check_start
from wellposed.kernel._spectrum import Spectrum, Steps, Times, freezes_none, spectrum
from wellposed.kernel.wide_limits import check_positive


class KernelMachine:
    r"""Predictions of a model with the constant tangent kernel H, at any time, from one
    eigendecomposition, which is made when it is needed: `posterior` takes a Cholesky factor.

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

    Examples:
        >>> import torch
        >>> from wellposed.kernel import KernelMachine
        >>> machine = KernelMachine(torch.tensor([[2.0]]), torch.tensor([1.0]))
        >>> machine.predict([0.0, 0.5, float("inf")]).squeeze(1)
        tensor([0.0000, 0.6321, 1.0000])
    """

    def __init__(
        self, H: Tensor, y: Tensor, f0: Tensor | None = None, *, rtol: float | None = None, on_failure: str = "warn"
    ) -> None:
        self._H, n = check_kernel(H), len(H)
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
        self._rtol, self._y = rtol, y
        self._difference = (y - f0).reshape(n, -1)
        self._factor: NoisyFactor | None = None
        if not freezes_none(self._H, rtol) and self.num_frozen and on_failure != "ignore":
            self._report(on_failure)

    @cached_property
    def _spectrum(self) -> Spectrum:
        with self._as_at_construction():
            found = spectrum(self._H, self._rtol)
        self._H, self._factor = self._H[:0], None  # (n, n) each, and not needed any more
        return found

    @cached_property
    def _residual(self) -> Tensor:
        """(n, outputs) y - f0 in the basis of eigenvectors."""
        with self._as_at_construction():
            return self._spectrum.V.T @ self._difference

    @contextmanager
    def _as_at_construction(self) -> Iterator[None]:
        """What is kept has a graph if H or y had one, wherever it is asked for first."""
        graph = self._H.requires_grad or self._difference.requires_grad
        with torch.inference_mode(self._H.is_inference()), torch.set_grad_enabled(graph):
            yield

    @property
    def eigenvalues(self) -> Tensor:
        return self._spectrum.eigenvalues

    @property
    def num_frozen(self) -> int:
        return self._spectrum.num_frozen

    def _report(self, on_failure: str) -> None:
        r = self._residual.detach()
        held = r[~self._spectrum.active].norm() / r.norm().clamp(min=torch.finfo().tiny)
        message = (
            f"KernelMachine: {self.num_frozen} of {len(r)} directions have eigenvalues up to {self._spectrum.threshold:.1e}"
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
        inverse = self._spectrum.flow(math.inf)[1]
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
        return self._predict(*self._spectrum.flow(t), cross, f0)

    def predict_descent(
        self, num_steps: Steps, step_size: float, cross: Tensor | None = None, *, f0: Tensor | None = None
    ) -> Tensor:
        """Predictions after steps of gradient descent; as `predict`. Diverges above
        `max_step_size`, as it should."""
        return self._predict(*self._spectrum.descent(num_steps, step_size), cross, f0)

    def loss(self, t: Times) -> Tensor:
        """|f_t - y|^2/2 along gradient flow: a scalar, or (times,)."""
        return self._loss(self._spectrum.flow(t)[0])

    def loss_descent(self, num_steps: Steps, step_size: float) -> Tensor:
        """|f - y|^2/2 after steps of gradient descent: a scalar, or (numbers of steps,)."""
        return self._loss(self._spectrum.descent(num_steps, step_size)[0])

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
        value = check_positive(noise, "KernelMachine", "noise", or_zero=True)
        if cross is not None and diagonal is not None and "_spectrum" not in self.__dict__:
            cross, diagonal = check_new(cross, diagonal, self._difference)
            mean, variance = self._factor_of(noise, value).posterior(cross, diagonal)
            return self._with_start(mean.reshape(cross.shape[0], *self._y.shape[1:]), cross, f0), variance
        gain = self._spectrum.regularized(noise, frozen=value <= self._spectrum.threshold)
        mean = self._predict(torch.where(gain > 0, noise * gain, 1.0), gain, cross, f0)
        return mean, self._explained(gain, cross, diagonal)

    def _factor_of(self, noise: float | Tensor, value: float) -> NoisyFactor:
        """The last one serves again, unless it has a graph."""
        if any(isinstance(part, Tensor) and part.requires_grad for part in (noise, self._H, self._difference)):
            return NoisyFactor(self._H, self._difference, noise)
        if self._factor is None or self._factor.noise != value:
            with self._as_at_construction():
                self._factor = NoisyFactor(self._H, self._difference, value)
        return self._factor

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
                training inputs, which are the same if `cross` is None; H and `cross` if None.

        Returns:
            (p,), or (times, p).
        """
        if start is None:
            return self._explained(
                self._spectrum.flow(2 * torch.as_tensor(t, dtype=self._spectrum.V.dtype))[1], cross, diagonal
            )
        of_training = cross is None
        cross, diagonal = self._kernels_of_new(cross, diagonal)
        check_start(start, cross, of_training=of_training)
        diagonal = start[0].diagonal() if of_training else diagonal
        return self._spectrum.spread(self._spectrum.flow(t)[1], cross, diagonal, start=start)

    def log_likelihood(self, noise: float | Tensor) -> Tensor:
        """log p(y) under the Gaussian process of `posterior`, summed over outputs; a scalar with a
        gradient by `noise`, which must be above 0, and above what freezes a direction if any is."""
        value = check_positive(noise, "KernelMachine", "noise")
        searched = isinstance(noise, Tensor) and noise.requires_grad  # many values will follow, which one spectrum serves
        if "_spectrum" not in self.__dict__ and not searched:
            return self._factor_of(noise, value).log_likelihood()
        n, outputs = self._difference.shape
        gain = self._spectrum.regularized(noise, frozen=False)
        return -(gain[:, None] * self._residual**2).sum() / 2 + outputs * (gain.log().sum() - n * math.log(2 * math.pi)) / 2

    def _kernels_of_new(self, cross: Tensor | None, diagonal: Tensor | None) -> tuple[Tensor, Tensor]:
        """Kernels (p, n) of new with training inputs and (p,) of new ones with themselves; those of
        the training inputs if there are none."""
        if cross is None and diagonal is None:
            H = (self._spectrum.V * self.eigenvalues) @ self._spectrum.V.T
            return H, H.diagonal()
        return check_new(cross, diagonal, self._difference)

    def _explained(self, gain: Tensor, cross: Tensor | None, diagonal: Tensor | None) -> Tensor:
        return self._spectrum.unexplained(gain, *self._kernels_of_new(cross, diagonal))

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
            moved = self._spectrum.V @ (decay[..., None] * self._residual)
            return self._y - moved.reshape(*decay.shape[:-1], *self._y.shape)
        check_cross(cross, self._difference)
        learnt = (cross @ self._spectrum.V) @ (gain[..., None] * self._residual)
        learnt = learnt.reshape(*decay.shape[:-1], cross.shape[0], *outputs)
        return self._with_start(learnt, cross, f0)

    def _with_start(self, learnt: Tensor, cross: Tensor, f0: Tensor | None) -> Tensor:
        if f0 is None:
            return learnt
        check_like(f0, self._difference, "KernelMachine: f0")
        expected = (cross.shape[0], *self._y.shape[1:])
        if f0.shape != expected:
            raise InvalidArgument(f"KernelMachine: f0 must be {expected}, as cross and y are; got {tuple(f0.shape)}.")
        return f0 + learnt
