"""A transformer block whose depth is an equilibrium."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed._torch import eager, transforms_active
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._solver_kwargs import SolverKwargs, check_solver_kwargs
from wellposed.nn.layer import EquilibriumLayer
from wellposed.solve import Solution

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TransformerCell(nn.Module):
    r"""One post-norm transformer block [vaswani2017] with its input injected [bai2019].

        u = norm(x + z + W_o attention(W_qkv z + U x)),   f(z, x) = norm(u + W_2 relu(W_1 u))

    Attention is causal: position t sees positions up to t, so that z_t depends on x_1, ..., x_t
    alone. Nothing bounds its Jacobian; weights start small (`init_std`) so that equilibria are
    found at first. A departure: x also enters the sum before the first norm. Without it small
    weights leave norm(z + little), close to the identity, with no preferred point.

    Args:
        width: Features of a position.
        heads: Must divide the width.
        hidden: Rows of W_1; four times the width if not given.
        init_std: Standard deviation of the entries of W_qkv, W_o, W_1, W_2.
        generator, device, dtype: Of the parameters.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int | None = None,
        *,
        init_std: float = 0.02,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = 4 * width if hidden is None else hidden
        for name, value in (("width", width), ("heads", heads), ("hidden", hidden)):
            check_positive_integer("TransformerCell", name, value)
        if width % heads:
            raise InvalidArgument(f"The 'heads' parameter of TransformerCell must divide width={width}. Got {heads} instead.")
        check_interval("TransformerCell", "init_std", init_std, low=0.0, closed="neither")
        self.width, self.heads, self.hidden = width, heads, hidden
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}

        def drawn(rows: int, columns: int, std: float) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, columns, **factory_kwargs).normal_(0.0, std, generator=generator))

        self.W_qkv, self.W_o = drawn(3 * width, width, init_std), drawn(width, width, init_std)
        self.U = drawn(3 * width, width, 1 / math.sqrt(width))
        self.W_1, self.W_2 = drawn(hidden, width, init_std), drawn(width, hidden, init_std)
        self.b_1, self.b_2 = (
            nn.Parameter(torch.zeros(hidden, **factory_kwargs)),
            nn.Parameter(torch.zeros(width, **factory_kwargs)),
        )
        self.norm1, self.norm2 = nn.LayerNorm(width, **factory_kwargs), nn.LayerNorm(width, **factory_kwargs)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """(batch, length, width) states z and inputs x of the same shape -> the next state."""
        qkv = z @ self.W_qkv.mT + x @ self.U.mT
        q, k, v = (self._split(part) for part in qkv.chunk(3, dim=-1))
        scores = (q @ k.mT) / math.sqrt(self.width // self.heads)
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
        seen = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ v
        joined = seen.transpose(1, 2).reshape(z.shape)
        u = self.norm1(x + z + joined @ self.W_o.mT)
        z_next: Tensor = self.norm2(u + torch.relu(u @ self.W_1.mT + self.b_1) @ self.W_2.mT + self.b_2)
        return z_next

    def _split(self, part: Tensor) -> Tensor:
        """(batch, length, width) -> (batch, heads, length, width of a head)."""
        return part.reshape(*part.shape[:2], self.heads, self.width // self.heads).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, hidden={self.hidden}"


class TransformerDEQ(nn.Module):
    r"""Next-token logits from the equilibrium of a `TransformerCell` on embedded tokens.

        x_t = sqrt(width) (E[token_t] + P[t]),   z = f(z, x),   logits_t = E z_t + b

    Read-out and embedding share E [vaswani2017]; the root makes x at least as large as z, which
    also helps f to contract. Memory of training does not grow with the number of solver steps.

        >>> import torch, wellposed as wp
        >>> model = wp.nn.TransformerDEQ(50, 16, 2, length=10, generator=torch.Generator().manual_seed(0))
        >>> model(torch.zeros(3, 7, dtype=torch.int64)).shape
        torch.Size([3, 7, 50])

    Args:
        vocabulary: Number of tokens.
        width, heads, hidden, init_std: As in `TransformerCell`.
        length: The longest sequence.
        solver_kwargs: solver, gradient, on_failure, rtol, atol, max_steps, as in
            `EquilibriumLayer`.
        generator, device, dtype: Of the parameters.

    Attributes:
        layer: The `EquilibriumLayer`; a sample is a sequence.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        heads: int,
        *,
        length: int,
        hidden: int | None = None,
        init_std: float = 0.02,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **solver_kwargs: Unpack[SolverKwargs],
    ) -> None:
        super().__init__()
        check_positive_integer("TransformerDEQ", "vocabulary", vocabulary)
        check_positive_integer("TransformerDEQ", "length", length)
        check_solver_kwargs("TransformerDEQ", solver_kwargs)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        cell = TransformerCell(width, heads, hidden, init_std=init_std, generator=generator, **factory_kwargs)
        self.layer = EquilibriumLayer(cell, **solver_kwargs)
        E, P = torch.empty(vocabulary, width, **factory_kwargs), torch.empty(length, width, **factory_kwargs)
        self.E, self.P = (nn.Parameter(table.normal_(0.0, width**-0.5, generator=generator)) for table in (E, P))
        self.b = nn.Parameter(torch.zeros(vocabulary, **factory_kwargs))

    def embedded(self, tokens: Tensor) -> Tensor:
        """(batch, t) of integers -> (batch, t, width): x."""
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            seen = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidType(
                f"TransformerDEQ expects an int64 tensor of tokens; got {seen}. Convert it, e.g. "
                "torch.as_tensor(tokens, dtype=torch.int64)."
            )
        if tokens.dim() != 2 or not 0 < tokens.shape[1] <= len(self.P):
            raise InvalidArgument(
                f"TransformerDEQ expects tokens of shape (batch, t) with t from 1 to {len(self.P)}; got {tuple(tokens.shape)}."
            )
        self._check_known(tokens)
        x: Tensor = math.sqrt(self.E.shape[1]) * (nn.functional.embedding(tokens, self.E) + self.P[: tokens.shape[1]])
        return x

    @eager
    def _check_known(self, tokens: Tensor) -> None:
        if transforms_active() or not tokens.numel():  # torch.func transforms hide values
            return
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= len(self.E):
            raise InvalidArgument(
                f"TransformerDEQ expects tokens from 0 to {len(self.E) - 1}; got {low if low < 0 else high}. Map those that "
                "are not in the vocabulary to one that is, or make the vocabulary larger."
            )

    def equilibrium(self, tokens: Tensor, z0: Tensor | None = None) -> Tensor:
        """(batch, t) -> (batch, t, width), differentiable; z0 is the start, zeros if not given."""
        z: Tensor = self.layer(self.embedded(tokens), z0)
        return z

    def solve(self, tokens: Tensor, z0: Tensor | None = None, *, record: bool = False) -> Solution:
        """The equilibrium without a graph; see `EquilibriumLayer.solve`."""
        with torch.no_grad():
            return self.layer.solve(self.embedded(tokens), z0, record=record)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, t) -> (batch, t, vocabulary) logits of the next token."""
        return self.equilibrium(tokens) @ self.E.mT + self.b
