"""The only file that uses private parts of torch: transforms, the compiler, graphs, draws."""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from wellposed.errors import WellposedError

pytree = _pytree  #: Structures of tensors.

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


def require_values(owner: str, advice: str) -> None:
    """Raises inside transforms of torch.func, which hide the values that a solve depends on."""
    if transforms_active():
        raise WellposedError(f"{owner} needs concrete values; it is not supported under torch.func transforms. {advice}")


def concrete(tensor: Tensor) -> Tensor:
    """The values under all transforms; each `vmap` adds one dimension."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_legacy_batched(tensor: Tensor) -> bool:
    """Whether `torch.autograd.grad(is_grads_batched=True)` made this tensor."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)


def inside_a_mode() -> bool:
    """Whether functions of torch pass through a mode now, such as one that replaces tensors."""
    return torch._C._len_torch_function_stack() > 0


def graph_edge(tensor: Tensor) -> Edge:
    """Where the cotangent of a tensor with a graph arrives."""
    return tensor.grad_fn, tensor.output_nr


def pulled_back(value: Tensor, point: Tensor, u: Tensor) -> Tensor | None:
    """J^T u for a value recorded at a point; None if the value does not depend on it.

    `torch.autograd.grad` without its checks, which take as long as the product with a small map.
    """
    if _engine is None or not type(value) is type(u) is Tensor:
        return torch.autograd.grad(value, point, u, retain_graph=True, allow_unused=True)[0]
    # outputs, cotangents, whether the graph is kept, whether one is made, inputs, whether they may be unused
    product: Tensor | None = _engine.run_backward((value,), (u,), True, False, (point,), True, accumulate_grad=False)[0]
    return product


_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def sequence_number() -> int:
    """A number that the nodes of the graph made from now on reach or exceed."""
    return torch._C._autograd._get_sequence_nr()


def runs(node: Any) -> bool:
    """Whether the derivative that is computed now reaches this node."""
    try:
        return node is not None and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # of a leaf at which it ends
        return True


#: A context in which functions of torch pass through no mode and no override.
without_modes: Any = torch._C.DisableTorchFunction


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """A context without autocast; one of torch takes some microseconds even if there is none."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def apart() -> AbstractContextManager[None]:
    """A context for evaluations of a solver, whose graphs are gone when it ends.

    Hooks of the caller on saved tensors must not see them: those of `torch.utils.checkpoint` would
    run the whole forward pass again for each product with a Jacobian. And `parametrize.cached()` of
    the caller must not keep what they compute: a weight without a graph has no gradient later.
    """
    hooked = saved_tensors_hooked()
    return _apart(hooked) if hooked or parametrize._cache_enabled else nullcontext()


@contextmanager
def _apart(hooked: bool) -> Iterator[None]:
    cached, outside = parametrize._cache_enabled, parametrize._cache
    if cached:
        parametrize._cache = dict(outside)
    try:
        with torch.autograd.graph.saved_tensors_hooks(_same, _same) if hooked else nullcontext():
            yield
    finally:
        if cached:
            parametrize._cache = outside


def saved_tensors_hooked() -> bool:
    """Whether hooks on saved tensors are active, which `torch.func.grad` does not allow."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(""):
            return False
    except RuntimeError:
        return True


def _same(tensor: Tensor) -> Tensor:
    return tensor


def random_state(device: torch.device) -> Tensor:
    """The state of the generator from which a function would draw on this device.

    Other threads draw from it too.
    """
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def outer_states() -> tuple[object, bytes]:
    """Of the generators that the functions of Python's `random`, and of `numpy.random`, share."""
    module = sys.modules.get("numpy.random")
    return random.getstate(), b"" if module is None else pickle.dumps(module.get_state(legacy=False))


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
#: about microseconds of one processor core; only ratios matter.
PER_OPERATION, PER_NUMBER, PER_FLOP = 5.0 / 32, 4e-4, 2e-5
#: The samples that share the first, and work that depends on none of them, such as making a weight: 32, whatever the
#: batch is, so that no sample is treated in another way because of the others.
SHARED_BY = 32


def counted(f: Callable[[Tensor], Tensor], z: Tensor, inputs: tuple[Tensor, ...] = ()) -> tuple[Tensor, float]:
    """f(z), and its cost per row: operations are counted, not timed, so that it is reproducible.

    Args:
        f: The map. z: (batch, features).
        inputs: What else it depends on: data of samples, where the first dimension is the batch.
    """
    batch = z.shape[0]
    with _Cost(z, *(tensor for tensor in inputs if tensor.dim() and tensor.shape[0] == batch)) as cost:
        value = uncompiled(lambda: f(z))
    numbers, flops = (a / SHARED_BY + b / max(batch, 1) for a, b in zip(cost.shared, cost.of_samples, strict=True))
    return value, PER_OPERATION * cost.operations + PER_NUMBER * numbers + PER_FLOP * flops


def relative_cost(operations: int, numbers: int, cost: float, batch: int = SHARED_BY) -> float:
    """What operations on so many numbers of a row cost, over `cost`, which was `counted`."""
    shared = PER_OPERATION * operations * SHARED_BY / max(batch, 1)
    return (shared + PER_NUMBER * numbers) / max(cost, PER_OPERATION)


class _Cost(DispatchMode):
    """Adds up the operations of this thread, and the numbers and flops of those that depend on
    samples and of the others; some microseconds for each.

    What depends on samples is known by its memory, which views share.
    """

    def __init__(self, *samples: Tensor) -> None:
        super().__init__()
        self.operations, self.shared, self.of_samples = 0, [0, 0], [0, 0]
        self._memory = set(map(_memory, samples))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        if func.is_view:
            return value
        results = _tensors((value,))
        depends = any(_memory(tensor) in self._memory for tensor in _tensors(args))
        (self._memory.update if depends else self._memory.difference_update)(map(_memory, results))
        flops, work = flop_registry.get(func.overloadpacket), self.of_samples if depends else self.shared
        self.operations += 1
        work[0] += sum(result.numel() for result in results)
        work[1] += flops(*args, **(kwargs or {}), out_val=value) if flops is not None else 0
        return value


def _tensors(values: Any) -> list[Tensor]:
    """Those in a sequence, and in the sequences in it."""
    nested = (value if isinstance(value, (tuple, list)) else (value,) for value in values)
    return [value for part in nested for value in part if isinstance(value, Tensor)]


def _memory(tensor: Tensor) -> int:
    """Where its numbers are; 0 if they are not in one place, as those of a sparse one."""
    try:
        return concrete(tensor).untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0
