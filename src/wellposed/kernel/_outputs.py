"""The outputs of a model, if it treats every sample by itself and draws no random numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed._torch import BatchNorm, outer_states, random_state, watched
from wellposed.errors import InvalidArgument, InvalidType

#: Rows that are evaluated together and alone, to see whether the model treats every sample by itself.
_COMPARED = 3
# The equilibrium of a sample alone and in a batch agree to the tolerance of the solve, which the user may have set high.
_VALUE_TOLERANCE = 1e-3
_GRADIENT_TOLERANCE = 1e-6


def outputs_of(model: nn.Module, X: Tensor) -> Tensor:
    """The outputs of the first few rows, if they are those of a model that keeps samples apart."""
    _refuse_batch_statistics(model)
    rows = X[:_COMPARED].detach()
    before = random_state(rows.device), outer_states()
    differentiable = rows.is_floating_point() and rows.shape[0] > 1
    if differentiable:
        rows = rows.clone().requires_grad_()
    with torch.enable_grad():
        together = _call(model, rows)
        if rows.shape[0] > 1:
            alone = torch.cat([_call(model, rows[i : i + 1]).detach() for i in range(rows.shape[0])])
        if not torch.equal(before[0], random_state(rows.device)) or before[1] != outer_states():
            _refuse_draws(model, rows)
        if rows.shape[0] > 1:
            scale = together.detach().abs().max()
            if bool((alone - together.detach()).abs().max() > _VALUE_TOLERANCE * scale):
                raise _mixing("a sample has another output alone than in a batch")
        if differentiable and together.requires_grad:
            (gradient,) = torch.autograd.grad(together[0].sum(), rows, allow_unused=True)
            if gradient is not None:
                gradient = gradient.abs()
                if bool(gradient[1:].max() > _GRADIENT_TOLERANCE * gradient.max()):
                    raise _mixing("the output of one sample depends on another sample")
    return together.detach()


def _refuse_draws(model: nn.Module, rows: Tensor) -> None:
    """Evaluates once more: another thread may have changed the state of a generator."""
    outer = outer_states()
    _, drawn = watched(lambda given: _call(model, given), rows)
    if drawn or outer_states() != outer:
        raise _mixing("it draws random numbers, as dropout does in training mode")


def _call(model: nn.Module, rows: Tensor) -> Tensor:
    try:
        output = model(rows)
    except (RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidArgument(
            f"tangent_kernel: model(X) fails on rows of shape {tuple(rows.shape)} and dtype {rows.dtype}: {reason}. "
            "Give X the shape and dtype that the model takes."
        ) from error
    if not isinstance(output, Tensor):
        raise InvalidType(f"tangent_kernel: model(X) must return a tensor, got {type(output).__name__}.")
    if output.dim() not in (1, 2) or output.shape[0] != rows.shape[0] or output.numel() == 0:
        raise InvalidArgument(
            f"tangent_kernel: model(X) must be (n,) or (n, c); got {tuple(output.shape)} for n = {rows.shape[0]} samples. "
            "Flatten the outputs of a sample into one dimension."
        )
    if not output.is_floating_point():
        raise InvalidArgument(f"tangent_kernel: model(X) must be real and floating-point, got {output.dtype}.")
    return output


def _refuse_batch_statistics(model: nn.Module) -> None:
    """Before any call: a call would change the running statistics of the model."""
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and (module.training or module.running_mean is None):
            raise _mixing(f"{type(module).__name__} {name!r} takes its statistics from the batch")


def _mixing(reason: str) -> InvalidArgument:
    return InvalidArgument(
        f"tangent_kernel: the model mixes samples or is random: {reason}. A single prediction has no gradient; "
        "call model.eval() first, or use a normalization within samples."
    )
