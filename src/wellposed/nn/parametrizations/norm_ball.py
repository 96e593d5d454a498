"""Matrices and convolutions whose operator norm stays below a bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn.parametrizations._radial import radial
from wellposed.solve import check_interval, check_positive_integer

__all__ = ["ConvNormBall", "NormBall", "conv_norm_upper"]


class NormBall(nn.Module):
    r"""V -> V min(1, bound/|V|) for a matrix V of any shape, with the exact spectral norm, differentiated with it.

    The radial projection onto the ball |V| <= bound. What `Spectral` is for a square recurrent matrix, this is for the
    factors of z -> W^T s(W z + ...): there any positive bound makes sense, and 1 itself is the border.

    Args:
        bound: Positive.
    """

    def __init__(self, bound: float = 1.0) -> None:
        super().__init__()
        check_interval("NormBall", "bound", bound, low=0.0, closed="neither")
        self.bound = bound

    def forward(self, V: Tensor) -> Tensor:
        """(h, m) -> (h, m)."""
        norm = torch.linalg.matrix_norm(V.float() if V.dtype in (torch.float16, torch.bfloat16) else V, ord=2)
        return radial(V, norm, self.bound)

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}"


class ConvNormBall(nn.Module):
    r"""K -> K min(1, bound/N(K)), where N(K) bounds the norm of the convolution with K from above: see `conv_norm_upper`.

    Args:
        bound: Positive.
        grid: As in `conv_norm_upper`.
    """

    def __init__(self, bound: float = 1.0, *, grid: int = 12) -> None:
        super().__init__()
        check_interval("ConvNormBall", "bound", bound, low=0.0, closed="neither")
        check_positive_integer("ConvNormBall", "grid", grid)
        self.bound, self.grid = bound, grid

    def forward(self, K: Tensor) -> Tensor:
        """(h, c, k, k) -> (h, c, k, k)."""
        norm = conv_norm_upper(K, grid=self.grid)
        return radial(K, norm, self.bound)

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}, grid={self.grid}"


def conv_norm_upper(K: Tensor, *, grid: int = 12) -> Tensor:
    r"""An upper bound of the operator norm of the convolution with K, for images of every size; differentiable.

    Stride 1, with zeros around the image or wrapped around (not reflected or replicated, which can amplify more).

    A convolution with wrapped borders is block diagonal in frequencies, with blocks K(w) = sum_ab K_ab e^(i(a w_1 + b w_2)).
    One with zeros around the image is that of a larger torus, restricted to the images that vanish outside, so for both

        |conv| <= M = max_w |K(w)|.                                                                            (1)

    The maximum is over a continuum; it is taken on a grid of N x N frequencies and corrected. Let u^* K(w) v = M at the
    maximal w for unit vectors u, v. As a function of w_1 alone Re u^* K v is a real trigonometric polynomial of degree
    d = (k - 1)/2 (the kernel is centred, which changes phases only) whose modulus has its maximum M there. Such a polynomial
    stays above M cos(d t) at distance t <= pi/d from its maximum (M. Riesz), and a grid point has t <= pi/N. The same again
    for w_2:

        M <= max_grid |K(w)| / cos(d pi/N)^2.                                                                  (2)

    With 3 x 3 kernels and N = 12 the correction is 1.07. One Hermitian eigenvalue problem of size min(h, c) per frequency,
    in float64; only the frequency that attains the maximum is differentiated.

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
    with torch.no_grad():
        blocks = torch.fft.rfft2(K64, s=(grid, grid)).permute(2, 3, 0, 1)
        squares = torch.linalg.eigvalsh(blocks.mH @ blocks)[..., -1]
        first, second = divmod(int(squares.argmax()), squares.shape[1])
    taps = torch.arange(k, device=K.device, dtype=torch.float64)
    phase = torch.exp(-2j * math.pi / grid * (first * taps[:, None] + second * taps[None, :]))
    block = (K64 * phase).sum(dim=(2, 3))
    # a rounding of (1 + 1e-12) covers the eigenvalue problem and the sums
    return torch.linalg.matrix_norm(block, ord=2) * ((1 + 1e-12) / math.cos((k - 1) / 2 * math.pi / grid) ** 2)
