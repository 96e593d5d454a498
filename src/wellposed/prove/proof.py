"""What `prove` returns: a verdict, the numbers of all steps, and the tail."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from wellposed._checks import check_path
from wellposed._latex import table, text
from wellposed.certify import Verdict
from wellposed.errors import InvalidArgument
from wellposed.nn.families import FAMILIES
from wellposed.prove._problem import Parameters, ProvedProblem

ASSUMPTIONS = (
    "IEEE float64 and float32 arithmetic with rounding to nearest and gradual underflow",
    "matrix products by the definition, in any order of summation (not Strassen's)",
)
#: Also assumed of smooth activations.
LIBRARY = "exp, log and tanh of the mathematical library are right to 8 units in the last place"


@dataclass(frozen=True, eq=False)
class Proof:
    r"""A computer-assisted proof that plain gradient descent, from its start, ends at zero loss.

    CERTIFIED: exact descent theta <- theta - eta grad |r|^2/2, on all parameters and samples, from
    the stored start, has |r_{K+k}| <= rate^k |r_K| (up to the error bounds) for all k >= 0.
    UNDECIDED: nothing is proved beyond step K, and `reason` says why.

    Attributes:
        verdict: `Verdict.CERTIFIED` (printed as 'proved') or `Verdict.UNDECIDED`.
        reason: Why it is undecided; empty if proved.
        step_size: eta.
        num_steps: K, how many steps are followed one by one.
        delta: How far the exact iterate K is from the computed one, at most.
        loss: |r|^2/2 at the computed point K.
        radius: How far the exact iterates after K are from the K-th, at most; None if undecided.
        rate: q < 1, see above; None if undecided.
        distance: How far all later iterates are from the start, at most; None if undecided.
        seconds: Time that it took.
        family, activation: Of the network.
        sizes: {"n": samples, "m": width, "d": inputs}.
        steps: The numbers of each step by name: the columns of `wellposed.prove.format`.
        tail: The numbers of the tail; None if undecided.
        attempts: Where the tail was tried and did not hold.
        assumptions: What is assumed of the computer.

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> proof = wp.prove(model, X, y)
        >>> proof.verdict, proof.rate < 1
        (<Verdict.CERTIFIED: 'certified'>, True)
    """

    verdict: Verdict
    reason: str
    step_size: float
    num_steps: int
    delta: float
    loss: float
    radius: float | None
    rate: float | None
    distance: float | None
    seconds: float
    family: str
    activation: str
    sizes: dict[str, int]
    steps: dict[str, list[Any]]
    tail: dict[str, Any] | None
    attempts: list[dict[str, Any]] = field(default_factory=list)
    assumptions: tuple[str, ...] = ASSUMPTIONS
    _problem: ProvedProblem | None = field(default=None, repr=False)
    _at: Parameters | None = field(default=None, repr=False)
    _checkpoints: dict[int, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def can_be_saved(self) -> bool:
        """False if `prove` could follow no step: then there is no more than the `reason`."""
        return self._problem is not None

    def __bool__(self) -> bool:
        raise TypeError("A proof is not a bare yes or no: compare `proof.verdict` with Verdict.CERTIFIED.")

    def loss_bound(self, step: int) -> float:
        """A proved upper bound of the loss |r|^2/2 of exact descent at this step, from 0 on.

        Raises:
            InvalidArgument: The step is not an integer of at least 0, or beyond the last that an
                undecided proof followed.
        """
        last = self.num_steps - (self.tail is None)
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise InvalidArgument(f"step must be an integer of at least 0; got {step!r}.")
        if step > last and self.tail is None:
            raise InvalidArgument(f"This proof is undecided, so step must be from 0 to {last}; got {step}.")
        if step >= self.num_steps and self.tail is not None and self.rate is not None:
            return 0.5 * (self.tail["residual"] * self.rate ** (step - self.num_steps)) ** 2 * (1 + 1e-9)
        return 0.5 * float(self.steps["residual"][step]) ** 2 * (1 + 1e-9)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `proof.json` and `proof.safetensors`, as `wellposed.prove.format` defines them."""
        from wellposed.prove.format import save

        return save(self, check_path("The folder of a proof", folder))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Proof:
        """A stored proof, to look at or to continue (`prove(..., resume=proof)`).

        It is read, and nothing but its checksums is checked: `wp.verify(folder)` does the rest.
        """
        from wellposed.prove.format import load

        return load(check_path("The folder of a proof", folder))

    @property
    def cited(self) -> str:
        """Where the network comes from, with keys of sources: for `wp.cite`."""
        return FAMILIES[self.family].__doc__ or ""

    def to_latex(self) -> str:
        """A table of the numbers of `print(proof)`; the caption has the statement."""
        title, rows = self._rows()
        caption = f"{title[0].upper()}{title[1:]}."
        return table(r"lp{0.66\linewidth}", [[text(name), text(value)] for name, value in rows], text(caption))

    def __str__(self) -> str:
        title, rows = self._rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _rows(self) -> tuple[str, list[tuple[str, str]]]:
        """The statement, and the numbers with their names."""
        n, m, d = (self.sizes[name] for name in "nmd")
        proved = self.verdict is Verdict.CERTIFIED
        rows = [
            ("network", f"{self.family}, {self.activation}, n = {n} samples, m = {m} units, d = {d} inputs"),
            ("step size", f"{self.step_size:.6g}"),
            ("steps followed", f"{self.num_steps}, exact descent within delta = {self.delta:.3g} of the computed one"),
            ("loss there", f"{self.loss:.4g}"),
        ]
        ratios = [ratio for ratio in self.steps["mask_ratio"] if ratio is not None]
        if ratios:
            rows.append(("least mask ratio", f"{min(ratios):.3g}, which must be above 1"))
        if proved and self.tail is not None:
            if "switches" in self.tail:
                rows.append(("units that may switch", f"at most {int(self.tail['switches'])} of {n * m} (sample, unit)"))
            rows.append(
                (
                    "from there on",
                    f"|r| falls by the factor {self.rate:.9g} a step, parameters move by at most {self.radius:.3g}",
                )
            )
            rows.append(("from the start", f"all parameters together move by at most {self.distance:.4g}"))
        rows.append(("time", f"{self.seconds:.1f} s"))
        rows.append(("assumed", "; ".join(self.assumptions)))
        title = (
            "proved: plain gradient descent from this start ends at zero loss"
            if proved
            else f"UNDECIDED at step {self.num_steps}: {self.reason}"
        )
        return title, rows
