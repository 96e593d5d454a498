"""A generalization bound that depends on where training starts [gao2023, Theorem 4.1]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._gate import DECLARED, changed, check_data, check_finite, check_unchanged
from wellposed.certify._kernel_machine import kernel_machine
from wellposed.certify._solved import check_solved, precise_copy
from wellposed.certify.measurement import no_room, unit_of
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel import diagonal_limit, tangent_kernel
from wellposed.linalg.directed import DataUnit, down, ldexp, scaled, up

#: Tangent kernels at infinite width, by the key in `Theory.limit`: (X, number) -> (n, n).
LIMITS = {"diagonal": diagonal_limit}
#: The grid of norms B over which the bound is made uniform: 1, q, q^2, ...
_RATIO = 2.0**0.25
#: Predictions nearer to the labels than this, relatively, come from a model trained on them.
_FITS = 0.01
#: The grid ends where its norms leave float64.
_LARGEST_NORM = 2.0**1000


@dataclass(frozen=True)
class GeneralizationBound:
    """What `generalization_bound` found.

    Attributes:
        kernel: "tangent" (H0, of the given model) or "limit" (H-infinity, of the diagonal
            initialization).
        bound: Upper bound of the expected loss of the kernel machine, with probability 1 - delta,
            for a model that was drawn without using the sample.
        vacuous: Whether the bound says nothing: it is at least `loss_bound`, or the model fits the
            labels already, so it has seen them.
        norm: Upper bound of B = sqrt((y - u0)^T H^+ (y - u0)), the norm of the kernel machine's
            change.
        dominating: sqrt((y - u0)^T H^+ (y - u0)/n) sqrt(max_i k(x_i, x_i)), which the theorem calls
            its dominating term; which term of `bound` is the largest is `largest_term`.
        complexity: B' sqrt(trace H)/n, which bounds the Rademacher complexity; B' is the next norm
            on the grid.
        confidence: The term with delta.
        empirical: Upper bound of the mean training loss of the kernel machine; 0 if H is regular.
        eigenvalues: (n,) of H, descending.
        projections: (n,) q_i . (y - u0), in the same order.
        contributions: (n,) their parts of B^2; 0 where the eigenvalue was taken for 0.
        rank: How many eigenvalues were not.
        delta, lipschitz, loss_bound: As given.
        limit: The same for H-infinity, where there is one.
        fit: |y - u0|/|y|, how far the predictions of the model are from these labels; 1 for
            predictions 0.
    """

    kernel: str
    bound: float
    vacuous: bool
    norm: float
    dominating: float
    complexity: float
    confidence: float
    empirical: float
    eigenvalues: Tensor
    projections: Tensor
    contributions: Tensor
    rank: int
    delta: float
    lipschitz: float
    loss_bound: float
    limit: GeneralizationBound | None = None
    fit: float = 1.0

    @property
    def trained(self) -> bool:
        """Whether the predictions fit the labels, so that the model has seen them and the bound
        does not apply to it."""
        return self.kernel == "tangent" and self.fit < _FITS

    @property
    def terms(self) -> dict[str, float]:
        """The three terms whose sum is `bound`."""
        complexity = 2 * self.lipschitz * self.complexity
        return {"training": self.empirical, "complexity": complexity, "confidence": self.confidence}

    @property
    def largest_term(self) -> str:
        """The name of the largest of `terms`."""
        return max(self.terms, key=self.terms.__getitem__)

    def _condition(self) -> str:
        if self.kernel == "limit":
            return "holds for the kernel of the architecture, which does not depend on the sample"
        if self.trained:
            return (
                f"does not apply: the predictions are within {self.fit:.1e} |y| of these labels, so the model was trained on "
                "them. Give the model as it was drawn, before training"
            )
        return "holds for a model drawn without using (X, y); for one that was trained on these labels it does not"

    def __str__(self) -> str:
        n = len(self.eigenvalues)
        word = f"below the trivial {self.loss_bound:g}"
        if self.vacuous:
            word = "not valid after training on these labels" if self.trained else "vacuous"
        title = f"generalization of the kernel machine ({self.kernel} kernel): {self.bound:.4g}, {word}"
        largest = self.largest_term
        lines = [
            title,
            "=" * len(title),
            self._condition(),
            f"with probability {1 - self.delta:g}: "
            + " + ".join(f"{value:.4g} ({name})" for name, value in self.terms.items()),
            f"largest term: {largest} {self.terms[largest]:.4g}; norm B {self.norm:.4g}, rank {self.rank} of {n}",
            f"the theorem's sqrt((y - u0)^T H^+ (y - u0)/n) sqrt(max k): {self.dominating:.4g}",
            "  i  eigenvalue  projection  share of B^2",
        ]
        total = max(float(self.contributions.sum()), 1e-300)
        shown = range(n) if n <= 10 else [*range(5), *range(n - 5, n)]
        for i in shown:
            if n > 10 and i == n - 5:
                lines.append("  ...")
            share = float(self.contributions[i]) / total
            lines.append(f"{i:3d}  {float(self.eigenvalues[i]):10.4g}  {float(self.projections[i]):10.4g}  {share:12.2%}")
        if self.limit is not None:
            lines += ["", str(self.limit)]
        return "\n".join(lines)


def generalization_bound(
    model: Any,
    X: Tensor,
    y: Tensor,
    *,
    delta: float = 0.05,
    lipschitz: float = 1.0,
    loss_bound: float = 1.0,
    rtol: float = 1e-10,
) -> GeneralizationBound:
    r"""[gao2023, Theorem 4.1] with its square roots back, and with constants.

    The given model, drawn without using the sample, has predictions u0 and tangent kernel k0;
    trained to the end with that kernel frozen it becomes the kernel machine f(x) = f0(x) + k0(x, X)
    H0^+ (y - u0). For a loss in [0, c], rho-Lipschitz in the prediction and 0 where it is right,
    with probability 1 - delta over a sample of n independent pairs

        E loss(f) <= mean loss(f) + 2 rho B' sqrt(trace H0)/n + 3 c sqrt(log(2 (j+1)(j+2)/delta)/(2 n))

    where B^2 = (y - u0)^T H0^+ (y - u0) and B' = q^j is the least number on the grid 1, q, q^2, ...
    (q = 2^(1/4)) that is at least B. *Proof.* f - f0 has norm B in the space of k0, and the ball of
    radius B' there has empirical Rademacher complexity at most B' sqrt(trace H0)/n (the offset f0
    changes nothing). For fixed j and delta_j = delta/((j+1)(j+2)) the bound is the standard one for
    Lipschitz bounded losses [mohri2018, Chapter 3]; the delta_j sum up to delta, so it holds for
    all j at once, also for the one that the sample chose. (The paper takes the ball of the sample's
    own B, which is not allowed without this last step.)

    As trace H0 <= n max k0 the second term is at most 2 rho times `dominating`, sqrt((y - u0)^T
    H0^(-1)(y - u0)/n) times sqrt(max k0), up to q, where B >= 1 (the grid begins there). The
    paper's text lost the roots, prints lambda_i^(-2) for lambda_i^(-1) in the spectral form, and
    calls the sum of the eigenvalues |H|_F; it is the trace.

    What this is *not*: a bound for the trained network. That f comes near to it is asymptotic (m =
    Omega(n^10/lambda_0^8)). And it is one for the *initial* model: after training on (X, y), k0
    depends on the sample and the proof is void. A model does not record what it was trained on, so
    this is the caller's to know, and the answer states the condition; only where the predictions
    are within 1 % of the labels is it plain that the model has seen them, and `vacuous` is then
    True.

    All terms are rounded upward, for the kernel and the predictions as float64 has them: equilibria
    are found to 1e-12, and a model with one that does not converge is refused.

    Where `ImplicitOnlyDEQ(init="diagonal")` is given, `limit` is the same for its kernel at
    infinite width, which does not depend on the draw; there u0 is taken to be 0.

    Args:
        model: A theory network at its initialization.
        X: (n, d). y: (n,).
        delta: Probability of failure, in (0, 1).
        lipschitz: rho, of the loss in the prediction.
        loss_bound: c, the largest loss; e.g. min(|f - y|, 1) has rho = c = 1.
        rtol: Eigenvalues below rtol times the largest are taken for 0: the machine then ignores
            those directions of y - u0, and what it misses counts as training loss.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(5, 100, generator=torch.Generator().manual_seed(0))
        >>> result = wp.generalization_bound(model, torch.eye(5), torch.ones(5))
        >>> result.vacuous
        True
    """
    options = {"delta": delta, "lipschitz": lipschitz, "loss_bound": loss_bound}
    _check_options(options, rtol)
    X, y = check_data(model, X, y)
    check_unchanged("generalization_bound", model, declared=DECLARED)
    check_finite("generalization_bound", model)
    twin = precise_copy(model)
    with torch.no_grad():
        unit, X, y = _in_unit(twin, X, y)
        u0 = twin(X)
    check_solved(twin, u0)
    limit = None
    if twin.theory.limit is not None and not changed(model, declared=("theory",)):
        key, number = twin.theory.limit
        limit = _bound("limit", LIMITS[key](X, number), y, rtol, options, None, unit)
    labels, exponent = scaled(y)
    distance = float(torch.linalg.vector_norm(ldexp(y - u0, -exponent)))
    fit = distance / float(torch.linalg.vector_norm(labels)) if bool(y.any()) else 1.0
    H = tangent_kernel(twin, X)
    check_solved(twin, H)
    return _bound("tangent", H, y - u0, rtol, options, limit, unit, fit)


def _check_options(options: dict[str, float], rtol: float) -> None:
    for name, value in (*options.items(), ("rtol", rtol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidType(f"generalization_bound: {name} must be a number; got {type(value).__name__} {value!r:.60}.")
    for name, value in options.items():
        high = 1.0 if name == "delta" else math.inf
        if not 0 < value < high:
            raise InvalidArgument(f"generalization_bound: {name} must be in (0, {high:g}); got {value!r}.")
    if not 0 <= rtol < 1:
        raise InvalidArgument(f"generalization_bound: rtol must be in [0, 1); got {rtol!r}.")


def _in_unit(twin: Any, X: Tensor, y: Tensor) -> tuple[DataUnit, Tensor, Tensor]:
    """The data in a unit in which the kernel has room, or one sentence about why there is none."""
    found = unit_of(twin, X, y) if twin.theory.closed_form else no_room(twin, X, y) or (DataUnit(), X, y)
    if isinstance(found, str):
        raise InvalidArgument(f"generalization_bound: {found}")
    return found


def _bound(
    kernel: str,
    H: Tensor,
    r: Tensor,
    rtol: float,
    options: dict[str, float],
    limit: GeneralizationBound | None,
    unit: DataUnit,
    fit: float = 1.0,
) -> GeneralizationBound:
    """H and r are in the unit, in which B is the same."""
    n, delta, rho, c = len(r), options["delta"], options["lipschitz"], options["loss_bound"]
    machine = kernel_machine(H, r, rtol)
    B = machine.norm
    empirical = min(c, up(rho * unit.upper(machine.missed))) if machine.missed > 0 else 0.0
    j = _grid_index(B)
    trace = up(max(0.0, float(H.trace())) * (1 + n * 2.0**-52))
    complexity = unit.upper(up(up(_RATIO**j) * math.sqrt(trace) / n))
    confidence = up(3 * c * math.sqrt((math.log(2 * (j + 1) * (j + 2)) - math.log(delta)) / (2 * n)))
    bound = math.nextafter(math.fsum((empirical, 2 * rho * complexity, confidence)), math.inf)
    return GeneralizationBound(
        kernel,
        bound,
        not bound < c or (kernel == "tangent" and fit < _FITS),
        B,
        unit.upper(up(B * math.sqrt(max(0.0, float(H.diagonal().max())) / n))),
        complexity,
        confidence,
        empirical,
        ldexp(machine.eigenvalues, 2 * unit.exponent),
        ldexp(machine.projections, unit.exponent),
        machine.contributions,
        int(machine.kept.sum()),
        delta,
        rho,
        c,
        limit,
        fit,
    )


def _grid_index(B: float) -> int:
    """The least j whose grid norm q^j is at least B for certain."""
    if not B < _LARGEST_NORM:
        raise InvalidArgument(
            f"generalization_bound: the norm of the kernel machine is only known to be at most {B:.3g}, beyond the grid. "
            "Rescale the labels, or take a larger rtol."
        )
    j = max(0, math.floor(math.log2(B) / math.log2(_RATIO)) - 1) if B > 1 else 0
    while (down(_RATIO**j) if j else 1.0) < B:
        j += 1
    return j
