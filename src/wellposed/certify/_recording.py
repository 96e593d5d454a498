r"""A cell is evaluated once while every operation of torch that it uses is noted.

So any Python code may stand in it. What cannot be noted is refused with a reason: random numbers,
decisions and numbers taken from the values of z, changes of parameters or attributes, tensors that
are neither parameters nor buffers nor part of x, operations that are not known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellposed._torch import DispatchMode, pytree
from wellposed.certify import _lowering, _nonlinear  # noqa: F401  # which fill the table
from wellposed.certify._definitions import attention, pad_circular
from wellposed.certify._operations import BLANK, READS, narrows, values_read
from wellposed.certify._steps import LOWER
from wellposed.certify._tape import Node, Tape, TapeRefused

#: Ways out of torch, after which nothing is known of a number.
_EXITS = {
    *("numpy", "tolist", "__array__", "data_ptr", "__dlpack__", "untyped_storage", "storage", "share_memory_"),
    *("__repr__", "__str__", "__format__"),
}
#: Ways to hide a part of the cell from derivatives, which a tape does not hide, or to change them.
_HIDES = (torch._C._set_grad_enabled, Tensor.data.__get__, Tensor.register_hook)  # type: ignore[attr-defined]  # the first two


def record(call: Callable[[Tensor], Tensor], z: Tensor, x: Any, module: nn.Module) -> Tape:
    """The steps of `call(z)`.

    Args:
        call: Evaluates a cell; may prepare what depends on x first.
        z: (1, n) a state, in the dtype that the cell expects.
        x: The tensors that count as data.
        module: Whose parameters and buffers are constants.

    Raises:
        Refused: Something in it is not known.
    """
    recorder, before = _Recorder(module, x), _attributes(module)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), recorder, _NoExit(recorder):

        def with_state(state: Tensor) -> Tensor:
            out = call(state)
            if not isinstance(out, Tensor):
                raise TapeRefused(f"It returns a {type(out).__name__}.")
            return out

        recorder.expect_state(z)
        try:
            out = torch.func.functionalize(_first_touch(with_state), remove="mutations")(z)
        finally:
            changed = _restore(before)
    if changed:
        raise TapeRefused(f"It keeps a state: {changed} changes while it is evaluated.")
    if recorder.refusal:  # in case the cell caught it
        raise TapeRefused(recorder.refusal)
    return recorder.finish(out)


def _attributes(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The attributes, parameters and buffers of all parts, as tables and copies of them."""
    tables = (table for part in module.modules() for table in (vars(part), part._parameters, part._buffers))
    return [(table, dict(table)) for table in tables]


def _restore(before: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Puts everything back; the name of something that was not in its place, or nothing."""
    found = ""
    missing = object()
    for table, kept in before:
        moved = [name for name in {*table, *kept} if table.get(name, missing) is not kept.get(name, missing)]
        if moved:
            found = found or min(moved)
            table.clear()
            table.update(kept)
    return found


def _first_touch(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """With an operation at both ends, by which the state and the result are known under a
    transform."""
    return lambda z: torch.ops.aten.alias(call(torch.ops.aten.alias(z)))


class _NoExit(TorchFunctionMode):
    """Refuses calls that take numbers out of torch."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _EXITS:
            raise self._recorder.refuse(f"It takes numbers out of torch ({name}), so what it computes is not known.")
        if name == "tensor_split" and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args[1:], kwargs))):
            raise self._recorder.refuse("It splits at places that a tensor holds (tensor_split); give them as numbers.")
        if func in _HIDES:
            self._recorder.hides = True
        if name == "pad" and "circular" in (*args, *(kwargs or {}).values()):
            return pad_circular(*args, **(kwargs or {}))
        if name == "scaled_dot_product_attention":
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _of_parameters(step: Node) -> bool:
    return step.name == "parameter" or any(map(_of_parameters, step.parents))


