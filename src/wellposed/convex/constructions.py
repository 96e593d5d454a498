"""Networks that the lemmas of [xie2021] construct: feedforward networks as unit layers, and
networks with many equilibria."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.convex.opteq import AbstractDenseOptEq, DeepOptEq, OptEq, check_dense
from wellposed.errors import InvalidArgument
from wellposed.nn import AbstractActivation, ReLU


def feedforward_as_units(weights: Sequence[Tensor], *, width: int | None = None) -> list[Tensor]:
    r"""Matrices that turn a feedforward network into unit layers without changing its output
    [xie2021, Lemma 1].

    The network z_(k+1) = s(W_k z_k + U_k x + b_k), k = 1..L-1, y = W_L z_L, becomes, with Wbar_0,
    ..., Wbar_L from here,

        zbar_1 = Wbar_0^T z_1,    zbar_(k+1) = Wbar_k^T s(Wbar_k zbar_k + U_k x + b_k),    y = Wbar_L zbar_L,

    because W_k = Wbar_k Wbar_(k-1)^T. They are made from the top down: Wbar_(k-1)^T = Wbar_k^+ W_k
    + N R, where N spans the null space of Wbar_k and R is chosen to give Wbar_(k-1) full rank. That
    needs n_k + n_(k-1) - rank W_k columns. The paper claims that max_k n_k columns suffice; they do
    for W_k of full column rank, not for others.

    Args:
        weights: W_1, ..., W_L, of shapes (n_k, n_(k-1)).
        width: Columns of the Wbar_k; the largest n_k + n_(k-1), which suffices for all weights, if
            not given.

    Returns:
        Wbar_0, ..., Wbar_L, of shapes (n_k, width).
    """
    _check_chain("feedforward_as_units", weights)
    sizes = [weights[0].shape[1], *(W.shape[0] for W in weights)]
    enough = max(a + b for a, b in zip(sizes, sizes[1:], strict=False))
    width = enough if width is None else width
    if width < max(sizes):
        raise InvalidArgument(f"width={width} is below the largest layer, {max(sizes)}; {enough} suffices for all weights.")
    top = weights[-1]
    bars = [torch.eye(sizes[-1], width, dtype=top.dtype, device=top.device)]
    for W in reversed(weights):
        above = bars[0]
        n, below = W.shape
        transposed = torch.linalg.pinv(above) @ W
        # the directions that W_k forgets must come from the null space of Wbar_k
        _, sigma, Vh = torch.linalg.svd(W, full_matrices=True)
        rank = int((sigma > 1e-10 * sigma.max().clamp(min=torch.finfo(W.dtype).tiny)).sum())
        missing = below - rank
        if missing > width - n:
            raise InvalidArgument(
                f"width={width} is too small: a matrix of shape {tuple(W.shape)} has rank {rank} and needs "
                f"{n + missing} columns; {enough} suffices for all weights."
            )
        null = torch.linalg.svd(above, full_matrices=True).Vh[n:].t()  # (width, width - n)
        bars.insert(0, (transposed + null[:, :missing] @ Vh[rank:]).t())
    return bars


def feedforward_as_deep_opteq(
    weights: Sequence[Tensor], biases: Sequence[Tensor], readout: Tensor, *, activation: AbstractActivation | None = None
) -> DeepOptEq:
    r"""A deep OptEq that computes y = w . h_L, h_l = s(A_l h_(l-1) + b_l), h_0 = x: [xie2021, Lemma
    2], corrected.

    The paper sets W_1 = 0, which makes f_1 and with it the output of layer 1 zero. Instead, with
    one block of the state per hidden layer and a = 1,

        W_1 = [I 0 ... 0], U_1 = A_1,     W_l = [0 .. A_l I .. 0] (A_l in block l-1, I in block l), U_l = 0 for l > 1.

    Layer l finds h_(l-1) in block l-1 and leaves h_l in block l, where the next one finds zeros
    besides; block 1 is zero when a sweep begins because W_1 W_L^T = 0, for which L >= 3. With fewer
    hidden layers, ReLU layers relu(h) = h are put on top. The equilibrium is reached in two sweeps
    from any start, though |W_l| > 1: `contraction_upper` does not see it.

    Args:
        weights: A_1 (n_1, d), A_2 (n_2, n_1), ..., A_L.
        biases: b_1 (n_1,), ..., b_L.
        readout: (n_L,) w.
        activation: s; `ReLU()` if not given. With fewer than three layers it must be ReLU.

    Returns:
        The network; block l of its equilibrium contains what layer L leaves: A_L^T h_L in block
        L-1, h_L in block L.
    """
    _check_chain("feedforward_as_deep_opteq", weights)
    activation = ReLU() if activation is None else activation
    A, b = list(weights), list(biases)
    if len(b) != len(A) or any(v.shape != (W.shape[0],) for W, v in zip(A, b, strict=False)):
        raise InvalidArgument("feedforward_as_deep_opteq needs one bias of shape (n_l,) for every weight (n_l, n_(l-1)).")
    if len(A) < 3 and not isinstance(activation, ReLU):
        raise InvalidArgument(
            f"With {len(A)} hidden layer(s), fewer than 3, layers that change nothing must be added, which only ReLU allows; "
            f"got {activation!r}. Use three layers or more."
        )
    last = A[-1]
    while len(A) < 3:
        A.append(torch.eye(last.shape[0], dtype=last.dtype, device=last.device))
        b.append(torch.zeros(last.shape[0], dtype=last.dtype, device=last.device))
    sizes = [W.shape[0] for W in A]
    model = DeepOptEq(
        A[0].shape[1], sizes, width=sum(sizes), norm_bound=None, activation=activation, device=last.device, dtype=last.dtype
    )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    with torch.no_grad():
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            model.W[i].zero_()
            model.W[i][:, start : start + size] = torch.eye(size, dtype=last.dtype, device=last.device)
            model.U[i].zero_()
            if i == 0:
                model.U[i].copy_(A[0])
            else:
                model.W[i][:, starts[i - 1] : start] = A[i]
            model.b[i].copy_(b[i])
        model.w.zero_()
        model.w[starts[-1] :] = readout
    return model


class MultiBlock:
    r"""A deep OptEq as one wide unit layer of all its blocks at once [xie2021, Lemma 3].

        zbar = a/mu W^T s(W P zbar + U x + b) + (1 - a) P zbar,      zbar = (z_1, ..., z_(L-1), z_0)

    with W block diagonal and P the cyclic shift (P zbar)_l = z_(l-1).

    Attributes:
        W: (sum m_l, L m). U: (sum m_l, d). b: (sum m_l,). P: (L m, L m).
    """

    def __init__(self, model: AbstractDenseOptEq) -> None:
        units, m = model.parameters_by_unit(), model.width
        with torch.no_grad():
            self.W = torch.block_diag(*model.matrices())
            self.U = torch.cat([unit.U for unit in units])
            self.b = torch.cat([unit.b for unit in units])
        identity = torch.eye(len(units) * m, dtype=self.W.dtype, device=self.W.device)
        self.P = identity.roll(m, dims=0)  # row block l of P picks block l-1
        self._alpha, self._mu, self._activation = model.alpha, model.mu, model.activation

    def __call__(self, z: Tensor, X: Tensor) -> Tensor:
        """(n, L m), (n, d) -> (n, L m) the right side."""
        shifted = z @ self.P.t()
        hidden = self._activation(shifted @ self.W.t() + X @ self.U.t() + self.b)
        return self._alpha / self._mu * hidden @ self.W + (1 - self._alpha) * shifted


def multi_block(model: AbstractDenseOptEq) -> MultiBlock:
    """The one-layer form of a deep network without a prior; see `MultiBlock`."""
    return MultiBlock(check_dense("multi_block", model, plain=True))


def line_of_equilibria(*, shrinkage: float = 0.6, dtype: torch.dtype = torch.float64) -> tuple[OptEq, Tensor, Tensor]:
    r"""An OptEq with |W| = 1 whose equilibria are a segment, and the ends of it; the input does not
    matter.

    W = n n^T + r p p^T with orthonormal n = (2, -1)/sqrt 5 and p = (1, 2)/sqrt 5, b = p, U = 0.
    With z = W u the objective is (1 - r^2) <p, u>^2/2 - <p, u> over u >= 0: only <p, u> = t = 1/(1
    - r^2) matters, and <n, u> is free between -t/2 and 2 t, where a unit becomes zero. So the
    equilibria are r t p + x n with -t/2 <= x <= 2 t, and the one of least norm is r t p.

    Args:
        shrinkage: r, in (0, 1).
        dtype: Of the parameters.

    Returns:
        The network, which takes inputs (n, 1), and the two ends (2,) of the segment.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, one_end, other_end = wp.convex.line_of_equilibria()
        >>> middle = ((one_end + other_end) / 2).unsqueeze(0)
        >>> x = torch.zeros(1, 1, dtype=torch.float64)
        >>> bool((wp.convex.inclusion_residual(model, x, middle) < 1e-9).all())
        True
    """
    if not 0 < shrinkage < 1:
        raise InvalidArgument(f"The 'shrinkage' parameter of line_of_equilibria must be in (0, 1). Got {shrinkage!r} instead.")
    n = torch.tensor([2.0, -1.0], dtype=dtype) / math.sqrt(5)
    p = torch.tensor([1.0, 2.0], dtype=dtype) / math.sqrt(5)
    model = OptEq(1, 2, norm_bound=None, dtype=dtype)
    t = 1 / (1 - shrinkage**2)
    with torch.no_grad():
        model.W.copy_(torch.outer(n, n) + shrinkage * torch.outer(p, p))
        model.U.zero_()
        model.b.copy_(p)
    return model, shrinkage * t * p - t / 2 * n, shrinkage * t * p + 2 * t * n


def _check_chain(owner: str, weights: Sequence[Tensor]) -> None:
    shapes = [tuple(W.shape) if isinstance(W, Tensor) else type(W).__name__ for W in weights]
    good = len(shapes) > 0 and all(isinstance(shape, tuple) and len(shape) == 2 for shape in shapes)
    if not good or any(a[0] != b[1] for a, b in zip(shapes, shapes[1:], strict=False)):
        raise InvalidArgument(f"{owner} needs matrices of shapes (n_k, n_(k-1)) that fit one another; got {shapes}.")
