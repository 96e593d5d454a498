"""The only file that uses private parts of torch: structures, transforms, the compiler, graphs,
draws."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = [
    "BatchNorm",
    "DispatchMode",
    "Edge",
    "PER_NUMBER",
    "PER_OPERATION",
    "concrete",
    "counted",
    "eager",
    "graph_edge",
    "is_legacy_batched",
    "pytree",
    "pulled_back",
    "random_state",
    "sequence_number",
    "transforms_active",
    "uncompiled",
    "unhooked",
    "watched",
]

P = ParamSpec("P")
R = TypeVar("R")
#: A node of the graph and which of its outputs.
Edge = tuple[Any, int]

#: What every batch normalization of torch is.
BatchNorm = nn.modules.batchnorm._BatchNorm


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.disable` without its import of the compiler, which takes as long as torch.

    A loop that depends on values gains nothing from a trace. Before the compiler is loaded no
    frame can be traced, and the function is called directly.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what a trace of the caller looks for
    return call


def uncompiled(call: Callable[[], R]) -> R:
    """The result of `call()`, in which every function made by `torch.compile` is plain Python.

    Compiled code does not pass through a `TorchFunctionMode`: it holds the tensors that it was
    traced with, or a trace of the mode itself. What a mode puts in the place of a tensor reaches a
    compiled function only in this way.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and the import takes seconds
        return call()

    def run() -> R:
        with torch.compiler.set_stance("force_eager"):
            return call()

    return torch.compiler.disable(run)()  # a stance cannot be set while an outer function is being traced


def transforms_active() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def concrete(tensor: Tensor) -> Tensor:
    """The values under all transforms; each `vmap` adds one dimension."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` made this tensor."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def graph_edge(tensor: Tensor) -> Edge:
    """Where the cotangent of a tensor with a graph arrives."""
    return tensor.grad_fn, tensor.output_nr


def pulled_back(value: Tensor, point: Tensor, u: Tensor) -> Tensor | None:
    """J^T u for a value recorded at a point; None if the value does not depend on it.

    `torch.autograd.grad` without its checks, which take as long as the product with a small map.
    """
    if _run_backward is None or not type(value) is type(u) is Tensor:
        return torch.autograd.grad(value, point, u, retain_graph=True, allow_unused=True)[0]
    product: Tensor | None = _run_backward((value,), (u,), True, False, (point,), True, accumulate_grad=False)[0]
    return product


#: Outputs, cotangents, whether the graph is kept, whether one is made, inputs, whether they may be unused.
_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)


def sequence_number() -> int:
    """A number that the nodes of the graph made from now on reach or exceed."""
    return torch._C._autograd._get_sequence_nr()


def unhooked() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which graphs save their tensors unchanged, whatever hooks are active outside.

    The graphs that a solver records are gone when it ends, so the caller's hooks must not see them:
    those of `torch.utils.checkpoint` would run the whole forward pass again for each product with a
    Jacobian.
    """
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the generator from which a function would draw on this device.

    Other threads draw from it too.
    """
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def watched(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, bool]:
    """f(z), and whether f itself drew random numbers of torch, whatever other threads do."""
    with _Draws() as draws:
        value = f(z)
    return value, draws.seen


class DispatchMode(TorchDispatchMode):
    """A mode that sees operations, without the import of the compiler, which takes as long as
    torch."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Draws(DispatchMode):
    """Notes whether an operation of this thread depends on the seed; some microseconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


#: What one operation costs before it computes anything, a pass over a number, and an addition or multiplication, in
#: about microseconds of one processor core; only ratios matter. The first is shared by the samples of a batch: of 32,
#: whatever the batch is, so that no sample is treated in another way because of the others.
PER_OPERATION, PER_NUMBER, PER_FLOP = 5.0 / 32, 4e-4, 2e-5


def counted(f: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, float]:
    """f(z), and its cost per row: operations are counted, not timed, so that it is reproducible."""
    with _Cost() as cost:
        value = uncompiled(lambda: f(z))
    return value, PER_OPERATION * cost.operations + cost.work / max(z.shape[0], 1)


class _Cost(DispatchMode):
    """Adds up the cost of the operations of this thread; some microseconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.work = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func.is_view:
            return value
        flops = flop_registry.get(func.overloadpacket)
        results = value if isinstance(value, (tuple, list)) else (value,)
        numbers = sum(result.numel() for result in results if isinstance(result, Tensor))
        self.operations += 1
        self.work += PER_NUMBER * numbers
        self.work += PER_FLOP * flops(*args, **(kwargs or {}), out_val=value) if flops is not None else 0.0
        return value
