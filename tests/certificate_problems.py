"""Random problems for the radius certificate, and the dynamics that it speaks about, with every licensed bound checked."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import Certificate

FAMILIES = ("gaussian", "skip", "monotone", "implicit")
#: Below this part of its start a residual is rounding.
ROUNDING = 1e-13


def problem(family: str, seed: int, n: int = 4, d: int = 6, m: int = 40) -> tuple[Any, Tensor, Tensor]:
    """Inputs on the sphere of radius sqrt(d) (1 for the two networks of Gao et al.), normal labels, a fresh network."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=g, dtype=torch.float64)
    y = torch.randn(n, generator=g, dtype=torch.float64)
    X = X / X.norm(dim=1, keepdim=True)
    options: dict[str, Any] = {"generator": g, "dtype": torch.float64, "rtol": 1e-13, "max_steps": 2000, "on_failure": "ignore"}
    if family == "gaussian":
        return wp.GaussianDEQ(d, m, weight_variance=0.06, on_ill_posed="ignore", **options), X * math.sqrt(d), y
    if family == "skip":
        return wp.SkipDEQ(d, m, gamma=0.2, on_ill_posed="ignore", **options), X, y
    if family == "monotone":
        return wp.MonotoneDEQ(d, m, margin=0.5, **options), X * math.sqrt(d), y
    model = wp.ImplicitOnlyDEQ(d, m, gamma0=0.4, init="half_normal", on_ill_posed="ignore", **options)
    with torch.no_grad():
        return model, X, model(X) + 0.1 * y  # far labels push units onto their kinks, where nothing is certified


def _active_set(R: Tensor, c: Tensor, active: Tensor) -> tuple[Tensor, Tensor] | None:
    """(z, its mask) with (I - R_SS) z_S = c_S, by Newton's method on the masks: exact to rounding, if it ends."""
    for _ in range(40):
        S = active.nonzero().squeeze(1)
        z = torch.zeros_like(c)
        z[S] = torch.linalg.solve(torch.eye(len(S), dtype=R.dtype) - R[S][:, S], c[S])
        now = R @ z + c > 0
        if torch.equal(now, active):
            return z, active
        active = now
    return None


class Point:
    """Equilibria, adjoints, residual and gradients at the present parameters, by dense algebra and formulas of their own."""

    def __init__(self, model: Any, X: Tensor, y: Tensor, before: Point | None = None) -> None:
        with torch.no_grad():
            R, C, v = model.recurrent(), model.injection(X), model.readout_weight()
            self.masks = C > 0 if before is None else before.masks
            rows = [_active_set(R, c, mask) for c, mask in zip(C, self.masks, strict=True)]
            if any(row is None for row in rows):  # Newton went in circles, or a unit sits at its kink
                Z = model.solve(X).value
                self.masks = torch.addmm(C, Z, R.t()) > 0
            else:
                Z = torch.stack([row[0] for row in rows if row is not None])
                self.masks = torch.stack([row[1] for row in rows if row is not None])
            P = torch.zeros_like(Z)
            for i, mask in enumerate(self.masks):
                S = mask.nonzero().squeeze(1)
                P[i, S] = torch.linalg.solve((torch.eye(len(S), dtype=R.dtype) - R[S][:, S]).t(), v[S])
            self.r = model.readout(Z, C) - y
            self.Z, self.P, self.C = Z, P, C
            self.features = torch.cat([Z, C], dim=1) if isinstance(model, wp.SkipDEQ) else Z
            self.gradients = self._gradients(model, X)
            self.tangent = model._tangent(X, C, Z, P)

    def _gradients(self, model: Any, X: Tensor) -> dict[str, Tensor]:
        Z, C, r = self.Z, self.C, self.r
        Q = self.P * r.unsqueeze(1)
        M = Q.t() @ Z
        if isinstance(model, wp.GaussianDEQ):
            return {"W": M, "U": Q.t() @ X, "a": Z.t() @ r}
        if isinstance(model, wp.MonotoneDEQ):
            return {"A": -model.A @ (M + M.t()), "B": M - M.t(), "U": Q.t() @ X, "u": Z.t() @ r}
        if isinstance(model, wp.ImplicitOnlyDEQ):
            return {"A": model.gamma * M.t()}
        root = math.sqrt(model.width)
        through = (self.P + model.v) * (C > 0) * r.unsqueeze(1)
        return {"A": model.gamma / root * M, "W": through.t() @ X / root, "u": Z.t() @ r, "v": C.t() @ r}

    def kernel(self, rates: dict[str, float]) -> Tensor:
        """sum over the parameters of rate K_parameter, from the closed form."""
        K = torch.zeros(len(self.r), len(self.r), dtype=self.r.dtype)
        for name, products in self.tangent.terms.items():
            for product in products:
                part = torch.full_like(K, product.coefficient)
                for left, right in product.factors:
                    part = part * (self.tangent.features[left] @ self.tangent.features[right].t())
                K = K + rates[name] * part.detach()
        return (K + K.t()) / 2


