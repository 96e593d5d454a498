r"""How far an input may be moved before the class of a monotone classifier can change: a proved
radius per sample.

With l = logits and g_j = l_y - l_j > 0 for all other classes j, no perturbation shorter than min_j
g_j/K_j changes the class, if K_j bounds the Lipschitz constant of l_y - l_j [pabbaraju2021]. Three
bounds K_j are used, and the best radius counts:

1. Global: those of `lipschitz_upper`.
2. Active set (ReLU, dense): in the ball of radius r a pre-activation a_i moves by at most s_i r,
   s_i = |M^(-1/2) W_i^T| |M^(-1/2) U| + |U_i|. Units with a_i + s_i r < 0 stay off, so the change
   of z lives on the others, S(r), and (2) of `lipschitz` holds there. S(r) and with it K_j(r) grow
   with r: the largest r with r K_j(r) <= g_j is found by bisection.
3. Linear region (ReLU, dense): as long as no pre-activation can change its sign the network is
   affine, z' = z + J dx with J = (I - D W)^(-1) D U. The affine continuation is an equilibrium
   while r |(W J + U)_i| < |a_i| for all i, and equilibria are unique; there K_j = |(w_y - w_j) J|
   exactly.

The computed equilibrium is not exact: z~ = f(z) is the equilibrium for the constant c + W (z - z~),
so by (1) of `lipschitz` a logit difference is off by at most |M^(-1/2)(w_y - w_j)| |W (z -
z~)|/sqrt(margin), which is taken from g_j.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._gate import check_finite, check_model, check_tensors, check_unchanged
from wellposed.certify.lipschitz import SLACK, LipschitzBounds, certified_operator, classifier_bounds
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import ldexp, ldexp_down, row_norms_upper, scaled
from wellposed.nn import DenseCell, MonotoneClassifier, ReLU

#: Halvings of the interval in which the radius of the active set is sought: to a thousandth.
BISECTIONS = 10
#: The float64 solve that a certificate starts from.
RTOL, MAX_STEPS = 1e-11, 20000


@dataclass(frozen=True)
class Robustness:
    """Certified radii, in the Euclidean norm of the input.

    They speak of the network in exact arithmetic, with the parameters as stored.

    Attributes:
        radius: (n,) no perturbation shorter than this changes the predicted class; 0 where the
            prediction is not y, or where nothing was proved.
        correct: (n,) bool, whether the prediction is y.
        margin: (n,) the least g_j, after what the solver may have got wrong.
        global_radius: (n,) what the global bounds alone prove.
    """

    radius: Tensor
    correct: Tensor
    margin: Tensor
    global_radius: Tensor

    def certified_accuracy(self, radius: float) -> float:
        """The part of the samples that are right, and provably stay right under every perturbation
        of this length."""
        return float((self.correct & (self.radius > radius)).double().mean())


@torch.no_grad()
def robustness(model: MonotoneClassifier, x: Tensor, y: Tensor, *, local: bool = True) -> Robustness:
    """A certified radius for every sample.

    Args:
        model: The classifier; a copy of it is evaluated in float64.
        x: (n, ...) inputs.
        y: (n,) classes.
        local: Whether to sharpen radii sample by sample through the active set; needs a dense ReLU
            cell, costs some factorizations of the active part of M, and norms of matrices of the
            size of the input, per sample.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.nn.MonotoneClassifier.dense(4, 16, 3, generator=torch.Generator().manual_seed(0))
        >>> x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
        >>> y = model(x).argmax(dim=1)
        >>> result = wp.certify.robustness(model, x, y)
        >>> bool((result.radius > 0).all()), bool((result.radius >= result.global_radius).all())
        (True, True)
    """
    _check_inputs(model, x, y)
    check_unchanged("robustness", model)
    check_finite("robustness", model)
    bounds = classifier_bounds(model)
    exact = copy.deepcopy(model).double()
    exact.layer.rtol, exact.layer.max_steps, exact.layer.on_failure = RTOL, MAX_STEPS, "ignore"
    inputs = exact.prepared(x.double())
    f = exact.cell.bind(inputs)
    z = f(exact.layer.solve(inputs).value.flatten(1))
    fz = f(z)
    gaps, errors = _gaps(exact, bounds, z, fz, f.inputs()[-1], y)
    other = torch.ones_like(gaps, dtype=torch.bool).scatter_(1, y.unsqueeze(1), False)
    least = torch.where(other, gaps, torch.inf).amin(dim=1)
    quotient = torch.where(other, gaps / bounds.pairs[y], torch.inf)
    # what has overflowed proves nothing
    global_radius = quotient.amin(dim=1).clamp(min=0.0).nan_to_num(nan=0.0, posinf=0.0)
    radius = global_radius.clone()
    correct = exact.head(exact.readout(fz)).argmax(dim=1) == y
    if local and isinstance(exact.cell, DenseCell) and isinstance(exact.cell.activation, ReLU):
        refine = _ActiveSet(exact, bounds)
        for i in (least > 0).nonzero().squeeze(1).tolist():
            found = refine(fz[i], f.inputs()[-1][i], int(y[i]), gaps[i], float(radius[i]), float(errors[i]))
            radius[i] = max(float(radius[i]), found)
    return Robustness(radius, correct, least, global_radius)


def _check_inputs(model: Any, x: Any, y: Any) -> None:
    """One sentence about what is wrong with the classifier or the samples."""
    if not isinstance(model, MonotoneClassifier):  # by type: the bounds are about its head and its pooling
        raise InvalidType(f"robustness needs a MonotoneClassifier; got {type(model).__name__}.")
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise InvalidType(f"robustness: x and y must be tensors; got {type(x).__name__} and {type(y).__name__}.")
    check_model("robustness", model)
    check_tensors("robustness", (("x", x), ("y", y)))
    if not x.is_floating_point():
        raise InvalidType(
            f"robustness: x must be floating point; got {x.dtype}. Convert it, e.g. x.to({model.head.weight.dtype})."
        )
    if x.dtype != (dtype := model.head.weight.dtype):  # as the classifier itself refuses it
        raise InvalidType(
            f"robustness: the classifier has {dtype} parameters and x is {x.dtype}; convert one, e.g. x.to({dtype})."
        )
    model.prepared(x)
    if x.shape[0] == 0:
        raise InvalidArgument("robustness: x has no samples; a radius needs at least one.")
    if not bool(torch.isfinite(x).all()):
        raise InvalidArgument("robustness: x has NaN or infinite entries; clean the data first.")
    if model.classes < 2:
        raise InvalidArgument("robustness: the classifier has one class, so its prediction cannot change; it needs at least 2.")
    if y.shape != (x.shape[0],) or y.dtype != torch.int64:
        raise InvalidArgument(
            f"y must hold one class per sample, int64 of shape ({x.shape[0]},); got {y.dtype} of {tuple(y.shape)}."
        )
    if y.numel() and not (0 <= int(y.min()) and int(y.max()) < model.classes):
        raise InvalidArgument(f"y must be in 0..{model.classes - 1}; got values in {int(y.min())}..{int(y.max())}.")


def _gaps(
    model: MonotoneClassifier, bounds: LipschitzBounds, z: Tensor, fz: Tensor, c: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """(n, classes) l_y - l_j less its error, and (n,) the error of W z + c."""
    operator, _, margin = certified_operator(model)
    # Rounding in one evaluation of f: some 1e-13 of the sizes involved, counted ten times.
    size = row_norms_upper(c) + (1 + operator.monotonicity()[1]) * row_norms_upper(fz)
    disturbance = row_norms_upper(operator.product(z - fz)) + 1e-12 * size
    logits = model.head(model.readout(fz))
    gaps = logits.gather(1, y.unsqueeze(1)) - logits
    gaps = gaps - 1e-12 * logits.abs().amax(dim=1, keepdim=True)
    distance = disturbance / margin  # |z~ - z*|
    preactivation = (1 + operator.monotonicity()[1]) * distance + disturbance
    return gaps - bounds.weighted_readout[y] * (disturbance / math.sqrt(margin)).unsqueeze(1) * SLACK, preactivation


class _ActiveSet:
    """Bounds 2 and 3 of this module, for a dense ReLU cell in float64."""

    def __init__(self, model: MonotoneClassifier, bounds: LipschitzBounds) -> None:
        cell = model.cell
        assert isinstance(cell, DenseCell)
        self.W = cell.recurrent().detach()
        self.U, self._injected = scaled(cell.U.detach())  # radii are measured in units of 2^-injected
        identity = torch.eye(self.W.shape[0], dtype=self.W.dtype, device=self.W.device)
        self.M = identity - (self.W + self.W.t()) / 2
        self.w, self._read = scaled(model.directions())  # and gaps in units of 2^read
        self.margin = bounds.margin
        self.input_rows = row_norms_upper(self.U)
        everything = torch.ones(self.W.shape[0], dtype=torch.bool, device=self.W.device)
        self.sensitivity = self._sensitivity(everything)

    def __call__(self, z: Tensor, c: Tensor, y: int, gaps: Tensor, radius: float, error: float) -> float:
        a = self.W @ z + c
        others = [j for j in range(len(gaps)) if j != y]
        w, g = self.w[y] - self.w[others], ldexp(gaps[others], -self._read)
        radius = max(ldexp_down(radius, self._injected), self._linear_region(a, w, g, error))
        return max(0.0, ldexp_down(self._largest(radius, a, w, g, error), -self._injected))

    def _largest(self, radius: float, a: Tensor, w: Tensor, g: Tensor, error: float) -> float:
        """By bisection, from a radius that is proved."""
        low, high = radius, max(8 * radius, 1e-6)
        if self._proved(high, a, w, g, error):
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._proved(middle, a, w, g, error) else (low, middle)
        return low

    def _proved(self, r: float, a: Tensor, w: Tensor, g: Tensor, error: float) -> bool:
        awake = a + self.sensitivity * r + error >= 0
        if not bool(awake.any()):
            return True  # nothing can change at all
        awake = awake & (a + self._sensitivity(awake) * r + error >= 0)  # again, with what S itself allows
        if not bool(awake.any()):
            return True
        readout, input_norm, _ = self._norms(awake, w)
        return bool((r * readout * input_norm * SLACK <= g).all())

    def _norms(self, S: Tensor, rows: Tensor) -> tuple[Tensor, float, Tensor]:
        """Upper bounds of |M_SS^(-1/2) rows_S| for each row, and of |M_SS^(-1/2) U_S|; M_SS^(-1)
        U_S."""
        M, U, R = self.M[S][:, S], self.U[S], rows[:, S]
        factor = torch.linalg.cholesky(M)
        y = torch.cholesky_solve(torch.cat([U, R.t()], dim=1), factor)
        residual = torch.cat([U, R.t()], dim=1) - M @ y
        d = U.shape[1]
        gram = U.t() @ y[:, :d]
        slack = float(residual[:, :d].norm() * U.norm()) / self.margin
        input_norm = math.sqrt(spectral_norm_upper(gram) + slack)
        square = (R.t() * y[:, d:]).sum(dim=0) + residual[:, d:].norm(dim=0) * R.norm(dim=1) / self.margin
        return square.clamp(min=0).sqrt(), input_norm, y[:, :d]

    def _sensitivity(self, S: Tensor) -> Tensor:
        """(width,) upper bounds of how far a unit of input moves each pre-activation while dz lives
        on S."""
        rows, input_norm, _ = self._norms(S, self.W)
        return (rows * input_norm + self.input_rows) * SLACK

    def _linear_region(self, a: Tensor, w: Tensor, g: Tensor, error: float) -> float:
        """The radius that bound 3 proves: that of the linear region, or of the class inside it."""
        on = a > 0
        J = torch.zeros_like(self.U)
        J[on] = torch.linalg.solve(torch.eye(int(on.sum()), dtype=a.dtype) - self.W[on][:, on], self.U[on])
        region = float(((a.abs() - error).clamp(min=0) / ((self.W @ J + self.U).norm(dim=1) * SLACK).clamp(min=1e-300)).min())
        boundary = float((g / ((w @ J).norm(dim=1) * SLACK).clamp(min=1e-300)).min())
        return min(region, boundary)
