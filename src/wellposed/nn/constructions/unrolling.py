"""An equilibrium network as an explicit one: k layers that share their weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import round_up, row_norms_upper
from wellposed.nn.activations import Identity, LeakyReLU, ReLU, SoftThreshold
from wellposed.nn.cell import AbstractCell, DenseCell
from wellposed.nn.constructions.weight_tying import WeightTiedCell
from wellposed.nn.families import AbstractNetwork, is_theory_network
from wellposed.nn.layer import EquilibriumLayer
from wellposed.nn.maps.affine import OperatorMap


def unrolled(network: AbstractNetwork | EquilibriumLayer, steps: int, *, step_size: float | None = None) -> UnrolledNetwork:
    r"""An equilibrium network as a feed-forward network of k layers with shared weights.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, generator=torch.Generator().manual_seed(0))
        >>> explicit = wp.nn.unrolled(model, 50)
        >>> X = torch.randn(8, 4)
        >>> torch.allclose(explicit(X), model(X), atol=1e-4)
        True

    Args:
        network: A theory network, or an `EquilibriumLayer` over `DenseCell` (or `WeightTiedCell`).
            Shared, not copied.
        steps: k, the number of layers.
        step_size: a. None chooses what is proved to converge at the present parameters: for
            `MonotoneDEQ`, on which plain iteration may diverge, the forward-backward step m/L^2;
            otherwise 1, the plain iteration, if |W| < 1, or m/L^2 if I - W is strongly monotone. If
            nothing is proved it refuses, and step_size=1.0 insists.
    """
    check_positive_integer("unrolled", "steps", steps)
    cell = _cell_of(network)
    if step_size is None:
        step_size = _certified_step(network)
    check_interval("unrolled", "step_size", step_size, low=0.0)
    if step_size != 1 and isinstance(cell, DenseCell) and not isinstance(cell.activation, _EXACT):
        raise InvalidArgument(
            f"unrolled with step_size={step_size:g} needs an activation whose proximal operator is a formula (ReLU, LeakyReLU, "
            f"SoftThreshold, Identity); got {cell.activation!r}. Keep |W| below 1, e.g. with Spectral(0.95), for step_size=1.0."
        )
    return UnrolledNetwork(network, steps, step_size=step_size)


#: Activations whose prox is differentiated by autograd as it stands.
_EXACT = (ReLU, LeakyReLU, SoftThreshold, Identity)


class UnrolledNetwork(nn.Module):
    r"""z_0 = 0, z_{j+1} = s_a(W_a z_j + a c(x)), W_a = (1 - a) I + a W, for j < k; then the
    read-out of the network, if any.

    Every layer has the fixed point of the network, because s_a is the proximal operator of a times
    the potential of s: for a = 1 this is plain iteration, for other a the forward-backward
    iteration. With q = |W_a| < 1

        |z_k - z*| <= q^k/(1 - q) |z_1 - z_0|.

    For strongly monotone I - W >= m and |I - W| <= L, q <= sqrt(1 - 2 a m + a^2 L^2) [nguyen2022,
    2.3.1], below 1 for a in (0, 2m/L^2). Gradients are those of the explicit network, by
    backpropagation through its k layers; the memory grows with k. Every `torch.func` transform
    works, for monotone networks too.

    a is fixed when the network is made; `contraction_upper` shows what is proved after training.

    Args:
        network: Shared.
        steps: k.
        step_size: a.
    """

    def __init__(self, network: AbstractNetwork | EquilibriumLayer, steps: int, *, step_size: float) -> None:
        super().__init__()
        self.network, self.steps, self.step_size = network, steps, step_size

    def forward(self, X: Tensor) -> Tensor:
        """The output of the network with z_k for z*: (n,) predictions, or (n, m) states."""
        z = self.equilibrium(X)
        if not is_theory_network(self.network):
            return z
        with torch.autocast(X.device.type, enabled=False):
            return self.network.readout(z, self.network.injection(X))

    def equilibrium(self, X: Tensor, z0: Tensor | None = None) -> Tensor:
        """(n, d) -> (n, m) z_k.

        Args:
            X: (n, d) inputs.
            z0: (n, m) the start; zeros if not given.
        """
        return self._run(X, z0, self.steps).to(X.dtype)

    def contraction_upper(self) -> float:
        """A rigorous upper bound of q = |W_a|; one singular value decomposition."""
        with torch.no_grad():
            return spectral_norm_upper(self._relaxed(_recurrent(self.network)))

    def error_bound(self, X: Tensor, z0: Tensor | None = None) -> Tensor:
        """(n,) the bound of |z_k - z*| above, plus rounding; infinite where q >= 1."""
        q = self.contraction_upper()
        with torch.no_grad():
            z1, z = self._run(X, z0, 1), self._run(X, z0, self.steps)
            finfo = torch.finfo(z.dtype)
            if q >= 1:
                return z.new_full((z.shape[0],), torch.inf)
            first = row_norms_upper(z1 if z0 is None else z1 - z0) * (1 + finfo.eps)
            # a layer rounds by at most some m eps |z|, or m eps tiny where it underflows, and later ones make less of it
            rounding = 4 * (z.shape[1] + 8) * finfo.eps * (row_norms_upper(z) + finfo.tiny)
            power = math.nextafter(q**self.steps * (1 + 2.0**-40), math.inf)
            return round_up((first * power + rounding) / (1 - q) * (1 + 2.0**-50), z.dtype)

    def _run(self, X: Tensor, z0: Tensor | None, steps: int) -> Tensor:
        if is_theory_network(self.network):
            self.network._check(X)
        with torch.autocast(X.device.type, enabled=False):
            x = self.network.injection(X) if is_theory_network(self.network) else X
            cell = _cell_of(self.network)
            shape = cell.state_shape(x)
            f = cell.bind(x)
            assert isinstance(f, OperatorMap)
            c = f.inputs()[-1]
            W = self._relaxed(_recurrent(self.network).to(c.dtype))
            c, a = c * self.step_size, self.step_size
            if z0 is None:
                z = f.prox(c, a)
            elif z0.shape != shape:
                raise InvalidArgument(f"z0 must have the shape of the state, {shape}; got {tuple(z0.shape)}.")
            else:
                z = f.prox(torch.addmm(c, z0.to(c.dtype), W.t()), a)
            for _ in range(steps - 1):
                z = f.prox(torch.addmm(c, z, W.t()), a)
            return z

    def _relaxed(self, W: Tensor) -> Tensor:
        """W_a."""
        a = self.step_size
        return W if a == 1 else torch.eye(W.shape[0], dtype=W.dtype, device=W.device) * (1 - a) + a * W

    def extra_repr(self) -> str:
        return f"steps={self.steps}, step_size={self.step_size:g}"


def _cell_of(network: AbstractNetwork | EquilibriumLayer) -> AbstractCell:
    """The cell that is iterated, if its map is dense."""
    if is_theory_network(network):
        return network.layer.cell  # type: ignore[return-value]
    if isinstance(network, EquilibriumLayer) and isinstance(network.cell, (DenseCell, WeightTiedCell)):
        return network.cell
    seen = f"an EquilibriumLayer over {network.cell!r}" if isinstance(network, EquilibriumLayer) else type(network).__name__
    raise InvalidType(
        f"unrolled expects a theory network such as GaussianDEQ, or an EquilibriumLayer over DenseCell; got {seen}."
    )


def _recurrent(network: AbstractNetwork | EquilibriumLayer) -> Tensor:
    """(m, m) the matrix that multiplies z, lifted as the solve lifts it."""
    cell: Any = network if is_theory_network(network) else network.cell
    W: Tensor = cell.recurrent()
    return W.float() if W.dtype in LOW_PRECISION else W


def _certified_step(network: AbstractNetwork | EquilibriumLayer) -> float:
    """1 if plain iteration is proved to converge, else m/L^2 if forward-backward is."""
    with torch.no_grad():
        W = _recurrent(network)
        norm = spectral_norm_upper(W)
        if norm < 1 and not (is_theory_network(network) and network.theory.margin is not None):
            return 1.0
        F = torch.eye(W.shape[0], dtype=torch.float64, device=W.device) - W.double()
        m, L = least_eigenvalue_lower((F + F.t()) / 2), spectral_norm_upper(F)
    if m <= 0:
        raise InvalidArgument(
            f"unrolled: nothing proves that any step size converges; |W| is only known to be at most {norm:.3g}, and "
            f"sym(I - W) >= m only with m = {m:.3g}. Constrain the network (Spectral, Monotone), or give step_size=1.0 to "
            "unroll the plain iteration without proof."
        )
    return m / L**2