class _Recorder(DispatchMode):
    """Notes steps; holds every tensor, so that none takes the identity of another."""

    def __init__(self, module: nn.Module, x: Any) -> None:
        super().__init__()
        self.steps: list[Node] = []
        self.refusal, self.reads_x, self.hides, self.computed = "", False, False, list[str]()
        self._of: dict[int, Node | str] = {}  # a string says why a result is not known
        self._held: list[Tensor] = []
        self._stored = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._data = {id(tensor) for tensor in pytree.tree_leaves(x) if isinstance(tensor, Tensor)}
        self._state = 0

    def expect_state(self, z: Tensor) -> None:
        """The first tensor of this shape that is not known is the state."""
        self._state = id(z)

    def refuse(self, reason: str) -> TapeRefused:
        self.refusal = self.refusal or reason
        return TapeRefused(self.refusal)

    def add(self, step: Node) -> Node:
        if step.value is None or not step.value.is_complex():  # those have no bounds, and no step reads them
            self.steps.append(step)
        return step

    def finish(self, out: Tensor) -> Tape:
        result = self._of.get(id(out))
        if not isinstance(result, Node):
            raise self.refuse("Its result is made in a way that is not known.")
        if not result.of_z:
            self.steps.insert(0, Node("state", result.shape, of_z=True))
        return Tape(tuple(self.steps), result, self.reads_x, tuple(dict.fromkeys(self.computed)), self.hides)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.hides = self.hides or torch.is_inference_mode_enabled()
        name = func._schema.name.removeprefix("aten::")
        if name == "_scaled_dot_product_flash_attention_for_cpu":  # called by nn.MultiheadAttention
            return self._fused_attention(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.refuse(f"It draws random numbers ({name}); call eval(), or leave them out.")
        if func._schema.is_mutable:
            return self._mutate(func, name, tensors, args, kwargs)
        fresh = name == "lift_fresh"
        inputs = {id(tensor): self._step(tensor, fresh) for tensor in tensors}
        of_z, of_x = any(step.of_z for step in inputs.values()), any(step.of_x for step in inputs.values())
        read = [inputs[id(tensor)] for tensor in values_read(func, name, args)]
        if any(step.of_z for step in read):
            raise self.refuse("It takes a decision or a number from the values of z.")
        self.reads_x = self.reads_x or any(step.of_x for step in read)
        if name in READS:
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if name in BLANK:
            return self._constant(out)
        whole = isinstance(out, Tensor) and not (out.is_floating_point() or out.is_complex())
        imaginary = any(isinstance(leaf, Tensor) and leaf.is_complex() for leaf in [*tensors, *pytree.tree_leaves(out)])
        # integers wrap around, and True + True is True; the bounds are of real numbers
        lower = None if whole or imaginary or narrows(tensors, out) else LOWER.get(name)
        if imaginary and of_z:
            raise self.refuse("Nothing is proved of complex states or steps. Write the cell with real and imaginary parts.")
        if lower is None and of_z:
            raise self.refuse(f"The operation {name} is not known to this proof.")
        found: Any = None
        if lower is not None:
            steps = pytree.tree_map_only(Tensor, lambda tensor: inputs[id(tensor)], (args, kwargs))
            with contextlib.suppress(TypeError):  # of arguments that the step does not know
                found = lower(self, func, out, *steps[0], **steps[1])
        if found is None and of_z:
            raise self.refuse(f"The operation {name} is not known to this proof with these arguments.")
        outputs = [out] if isinstance(out, Tensor) else list(out)
        if found is None:
            self.computed += [] if whole else [name]
            trained = any(map(_of_parameters, inputs.values()))
            found = [self._taken(tensor, of_x, trained) for tensor in outputs]
        for tensor, step in zip(outputs, found if isinstance(found, list) else [found], strict=True):
            self._hold(tensor, step)
        return out

    def _fused_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, causal: bool = False, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """The definition in the place of the kernel, whose second result serves derivatives."""
        with self:
            return attention(q, k, v, named.get("attn_mask"), dropout, causal, named.get("scale")), torch.zeros(q.shape[:-1])

    def _hold(self, tensor: Tensor, step: Node | str) -> None:
        self._held.append(tensor)
        self._of[id(tensor)] = step

    def _taken(self, tensor: Tensor, of_x: bool, trained: bool) -> Node:
        kind = "computed" if of_x else "constant"
        name = "parameter" if trained or not of_x else ""  # what a parametrization gives is one
        return self.add(Node(kind, tensor.shape, value=tensor.detach().clone(), of_x=of_x, name=name))

    def _constant(self, out: Any) -> Any:
        for tensor in pytree.tree_leaves(out):
            self._hold(tensor, self.add(Node("constant", tensor.shape, value=tensor.detach().clone())))
        return out

    def _step(self, tensor: Tensor, fresh: bool = False) -> Node:
        """The step of a tensor; one that is new is a constant, part of x, or z."""
        known = self._of.get(id(tensor))
        if isinstance(known, str):
            raise self.refuse(known)
        if known is not None:
            return known
        if id(tensor) == self._state:
            step = Node("state", tensor.shape, of_z=True)
        elif id(tensor) in self._data:
            step = Node("data", tensor.shape, value=tensor.detach().clone(), of_x=True)
        elif id(tensor) in self._stored or fresh:
            step = Node("constant", tensor.shape, value=tensor.detach().clone(), name="" if fresh else "parameter")
        else:
            raise self.refuse(
                f"It uses a tensor of shape {tuple(tensor.shape)} that is neither a parameter, nor a buffer, nor part of x. "
                "Register it with register_buffer; if it is a weight of a module, write the cell as a Module that holds it."
            )
        self._hold(tensor, self.add(step))
        return step

    def _mutate(self, func: Any, name: str, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """Writing is allowed only between constants that the cell made itself: their values are
        taken when they are used."""
        written = [
            args[i] if i < len(args) else kwargs.get(argument.name)
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if any(id(tensor) in self._stored | self._data | {self._state} for tensor in written):
            raise self.refuse(f"It changes a parameter, a buffer or its input while it is evaluated ({name}).")
        if any(step.of_z or step.of_x for step in map(self._step, tensors)):
            raise self.refuse(f"It writes into a part of a tensor ({name}), which is not known to this proof.")
        places = {tensor.untyped_storage().data_ptr() for tensor in written}
        out = func(*args, **kwargs)
        for tensor in list(self._held):
            step = self._of.get(id(tensor))
            if isinstance(step, Node) and tensor.untyped_storage().data_ptr() in places:
                if step.of_z or step.of_x or id(tensor) in self._stored:
                    raise self.refuse(f"It writes into memory that it shares with another tensor ({name}).")
                self._of[id(tensor)] = self.add(Node("constant", tensor.shape, value=tensor.detach().clone()))
        return out
