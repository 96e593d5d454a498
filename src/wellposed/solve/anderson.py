"""Anderson acceleration, one small least-squares problem per sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed.solve.map import AbstractMap
from wellposed.solve.solver import AbstractSolver, Point, Step


@dataclass(frozen=True)
class Anderson(AbstractSolver):
    r"""Anderson acceleration of type II [anderson1965], in the difference form of [walker2011].

    With g = f(z) - z and the last `memory` differences dG, dF of g and f, sample by sample:

        gamma = argmin |g - dG gamma|^2 + regularization |D gamma|^2,   D = column norms of dG   (1)
        z_next = f(z) - dF gamma - (1 - damping)(g - dG gamma)

    (1) is solved through its scaled normal equations by Cholesky; scaling makes `regularization`
    independent of units, and a singular system gives a plain step. *Safeguard*: a point whose
    residual exceeds that of the last accepted point is not accepted; the run returns to the
    accepted point, takes the plain step from there, and deletes its differences. So a run is never
    worse than its last accepted step. The same happens, at once, where f is not finite: an
    extrapolation may leave the domain of f though plain steps do not.

    Costs one evaluation of f a step (two where the first was not finite), and memory for 2 `memory`
    states.

    Args:
        memory: Number of differences kept.
        regularization: Relative to the squared column norms; not below a few units of rounding of
            the dtype.
        damping: Weight of the residual in the new point, in (0, 1].

    Examples:
        >>> import torch, wellposed as wp
        >>> slow = lambda z: 0.99 * z + 1
        >>> z0 = torch.zeros(3, 1, dtype=torch.float64)
        >>> wp.fixed_point(slow, z0, wp.Picard(), on_failure="ignore").status
        StatusArray(MAX_STEPS: 3)
        >>> wp.fixed_point(slow, z0, wp.Anderson(memory=3)).status
        StatusArray(CONVERGED: 3)
    """

    idle_part: ClassVar[float] = 1 / 4
    steps_once: ClassVar[bool] = True
    confirms: ClassVar[bool] = True
    memory: int = 6
    regularization: float = 1e-10
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_positive_integer("Anderson", "memory", self.memory)
        check_interval("Anderson", "regularization", self.regularization, low=0.0, closed="left")
        check_interval("Anderson", "damping", self.damping, low=0.0, high=1.0)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        batch, features = point.z.shape
        state: dict[str, Any] = {
            "dG": point.z.new_empty(batch, self.memory, features),  # only the places of the last `count` differences are read
            "dF": point.z.new_empty(batch, self.memory, features),
            "gram": point.z.new_zeros(batch, self.memory, self.memory),
            "count": 0,  # of differences, those that were overwritten included
            # the last accepted point
            "z": point.z,
            "f": point.fz,
            "r": point.r,
            # of the last point, accepted or not: the newest difference of g and g, so that one product serves both
            "pair": point.z.new_empty(batch, 2, features),
            "f_last": point.fz,
            # whether the last point was a plain step from an accepted point; None if none was
            "plain": torch.ones_like(point.r, dtype=torch.bool),
            "started": False,
        }
        state["pair"][:, 1] = point.g
        return self._with_trail(state, point) if point.trail else state

    def _with_trail(self, state: dict[str, Any], point: Point) -> dict[str, Any]:
        """The differences of the plain steps before the first point."""
        points = [*point.trail[-self.memory :], point.z, point.fz]
        old = points[1] - points[0]
        for j, (before, after) in enumerate(pairwise(points[1:])):  # a difference of f is the g of the later point
            new = torch.sub(after, before, out=state["dF"][:, j])
            torch.sub(new, old, out=state["dG"][:, j])
            old = new
        state["count"] = used = len(points) - 2
        dG = state["dG"][:, :used]
        state["gram"][:, :used, :used] = torch.bmm(dG, dG.transpose(1, 2))
        state["projection"] = torch.bmm(point.g.unsqueeze(1), dG.transpose(1, 2)).squeeze(1)  # a tenth of the time of dG @ g
        return state

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        rejected = self._remember(state, point) if state["started"] else None
        state["started"] = True
        z = self._candidate(state, point, rejected)
        z, fz = (z, f(z)) if point.evaluate is None else point.evaluate(z)
        if math.isfinite(float(fz.sum())):
            return Step(z, fz)
        outside = ~_either(fz.sum(dim=1).isfinite(), state["plain"]) & (point.budget >= 2)
        return self._back_inside(state, f, Step(z, fz), outside) if bool(outside.any()) else Step(z, fz)

    def _back_inside(self, state: dict[str, Any], f: AbstractMap, step: Step, outside: Tensor) -> Step:
        """The plain step from the accepted point for those whose candidate left the domain of f."""
        self._send_back(state, outside)
        rows = outside.nonzero().squeeze(1)
        z = state["f"][rows]
        fz = f.take(rows)(z)
        return Step(step.z.index_copy(0, rows, z), step.fz.index_copy(0, rows, fz), 1 + outside.to(torch.int64))

    def _remember(self, state: dict[str, Any], point: Point) -> Tensor | None:
        """Adds the newest differences; (batch,) the samples that must go back, or None."""
        j = state["count"] % self.memory
        state["count"] += 1
        used = min(state["count"], self.memory)  # the other places are still empty
        dG, gram = state["dG"][:, :used], state["gram"][:, :used, :used]
        pair = state["pair"]
        torch.sub(point.g, pair[:, 1], out=dG[:, j])
        torch.sub(point.fz, state["f_last"], out=state["dF"][:, j])
        pair[:, 0] = dG[:, j]
        pair[:, 1] = point.g
        products = torch.bmm(pair, dG.transpose(1, 2))  # rows on the left: by far the faster layout
        gram[:, j, :] = products[:, 0]
        gram[:, :, j] = products[:, 0]
        state["projection"] = products[:, 1]  # dG . g
        state["f_last"] = point.fz
        # A plain step is the way back from a rejection: it is always accepted, or the run could stop.
        accepted = point.r <= state["r"]
        if bool(accepted.all()) or bool((accepted := _either(accepted, state["plain"])).all()):
            state["z"], state["f"], state["r"] = point.z, point.fz, point.r
            return None
        keep = accepted.unsqueeze(1)
        state["z"] = torch.where(keep, point.z, state["z"])
        state["f"] = torch.where(keep, point.fz, state["f"])
        state["r"] = torch.where(accepted, point.r, state["r"])
        return ~accepted

    def _candidate(self, state: dict[str, Any], point: Point, rejected: Tensor | None) -> Tensor:
        gamma, state["plain"] = self._coefficients(state, point.g)
        used = gamma.shape[1]
        z = torch.baddbmm(point.fz.unsqueeze(1), gamma.unsqueeze(1), state["dF"][:, :used], alpha=-1).squeeze(1)
        if self.damping < 1.0:
            g = torch.baddbmm(point.g.unsqueeze(1), gamma.unsqueeze(1), state["dG"][:, :used], alpha=-1).squeeze(1)
            z = z - (1.0 - self.damping) * g
        if rejected is not None:
            self._send_back(state, rejected)
            z = torch.where(rejected.unsqueeze(1), state["f"], z)
        return z

    def _send_back(self, state: dict[str, Any], rejected: Tensor) -> None:
        """The plain step from the accepted point, with no memory."""
        state["plain"] = _either(rejected, state["plain"])
        rows, used = rejected.nonzero().squeeze(1), min(state["count"], self.memory)
        for name in ("dG", "dF", "gram"):
            state[name][:, :used].index_fill_(0, rows, 0.0)
        keep = rejected.unsqueeze(1)
        state["pair"][:, 1] = torch.where(keep, state["f"] - state["z"], state["pair"][:, 1])
        state["f_last"] = torch.where(keep, state["f"], state["f_last"])

    def _coefficients(self, state: dict[str, Any], g: Tensor) -> tuple[Tensor, Tensor | None]:
        """(batch, differences) gamma of (1), and (batch,) where it is 0, if anywhere: no regular
        system."""
        used = min(state["count"], self.memory)
        gram = state["gram"][:, :used, :used]
        if used == 0:
            return state["gram"][:, 0, :0], torch.ones_like(state["r"], dtype=torch.bool)
        # An empty place in the memory has square 0: its row and column stay 0, and so does its gamma.
        scale = torch.diagonal(gram, dim1=1, dim2=2).clamp_min(torch.finfo(g.dtype).tiny).rsqrt_()
        scaled = (gram * scale.unsqueeze(1)).mul_(scale.unsqueeze(2))
        torch.diagonal(scaled, dim1=1, dim2=2).add_(max(self.regularization, 8 * torch.finfo(g.dtype).eps))
        factor, info = torch.linalg.cholesky_ex(scaled)
        gamma = torch.cholesky_solve((state["projection"] * scale).unsqueeze(2), factor).squeeze(2).mul_(scale)
        if not bool(info.any()):  # the usual case
            return gamma, None
        singular = info != 0
        return torch.where(singular.unsqueeze(1), torch.zeros_like(gamma), gamma), singular


def _either(rows: Tensor, others: Tensor | None) -> Tensor:
    """(batch,) where one of two holds; None is nowhere."""
    return rows if others is None else rows | others
