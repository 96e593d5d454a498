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
from wellposed.nn.pretrained import Pretrained
from wellposed.nn.sequence.cell import TransformerCell
from wellposed.solve import Solution

if TYPE_CHECKING:
    from typing_extensions import Unpack


class TransformerDEQ(Pretrained):
    r"""Next-token logits from the equilibrium of a `TransformerCell` on embedded tokens.

        x_t = sqrt(width) E[token_t],   z = f(z, x),   logits_t = E z_t + b

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
        self.length = length
        E = torch.empty(vocabulary, width, **factory_kwargs)
        self.E = nn.Parameter(E.normal_(0.0, width**-0.5, generator=generator))
        self.b = nn.Parameter(torch.zeros(vocabulary, **factory_kwargs))

    def embedded(self, tokens: Tensor) -> Tensor:
        """(batch, t) of integers -> (batch, t, width): x."""
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64:
            seen = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidType(
                f"TransformerDEQ expects an int64 tensor of tokens; got {seen}. Convert it, e.g. "
                "torch.as_tensor(tokens, dtype=torch.int64)."
            )
        if tokens.dim() != 2 or not 0 < tokens.shape[1] <= self.length:
            raise InvalidArgument(
                f"TransformerDEQ expects tokens of shape (batch, t) with t from 1 to {self.length}; got {tuple(tokens.shape)}."
            )
        self._check_known(tokens)
        x: Tensor = math.sqrt(self.E.shape[1]) * nn.functional.embedding(tokens, self.E)
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

    def equilibrium(self, tokens: Tensor, z0: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        """(batch, t) -> (batch, t, width), differentiable; z0 is the start, zeros if not given.

        Args:
            tokens: (batch, t) of integers.
            z0: (batch, t, width).
            mask: (batch, t), True for tokens and False for padding, on either side. Padding has the
                state 0, no token sees it, and it does not count in the residual.
        """
        z: Tensor = self.layer(*self._prepared(tokens, z0, mask))
        return z

    def solve(self, tokens: Tensor, z0: Tensor | None = None, *, mask: Tensor | None = None, record: bool = False) -> Solution:
        """The equilibrium without a graph; see `EquilibriumLayer.solve`."""
        with torch.no_grad():
            return self.layer.solve(*self._prepared(tokens, z0, mask), record=record)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, t) -> (batch, t, vocabulary) logits of the next token; mask as above."""
        return self.equilibrium(tokens, mask=mask) @ self.E.mT + self.b

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        steps: int,
        *,
        mask: Tensor | None = None,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
        reuse: bool = True,
    ) -> Tensor:
        """Continues every row of tokens: (batch, t) -> (batch, t + steps).

        Rows of the equilibrium do not depend on later tokens. So the equilibrium of the prefix is
        kept (its keys and values), and a step solves for the new position alone, from the state of
        the position before it.

        Args:
            tokens: (batch, t), t + steps at most `length`.
            steps: Tokens to add.
            mask: (batch, t), False for padding, which must be on the left.
            temperature: 0 takes the most probable token; above it tokens are drawn from
                softmax(logits / temperature).
            generator: Of the draws.
            reuse: False solves for the whole sequence at every step, from zeros: slower, the same
                logits to the tolerance of the solves.
        """
        check_positive_integer("TransformerDEQ.generate", "steps", steps)
        check_interval("TransformerDEQ.generate", "temperature", temperature, low=0.0, closed="left")
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.shape[1] == 0:
            seen = f"shape {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
            raise InvalidArgument(f"generate continues token numbers, a tensor of shape (batch, t) with t >= 1; got {seen}.")
        if tokens.shape[1] + steps > self.length:
            raise InvalidArgument(
                f"{tokens.shape[1]} tokens and {steps} steps are more than length={self.length}. Lower steps, give fewer "
                "tokens, or make the network with a larger length."
            )
        self._check_mask(tokens, mask)
        if mask is not None and not bool(mask[:, -1].all() & (mask[:, 1:] | ~mask[:, :-1]).all()):
            raise InvalidArgument("generate continues at the right end: padding (False in mask) must be on the left.")
        past: tuple[Tensor, Tensor] | None = None
        start: Tensor | None = None
        new = tokens
        for _ in range(steps):
            inputs, z0 = self._prepared(new, start, mask, past)
            z: Tensor = self.layer.solve(inputs, z0).value
            chosen = _drawn(z[:, -1] @ self.E.mT + self.b, temperature, generator)
            tokens = torch.cat([tokens, chosen], dim=1)
            mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            if reuse:
                past, start, new = self._cell.keys_and_values(z, inputs), z[:, -1:], chosen
            else:
                new = tokens
        return tokens

    @property
    def _cell(self) -> TransformerCell:
        assert isinstance(self.layer.cell, TransformerCell)
        return self.layer.cell

    def _prepared(
        self, tokens: Tensor, z0: Tensor | None, mask: Tensor | None, past: tuple[Tensor, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The input of the layer, and the start."""
        x = self.embedded(tokens)
        if past is None:
            self._check_mask(tokens, mask)
        return self._cell.prepare(x, mask, past), torch.zeros_like(x) if z0 is None else z0

    @staticmethod
    def _check_mask(tokens: Tensor, mask: Tensor | None) -> None:
        if mask is not None and not isinstance(mask, Tensor):
            raise InvalidType(f"mask must be a bool tensor of the shape of the tokens; got {type(mask).__name__}.")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape):
            raise InvalidArgument(
                f"mask must be bool and of the shape of the tokens, {tuple(tokens.shape)}; got {mask.dtype} of shape "
                f"{tuple(mask.shape)}."
            )


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """(batch, vocabulary) -> (batch, 1) tokens."""
    scaled = logits / temperature if temperature else logits
    if not bool(torch.isfinite(scaled).all()):
        if bool(torch.isfinite(logits).all()):
            fault = f"the temperature {temperature:g} is too small: logits divided by it overflow in {logits.dtype}. Take 0"
        else:
            fault = "logits are NaN or infinite. Go back to finite parameters"
        raise InvalidArgument(f"generate cannot draw a token: {fault}.")
    if temperature == 0.0:
        return logits.argmax(dim=1, keepdim=True)
    return torch.multinomial(torch.softmax(scaled, dim=1), 1, generator=generator)
