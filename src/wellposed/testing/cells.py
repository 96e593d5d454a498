"""What every cell f(z, x), and every gradient mode, must do."""

from __future__ import annotations

import abc
import copy
import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wellposed.implicit import AbstractGradient
from wellposed.nn import AbstractCell, DenseCell, EquilibriumLayer, Identity, ReLU, Spectral, Tanh
from wellposed.solve import AbstractMap, AbstractSplitMap
from wellposed.testing._checks import require, same
from wellposed.testing._dense import adjoint_gradients, polished
from wellposed.testing._problem import gaussian

F64 = torch.float64


class CellConformance(abc.ABC):
    """Tests that a cell inherits: subclass it in a test file and define `make` and `reference`.

    `reference` is the dense twin: f(z, x) written from its definition, with whole matrices and no
    speed.

        >>> import torch, wellposed as wp
        >>> from wellposed.testing import CellConformance
        >>> class TestDenseCell(CellConformance):
        ...     def make(self, generator):
        ...         cell = wp.nn.DenseCell(2, 4, generator=generator, dtype=torch.float64)
        ...         return cell, torch.randn(3, 2, generator=generator, dtype=torch.float64)
        ...     def reference(self, cell, z, x):
        ...         return torch.relu(z @ cell.W.T + x @ cell.U.T + cell.b)
        >>> TestDenseCell().test_forward_is_the_definition()

    Attributes:
        options: Of the `EquilibriumLayer` that the gradients are checked with, for example a solver
            or `state_shape=`.
        rtol: How closely two computations in float64 must agree, relative to the largest entry.
    """

    options: ClassVar[dict[str, Any]] = {}
    rtol: ClassVar[float] = 1e-9

    @abc.abstractmethod
    def make(self, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
        """The cell in float64, and (batch, ...) an input of three samples or more."""

    @abc.abstractmethod
    def reference(self, cell: Any, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x) from its definition, differentiable in z, x and the parameters of the cell."""

    def test_forward_is_the_definition(self) -> None:
        """cell(z, x) is f(z, x), of the shape and dtype of z, and changes neither."""
        cell, x, z = self._problem()
        before = z.clone(), x.clone()
        value = cell(z, x)
        require(value.shape == z.shape, f"cell(z, x) must keep the shape of z, {tuple(z.shape)}; got {tuple(value.shape)}")
        require(value.dtype == z.dtype, f"cell(z, x) must keep the dtype of z, {z.dtype}; got {value.dtype}")
        require(torch.equal(z, before[0]) and torch.equal(x, before[1]), "cell(z, x) changes z or x in place")
        require(same(value, self.reference(cell, z, x), rtol=self.rtol), "cell(z, x) is not the f(z, x) of `reference`")
        require(torch.equal(value, cell(z, x)), "two calls with the same arguments differ: draw random numbers outside")

    def test_the_derivative_of_forward(self) -> None:
        """Autograd through cell(z, x) is that of the definition."""
        cell, x, z = self._problem()
        x, z, v = x.requires_grad_(), z.requires_grad_(), gaussian(*z.shape, seed=6)
        leaves = [z, x, *(parameter for parameter in cell.parameters() if parameter.requires_grad)]
        ours, expected = (
            torch.autograd.grad(f, leaves, v, allow_unused=True) for f in (cell(z, x), self.reference(cell, z, x))
        )
        compare(ours, expected, self.rtol)

    def test_samples_are_independent(self) -> None:
        """Row i of f(z, x) depends on row i of z and x alone."""
        cell, x, z = self._problem()
        for chosen in ([1], [2, 0]):
            rows = torch.tensor(chosen)
            part = cell(z[rows], x[rows])
            require(same(part, cell(z, x)[rows], rtol=self.rtol), "a sample depends on the other samples of its batch")
        f = self._bound(cell, x)
        if f is not None:
            taken = f.take(rows)(z.flatten(1)[rows])
            require(same(taken, part.flatten(1), rtol=self.rtol), "bind(x).take(rows) is another map than that of these rows")

    def test_the_bound_map_is_the_cell(self) -> None:
        """bind(x) is z -> f(z, x), with and without a buffer, with and without a graph."""
        cell, x, z = self._problem()
        f = self._bound(cell, x)
        if f is None:
            return
        expected = self.reference(cell, z, x).flatten(1)
        require(tuple(cell.state_shape(x)) == tuple(z.shape), "state_shape(x) is not the shape of the state")
        for name, value in (("f(z)", f(z.flatten(1))), ("f.tracked(z)", f.tracked(z.flatten(1)))):
            require(same(value, expected, rtol=self.rtol), f"{name} of bind(x) is not f(z, x)")
        if f.writes_out:
            value = f(z.flatten(1), out=torch.full_like(expected, torch.nan))
            require(same(value, expected, rtol=self.rtol), "f(z, out=buffer) of bind(x) is not f(z, x)")

    def test_products_with_the_jacobian(self) -> None:
        """J u and J^T u of bind(x) are those of a dense Jacobian of the definition."""
        cell, x, z = self._problem()
        f = self._bound(cell, x)
        if f is None:
            return
        rows, size = z.flatten(1), z[0].numel()
        u = gaussian(*rows.shape, seed=7)
        jacobian = f.jacobian(rows)
        for i in range(len(rows)):
            of_sample = functools.partial(self._sample, cell, x[i : i + 1], z.shape[1:])
            J = torch.autograd.functional.jacobian(of_sample, rows[i]).reshape(size, size)
            require(same(jacobian.mv(u)[i], J @ u[i], rtol=self.rtol), "jacobian(z).mv(u) is not J u")
            require(same(jacobian.rmv(u)[i], J.T @ u[i], rtol=self.rtol), "jacobian(z).rmv(u) is not J^T u")

    def test_the_resolvent_solves_its_equation(self) -> None:
        """For splitting methods: z + a ((I - W) z - c) = v, and f(z) = prox(W z + c)."""
        cell, x, z = self._problem()
        f = self._bound(cell, x)
        if not isinstance(f, AbstractSplitMap):
            return
        v = gaussian(*z.flatten(1).shape, seed=8)
        with torch.no_grad():
            for a in (0.1, 1.0, 3.0):
                solved = f.resolvent(v, a)
                require(
                    same(solved + a * (solved - f.affine(solved)), v, rtol=100 * self.rtol), f"resolvent(v, {a}) is not solved"
                )
            require(same(f.prox(f.affine(v), 1.0), f(v), rtol=self.rtol), "f(z) is not prox(affine(z), 1)")

    def test_gradients_of_the_equilibrium(self) -> None:
        """Parameters and input get the gradients of (I - J)^-1 as a dense matrix."""
        cell, x, _ = self._problem()
        x = x.requires_grad_()
        layer = EquilibriumLayer(cell, **{"on_failure": "raise", **self.options})
        z = layer(x)
        v = gaussian(*z.shape, seed=9)
        leaves = [x, *(parameter for parameter in cell.parameters() if parameter.requires_grad)]
        ours = torch.autograd.grad(z, leaves, v, allow_unused=True)
        f: Callable[[Tensor], Tensor] = lambda w: self.reference(cell, w, x)  # noqa: E731
        compare(ours, adjoint_gradients(f, polished(f, z), v, leaves), 100 * self.rtol)

    def test_copies_and_state_dicts(self) -> None:
        """A deep copy, a pickled copy and a cell with the loaded state are the same map."""
        cell, x, z = self._problem()
        expected = cell(z, x)
        for copied in (copy.deepcopy(cell), pickle.loads(pickle.dumps(cell))):
            require(torch.equal(copied(z, x), expected), "a copy of the cell gives other values")
        other, _ = self.make(torch.Generator().manual_seed(1))
        other.load_state_dict(cell.state_dict())
        require(torch.equal(other(z, x), expected), "a cell with the state of another gives other values")

    def test_float32(self) -> None:
        """A cell in float32 gives float32, near the values in float64."""
        cell, x, z = self._problem()
        value = copy.deepcopy(cell).float()(z.float(), x.float())
        require(value.dtype == torch.float32, f"a float32 cell must return float32; got {value.dtype}")
        require(same(value.double(), cell(z, x).detach(), rtol=1e-4), "the values in float32 are far from those in float64")

    def _problem(self) -> tuple[Any, Tensor, Tensor]:
        """The cell, an input, and a random state of the right shape."""
        cell, x = self.make(torch.Generator().manual_seed(0))
        if isinstance(cell, AbstractCell):
            shape = tuple(cell.state_shape(x))
        else:
            shape = (len(x), *self.options.get("state_shape", tuple(x.shape[1:])))
        return cell, x.detach(), gaussian(*shape, seed=5)

    def _bound(self, cell: nn.Module, x: Tensor) -> AbstractMap | None:
        return cell.bind(x) if isinstance(cell, AbstractCell) else None

    def _sample(self, cell: Any, x: Tensor, shape: Sequence[int], v: Tensor) -> Tensor:
        return self.reference(cell, v.reshape(1, *shape), x).flatten()


class GradientConformance(abc.ABC):
    """Tests that a gradient mode inherits: subclass it in a test file and define `gradient`.

        >>> import wellposed as wp
        >>> from wellposed.testing import GradientConformance
        >>> class TestGMRES(GradientConformance):
        ...     def gradient(self):
        ...         return wp.ImplicitGradient(wp.GMRES())
        >>> TestGMRES().test_gradients_are_those_of_the_reference()

    A mode that is not exact overrides `reference`, its dense twin, with its own formula.

    Attributes:
        rtol: How closely gradients must agree with the reference, relative to the largest entry.
    """

    rtol: ClassVar[float] = 1e-7

    @abc.abstractmethod
    def gradient(self) -> AbstractGradient:
        """The gradient mode under test."""

    def reference(
        self, f: Callable[[Tensor], Tensor], z: Tensor, v: Tensor, leaves: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """The gradients for a cotangent v at z = f(z); by default exact, by a dense solve."""
        return adjoint_gradients(f, polished(f, z), v, leaves)

    def test_gradients_are_those_of_the_reference(self) -> None:
        """For dense cells, modules and functions, with respect to every leaf."""
        for name, cell, x, leaves in _layers():
            z = self._layer(cell)(x)
            v = gaussian(*z.shape, seed=9)
            ours = torch.autograd.grad(z, leaves, v, allow_unused=True)
            f = functools.partial(lambda cell, x, w: cell(w, x), cell, x)
            compare(ours, self.reference(f, z.detach(), v, leaves), self.rtol, name)

    def test_the_value_is_the_equilibrium(self) -> None:
        """A gradient mode does not change what was solved for."""
        for name, cell, x, _ in _layers():
            layer = self._layer(cell)
            value = layer(x).detach()
            require(same(value, layer.solve(x).value, rtol=self.rtol), f"{name}: the value is not the equilibrium")

    def test_samples_are_independent(self) -> None:
        """The gradient of a sum over samples is the sum of the gradients of the samples."""
        for name, cell, x, leaves in _layers():
            layer, v = self._layer(cell), gaussian(*self._layer(cell)(x).shape, seed=9)
            together = torch.autograd.grad(layer(x), leaves[1:], v, allow_unused=True)
            parts = [
                torch.autograd.grad(layer(x[i : i + 1]), leaves[1:], v[i : i + 1], allow_unused=True) for i in range(len(x))
            ]
            alone = [None if g[0] is None else torch.stack(list(g)).sum(dim=0) for g in zip(*parts, strict=True)]
            compare(together, alone, self.rtol, name)

    def test_a_gradient_mode_is_a_value(self) -> None:
        """Equal options make equal gradient modes, also after pickling."""
        mode = self.gradient()
        for other in (self.gradient(), pickle.loads(pickle.dumps(mode))):
            require(other == mode, f"{other!r} must equal {mode!r}: use a frozen dataclass")

    def _layer(self, cell: Any) -> EquilibriumLayer:
        shape = None if isinstance(cell, AbstractCell) else (4,)
        return EquilibriumLayer(cell, gradient=self.gradient(), on_failure="raise", state_shape=shape)


class _Module(nn.Module):
    """tanh(R z + V tanh(x)): a module without structure."""

    def __init__(self) -> None:
        super().__init__()
        self.R = nn.Parameter(0.2 * gaussian(4, 4, seed=11))
        self.V = nn.Parameter(gaussian(4, 2, seed=12))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.R.T + torch.tanh(x) @ self.V.T)


def _layers() -> list[tuple[str, Any, Tensor, list[Tensor]]]:
    """(name, cell, x, leaves), x the first leaf."""
    cells: dict[str, nn.Module] = {"module": _Module()}
    for name, activation in (("relu", ReLU()), ("tanh", Tanh()), ("identity", Identity())):
        generator = torch.Generator().manual_seed(3)
        cells[name] = DenseCell(2, 4, activation, weight=Spectral(0.7), generator=generator, dtype=F64)
    x = gaussian(3, 2, seed=2)
    return [
        (name, cell, leaf, [leaf, *cell.parameters()]) for name, cell in cells.items() for leaf in [x.clone().requires_grad_()]
    ]


def compare(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None], rtol: float, name: str = "") -> None:
    """Gradients agree; None counts as zero."""
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        error = float((a - b).abs().max())
        require(same(a, b, rtol=rtol), f"{name} leaf {k}: the gradient differs from the dense one by {error:.1e}".lstrip())
