r"""One equilibrium for every input: contraction, monotonicity, Perron-Frobenius of compositions.

At a given shape of the state, linear steps are multiplied out. Every step is then

    s = sum_k M_k a_k + (what does not depend on z),                                             (1)

a_0 = z, and a_k the results of the elementwise functions, products and normalisations before it,
with |a_k(v) - a_k(w)| <= L_k |v - w| and, entry by entry, <= P_k |v - w|. With f the last step:

    contraction         sum_k |M_k| L_k < 1
    Perron-Frobenius    rho(sum_k |M_k|_entries P_k) < 1       (contracts in a weighted max norm)
    monotonicity        lambda_max(sym M_0) + sum_{k>0} |M_k| L_k < 1                            (2)

(2) is taken of f, or, where f = s(g) for an s with quotients in [0, 1], of g: s is then the
proximal operator of a convex function p, z = s(g(z)) reads 0 in z - g(z) + dp(z), and z - g(z) is
strongly monotone and continuous, so there is exactly one solution [winston2020].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.certify._balls import SLACK, Interval, linear_interval, product
from wellposed.certify._composition import Bound, Lipschitz, of_product
from wellposed.certify._tape import Node, Tape
from wellposed.certify.well_posedness import radius_bounds
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, up, vector_norm_upper

#: Entries of a matrix M_k beyond which linear steps are not multiplied out.
LARGEST_MATRIX = 2**21


@dataclass(frozen=True)
class Constants:
    """Upper bounds, each below 1 if it proves one equilibrium for every input.

    Attributes:
        contraction: Of the Lipschitz constant of f.
        monotone: Of (2).
        perron_frobenius: Of the spectral radius.
        every_size: Whether they hold for images of every size. finite, remarks: As in `Lipschitz`.
    """

    contraction: float
    monotone: float = math.inf
    perron_frobenius: float = math.inf
    every_size: bool = False
    finite: bool = False
    remarks: tuple[str, ...] = ()


def constants(tape: Tape, *, multiply_out: bool) -> Constants:
    """The constants of a cell.

    Args:
        tape: Its steps.
        multiply_out: Whether to use (1), for the shape of the state that was recorded; if not, only
            norms of the single steps are used.
    """
    with torch.no_grad():
        sizes = [step.shape.numel() for step in tape.steps if step.of_z]
        bounds = Lipschitz(tape)
        if not multiply_out or max(sizes) ** 2 > LARGEST_MATRIX:
            L = tape.run(bounds).lipschitz
            remarks = tuple(dict.fromkeys(bounds.remarks))
            return Constants(L, every_size=bounds.every_size, finite=bounds.finite, remarks=remarks)
        atoms = _Atoms(bounds)
        result = tape.run(atoms)
        remarks = tuple(dict.fromkeys(bounds.remarks))
        norm = min(result.bound.lipschitz, atoms.lipschitz(result))
        outer = atoms.outer(result)
        growth = atoms.one_sided(result if outer is None else outer)
        rho = atoms.spectral_radius(result)
        return Constants(norm, min(growth, norm), rho, finite=bounds.finite, remarks=remarks)


@dataclass(frozen=True)
class _Sum:
    """(1).

    Attributes:
        bound: Of all entries.
        parts: M_k, as (entries of a_k, *shape), by k.
    """

    bound: Bound
    parts: dict[int, Interval]


@dataclass(frozen=True)
class _Atom:
    """a_k.

    Attributes:
        lipschitz: L_k.
        entries: (entries of a_k, n) P_k.
        inner: The argument, of an elementwise function with quotients in [0, 1].
    """

    lipschitz: float
    entries: Tensor
    inner: _Sum | None = None


class _Atoms:
    def __init__(self, bounds: Lipschitz) -> None:
        self._bounds = bounds
        self._atoms: list[_Atom] = []

    def interpret(self, step: Node, parents: tuple[_Sum, ...]) -> _Sum:
        bound = self._bounds.interpret(step, tuple(parent.bound for parent in parents))
        if not step.of_z or not step.shape.numel():
            return _Sum(bound, {})
        if step.kind == "state":
            n = step.shape.numel()
            return self._new(step, bound, _Atom(1.0, torch.eye(n, dtype=torch.float64)))
        if step.kind == "linear":
            return _Sum(bound, self._linear(step, parents))
        if step.kind == "bilinear":
            fixed = [i for i, parent in enumerate(parents) if parent.bound.ball is not None]
            if len(fixed) == 1:
                return _Sum(bound, self._times_constant(step, parents, fixed[0]))
            return self._new(step, bound, self._product(step, bound, parents))
        if step.kind == "function":
            return self._new(step, bound, self._function(step, parents[0]))
        P = torch.full((step.shape.numel(), self._n), math.inf, dtype=torch.float64)
        return self._new(step, bound, _Atom(of_product(bound.lipschitz, 1.0), P))

    @property
    def _n(self) -> int:
        return self._atoms[0].entries.shape[1]

    def _new(self, step: Node, bound: Bound, atom: _Atom) -> _Sum:
        self._atoms.append(atom)
        eye = torch.eye(step.shape.numel(), dtype=torch.float64).view(-1, *step.shape)
        return _Sum(bound, {len(self._atoms) - 1: Interval(eye, torch.zeros_like(eye))})

    def _linear(self, step: Node, parents: tuple[_Sum, ...]) -> dict[int, Interval]:
        assert step.apply is not None and step.absolute is not None
        apply, absolute = torch.vmap(step.apply), torch.vmap(step.absolute)
        found = {}
        for k in sorted({k for parent in parents for k in parent.parts}):
            size = self._atoms[k].entries.shape[0]
            full = []
            for parent, origin in zip(parents, step.parents, strict=True):
                zero = torch.zeros((size, *origin.shape), dtype=torch.float64)
                full.append(parent.parts.get(k, Interval(zero, zero)))
            found[k] = linear_interval(tuple(full), apply, absolute, step.terms)
        return found

    def _times_constant(self, step: Node, parents: tuple[_Sum, ...], which: int) -> dict[int, Interval]:
        assert step.apply is not None
        ball = parents[which].bound.ball
        assert ball is not None
        apply = torch.vmap(step.apply, in_dims=(0, None) if which == 1 else (None, 0))
        found = {}
        for k, part in parents[1 - which].parts.items():
            pair = (part, ball.value) if which == 1 else (ball.value, part)
            found[k] = product(*pair, apply, step.terms)
        return found

    def _function(self, step: Node, inner: _Sum) -> _Atom:
        assert step.function is not None
        least, largest = step.function.slopes_on(inner.bound.low, inner.bound.high)
        steepest = max(abs(least), abs(largest))
        P = self.entries(inner) * steepest * SLACK
        monotone = least >= 0 and largest <= 1
        return _Atom(of_product(steepest, self.lipschitz(inner)), P, inner if monotone else None)

    def _product(self, step: Node, bound: Bound, parents: tuple[_Sum, ...]) -> _Atom:
        P = torch.full((step.shape.numel(), self._n), math.inf, dtype=torch.float64)
        if step.name == "mul":
            P = torch.zeros_like(P)
            for parent, origin, other in zip(parents, step.parents, (parents[1], parents[0]), strict=True):
                if parent.parts:
                    index = torch.arange(origin.shape.numel()).view(origin.shape).expand(step.shape).reshape(-1)
                    P = P + self.entries(parent)[index] * other.bound.largest * SLACK
        return _Atom(bound.lipschitz, P)

    def lipschitz(self, s: _Sum) -> float:
        """Of a step, by (1) or by norms of the single steps."""
        total = sum(of_product(_norm(part), self._atoms[k].lipschitz) for k, part in s.parts.items())
        return min(s.bound.lipschitz, up(total)) if s.parts else 0.0

    def entries(self, s: _Sum) -> Tensor:
        """(entries, n) bounds of |s(v) - s(w)| by |v - w|, entry by entry."""
        total = torch.zeros((0, self._n), dtype=torch.float64)
        for k, (mid, rad) in s.parts.items():
            M = (mid.abs() + rad).reshape(mid.shape[0], -1).t()
            part = (M @ self._atoms[k].entries) * SLACK
            total = part if not total.numel() else total + part
        return total * SLACK

    def spectral_radius(self, s: _Sum) -> float:
        P = self.entries(s)
        if not P.numel() or not bool(torch.isfinite(P).all()):
            return math.inf if P.numel() else 0.0
        return radius_bounds(P)[1]

    def outer(self, s: _Sum) -> _Sum | None:
        """g if the step is s(g), with quotients of s in [0, 1]."""
        if len(s.parts) != 1:
            return None
        ((k, (mid, rad)),) = s.parts.items()
        M = mid.reshape(mid.shape[0], -1)
        is_identity = M.shape[0] == M.shape[1] and bool(torch.equal(M, torch.eye(len(M), dtype=M.dtype)))
        return self._atoms[k].inner if is_identity and not bool(rad.any()) else None

    def one_sided(self, s: _Sum) -> float:
        """(2)."""
        total = 0.0
        for k, part in s.parts.items():
            if k == 0:
                M = part.mid.reshape(part.mid.shape[0], -1)
                if not bool(torch.isfinite(M).all()):
                    return math.inf
                S = torch.eye(len(M), dtype=M.dtype) - (M + M.t()) / 2
                rounding = 4 * ROUNDING * (vector_norm_upper(M) + vector_norm_upper(S)) + vector_norm_upper(part.rad)
                total += 1 - least_eigenvalue_lower((S + S.t()) / 2) + rounding
            else:
                total += of_product(_norm(part), self._atoms[k].lipschitz)
        return up(total)


def _norm(part: Interval) -> float:
    """Upper bound of |M_k|."""
    if not part.mid.numel():
        return 0.0
    if not bool(torch.isfinite(part.mid).all()):
        return math.inf
    return up(spectral_norm_upper(part.mid.reshape(part.mid.shape[0], -1)) + vector_norm_upper(part.rad))
