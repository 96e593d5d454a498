"""What an OptEq equilibrium minimises, or solves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.convex._network import AbstractOptEq
from wellposed.convex.blocks import AbstractBlock, RegularizerBlock, UnitBlock
from wellposed.convex.opteq import AbstractDenseOptEq, OptEq, check_dense
from wellposed.convex.stages import ProxStep
from wellposed.errors import InvalidArgument


class Objective:
    r"""The convex function that the equilibria of a network with one or two blocks minimise, for
    given inputs.

    One block, [xie2021, Theorem 1]: phi(z), to which the equilibrium of every a is a minimiser. Two
    blocks, [xie2021, Corollary 1]:

        a M^(1-a)_phi1(z_1) + a M^(1-a)_phi2(z_0) + |z_1 - z_0|^2/2,

    minimised by z_0 = z and z_1 = f_1(z). A prior with a prox is a block too, its function R.

    Args:
        parts: One or two blocks, in the order in which the network applies them.
    """

    def __init__(self, parts: Sequence[AbstractBlock]) -> None:
        self.blocks = tuple(parts)

    def __call__(self, *states: Tensor) -> Tensor:
        """One (n, m) state per block, in the order of the blocks -> (n,) values; infinite outside
        the domain."""
        self._check(states)
        with torch.no_grad():
            value = sum((block.value(z) for block, z in zip(self.blocks, states, strict=True)), torch.zeros(()))
            return value + self._coupling(states)

    def states(self, z: Tensor) -> tuple[Tensor, ...]:
        """The state of every block at an equilibrium z: (z,), or (f_1(z), z)."""
        _check_fits(self.blocks, z)
        with torch.no_grad():
            return (z,) if len(self.blocks) == 1 else (self.blocks[0].prox(z), z)

    def along(self, states: Sequence[Tensor], directions: Sequence[Tensor], steps: Tensor) -> Tensor:
        """(n, k) values at states + t directions for the k numbers t.

        What is linear in the state is computed twice, for the state and the direction, and not once
        per t: in closed form a whole line costs two triangular solves, and W was factored before.

        Args:
            states: One (n, m) state per block.
            directions: One (n, m) direction per block.
            steps: (k,) the values of t.
        """
        self._check(states)
        self._check(directions)
        with torch.no_grad():
            prepared = [
                (block, z, d, block.prepare(z), block.prepare(d))
                for block, z, d in zip(self.blocks, states, directions, strict=True)
            ]
            values = []
            for t in steps.tolist():
                value = self._coupling([torch.add(z, d, alpha=t) for _, z, d, _, _ in prepared])
                for block, z, d, pz, pd in prepared:
                    value = value + block.value_prepared(torch.add(z, d, alpha=t), torch.add(pz, pd, alpha=t))
                values.append(value)
            return torch.stack(values, dim=1)

    @staticmethod
    def _coupling(states: Sequence[Tensor]) -> Tensor:
        if len(states) == 1:
            return torch.zeros(len(states[0]), dtype=states[0].dtype, device=states[0].device)
        return (states[0] - states[1]).square().sum(dim=1) / 2

    def _check(self, states: Sequence[Any]) -> None:
        if len(states) != len(self.blocks) or not all(isinstance(z, Tensor) and z.dim() == 2 for z in states):
            raise InvalidArgument(
                f"The objective has {len(self.blocks)} block(s) and needs one (n, m) tensor for each; got {len(states)} of "
                f"{[tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__ for z in states]}. See `states(z)`."
            )
        for z in states:
            _check_fits(self.blocks, z)
        if len({z.shape for z in states}) > 1:
            raise InvalidArgument(f"The states must have one shape; got {[tuple(z.shape) for z in states]}. See `states(z)`.")


def objective(model: AbstractOptEq, X: Tensor) -> Objective:
    """The function that the equilibria of a network minimise.

        >>> import torch, wellposed as wp
        >>> model, X = wp.OptEq(4, 6), torch.randn(3, 4)
        >>> phi = wp.convex.objective(model, X)
        >>> phi(model.solve(X).value).shape
        torch.Size([3])

    Args:
        model: A dense OptEq network with one unit layer, or two, or one and a prior with a prox.
            With one layer and no prior the skip connection is left out: it does not change the
            minimisers.
        X: (n, d) inputs.
    """
    model = check_dense("The objective", model)
    parts = blocks(model, X, skip=len(model.parameters_by_unit()) + (model.prior is not None) > 1)
    if len(parts) > 2:
        raise InvalidArgument(
            f"{type(model).__name__} has {len(parts)} blocks. More than two solve a monotone inclusion, not a minimisation "
            "(I - P is not symmetric); use inclusion_residual, or wide_limit for alpha -> 0."
        )
    return Objective(parts)


def blocks(model: AbstractOptEq, X: Tensor, *, skip: bool = True) -> list[AbstractBlock]:
    """The convex functions of [xie2021, Theorem 2], one per stage, in the order of the network.

    Args:
        model: A dense OptEq network.
        X: (n, d) inputs.
        skip: Whether the skip connections are kept: a M^(1-a)_phi instead of phi.
    """
    model = check_dense("The objective", model)
    if model.prior is not None and not (isinstance(model.prior, ProxStep) and model.prior.regularizer.is_convex):
        raise InvalidArgument(
            f"{model.prior!r} is not the proximal operator of a known convex function, so there is no objective."
        )
    model.sample_shape(X)
    with torch.no_grad():
        found: list[AbstractBlock] = [UnitBlock(unit if skip else unit.without_skip()) for unit in model.units(X)]
    if model.prior is not None:
        found.append(RegularizerBlock(model.prior.regularizer))
    return found


def inclusion_residual(model: AbstractOptEq, X: Tensor, Z: Tensor | None = None) -> Tensor:
    r"""(n,) how far the blocks of an equilibrium are from solving the monotone inclusion of
    [xie2021, Theorem 2].

        0 in dPhi(z) + (I - P) z,   Phi = sum_l a M^(1-a)_phi_l(z_l),   (P z)_l = z_(l-1)

    relative to |z|, with z_L = z_0. Where a < 1 Phi is smooth, and every gradient is found by
    inverting f_l. Where a = 1 (and for a prior) the subdifferential is not known by itself; what is
    returned is then the distance to z_l = prox(z_(l-1)), zero at the same points.

    Args:
        model: A dense OptEq network.
        X: (n, d) inputs.
        Z: (n, m) the last block; the equilibrium if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.DeepOptEq(4, (8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> residual = wp.convex.inclusion_residual(model, torch.ones(2, 4, dtype=torch.float64))
        >>> bool((residual < 1e-6).all())
        True
    """
    parts = blocks(model, X)
    if Z is not None:
        _check_fits(parts, Z)
    z = model.solve(X).value if Z is None else Z.detach()
    with torch.no_grad():
        states = [z]
        for block in parts[:-1]:
            states.append(block.prox(states[-1]))
        states.append(z)
        total = torch.zeros(len(z), dtype=z.dtype, device=z.device)
        for block, before, after in zip(parts, states, states[1:], strict=False):
            if isinstance(block, UnitBlock) and model.alpha < 1:
                missed = block.gradient(after) + after - before
            else:
                missed = after - block.prox(before)
            total += missed.square().sum(dim=1)
        size = torch.stack([state.square().sum(dim=1) for state in states[1:]]).sum(dim=0)
        return (total / size.clamp(min=torch.finfo(z.dtype).tiny)).sqrt()


class WideObjective:
    r"""y -> sum_l min_x phi_l(x) + |x - y|^2/2 = L |y|^2/2 - sum_l psi_l(y): the problem of
    [xie2021, Theorem 3], in y alone.

    Convex, finite and explicit; its gradient is L y - sum_l W_l^T s(W_l y + U_l x + b_l)/mu.

    Args:
        model: A dense OptEq network without a prior.
        X: (n, d) inputs.
    """

    def __init__(self, model: AbstractDenseOptEq, X: Tensor) -> None:
        check_dense("WideObjective", model, plain=True)
        self._blocks = [block for block in blocks(model, X, skip=False) if isinstance(block, UnitBlock)]

    def __call__(self, y: Tensor) -> Tensor:
        """(n, m) -> (n,)."""
        _check_fits(self._blocks, y)
        with torch.no_grad():
            return torch.stack([block.envelope(y) for block in self._blocks]).sum(dim=0)


def wide_limit(model: AbstractDenseOptEq) -> OptEq:
    r"""The network with one wide layer that a deep one tends to as alpha -> 0 [xie2021, Theorem 3].

    All blocks tend to the solution of L mu z = sum_l W_l^T s(W_l z + U_l x + b_l), which is an
    OptEq with the layers stacked and L mu in the place of mu. The difference is of order alpha.

    Args:
        model: A dense network without a prior; its alpha does not matter.

    Examples:
        >>> import torch, wellposed as wp
        >>> deep = wp.DeepOptEq(4, (8, 8), alpha=1e-6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> wide, X = wp.convex.wide_limit(deep), torch.ones(2, 4, dtype=torch.float64)
        >>> torch.allclose(deep.equilibrium(X), wide.equilibrium(X), atol=1e-4)
        True
    """
    check_dense("wide_limit", model, plain=True)
    units = model.parameters_by_unit()
    with torch.no_grad():
        W = torch.cat(model.matrices())
        wide = OptEq(
            model.in_features,
            model.width,
            hidden_width=W.shape[0],
            norm_bound=None,
            mu=len(units) * model.mu,
            activation=model.activation,
            device=W.device,
            dtype=W.dtype,
        )
        wide.W.copy_(W)
        wide.U.copy_(torch.cat([unit.U for unit in units]))
        wide.b.copy_(torch.cat([unit.b for unit in units]))
        wide.w.copy_(model.w)
    return wide


def _check_fits(parts: Sequence[AbstractBlock], z: Any) -> None:
    for block in parts:
        block.check(z)
