"""A layer as certificates see it: the equilibria that it finds, and its cell as a tape."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._torch import apart, uncompiled
from wellposed._tree import LOW_PRECISION, differs, leaves, map_tensors
from wellposed.certify._balls import Boxes
from wellposed.certify._gate import DECLARED, changed, not_finite
from wellposed.certify._outside import check_code
from wellposed.certify._recording import record
from wellposed.certify._repeated import check_repeats
from wellposed.certify._rows import DEPENDENT, is_other, rows_touch, values
from wellposed.certify._tape import Tape, TapeRefused, cause
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn import EquilibriumLayer
from wellposed.nn._any_cell import check_norms
from wellposed.nn.cell import AbstractCell
from wellposed.nn.families import is_theory_network
from wellposed.solve._graph_data import tensor_of_rows
from wellposed.solve._record import SolveRecord
from wellposed.solve.map import AbstractMap, FunctionMap
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.solver import AbstractSolver, Tolerance

#: Of solves from other starts: Newton's method continues where they end.
_ROUGH, _FEW = Tolerance(1e-6, 0.0), 60
#: Sides of images that are tried where no input is given.
_SIDES = (8, 16, 32)


def _depends_on_others(f: AbstractMap, z: Tensor, image: Tensor) -> bool:
    """Whether f of the first row is another if it is evaluated alone, if it can be."""
    if not isinstance(f, FunctionMap) or z.shape[0] < 2:
        return False
    try:
        alone = f.alone(torch.zeros(1, dtype=torch.int64, device=z.device))(z[:1].clone())
    except Exception:  # f need not accept some of the rows
        return False
    return bool(differs(alone, image[:1]).any())


class Followed:
    """A layer and an input; nothing of the layer changes.

    Args:
        layer: The layer.
        owner: The model that holds it, whose parameters the cell may use.
        x: Its input, batch first.
        z0: The start that the model gives to the layer; None if it gives none.
    """

    def __init__(self, layer: EquilibriumLayer, owner: nn.Module, x: Any, z0: Any = None) -> None:
        self.layer, self.owner, self.x, self.z0 = layer, owner, x, z0
        tensors = [leaf for leaf in leaves(x) if isinstance(leaf, Tensor) and leaf.dim()]
        if not tensors:
            raise InvalidType(f"x must be a tensor or a structure of tensors, batch first; got {type(x).__name__}.")
        self.batch = tensor_of_rows(x if z0 is None else z0).shape[0]
        self.coupled = bool(layer.coupled)
        self.computed: list[str] = []
        self.rounding: Tensor | None = None  # (batch, n) of what is returned in low precision
        self._tapes: dict[int | None, Tape] = {}
        self._objections: dict[int, str] = {}

    def objection(self) -> str:
        """Why nothing can be proved about this object; empty if there is no reason yet."""
        return objection(self.layer, self.owner)

    def solve(self) -> tuple[Tensor, Tensor]:
        """(batch, n) the equilibria that the layer finds, and f there; the batch is 1 if rows are
        coupled."""
        with self._apart(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            f, start, layout, options = self.layer._bind(self.x, self.z0)
            outcome = self.layer._solve(f, start, options)
            image = f(outcome.value.clone())
            self.coupled = self.coupled or outcome.coupled or _depends_on_others(f, outcome.value, image)
            shape = (1, -1) if self.coupled else image.shape
            if layout.dtype in LOW_PRECISION:  # as the layer returns it
                self.rounding = (outcome.value.to(layout.dtype).double() - outcome.value.double()).abs().reshape(shape).cpu()
            return outcome.value.reshape(shape).clone(), image.reshape(shape).clone()

    def solve_from(self, starts: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """As `solve`, roughly, from each of the starts, which are (batch, n).

        Once as the layer solves, and once by Newton's method, which also finds unstable equilibria.
        """
        x, start = self.x, torch.stack(starts)
        with self._apart(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solvers = (self.layer.solver, NewtonKrylov())
            if self.coupled:
                return [pair for solver in solvers for each in start for pair in self._rough(x, each, self.z0, solver)]
            times = len(starts)

            def repeated(t: Tensor) -> Tensor:
                return t.repeat(times, *(1,) * (t.dim() - 1)) if self._per_sample(t) else t

            given = map_tensors(repeated, x), start.flatten(0, 1), map_tensors(repeated, self.z0)
            found = [pair for solver in solvers for pair in self._rough(*given, solver)]
            return [pair for z, image in found for pair in zip(z.view_as(start), image.view_as(start), strict=True)]

    def _rough(self, x: Any, start: Tensor, z0: Any, solver: AbstractSolver) -> list[tuple[Tensor, Tensor]]:
        """Where it ends, and f there; nothing if the cell lacks a derivative that the solver
        needs."""
        f, zero, _, options = self.layer._bind(x, z0)
        rough = replace(options, solver=solver, tolerance=_ROUGH, max_steps=min(options.max_steps, _FEW))
        try:
            z = self.layer._solve(f, start.reshape(zero.shape).to(zero), rough).value
        except RuntimeError:
            return []
        return [(z.reshape(start.shape).clone(), f(z.clone()).reshape(start.shape).clone())]

    def _per_sample(self, tensor: Tensor) -> bool:
        return tensor.dim() > 0 and tensor.shape[0] == self.batch

    def tape(self, index: int | None = None) -> Tape:
        """The steps of the cell for one sample, or for the batch if rows are coupled.

        Raises:
            Refused: With the reason.
        """
        index = None if self.coupled else index
        if index in self._tapes:
            return self._tapes[index]
        given = (self.x, self.z0)
        if index is not None:
            given = map_tensors(lambda t: t[index : index + 1] if self._per_sample(t) else t, given)
        tape = self._tape_of(given)
        if index == 0:
            self._tapes[index] = tape
        return tape

    def _tape_of(self, given: Any) -> Tape:
        x, z0 = map_tensors(lambda t: t.detach().cpu(), given)
        with self._apart(), torch.no_grad():
            tape = _recorded(self.layer, self.owner, x, z0)
        self.computed += [name for name in tape.computed if name not in self.computed]
        return tape

    def objection_to_rows(self, *sizes: int) -> str:
        """Why what is proved of one row may be false in batches of this size, or of these sizes;
        empty if each row has the same map there, which depends on no other row."""
        if self.coupled:
            return ""
        for size in sizes:
            if size not in self._objections:
                found = self._objection_to(size) if size > 1 else ""
                self._objections[size] = found + (self._hint if found else "")
        return next((self._objections[size] for size in sizes if self._objections[size]), "")

    def _objection_to(self, rows: int) -> str:
        try:
            alone = self.tape(0)
        except TapeRefused as refused:
            return str(refused)
        try:
            batch = self._batch_tape(rows)
            equal = batch if rows != self.batch else self._tape_of_equal(rows)
        except TapeRefused as refused:
            return f"A row alone can be followed, but not a batch of {rows} rows: {refused}"
        if rows_touch(batch, rows):
            return DEPENDENT
        if is_other(alone, equal, rows):
            return f"It computes a row otherwise in a batch of {rows} rows than alone; what is proved is about one row alone."
        return ""

    @property
    def _hint(self) -> str:
        """About an x that seems to have no batch."""
        if not isinstance(self.x, Tensor) or self.x.dim() != 1:
            return ""
        return (
            f" x has the shape {tuple(self.x.shape)}, which is one number for each sample: if it is one, give x.unsqueeze(0)."
        )

    def values_in_batch(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, n) each: f at z as the steps of the whole batch give it, and a bound of its
        rounding."""
        return values(Boxes(self._batch_tape(self.batch)), z.double().cpu())

    def _batch_tape(self, rows: int) -> Tape:
        if rows == self.batch:
            if None not in self._tapes:
                self._tapes[None] = self._tape_of((self.x, self.z0))
            return self._tapes[None]
        return self._tape_of_equal(rows)

    def _tape_of_equal(self, rows: int) -> Tape:
        """Of a batch in which each row has the data of the first."""

        def repeated(t: Tensor) -> Tensor:
            return t[:1].repeat(rows, *(1,) * (t.dim() - 1)) if self._per_sample(t) else t

        return self._tape_of(map_tensors(repeated, (self.x, self.z0)))

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Keeps the record of the layer as it is, and what `parametrize.cached()` keeps."""
        kept = self.layer._record
        self.layer._record = SolveRecord(coupled=set(kept.coupled))
        try:
            with apart():
                yield
        finally:
            self.layer._record = kept


def _recorded(layer: EquilibriumLayer, owner: nn.Module, x: Any, z0: Any) -> Tape:
    if any(tensor.device.type != "cpu" for tensor in (*owner.parameters(), *owner.buffers())):
        raise TapeRefused("Its parameters are not on the CPU, where the proof computes. Move a copy there.")
    cell = layer.cell

    def call(state: Tensor) -> Any:
        if isinstance(cell, AbstractCell):
            return cell(state.reshape(cell.state_shape(x)), x).reshape(1, -1)
        f, start, _, _ = layer._bind(x, z0)
        return f.tracked(state.reshape(start.shape)).reshape(1, -1)

    try:
        start = layer._bind(x, z0)[1]
        z = torch.zeros((1, start.numel()), dtype=start.dtype)
        tape = uncompiled(lambda: record(call, z, (x, z0), owner))  # of z0 only the shape is used
        uncompiled(lambda: check_repeats(call, z))
        check_code(cell)
        return tape
    except TapeRefused:
        raise
    except Exception as error:  # whatever the code of a cell raises under a transform
        raise TapeRefused(f"It could not be followed: {cause(error)}") from error


def objection(layer: EquilibriumLayer, owner: nn.Module) -> str:
    """Why nothing can be proved about this layer, whatever its input; empty if there is no
    reason."""
    if isinstance(layer.cell, nn.Module) and not isinstance(layer.cell, AbstractCell):
        try:
            check_norms(layer.cell, coupled=layer.coupled)
        except InvalidArgument as error:
            return str(error)
    declared = DECLARED if is_theory_network(owner) else ()
    return changed(owner, declared=declared) or _infinite_buffer(owner) or not_finite(owner)


def _infinite_buffer(owner: nn.Module) -> str:
    """A sentence about one, as a mask that is added may be."""
    for name, buffer in owner.named_buffers():
        if not bool(torch.isfinite(buffer).all()):
            return f"The buffer {name} has NaN or infinite entries, with which nothing is proved. Use a mask of booleans."
    return ""


def guessed_input(layer: EquilibriumLayer, owner: nn.Module) -> Any:
    """An input of zeros that fits, of one sample, from the shapes of the parameters; None if none
    was found."""
    tensors = [tensor for tensor in owner.parameters() if tensor.is_floating_point()]
    dtype = tensors[0].dtype if tensors else torch.get_default_dtype()
    sizes = dict.fromkeys(size for tensor in tensors for size in tensor.shape[:2])
    state = layer._state_shape
    shapes: list[tuple[int, ...]] = [] if state is None else [tuple(state)]
    shapes += [(size,) for size in sizes]
    sides = _SIDES if state is None or len(state) < 2 else (state[-1],)
    shapes += [(size, side, side) for side in sides for size in sizes]
    shapes += [(size, side) for side in sides for size in sizes]
    shapes += [(8,), (1, 8, 8)]
    for shape in dict.fromkeys(shapes):
        x = torch.zeros((1, *shape), dtype=dtype)
        followed = Followed(layer, owner, x)
        with contextlib.suppress(Exception), followed._apart(), torch.no_grad():  # that it does not fit
            f, start, _, _ = layer._bind(x, None)
            if f.tracked(start).shape == start.shape:
                return x
    return None
