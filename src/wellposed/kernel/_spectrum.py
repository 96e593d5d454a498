"""The eigenvectors of a kernel matrix, and what gradient flow and descent do along each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.kernel._matrix import nonnegative, sizes_of_terms

Times = float | Sequence[float] | Tensor
Steps = int | Sequence[int] | Tensor


class Spectrum(NamedTuple):
    """Eigenvalues (n,), ascending, with 0 for frozen ones; eigenvectors V (n, n) in columns; which
    are active, that is not frozen; and the threshold, up to which an eigenvalue counts as 0."""

    eigenvalues: Tensor
    V: Tensor
    active: Tensor
    threshold: float

    @property
    def num_frozen(self) -> int:
        return int((~self.active).sum())

    def flow(self, t: Times) -> tuple[Tensor, Tensor]:
        """e^(-lambda t) and (1 - e^(-lambda t))/lambda, the latter 0 for frozen directions."""
        times = torch.as_tensor(t, dtype=self.V.dtype, device=self.V.device)
        if times.ndim > 1 or not (times >= 0).all():
            raise InvalidArgument(f"KernelMachine: t must be a number or a sequence of numbers, each at least 0, got {t!r}.")
        rate = torch.where(self.active, self.eigenvalues, 1.0)
        # The end is set apart: through exp(-inf) autograd would find inf * 0.
        ended = torch.isinf(times)[..., None]
        exponent = -rate * torch.where(ended, 0.0, times[..., None])
        decay = torch.where(ended, 0.0, torch.exp(exponent))
        gain = torch.where(ended, 1.0, -torch.expm1(exponent)) / rate
        return torch.where(self.active, decay, 1.0), torch.where(self.active, gain, 0.0)

    def descent(self, num_steps: Steps, step_size: float) -> tuple[Tensor, Tensor]:
        """(1 - step_size lambda)^k and (1 - (1 - step_size lambda)^k)/lambda."""
        steps = torch.as_tensor(num_steps, device=self.V.device)
        if steps.ndim > 1 or steps.is_floating_point() or steps.dtype == torch.bool or not (steps >= 0).all():
            raise InvalidArgument(
                f"KernelMachine: num_steps must be an integer or several, each at least 0, got {num_steps!r}."
            )
        if not (isinstance(step_size, (int, float)) and 0 < step_size < math.inf):
            raise InvalidArgument(f"KernelMachine: step_size must be a finite number above 0, got {step_size!r}.")
        steps = steps[..., None]
        rate = torch.where(self.active, self.eigenvalues, 1.0)
        small = step_size * rate < 0.5
        # Near 1 the power is taken through its logarithm: 1 - (1 - e)^k keeps its digits for small e.
        exponent = steps * torch.log1p(-torch.where(small, step_size * rate, 0.0))
        power = (1 - step_size * rate) ** steps
        decay = torch.where(small, torch.exp(exponent), power)
        gain = torch.where(small, -torch.expm1(exponent), 1 - power) / rate
        return torch.where(self.active, decay, 1.0), torch.where(self.active, gain, 0.0)

    def regularized(self, noise: float | Tensor, *, frozen: bool) -> Tensor:
        """1/(lambda + noise); 0 for frozen directions if `frozen`: a noise below their threshold
        would multiply their rounding errors. Raises for that noise if not `frozen`."""
        value = float(noise.detach()) if isinstance(noise, Tensor) else noise
        if not frozen and self.num_frozen and value <= self.threshold:
            raise InvalidArgument(
                f"KernelMachine: noise={value:g} is below the rounding errors of the eigenvalues of {self.num_frozen} frozen"
                f" directions. Choose a noise above {self.threshold:.1e}, or remove equal inputs."
            )
        gain = 1 / torch.where(self.active, self.eigenvalues + noise, 1.0 if frozen else noise)
        return torch.where(self.active, gain, 0.0) if frozen else gain

    def unexplained(self, gain: Tensor, cross: Tensor, diagonal: Tensor) -> Tensor:
        """k(x, x) - sum_i gain_i (k(x) v_i)^2, at least 0: (..., p) for a gain (..., n)."""
        along = cross @ self.V
        variance = diagonal - (along**2 * gain[..., None, :]).sum(dim=-1)
        return nonnegative(
            variance, diagonal, lambda: sizes_of_terms(diagonal, cross, gain[..., None, :] * along, self.eigenvalues.sum())
        )

    def spread(self, gain: Tensor, cross: Tensor, diagonal: Tensor, *, start: tuple[Tensor, Tensor]) -> Tensor:
        """The variance of f_0(x) + A (y - f_0), A = k(x) V gain V^T, for starts f_0 with these
        covariances, (n, n) and (p, n)."""
        K, K_cross = start
        A = ((cross @ self.V) * gain[..., None, :]) @ self.V.T
        variance = diagonal + ((A @ K - 2 * K_cross) * A).sum(dim=-1)
        return nonnegative(variance, diagonal, lambda: sizes_of_terms(diagonal, K_cross, A, K.trace()))


def spectrum(H: Tensor, rtol: float | None) -> Spectrum:
    """Of H (n, n), symmetric; raises `InvalidArgument` where it has negative eigenvalues."""
    eps = torch.finfo(H.dtype).eps
    eigenvalues, V = torch.linalg.eigh(H)
    largest = float(eigenvalues.detach().abs().max())
    threshold = _part(H, rtol) * largest
    # Rounding in H itself may make eigenvalues negative by more than eigh's own error.
    least, last = float(eigenvalues[0].detach()), float(eigenvalues[-1].detach())
    if least < -max(10 * threshold, math.sqrt(eps) * largest):
        raise InvalidArgument(
            f"KernelMachine: H must be positive semi-definite, and has eigenvalues from {least:.3e} to {last:.3e}."
            " The kernel of the training inputs with themselves was expected."
        )
    active = eigenvalues > threshold
    return Spectrum(torch.where(active, eigenvalues, 0.0), V, active, threshold)


def freezes_none(H: Tensor, rtol: float | None) -> bool:
    """Whether it is certain, without the spectrum, that no direction of H is frozen.

    H - t I has a Cholesky factor, t being the threshold with an upper bound of |H| in it, and a
    bound of the rounding errors of the factor [higham2002, (10.6)] and of the eigenvalues. The
    bound is the trace: H is positive definite if there is a factor.
    """
    n, eps = H.shape[0], torch.finfo(H.dtype).eps
    shifted = H.detach().clone()
    shifted.diagonal().sub_(max(float(H.detach().trace()), 0.0) * (_part(H, rtol) + 8 * (n + 2) * eps))
    return int(torch.linalg.cholesky_ex(shifted).info) == 0


def _part(H: Tensor, rtol: float | None) -> float:
    return H.shape[0] * torch.finfo(H.dtype).eps if rtol is None else rtol
