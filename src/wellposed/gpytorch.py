"""Kernels of equilibrium networks for gpytorch and linear_operator: Gaussian processes without the
kernel matrix. Needs the extra `gp`."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, WellposedWarning
from wellposed.kernel._conjugate import check_tolerance, conjugate_gradients, factored_solve
from wellposed.kernel._kernel_operator import MEMORY, MISSING, KernelOperator, check_installed
from wellposed.kernel._rows import FeatureKernel, WideFunction, network_rows
from wellposed.kernel.deq_limit import deq_ntk
from wellposed.kernel.wide_limits import check_fraction
from wellposed.nn.activations import ReLU

__all__ = ["KernelOperator", "NetworkKernel", "WideKernel", "solve"]

Kernel: Any = object  # without the packages the module can still be imported and read
if not MISSING:
    Kernel = importlib.import_module("gpytorch").kernels.Kernel

#: Bytes of a matrix that `solve` forms: 4096 rows in float64.
DENSE = 2**27
#: Attributes of a module whose content is compared as values of tensors, module by module.
_LISTED = ("_parameters", "_buffers", "_modules")


class NetworkKernel(Kernel):
    """The tangent kernel of a network at its present parameters, for gpytorch.

    The network is not trained: its parameters are no parameters of the kernel. Features of the last
    two batches are kept, until the parameters change, or which of them are trained, or the mode, or
    a number, a tensor, a function, a list or a dictionary that a module holds. A change inside an
    object of another class is not noticed: make a new kernel. What gpytorch itself keeps for
    predictions it drops in `train()` only.

    Args:
        network: As in `tangent_kernel`, with one output. With `tangent_features`, a product costs
            O(n m^2); without, the gradients (n, p) of all samples are held.
    """

    def __init__(self, network: nn.Module) -> None:
        check_installed("NetworkKernel")
        super().__init__()
        self._network = (network,)  # in a tuple, so that it is not a sub-module
        self._kept: list[tuple[Tensor, list[Tensor], list[Any], Tensor, FeatureKernel]] = []

    @property
    def dtype(self) -> torch.dtype:
        return next(self._network[0].parameters()).dtype

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return _answer(self, x1, x2, diag)

    def operator(self, X: Tensor, X2: Tensor | None = None) -> KernelOperator:
        """The kernel of X (n, ...) with X2 as an operator of linear_operator; it has no gradient by
        them, and an X that requires one is refused."""
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (X, X2)):
            raise InvalidArgument(
                "NetworkKernel: the kernel is not differentiable by its inputs, and X requires a gradient. Pass X.detach()."
            )
        features, function = self._features(X)
        features2 = features if X2 is None else self._features(X2)[0]
        return KernelOperator(features, features2, function=function)

    def _features(self, X: Tensor) -> tuple[Tensor, FeatureKernel]:
        network = self._network[0]
        tensors = [*network.parameters(), *network.buffers()]  # their values: a change through .data has no other trace
        settings = _settings(network)  # a network that counts its calls, or keeps results, is asked again
        for seen, before, held, features, function in self._kept:
            if held == settings and all(map(_equal, [seen, *before], [X, *tensors])):
                return features, function
        features, function = network_rows(network, X, "NetworkKernel")
        copies = [tensor.detach().clone() for tensor in tensors]
        self._kept = [*self._kept[-1:], (X.detach().clone(), copies, _settings(network), features, function)]
        return features, function


class WideKernel(Kernel):
    """The kernel of an infinitely wide equilibrium network, for gpytorch.

    `weight_variance` is a parameter, learnt by gradient with the noise. For activations other than
    ReLU, and with layers around the equilibrium, it stays as it is. `readout_variance=0` gives the
    Gram kernel of the equilibria (`population_gram`), the covariance of an untrained network.

    The parameter has the default dtype of torch, as all of gpytorch: `WideKernel(0.1).double()` has
    0.1 as float32 rounds it. For all digits of float64 set `kernel.weight_variance = 0.1` again.

    Args:
        weight_variance: s in [0, 1), where training starts; above 0 if it is trained.
        options: `input_variance`, `bias_variance`, `readout_variance`, `activation`, `width`,
            `ntk_parametrization`, `before` and `after` of `deq_ntk`.
    """

    def __init__(self, weight_variance: float = 0.08, **options: Any) -> None:
        check_installed("WideKernel")
        super().__init__()
        stack = options.get("before") or options.get("after")
        self._trained = isinstance(options.get("activation", ReLU()), ReLU) and not stack
        check_fraction(weight_variance, "WideKernel", "weight_variance")
        if weight_variance == 0 and self._trained:
            raise InvalidArgument("WideKernel: 'weight_variance' must be above 0 where training starts, got 0.")
        if "by_parameter" in options:
            raise InvalidArgument("WideKernel: one kernel is expected, so by_parameter cannot be given. Use deq_ntk.")
        deq_ntk(torch.ones(1, 1, dtype=torch.float64), weight_variance=weight_variance, **options)  # names a wrong option
        self._function = WideFunction(options)
        self.register_parameter("raw_weight_variance", nn.Parameter(torch.zeros(()), requires_grad=self._trained))
        interval = importlib.import_module("gpytorch").constraints.Interval(0.0, 1.0)
        self.register_constraint("raw_weight_variance", interval)
        self.weight_variance = weight_variance

    @property
    def weight_variance(self) -> Tensor:
        return self.raw_weight_variance_constraint.transform(self.raw_weight_variance)

    @weight_variance.setter
    def weight_variance(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_weight_variance.dtype, device=self.raw_weight_variance.device)
        check_fraction(value.detach(), "WideKernel", "weight_variance")  # as it was rounded
        self.initialize(raw_weight_variance=self.raw_weight_variance_constraint.inverse_transform(value))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        return _answer(self, x1, x2, diag)

    def operator(self, X: Tensor, X2: Tensor | None = None, *, memory: int = MEMORY) -> KernelOperator:
        """The kernel of X (n, d) with X2 as an operator of linear_operator. Its entries, of one set
        of samples half of them, are kept between products if they take at most `memory` bytes."""
        if X.dim() != 2:
            raise InvalidArgument(f"WideKernel: X must be (n, d), one set of samples as rows; got shape {tuple(X.shape)}.")
        s = self.weight_variance.to(X) if self._trained else self.weight_variance.detach().to(X)
        return KernelOperator(X, X if X2 is None else X2, s, function=self._function, memory=memory)


@torch.no_grad()
def solve(
    operator: Any, y: Tensor, *, rtol: float = 1e-10, max_steps: int = 1000, rank: int = 100, dense: int = DENSE
) -> Tensor:
    """operator^(-1) y by preconditioned conjugate gradients, with a residual that is measured.

    The preconditioner is the partial Cholesky factor of linear_operator. Its own conjugate
    gradients (`operator.solve`) take small steps for zero and end near 1e-6 of |y|, whatever
    tolerance is set. A small matrix is formed and factored, which is quicker.

    Args:
        operator: A positive definite `LinearOperator`, as `kernel.operator(X).add_diagonal(noise)`,
            or a matrix.
        y: (n,) or (n, outputs).
        rtol: |operator a - y| <= rtol |y|, column by column.
        max_steps: Products with the operator; `NotConverged` is raised after them.
        rank: Of the partial Cholesky factor, which takes so many rows of the kernel.
        dense: Bytes up to which the matrix is formed; 0 never forms it.
    """
    check_installed("solve")
    operator = importlib.import_module("linear_operator").to_linear_operator(operator)
    if operator.dim() != 2 or operator.shape[0] != operator.shape[1]:
        raise InvalidArgument(f"solve: the operator must be a square (n, n), got {tuple(operator.shape)}.")
    check_tolerance(rtol, operator.dtype)
    if y.shape[:1] != operator.shape[:1] or y.dtype != operator.dtype or not bool(torch.isfinite(y).all()):
        seen = f"{tuple(y.shape)}, {y.dtype}" + ("" if bool(torch.isfinite(y).all()) else ", with NaN or infinity")
        raise InvalidArgument(f"solve: y must be finite, ({operator.shape[0]}, ...) and {operator.dtype}; got {seen}.")
    b = y.reshape(len(y), -1)
    if len(y) ** 2 * y.element_size() <= dense:
        found = factored_solve(operator.to_dense(), b, rtol=rtol)
        if found is not None:
            return found.reshape(y.shape)
    settings = importlib.import_module("linear_operator").settings
    with settings.max_preconditioner_size(rank), settings.min_preconditioning_size(1):
        precondition = operator._preconditioner()[0] or (lambda r: r)
    if not bool(torch.isfinite(precondition(b)).all()):  # without noise it divides by 0
        precondition = torch.clone
    # the operator itself: blocks that it keeps serve all steps
    return conjugate_gradients(operator._matmul, b, precondition, rtol=rtol, max_steps=max_steps).reshape(y.shape)


def _answer(kernel: NetworkKernel | WideKernel, x1: Tensor, x2: Tensor, diag: bool) -> Any:
    """What gpytorch asks a kernel for: the diagonal, or an operator."""
    equal = x1 is x2 or torch.equal(x1, x2)
    # Equal tensors are two variables where one of them has a gradient, as inducing points that start at the data do.
    same = x1 is x2 or (equal and not x1.requires_grad and not x2.requires_grad)
    operator = kernel.operator(x1, None if same else x2)
    if diag:
        return operator.diagonal()
    if equal:
        _warn_of_loose_solves(len(x1))
    return operator


def _warn_of_loose_solves(n: int) -> None:
    settings = importlib.import_module("gpytorch").settings
    largest, fast = settings.max_cholesky_size.value(), settings.fast_computations
    if n > largest and (fast.solves.on() or fast.log_prob.on()):
        warnings.warn(
            f"gpytorch solves for more than {largest} samples to a tolerance of {settings.cg_tolerance.value():g} in training"
            f" and {settings.eval_cg_tolerance.value():g} in predictions, and draws log-determinants at random: expect errors"
            f" of a few percent with these {n}. Use gpytorch.settings.max_cholesky_size({n}), or kernel.operator(X) with"
            " wellposed.gpytorch.solve.",
            WellposedWarning,
            stacklevel=3,
        )


def _settings(network: nn.Module) -> list[Any]:
    """What a kernel depends on besides the values of parameters and buffers; compared by ==."""
    found: list[Any] = [repr(network), [parameter.requires_grad for parameter in network.parameters()]]
    seen = {id(module) for module in network.modules()}
    for module in network.modules():
        found += _held(module, seen)
    return found


def _held(module: nn.Module, seen: set[int]) -> list[Any]:
    return [(name, _plain(value, seen)) for name, value in vars(module).items() if name not in _LISTED]


def _plain(value: Any, seen: set[int]) -> Any:
    """The content of what a module holds; of classes that are not known here only the name, since
    solutions and other results are kept in the same places."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        content = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype), tuple(value.shape), hashlib.sha256(content.data).digest()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (list, tuple, dict, set, frozenset, nn.Module)):
        if id(value) in seen:
            return None
        seen = seen | {id(value)}
        if isinstance(value, nn.Module):  # in a list or a dictionary, where torch does not see it
            inner = [*value.parameters(), *value.buffers()]
            return id(value), [_plain(part, seen) for part in inner], [_held(part, seen) for part in value.modules()]
        if isinstance(value, dict):
            return [(key, _plain(part, seen)) for key, part in value.items()]
        return frozenset(value) if isinstance(value, (set, frozenset)) else [_plain(part, seen) for part in value]
    simple = callable(value) or isinstance(value, (bool, int, float, complex, str, type(None)))
    return value if simple else type(value).__name__


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
