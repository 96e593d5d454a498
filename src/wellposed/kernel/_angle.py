r"""Angles between samples, and the angles that ReLU makes of them, without loss of digits.

Every kernel of a wide ReLU network is a function of norms and of angles. With `v(t) = sin t - t cos
t` and `phi = pi - theta`, for unit vectors at the angle theta,

    2 E[relu(u) relu(v)]   = Q(cos theta) = v(phi) / pi                                                    (1)
    2 E[relu'(u) relu'(v)] = phi / pi                                                                      (2)

[ling2022, eq. 11]. The angle is never taken from its cosine: arccos turns one rounding near 1 into
1e-8, and (2) shows it. Instead `theta = 2 atan2(|a - b|, |a + b|)` for the unit vectors a, b
[kahan2006], right to a few eps at every angle (those of a and b; a small theta or phi has a
relative error of a few eps over itself), and theta and phi are kept side by side, because the small
one of them is lost in the other.

At the equilibrium of a recurrent layer the angle theta solves `c = s Q(c) + (1 - s) cos theta_0`, c
= cos theta [ling2022, eq. 14]. Since `1 - Q(cos theta) = (1 - cos theta) - v(theta)/pi`, with `r =
s/(1 - s)` this reads

    d + r v(theta)/pi = d_0,        d = 1 - cos theta = 2 sin^2(theta/2)                                     (3)

whose terms are all positive: no cancellation. The left side is increasing and convex in d, with
derivative `1 + r theta/pi`, so Newton's method from `d = d_0` descends monotonically to the root,
for every s < 1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# v(t) = sum_k (-1)^(k+1) 2k/(2k+1)! t^(2k+1); the first term left out is below 1e-17 of the sum for |t| <= 1.
_SERIES = [(-1.0) ** (k + 1) * 2 * k / math.factorial(2 * k + 1) for k in range(1, 10)]


class Angles(NamedTuple):
    """Norms (n, 1) and (1, n2) of two sets of samples, the angles theta (n, n2) between them, and
    phi = pi - theta.

    A zero row has norm 0 and an angle that means nothing.
    """

    norm: Tensor
    norm2: Tensor
    theta: Tensor
    phi: Tensor


def angles(X: Tensor, X2: Tensor) -> Angles:
    """Norms and angles of the rows of X (n, d) and X2 (n2, d); differences are taken entry by
    entry, at O(n n2 d)."""
    norm, A = _normalized(X)
    norm2, B = (norm, A) if X2 is X else _normalized(X2)
    apart = torch.cdist(A, B, compute_mode="donot_use_mm_for_euclid_dist")
    together = torch.cdist(A, -B, compute_mode="donot_use_mm_for_euclid_dist")
    return Angles(norm, norm2.T, 2 * torch.atan2(apart, together), 2 * torch.atan2(together, apart))


def sine_defect(t: Tensor) -> Tensor:
    """v(t) = sin t - t cos t for 0 <= t <= pi, to a few roundings of itself, also where it is about
    t^3/3."""
    square = t * t
    series = torch.full_like(t, _SERIES[-1])
    for coefficient in reversed(_SERIES[:-1]):
        series = series * square + coefficient
    return torch.where(t < 1.0, series * square * t, torch.sin(t) - t * torch.cos(t))


def equilibrium_angles(between: Angles, weight_variance: float | Tensor) -> Angles:
    """The same norms with the angles (3) that the equilibrium makes; first derivatives by the
    implicit function theorem, also by the weight variance."""
    s = torch.as_tensor(weight_variance, dtype=torch.float64, device="cpu")
    theta, phi = _EquilibriumAngle.apply(between.theta, between.phi, s)
    return between._replace(theta=theta, phi=phi)


def _normalized(X: Tensor) -> tuple[Tensor, Tensor]:
    """Norms (n, 1) and rows of norm 1; a zero row stays 0. Scaled first, so that squares neither
    overflow nor vanish."""
    scale = X.detach().abs().amax(dim=1, keepdim=True)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = X / scale
    norm = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    return norm * scale, scaled / torch.where(norm > 0, norm, torch.ones_like(norm))


class _EquilibriumAngle(torch.autograd.Function):
    """(3) for theta and phi, given those of the inputs. d theta/d theta_0 = sin theta_0/(sin theta
    (1 + r theta/pi)), d theta/d r = -v(theta)/(pi sin theta (1 + r theta/pi)), d r/d s = (1 +
    r)^2."""

    @staticmethod
    def forward(ctx: Any, theta_0: Tensor, phi_0: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        r = float(s.detach()) / (1.0 - float(s.detach()))
        d_0 = 2 * torch.sin(theta_0 / 2) ** 2
        d, theta = d_0, theta_0
        while True:
            after = d - (d - d_0 + r * sine_defect(theta) / math.pi) / (1 + r * theta / math.pi)
            # It can only descend; where it no longer does, rounding is all that is left.
            if not (after < d * (1 - 4 * torch.finfo(d.dtype).eps)).any():
                break
            d = torch.minimum(after, d).clamp(min=0.0)
            theta = 2 * torch.asin(torch.sqrt(d / 2).clamp(max=1.0))
        # For an obtuse angle 1 + cos theta is the small one, and (3) gives it as a sum of positive terms too.
        e = 2 * torch.sin(phi_0 / 2) ** 2 + r * sine_defect(theta) / math.pi
        small = 2 * torch.asin(torch.sqrt(e / 2).clamp(max=1.0))
        obtuse = theta > math.pi / 2
        theta, phi = torch.where(obtuse, math.pi - small, theta), torch.where(obtuse, small, math.pi - theta)
        ctx.save_for_backward(theta_0, theta)
        ctx.r = r
        return theta, phi

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None, Tensor | None]:
        of_theta, of_phi = cotangents
        theta_0, theta = ctx.saved_tensors
        sine = torch.sin(theta)
        safe = torch.where(sine > 0, sine, 1.0)
        # At theta_0 = 0 the equation is d = d_0 to first order: the ratio of sines tends to 1, and v/sine to 0.
        ratio = torch.where(sine > 0, torch.sin(theta_0) / safe, 1.0)
        cotangent = (of_theta - of_phi) / (1 + ctx.r * theta / math.pi)
        of_s = None
        if ctx.needs_input_grad[2]:
            of_r = -(cotangent * torch.where(sine > 0, sine_defect(theta) / safe, 0.0)).sum() / math.pi
            of_s = ((1 + ctx.r) ** 2 * of_r).to("cpu", torch.float64)
        return cotangent * ratio, None, of_s