def clone(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def move(model: Any, origin: dict[str, Tensor], by: dict[str, Tensor], factor: float = 1.0) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(origin[name] + factor * by[name])


def well_posed(model: Any) -> bool:
    return isinstance(model, wp.MonotoneDEQ) or float(torch.linalg.matrix_norm(model.recurrent().detach(), ord=2)) < 1


def train(model: Any, X: Tensor, y: Tensor, steps: int, loss: float = 0.0) -> None:
    """Plain descent with step 1/lambda_max of the first kernel, in place."""
    point = Point(model, X, y)
    size = 1 / float(torch.linalg.eigvalsh(point.kernel(dict.fromkeys(dict(model.named_parameters()), 1.0)))[-1])
    for _ in range(steps):
        if float(point.r.square().sum()) / 2 <= loss:
            return
        move(model, clone(model), point.gradients, -size)
        point = Point(model, X, y, point)


def check_descent(model: Any, X: Tensor, y: Tensor, cert: Certificate, steps: int) -> int:
    """Descends with the licensed steps on a copy; every bound at every step. Returns the number of steps checked."""
    assert cert.certified and cert.dynamics == "descent" and cert.rate is not None and cert.radii is not None
    assert isinstance(cert.step_size, dict) and 0 < cert.rate <= 1
    model = copy.deepcopy(model)
    origin, point, e = clone(model), Point(model, X, y), 0.0
    rounding = 1e-15 * (1 + float(y.norm()))  # of the predictions: residuals of 1e-10 are known to no more than this
    for k in range(steps + 1):
        size = float(point.r.norm())
        e = size if k == 0 else e
        if size <= ROUNDING * e:
            return k
        assert size <= cert.rate**k * e * (1 + 1e-10) + rounding, f"step {k}: {size} above {cert.rate**k * e}"
        assert well_posed(model)
        for name, parameter in model.named_parameters():
            assert float((parameter.detach() - origin[name]).norm()) <= cert.radii[name] * (1 + 1e-10), name
        now = clone(model)
        move(model, now, {name: -cert.step_size[name] * gradient for name, gradient in point.gradients.items()})
        point = Point(model, X, y, point)
    return steps


def check_flow(model: Any, X: Tensor, y: Tensor, cert: Certificate, steps: int) -> float:
    """Integrates the flow by RK4 on a copy; every bound at every step. Returns by which factor the residual fell."""
    assert cert.certified and cert.dynamics == "flow" and cert.rate is not None and cert.radii is not None
    assert cert.rates is not None
    rates = dict(cert.rates)
    model = copy.deepcopy(model)
    origin, point = clone(model), Point(model, X, y)
    R = max(cert.radii[name] / math.sqrt(rates[name]) for name in rates)
    e, t, length = float(point.r.norm()), 0.0, 0.0
    # RK4 is off by (lambda dt)^5/120 in a step: 3e-8 here, well below the 1e-6 that is allowed over 20 of them
    dt = 0.08 / float(torch.linalg.eigvalsh(point.kernel(rates))[-1])
    rounding = 1e-15 * (1 + float(y.norm()))  # of the predictions: residuals of 1e-10 are known to no more than this
    for _ in range(steps):
        now, slopes = clone(model), []
        for ahead in (0.0, 0.5, 0.5, 1.0):
            if slopes:
                move(model, now, slopes[-1], ahead * dt)
                point = Point(model, X, y, point)
            slopes.append({name: -rates[name] * gradient for name, gradient in point.gradients.items()})
        mean = {name: (slopes[0][name] + 2 * slopes[1][name] + 2 * slopes[2][name] + slopes[3][name]) / 6 for name in rates}
        move(model, now, mean, dt)
        point, t = Point(model, X, y, point), t + dt
        length += dt * math.sqrt(sum(float(mean[name].square().sum()) / rates[name] for name in rates))
        size = float(point.r.norm())
        if size <= ROUNDING * e:
            break
        bound = math.exp(-cert.rate * t) * e
        assert size <= bound * (1 + 1e-6) + rounding, f"t = {t}: {size} above {bound}"
        assert well_posed(model) and length <= R * (1 + 1e-6)
        for name, parameter in model.named_parameters():
            assert float((parameter.detach() - origin[name]).norm()) <= cert.radii[name] * (1 + 1e-6), name
    return float(point.r.norm()) / e
