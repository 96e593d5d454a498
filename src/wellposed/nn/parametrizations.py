"""Parametrizations: they keep a cell well-posed for all values of its parameters."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed._torch import transforms_active
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument


class _RadialProjection(nn.Module, abc.ABC):
    """V -> V min(1, bound/|V|): V itself inside the ball; V = 0 has a derivative."""

    def __init__(self, bound: float, *, high: float = math.inf) -> None:
        super().__init__()
        check_interval(type(self).__name__, "bound", bound, low=0.0, high=high, closed="neither")
        self.bound = bound

    def forward(self, V: Tensor) -> Tensor:
        """The projection of V, of the same shape."""
        norm = self.norm(V)
        limit = norm.new_tensor(self.bound)  # a number over a tensor is bound * (1/norm) in torch, not always 1 at the bound
        return V * (limit / norm.clamp(min=limit)).to(V.dtype)

    def norm(self, V: Tensor) -> Tensor:
        """() with its graph: the exact spectral norm of a matrix."""
        return torch.linalg.matrix_norm(V.float() if V.dtype in LOW_PRECISION else V, ord=2)

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}"


class Spectral(_RadialProjection):
    r"""V -> V min(1, bound/|V|): a contraction for every value of the parameter V, (m, m).

    The norm is the largest singular value (O(m^3), once per solve), differentiated with it, so the
    map keeps every V inside the ball and projects the others onto it radially. A cell s(W z + ...)
    with a 1-Lipschitz s and |W| <= bound < 1 has exactly one equilibrium for every input, and plain
    iteration finds it at the rate `bound` or better.

    |W| <= bound is meant of the matrix as its dtype stores it: the ball is made smaller by an
    allowance for rounding, of (m + 8) eps for the computed norm (an assumption about the singular
    value decomposition, tested in more digits and not proved; `certify` bounds |W| again) and
    eps' |V|_F/|V| <= eps' sqrt(m) for the entries, where eps' is that of the dtype and eps that of
    the computation, at least float32. So a V whose norm is nearer to the bound than that is shrunk,
    too. In float32 it is about 1e-5 of the bound at 100 units; in bfloat16 (eps' = 0.8 %) several
    per cent.

    Args:
        bound: In (0, 1).

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.DenseCell(4, 16, weight=wp.nn.Spectral(bound=0.9))
        >>> layer = wp.EquilibriumLayer(cell)
        >>> wp.certify(layer).verdict
        <Verdict.CERTIFIED: 'certified'>
    """

    def __init__(self, bound: float = 0.95) -> None:
        super().__init__(bound, high=1.0)

    def forward(self, V: Tensor) -> Tensor:
        """(m, m) -> (m, m)."""
        if not transforms_active() and not bool(torch.isfinite(V).all()):
            wrong = V.numel() - int(torch.isfinite(V).sum())
            raise InvalidArgument(
                f"Spectral: {wrong} of {V.numel()} entries of the matrix are NaN or infinite. Go back to finite parameters and "
                "take a smaller step."
            )
        A = V.float() if V.dtype in LOW_PRECISION else V
        largest = A.detach().abs().amax()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))
        A = A / scale  # so that no square overflows or vanishes
        norm = self.norm(A)
        m, eps, stored = max(V.shape), torch.finfo(A.dtype).eps, torch.finfo(V.dtype)
        known = norm.detach().clamp(min=0.5)  # it is at least 1, that of the largest entry, unless V = 0
        entries = stored.eps * (torch.linalg.vector_norm(A.detach()) / known + m * stored.tiny / self.bound)
        allowance = (m + 8) * eps + entries
        inside = (known * (1 + allowance) * scale <= self.bound) | (largest == 0)
        projected = A * (self.bound * (1 - allowance) / norm.clamp(min=0.5))
        return torch.where(inside, V, projected.to(V.dtype))


class NormBall(_RadialProjection):
    r"""V -> V min(1, bound/|V|) for a matrix V (h, m), with the exact spectral norm.

    The radial projection onto the ball |V| <= bound. `Spectral` is for a square recurrent matrix,
    this for the factors of z -> W^T s(W z + ...): there any positive bound makes sense, and 1 is
    the border.

    Args:
        bound: Positive.

    Examples:
        >>> import torch, wellposed as wp
        >>> V = torch.tensor([[3.0, 0.0], [0.0, 0.5]], dtype=torch.float64)
        >>> wp.nn.NormBall(bound=1.5)(V).round(decimals=3).tolist()
        [[1.5, 0.0], [0.0, 0.25]]
    """

    def __init__(self, bound: float = 1.0) -> None:
        super().__init__(bound)


class ConvNormBall(_RadialProjection):
    r"""K -> K min(1, bound/N(K)), with N(K) an upper bound of the norm of the convolution with K.

    Args:
        bound: Positive.
        grid: As in `conv_norm_upper`, which computes N(K).

    Examples:
        >>> import torch, wellposed as wp
        >>> ball, kernel = wp.nn.ConvNormBall(bound=0.9), torch.ones(2, 2, 3, 3)
        >>> smaller = ball(kernel)  # the convolution with it has norm <= 0.9
        >>> bool(smaller.norm() < kernel.norm())
        True
    """

    def __init__(self, bound: float = 1.0, *, grid: int = 12) -> None:
        super().__init__(bound)
        check_positive_integer("ConvNormBall", "grid", grid)
        self.grid = grid

    def norm(self, V: Tensor) -> Tensor:
        return conv_norm_upper(V, grid=self.grid)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, grid={self.grid}"


class Monotone(nn.Module):
    r"""(A, B) -> W = (1 - m) I - A^T A + B - B^T: every W with sym(I - W) >= m I, and no other.

    [winston2020, Proposition 1]. A cell s(W z + ...) whose s is the proximal operator of a convex
    function then has exactly one equilibrium for every input. Plain iteration need not find it;
    `ForwardBackward`, `PeacemanRachford` and `DouglasRachford` do.

    Args:
        margin: m, positive.

    Examples:
        >>> import torch, wellposed as wp
        >>> W = wp.nn.Monotone(margin=0.1)(torch.ones(2, 2), torch.zeros(2, 2))
        >>> bool(torch.linalg.eigvalsh(torch.eye(2) - W)[0] > 0.1 - 1e-5)
        True
    """

    def __init__(self, margin: float = 0.1) -> None:
        super().__init__()
        self.margin = margin

    @property
    def margin(self) -> float:
        """m; checked when it is assigned."""
        margin: float = self.__dict__["margin"]
        return margin

    @margin.setter
    def margin(self, margin: float) -> None:
        check_interval("Monotone", "margin", margin, low=0.0)
        self.__dict__["margin"] = margin

    def forward(self, A: Tensor, B: Tensor) -> Tensor:
        """(k, m), (m, m) -> (m, m)."""
        identity = torch.eye(B.shape[0], dtype=B.dtype, device=B.device)
        return (1 - self.margin) * identity - A.t() @ A + B - B.t()

    def right_inverse(self, W: Tensor) -> tuple[Tensor, Tensor]:
        """A = ((1 - m) I - sym(W))^(1/2), B = (W - W^T)/4 give W [nguyen2022, Proposition 1].

        Args:
            W: (m, m) with sym(I - W) >= m I up to rounding; otherwise `InvalidArgument`.
        """
        identity = torch.eye(W.shape[0], dtype=W.dtype, device=W.device)
        values, Q = torch.linalg.eigh((1 - self.margin) * identity - (W + W.t()) / 2)
        rounding = 8 * W.shape[0] * torch.finfo(W.dtype).eps * (1 + self.margin + float(W.detach().abs().max()))
        least = float(values.detach().min())
        if least < -rounding:
            raise InvalidArgument(
                f"right_inverse of Monotone: the least eigenvalue of sym(I - W) is {least + self.margin:.6g}, below the margin "
                f"{self.margin:g}, so no (A, B) gives W. Take a smaller margin, or subtract a multiple of I from W."
            )
        return (Q * values.clamp(min=0).sqrt()) @ Q.t(), (W - W.t()) / 4

    def extra_repr(self) -> str:
        return f"margin={self.margin}"


def conv_norm_upper(K: Tensor, *, grid: int = 12) -> Tensor:
    r"""An upper bound of the norm of the convolution with K, for images of every size.

    Stride 1, with zeros around the image or wrapped around (not reflected or replicated, which can
    amplify more).

    A convolution with wrapped borders is block diagonal in frequencies, with blocks K(w) = sum_ab
    K_ab e^(i(a w_1 + b w_2)). One with zeros around the image is that of a larger torus, restricted
    to the images that vanish outside, so for both

        |conv| <= M = max_w |K(w)|.                                                              (1)

    The maximum is over a continuum; it is taken on a grid of N x N frequencies and corrected. Let
    u^* K(w) v = M at the maximal w for unit vectors u, v. As a function of w_1 alone Re u^* K v is
    a real trigonometric polynomial of degree d = (k - 1)/2 (the kernel is centred, which changes
    phases only) whose modulus has its maximum M there. Such a polynomial stays above M cos(d t) at
    distance t <= pi/d from its maximum (M. Riesz), and a grid point has t <= pi/N. The same again
    for w_2:

        M <= max_grid |K(w)| / cos(d pi/N)^2.                                                    (2)

    With 3 x 3 kernels and N = 12 the correction is 1.07. One Hermitian eigenvalue problem of size
    min(h, c) per frequency, in float64; only the maximal frequency is differentiated.

    Args:
        K: (h, c, k, k) with k odd.
        grid: N, above k - 1.

    Returns:
        (), float64: the bound.
    """
    if K.dim() != 4 or K.shape[2] != K.shape[3] or K.shape[2] % 2 == 0:
        raise InvalidArgument(f"conv_norm_upper expects a kernel (out, in, k, k) with k odd; got shape {tuple(K.shape)}.")
    k = K.shape[2]
    if grid <= k - 1:
        raise InvalidArgument(
            f"conv_norm_upper needs grid > k - 1 = {k - 1} for this kernel; got grid={grid}. Try grid={4 * k}."
        )
    K64 = K.double()
    if K.shape[0] < K.shape[1]:
        K64 = K64.transpose(0, 1)  # the norm of K(w)^T, with the smaller Gram matrix
    blocks = torch.fft.rfft2(K64.detach(), s=(grid, grid)).permute(2, 3, 0, 1)
    squares = torch.linalg.eigvalsh(blocks.mH @ blocks)[..., -1]
    first, second = divmod(int(squares.argmax()), squares.shape[1])
    taps = torch.arange(k, device=K.device, dtype=torch.float64)
    phase = torch.exp(-2j * math.pi / grid * (first * taps[:, None] + second * taps[None, :]))
    block = (K64 * phase).sum(dim=(2, 3))
    # a rounding of (1 + 1e-12) covers the eigenvalue problem and the sums
    return torch.linalg.matrix_norm(block, ord=2) * ((1 + 1e-12) / math.cos((k - 1) / 2 * math.pi / grid) ** 2)
