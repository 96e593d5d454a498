"""Whether what is proved of images of one size is true of others.

Norms of convolutions hold for images of every size, but the code of a cell may read the size: it
resizes to a fixed number of pixels, or makes a table of positions. So a larger image is followed
too, and has to have the same steps, constants and bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.certify._composition import Lipschitz
from wellposed.certify._followed import Followed
from wellposed.certify._rows import made, steps_of
from wellposed.certify._tape import Tape, TapeRefused

#: Pixels by which the sides of the larger image are longer.
_MORE = 5
#: Relative rounding of two bounds of the same norm.
_ROUNDING = 1e-9


def is_same_for_other_images(followed: Followed, tape: Tape, bound: float) -> bool:
    """Whether a larger image has the same steps and no larger Lipschitz constant.

    Args:
        followed: The layer and its input. tape: Its steps.
        bound: The Lipschitz constant of the tape, from above.
    """
    x = followed.x
    if not isinstance(x, Tensor) or x.dim() < 3:
        return False
    larger = x.new_zeros((1, x.shape[1], *(side + _MORE for side in x.shape[2:])))
    try:
        other = Followed(followed.layer, followed.owner, larger).tape(0)
    except TapeRefused:
        return False
    if steps_of(tape) != steps_of(other) or not _same_constants(tape, other):
        return False
    bounds = Lipschitz(other)
    with torch.no_grad():
        L = other.run(bounds).lipschitz
    return bounds.every_size and L <= bound * (1 + _ROUNDING)


def _same_constants(tape: Tape, other: Tape) -> bool:
    """Whether what a cell makes itself is the same, or one number everywhere."""
    a, b = ([value for value in map(made, each.steps) if value is not None] for each in (tape, other))
    return len(a) == len(b) and all(torch.equal(s, t) or _is_one_number(s, t) for s, t in zip(a, b, strict=True))


def _is_one_number(s: Tensor, t: Tensor) -> bool:
    if not s.numel() or not t.numel():
        return False
    number = s.reshape(-1)[0]
    return bool((s == number).all() and (t == number).all())
