r"""Whether each row of a batch has its own map, and the same map in every batch.

What is proved of one row is true of a batch if no entry of row i of f depends on another row of z.
That is read from the tape of a batch: a set of rows touches an entry of a step if a coefficient
between them is not zero, and with

    S_k = {rows whose number has a 1 at bit k},   and their complements,

each touching none but its own rows, no two different rows touch each other. That the map of a row
is the same in batches of different sizes is compared: step by step, and by values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.certify._balls import Boxes
from wellposed.certify._tape import Node, Tape

DEPENDENT = (
    "Its rows depend on each other, so nothing is proved about one of them. Give coupled=True to the layer; or, if a sample "
    "has several dimensions (tokens, pixels), give the layer its state_shape."
)
#: Sizes of the states at which two tapes are compared.
_SCALES = (0.125, 1.0, 8.0, 64.0)
#: Units in the last place by which an operation that is not known may differ in batches of two sizes.
_UNITS = 64


class _Entries(NamedTuple):
    """Of a step, 1.0 or 0.0 for each entry.

    Attributes:
        touched: Whether it depends on the rows in question.
        present: Whether it can be different from 0, for some z and x.
    """

    touched: Tensor
    present: Tensor


class _Touch:
    """Interprets a tape: which entries depend on the entries of z in question."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def interpret(self, step: Node, parents: tuple[_Entries, ...]) -> _Entries:
        ones = torch.ones(step.shape, dtype=torch.float64)
        if step.kind == "state":
            return _Entries(self._state.reshape(step.shape), ones)
        if not parents:
            known = step.kind == "constant" and step.value is not None and not step.of_x
            return _Entries(torch.zeros_like(ones), _nonzero(step.value) if known and step.value is not None else ones)
        if step.kind == "linear":
            assert step.absolute is not None
            touched = step.absolute(*(parent.touched for parent in parents))
            return _Entries(_nonzero(touched), _nonzero(step.absolute(*(parent.present for parent in parents))))
        if step.kind == "bilinear":
            assert step.apply is not None
            a, b = parents
            touched = step.apply(a.touched, b.present) + step.apply(a.present, b.touched)
            return _Entries(_nonzero(touched), _nonzero(step.apply(a.present, b.present)))
        touched = parents[0].touched
        if step.kind == "normalise":
            touched = touched.amax(-1, keepdim=True).expand(step.shape)
        return _Entries(touched, ones)


def _nonzero(t: Tensor) -> Tensor:
    return (t.detach().cpu() != 0).double()  # NaN counts as different from 0


def rows_touch(tape: Tape, rows: int) -> bool:
    """Whether an entry of f may depend on another row of z, for some z and x.

    Args:
        tape: Of a batch.
        rows: How many there are.
    """
    number = torch.arange(rows)
    for bit in range((rows - 1).bit_length()):
        for side in (0, 1):
            chosen = ((number >> bit) & 1) == side
            state = chosen.double().unsqueeze(1).expand(rows, tape.result.shape.numel() // rows)
            touched = tape.run(_Touch(state)).touched.reshape(rows, -1)
            if bool(touched[~chosen].any()):
                return True
    return False


def is_other(alone: Tape, batch: Tape, rows: int) -> bool:
    """Whether two tapes, of one row and of a batch with the same data in each row, have different
    steps, constants or values.

    Args:
        alone, batch: The tapes. In the batch no row touches another.
        rows: How many there are.
    """
    if steps_of(alone) != steps_of(batch) or not _same_constants(alone, batch, rows):
        return True
    generator = torch.Generator().manual_seed(0)
    one, several = Boxes(alone), Boxes(batch)
    for scale in _SCALES:
        z = scale * torch.randn((1, alone.result.shape.numel()), generator=generator, dtype=torch.float64)
        if not agree(values(one, z), values(several, z.repeat(rows, 1)), alone):
            return True
    return False


def values(boxes: Boxes, z: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, n) each: f at z, and a bound of its rounding."""
    found = boxes.at(z.reshape(-1)).value
    return found.mid.reshape(z.shape), found.rad.reshape(z.shape)


def agree(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], tape: Tape) -> bool:
    """Whether two values with bounds of their rounding may be the same number."""
    allowed = a[1] + b[1]
    if tape.computed:  # taken as it was rounded
        sizes = [torch.finfo(s.value.dtype).eps for s in tape.steps if s.value is not None and s.value.is_floating_point()]
        allowed = allowed + _UNITS * max(sizes, default=0.0) * (1 + a[0].abs())
    return not bool(((a[0] - b[0]).abs() > allowed).any())  # where a bound overflowed, nothing is known


def steps_of(tape: Tape) -> list[object]:
    """What is done to z, without the moves of entries, which depend on how tensors lie in
    memory."""
    return [
        (step.kind, step.name, step.epsilon, step.function and (step.function.slope_range, step.function.value_range))
        for step in tape.steps
        if step.of_z and step.name != "move"
    ]


def _same_constants(alone: Tape, batch: Tape, rows: int) -> bool:
    """Whether what a cell makes itself is the same for each row."""
    given = [
        [value for value in map(made, tape.steps) if value is not None and value.is_floating_point()] for tape in (alone, batch)
    ]
    return len(given[0]) == len(given[1]) and all(_is_repeated(a, b, rows) for a, b in zip(*given, strict=True))


def made(step: Node) -> Tensor | None:
    return step.value if step.kind == "constant" and step.name != "parameter" else None


def _is_repeated(a: Tensor, b: Tensor, rows: int) -> bool:
    if not b.numel() or not a.numel() or bool((b == a.reshape(-1)[0]).all() and (a == a.reshape(-1)[0]).all()):
        return a.numel() in (b.numel(), b.numel() / rows)
    if a.shape == b.shape:
        return torch.equal(a, b)
    return b.numel() == rows * a.numel() and torch.equal(b.reshape(rows, -1), a.reshape(1, -1).expand(rows, -1))
