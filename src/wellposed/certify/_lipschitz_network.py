r"""How much the equilibrium and the prediction of a dense network can change with its input.

z = s(R z + c(x)), slopes of s in [0, b], y = v . z + v' . c. Two equilibria satisfy dz = E (R dz +
dc), E diagonal with the secant slopes of s, so, as in `lipschitz`, with M = sym(I - R) + (1/b - 1)
I,

    <dz, M dz> <= <dz, dc>,     that is     |dz - M^(-1) dc/2|_M <= |M^(-1) dc|_M/2                                     (1)

dz lies in a ball around M^(-1) dc/2, in the norm |y|_M^2 = <y, M y>. The farthest point of it in a
direction v gives

    |<v, dz>| <= (|<M^(-1) v, dc>| + |M^(-1/2) v| |M^(-1/2) dc|)/2                                                     (2)

which is at most |M^(-1/2) v| |M^(-1/2) dc|, by Cauchy and Schwarz. If c = U x (+ constant), dc = U
dx. If c = t relu(U x), the same with M = I says |<w, dc>| <= t (|U^T w| + |w| |U|)/2 |dx| and |dc|
<= t |U| |dx|. All of it holds between any two inputs, and none of it needs a derivative. M > 0
suffices for exactly one equilibrium, and |R| < 1/b implies it: M >= 1/b - |R|, where the half of
(2) is lost, |dz| <= |dc|/(1/b - |R|) remains, and is what one would write down first.

What is computed is not M^(-1), but some Y with B - M Y = N small; as M^(-1) >= 0 is at most 1/l, l
<= lambda_min(M), for all Y

    M^(-1) B = Y + M^(-1) N,     |M^(-1) N| <= |N|/l.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, down, exponent_of, ldexp, ldexp_up, up, vector_norm_upper
from wellposed.nn import DenseCell, EquilibriumLayer, Monotone, Spectral
from wellposed.nn.families import AbstractNetwork


@dataclass(frozen=True)
class NetworkLipschitz:
    """Certified upper bounds of Lipschitz constants in the Euclidean norm, over all inputs.

    Attributes:
        margin: Lower bound of the least eigenvalue of M = sym(I - R) + (1/b - 1) I; positive.
        contraction: Upper bound of b |R|; it need not be below 1.
        input_norm: Upper bound of the Lipschitz constant of x -> c.
        equilibrium: Of x -> z.
        prediction: Of x -> y; None where there is no read-out.
        plain: What norms alone say of y, or of z where there is no read-out: |v| |U| b/(1 - b |R|),
            or |v| |U|/m where a margin m holds by construction. Infinite if there is none and b |R|
            is not below 1.
    """

    margin: float
    contraction: float
    input_norm: float
    equilibrium: float
    prediction: float | None
    plain: float


@dataclass(frozen=True)
class _DenseNetwork:
    """What the bounds are about, in float64 and on the CPU.

    Attributes:
        R: (m, m) as computed from the parameters. R_error: Upper bound of |R - what the parameters
            mean|.
        U: (m, d).
        rectified: Whether c = scale relu(U x), instead of scale U x.
        scale: Of c, positive.
        v: (m,) read-out of z; None if z is the output. v_skip: (m,) read-out of c; None if there is
            none.
        readout_scale: What multiplies both, positive.
        slope: b.
        margin: A lower bound of lambda_min(M) that is known by construction; 0 if none is.
    """

    R: Tensor
    R_error: float
    U: Tensor
    rectified: bool = False
    scale: float = 1.0
    v: Tensor | None = None
    v_skip: Tensor | None = None
    readout_scale: float = 1.0
    slope: float = 1.0
    margin: float = 0.0


def network_bounds(model: AbstractNetwork) -> NetworkLipschitz:
    """`lipschitz_upper` of a network whose theory names U and the read-out."""
    theory = model.theory
    scales = (abs(theory.injection_scale), abs(theory.readout_scale))  # only norms of what they multiply occur
    twin = copy.deepcopy(model).double().cpu()
    U, *weights = _exact(twin.input_matrix(), *(getattr(twin, name) for name in theory.readout))
    _exact(*twin.parameters(), *twin.buffers())
    network = _DenseNetwork(
        twin.recurrent().detach(),
        twin.recurrent_error(),
        U.contiguous(),
        rectified=theory.rectified,
        scale=scales[0] if scales[0] == 1.0 else up(scales[0]),
        v=weights[0],
        v_skip=weights[1] if theory.skip else None,
        readout_scale=scales[1] if scales[1] == 1.0 else up(scales[1]),
        margin=0.0 if theory.margin is None else down(theory.margin),
    )
    return _bound_network(network, type(model).__name__)


def layer_bounds(model: EquilibriumLayer) -> NetworkLipschitz:
    """`lipschitz_upper` of a layer with a `DenseCell`."""
    cell = model.cell
    if not isinstance(cell, DenseCell):
        raise InvalidType(f"lipschitz_upper needs an EquilibriumLayer with a DenseCell; got one with {type(cell).__name__}.")
    slope = cell.activation.lipschitz
    if isinstance(cell.weight, Monotone):
        A, B, U = _exact(cell.A, cell.B, cell.U)
        R, error = _monotone(A, B, cell.weight)
        return _bound_network(_DenseNetwork(R, error, U, slope=slope, margin=down(cell.weight.margin + 1 / slope - 1)), "layer")
    W, U = _exact(cell.W, cell.U)
    if cell.weight is None:
        return _bound_network(_DenseNetwork(W, 0.0, U, slope=slope), "layer")
    if not isinstance(cell.weight, Spectral):
        raise InvalidType(f"lipschitz_upper knows weight=None, Spectral and Monotone; got {type(cell.weight).__name__}.")
    (R,) = _exact(cell.recurrent())  # as the layer uses it; a graph may round it differently
    error = up(len(R) * torch.finfo(cell.W.dtype).eps * vector_norm_upper(R))
    return _bound_network(_DenseNetwork(R, error, U, slope=slope), "layer")


def _exact(*parameters: Tensor) -> tuple[Tensor, ...]:
    """In float64 on the CPU, which changes no stored value."""
    found = tuple(parameter.detach().double().cpu() for parameter in parameters)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in found):
        raise InvalidArgument("lipschitz_upper: a parameter has NaN or infinite entries; look for the step that made them.")
    return found


def _monotone(A: Tensor, B: Tensor, weight: Monotone) -> tuple[Tensor, float]:
    """W = (1 - m) I - A^T A + B - B^T, and a bound of its rounding."""
    size = vector_norm_upper(A) * vector_norm_upper(A) + 2 * vector_norm_upper(B) + (1 + weight.margin) * math.sqrt(B.shape[0])
    W: Tensor = weight(A, B)
    return W, up(2 * (A.shape[0] + 8) * ROUNDING * size)


def _bound_network(network: _DenseNetwork, name: str) -> NetworkLipschitz:
    """The bounds, or an error where nothing proves that there is one equilibrium.

    Costs a singular value decomposition of R, an eigenvalue decomposition and a Cholesky
    factorization of M. The bounds are proportional to U and to v, which are divided by powers of
    two so that no product of theirs leaves the range of float64.

    Args:
        network: The matrices.
        name: Of the model, for the message.
    """
    if not bool(torch.isfinite(network.R).all()):
        raise InvalidArgument(
            f"lipschitz_upper: the recurrent matrix of this {name} leaves the range of float64. Scale its parameters down."
        )
    injected = exponent_of(network.U)
    read = max((exponent_of(w) for w in (network.v, network.v_skip) if w is not None and bool(w.any())), default=0)
    v, v_skip = (None if w is None else ldexp(w, -read) for w in (network.v, network.v_skip))
    found = _bounded(replace(network, U=ldexp(network.U, -injected), v=v, v_skip=v_skip), name)
    moves = bool(network.U.any())  # where nothing moves, or nothing is read out, 0 is exact
    reads = network.v is None or any(bool(w.any()) for w in (network.v, network.v_skip) if w is not None)
    return NetworkLipschitz(
        found.margin,
        found.contraction,
        ldexp_up(found.input_norm, injected) if moves else 0.0,
        ldexp_up(found.equilibrium, injected) if moves else 0.0,
        None if found.prediction is None else ldexp_up(found.prediction, injected + read) if moves and reads else 0.0,
        ldexp_up(found.plain, injected + read) if moves and reads else 0.0,
    )


def _bounded(network: _DenseNetwork, name: str) -> NetworkLipschitz:
    """The bounds where U and v are of moderate size."""
    R, U, b = network.R, network.U, network.slope
    m = R.shape[0]
    M = -(R + R.t()) / 2
    M.diagonal().add_(1.0 / b)
    # forming M: three roundings an entry
    M_error = up(network.R_error + 4 * ROUNDING * (vector_norm_upper(R) + math.sqrt(m) / b))
    margin = max(network.margin, down(least_eigenvalue_lower(M) - M_error))
    contraction = up(b * up(spectral_norm_upper(R) + network.R_error))
    if not margin > 0:
        raise InvalidArgument(
            f"lipschitz_upper: nothing proves that this {name} has one equilibrium: lambda_min(I - sym R) is only known to be "
            f"at least {margin:.3g}, and |R| to be at most {contraction:.3g}. Scale the recurrent matrix down."
        )
    whole = up(spectral_norm_upper(U))
    injected = up(network.scale * whole)
    solve = _Solve(M, M_error, margin)
    weighted = up(injected / math.sqrt(margin))  # |M^(-1/2) dc| <= weighted |dx|
    if network.rectified:
        centre = up(injected / margin)
    else:
        Y, error = solve(U)
        weighted = min(weighted, up(network.scale * math.sqrt(solve.form_upper(U, Y, error))))
        centre = up(network.scale * (spectral_norm_upper(Y) + error / margin))  # |M^(-1) U|
    plainly = up(b / (1.0 - contraction)) if contraction < 1.0 else math.inf  # |dz| <= plainly |dc|
    if network.margin > 0:
        plainly = min(plainly, up(1.0 / network.margin))
    equilibrium = min(up(injected * plainly), up((centre + weighted / math.sqrt(margin)) / 2), up(injected / margin))
    if network.v is None:
        return NetworkLipschitz(margin, contraction, injected, equilibrium, None, up(injected * plainly))
    plain, prediction = _prediction(network, solve, plainly=plainly, whole=whole, weighted=weighted)
    return NetworkLipschitz(margin, contraction, injected, equilibrium, prediction, plain)


def _prediction(network: _DenseNetwork, solve: _Solve, *, plainly: float, whole: float, weighted: float) -> tuple[float, float]:
    """What norms alone say of y, and the better of that and (2)."""
    v, U, t = network.v, network.U, network.scale
    assert v is not None
    skip = torch.zeros_like(v) if network.v_skip is None else network.v_skip
    plain = up(up(vector_norm_upper(v) * plainly + vector_norm_upper(skip)) * t * whole * network.readout_scale)
    y, error = solve(v.unsqueeze(1))
    readout = up(math.sqrt(solve.form_upper(v.unsqueeze(1), y, error)))  # |M^(-1/2) v|
    # <v, dz> + <v', dc> <= |<w, dc>| + |M^(-1/2) v| |M^(-1/2) dc|/2, w = M^(-1) v/2 + v'
    w, w_error = (
        y.squeeze(1) / 2 + skip,
        up(error / solve.margin + 2 * ROUNDING * (vector_norm_upper(y) + vector_norm_upper(skip))),
    )
    aligned = up(vector_norm_upper(w @ U) + _rounding(w, U) + w_error * whole)
    if network.rectified:
        aligned = up((aligned + up(vector_norm_upper(w) + w_error) * whole) / 2)
    return plain, min(plain, up(network.readout_scale * up(t * aligned + readout * weighted / 2)))


class _Solve:
    """B -> Y, |B - M Y|_F, where M is known up to an error: for whatever Y comes out the second is
    an upper bound."""

    def __init__(self, M: Tensor, error: float, margin: float) -> None:
        self._M, self._error, self.margin = M, error, margin
        self._factor, self._failed = torch.linalg.cholesky_ex(M)

    def __call__(self, B: Tensor) -> tuple[Tensor, float]:
        # without a factor the guess is 0: every guess is allowed
        Y = torch.zeros_like(B) if int(self._failed) else torch.cholesky_solve(B, self._factor)
        rounding = _rounding(self._M, Y) + 2 * ROUNDING * vector_norm_upper(B)
        return Y, up(vector_norm_upper(B - self._M @ Y) + rounding + self._error * vector_norm_upper(Y))

    def form_upper(self, B: Tensor, Y: Tensor, error: float) -> float:
        """Upper bound of |B^T M^(-1) B|."""
        product = B.t() @ Y
        return up(spectral_norm_upper(product) + _rounding(B.t(), Y) + error * vector_norm_upper(B) / self.margin)


def _rounding(A: Tensor, B: Tensor) -> float:
    """|fl(A B) - A B|_F <= gamma_k |A|_F |B|_F (Chapter 3 of [higham2002]), doubled."""
    return 2 * (A.shape[-1] + 4) * ROUNDING * vector_norm_upper(A) * vector_norm_upper(B)
