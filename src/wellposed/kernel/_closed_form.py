"""The closed form: blocks of the kernel as sums of Hadamard products of Gram blocks.

Beyond the features, (n, k) each, and the kernel, only blocks of `block_size` squared are held.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel._gram_blocks import GramBlocks, Terms, gram_product
from wellposed.kernel._kernel_memory import KernelMemory
from wellposed.kernel._method import BLOCK_SIZE, Block, Done, KernelLayout, KernelMethod, slices
from wellposed.nn.families.theory import formulas_hold
from wellposed.nn.tangent import GramProduct, TangentFeatures

#: Buffers of the size of the widest feature that solving a batch of rows takes; measured on the networks of `wellposed.nn`.
SOLVER_BUFFERS = 16
#: Bytes of the widest feature of the rows that are solved at once: the solver holds several times as much.
FEATURE_BYTES = 2 * 1024**2
#: Fewer rows would not keep the processor busy.
LEAST_ROWS = 64


class ClosedFormMethod(KernelMethod):
    """The kernel of a model that has `tangent_features`.

    The features of the first rows are computed at once, to know the sizes; the rest when the first
    block is asked for.

    Args:
        model: With a method `tangent_features(X) -> TangentFeatures`.
        X, X2: (n, d) and (n2, d) inputs; X2 None means X.
        block_size: Rows and columns of a block.
        dtype: Of the Gram products and of the kernel; that of the features if not given.
    """

    continues = True

    def __init__(
        self,
        model: nn.Module,
        X: Tensor,
        X2: Tensor | None = None,
        *,
        block_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.inputs = model, (X, X if X2 is None else X2)
        self.symmetric, self.outputs, self.vector_output = X2 is None, 1, True
        self.size, self.size2 = X.shape[0], self.inputs[1].shape[0]
        self.block_size = BLOCK_SIZE if block_size is None else block_size
        self._rows = rows_at_once(model, X.dtype)
        self._first = features_of(model, X[: self._batches(self.size)[0].stop])
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.terms: Terms = {name: terms for name, terms in self._first.terms.items() if name not in frozen}
        if not self.terms:
            raise InvalidArgument("tangent_kernel: no parameter of the model requires a gradient, so there is no kernel.")
        used = {name for terms in self.terms.values() for term in terms for pair in term.factors for name in pair}
        self._used = {name: feature for name, feature in self._first.features.items() if name in used}
        self._products = [term for terms in self.terms.values() for term in terms]
        self.parameters, self.factors = tuple(self.terms), tuple(term.factors for term in self._products)
        coefficients = (float(term.coefficient) for term in self._products)
        self.norms = (*(_norm(feature) for feature in self._used.values()), *coefficients)
        sample = next(iter(self._used.values()))
        self.dtype, self.device = dtype or sample.dtype, sample.device
        self.advice = "Write the kernel into a file with out='kernel.npy', use float32, or use TangentKernel for products only."
        self._sides: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features that are used."""
        return tuple(self._used)

    @property
    def sides(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Features of the first and of the second batch; the same object if there is one batch."""
        if self._sides is None:
            left = self._collect(self.inputs[0], self._used)
            self._sides = (left, left if self.symmetric else self._collect(self.inputs[1], None))
        return self._sides

    def memory(self, layout: KernelLayout) -> KernelMemory:
        widths = [feature.shape[1] for feature in self._used.values()]
        samples = self.size if self.symmetric else self.size + self.size2
        itemsize = self.dtype.itemsize
        side = [min(self.block_size, size) for size in (self.size, self.size2)]
        block = itemsize * side[0] * side[1]
        # A diagonal block is made symmetric in a copy, for which there are two more.
        blocks = block * (GramBlocks.buffers(self.terms, by_parameter=layout.by_parameter) + 2)
        work = itemsize * SOLVER_BUFFERS * min(self._rows, samples) * max(widths)
        kernel = self.kernel_bytes(layout)
        in_memory, disk = (kernel, 0) if layout.in_memory else (0, kernel)
        return KernelMemory(in_memory, itemsize * samples * sum(widths), blocks, work, disk)

    def blocks(self, layout: KernelLayout, done: Done | None = None) -> Iterator[Block]:
        grams: GramBlocks | None = None
        for rows, columns in self.places():
            if done is not None and done(rows, columns):
                yield Block(rows, columns, {})
                continue
            if grams is None:
                grams = GramBlocks(*self.sides, self.terms, block_size=self.block_size, symmetric=self.symmetric)
            yield Block(rows, columns, grams.block(rows, columns, by_parameter=layout.by_parameter))

    def places(self) -> list[tuple[slice, slice]]:
        """Rows and columns of the blocks, of the lower triangle if `symmetric`."""
        pairs = itertools.product(slices(self.size, self.block_size), slices(self.size2, self.block_size))
        return [(rows, columns) for rows, columns in pairs if not self.symmetric or columns.start <= rows.start]

    def product(self, v: Tensor, *, transposed: bool) -> Tensor:
        left, right = self.sides
        terms = self._products
        if transposed:
            # K_ji: the right features of the second batch come first.
            left, right = right, left
            terms = [GramProduct(tuple((b, a) for a, b in term.factors), term.coefficient) for term in terms]
        return gram_product(left, right, terms, v, block_size=self.block_size, symmetric=self.symmetric)

    def diagonal(self) -> Tensor:
        left, right = self.sides
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        for term in self._products:
            product = torch.full_like(total, term.coefficient)
            for a, b in term.factors:
                product *= torch.linalg.vecdot(left[a], right[b])
            total += product
        return total

    def gram_terms(self) -> tuple[dict[str, Tensor], list[GramProduct]]:
        return self.sides[0], self._products

    def rounding_upper(self, trace: float) -> float:
        """sum_t |c_t| gamma ||a_t|| ||b_t||, where a_t(i) = prod_k ||L_k(i)|| and b_t(j) = prod_k
        ||R_k(j)||.

        An inner product of k terms has error at most gamma_k |L_i| |R_j| [higham2002, (3.5)], which
        Cauchy-Schwarz bounds by gamma_k ||L_i|| ||R_j||; products and sums add one rounding each to
        the index of gamma. Underflow takes at most the least normal number from each product of
        entries, times the other factors.
        """
        left, right = self.sides
        unit = torch.finfo(self.dtype).eps / 2
        tiny = 2.0 * torch.finfo(self.dtype).smallest_normal * math.sqrt(self.size * self.size2)
        total = 0.0
        for term in self._products:
            depth = sum(left[name].shape[1] for name, _ in term.factors) + len(term.factors) + len(self._products) + 2
            norms = [
                math.prod(torch.linalg.vector_norm(side[pair[position]].double(), dim=1) for pair in term.factors)
                for position, side in enumerate((left, right))
            ]
            size = float(torch.linalg.vector_norm(norms[0])) * float(torch.linalg.vector_norm(norms[1]))
            total += abs(term.coefficient) * size * depth * unit / (1.0 - depth * unit)
            # L_k R_k^T loses (number of terms) tiny to underflow, and the products with what is left of the others tiny each
            sizes = [_norm(left[a]) * _norm(right[b]) for a, b in term.factors]
            lost = sum(
                left[a].shape[1] * (1.0 + math.prod(sizes[:k] + sizes[k + 1 :])) for k, (a, _) in enumerate(term.factors)
            )
            total += (1.0 + abs(term.coefficient)) * lost * tiny
        return total * (1.0 + 2.0**-20)  # the norms themselves are rounded

    def _batches(self, size: int) -> list[slice]:
        """Batches of rows of nearly equal size."""
        return slices(size, math.ceil(size / math.ceil(size / self._rows)))

    def _collect(self, X: Tensor, first: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Features of all rows; `first` are those of the first batch of rows, if they are known."""
        n, names = X.shape[0], list(self._used)
        batches = self._batches(n)
        known = features_of(self.model, X[batches[0]]).features if first is None else first
        if len(batches) == 1:
            return {name: known[name].to(self.dtype) for name in names}
        # A feature that is the input itself is not copied.
        whole = {name for name in names if known[name].dtype == self.dtype and is_view_of(known[name], X)}
        stored = {
            name: X if name in whole else torch.empty(n, known[name].shape[1], dtype=self.dtype, device=self.device)
            for name in names
        }
        for rows in batches:
            features = known if rows.start == 0 else features_of(self.model, X[rows]).features
            for name in names:
                if name not in whole:
                    stored[name][rows] = features[name]
        return stored


def _norm(A: Tensor) -> float:
    return float(torch.linalg.vector_norm(A.detach().double()))


def has_closed_form(model: nn.Module) -> bool:
    return callable(getattr(model, "tangent_features", None)) and formulas_hold(model)


def rows_at_once(model: nn.Module, dtype: torch.dtype) -> int:
    """How many rows to solve at once, before the width of the features is known: estimated from the
    parameters."""
    width = max((size for parameter in model.parameters() for size in parameter.shape), default=1)
    return max(LEAST_ROWS, FEATURE_BYTES // (dtype.itemsize * width))


def is_view_of(feature: Tensor, X: Tensor) -> bool:
    same = feature.data_ptr() == X.data_ptr() and feature.dtype == X.dtype
    return same and feature.shape[1:] == X.shape[1:] and feature.stride() == X.stride()


def features_of(model: nn.Module, X: Tensor) -> TangentFeatures:
    """The features of some rows, checked; for authors of networks, a mistake is named."""
    name = type(model).__name__
    if X.dim() != 2:
        raise InvalidArgument(f"tangent_kernel: X must be (n, d) for {name}, samples as rows; got shape {tuple(X.shape)}.")
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    if parameter is not None and X.dtype != parameter.dtype:
        raise InvalidArgument(
            f"tangent_kernel: X must have the dtype of the parameters of {name}, {parameter.dtype}; got {X.dtype}. "
            f"Use X.to({parameter.dtype})."
        )
    with torch.no_grad():
        found = model.tangent_features(X)  # type: ignore[operator]  # a method, where there is one
    if not isinstance(found, TangentFeatures):
        raise InvalidType(f"{name}.tangent_features must return TangentFeatures, got {type(found).__name__}.")
    for products in found.terms.values():
        for term in products:
            for left, right in term.factors:
                _check_pair(found.features, left, right, X.shape[0], name)
    return found


def _check_pair(features: Mapping[str, Tensor], left: str, right: str, rows: int, model: str) -> None:
    for name in (left, right):
        if name not in features:
            raise InvalidArgument(f"{model}.tangent_features: a term names the feature {name!r}, which is not among them.")
        if features[name].dim() != 2 or features[name].shape[0] != rows:
            raise InvalidArgument(
                f"{model}.tangent_features: feature {name!r} must be ({rows}, k), got {tuple(features[name].shape)}."
            )
    if features[left].shape[1] != features[right].shape[1]:
        raise InvalidArgument(
            f"{model}.tangent_features: {left!r} and {right!r} must have equal width to be multiplied; "
            f"got {features[left].shape[1]} and {features[right].shape[1]}."
        )
