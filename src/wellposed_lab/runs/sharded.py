"""FSDP2 by Lightning Fabric: gradients and optimizer state are spread over the processes.

Each process also has the whole model, as it was after the last epoch: evaluations, certificates and
checkpoints use it, and know nothing of shards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.nn.maps.operator import OperatorCache
from wellposed_lab.runs.fabric import FabricStep, reached

if TYPE_CHECKING:
    from wellposed_lab.runs.fabric import FabricWorld
    from wellposed_lab.runs.losses import AbstractLoss

__all__ = ["ShardedStep", "shard"]


def shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Spreads the parameters over the mesh; those that are single numbers stay whole.

    The model is one unit: equilibria are computed by methods other than `forward` too, before which
    FSDP2 would not gather the parameters of a layer.
    """
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        raise InvalidArgument("run.strategy=fsdp needs torch 2.6 or newer, which has fully_shard; use ddp.") from None
    numbers = {parameter for parameter in model.parameters() if parameter.dim() == 0}
    options: Any = {"ignored_params": numbers} if numbers else {}
    fully_shard(model, mesh=mesh["data_parallel"], **options)
    return model


class ShardedStep(FabricStep):
    """A step as that of `FabricStep`, on a copy of the model whose parameters are spread.

    Args:
        world, loss, clip: As there.
        model, optimizer: Whole; `collect` brings them up to date.
    """

    def __init__(
        self, world: FabricWorld, model: nn.Module, optimizer: torch.optim.Optimizer, loss: AbstractLoss, clip: float | None
    ) -> None:
        self.world, self.loss, self.clip = world, loss, clip
        self._whole, self._whole_optimizer = model, optimizer
        self.model = copy.deepcopy(model)
        with reached():
            self._wrapped = world.fabric.setup_module(self.model)
            self._optimizer = world.fabric.setup_optimizers(self._spread(optimizer))

    def _spread(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer on the spread parameters, with its state."""
        from torch.distributed.tensor import distribute_tensor

        names = {id(parameter): name for name, parameter in self._whole.named_parameters()}
        spread = dict(self.model.named_parameters())
        groups = [{**group, "params": [spread[names[id(p)]] for p in group["params"]]} for group in optimizer.param_groups]
        found: torch.optim.Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]  # its kinds have defaults
        for parameter, slots in optimizer.state.items():
            target: Any = spread[names[id(parameter)]]
            found.state[target] = {
                name: distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)  # all have it
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim()
                else copy.deepcopy(value)
                for name, value in slots.items()
            }
        return found

    def __call__(self, X: Tensor, y: Tensor, rows: Tensor, *further: float) -> Tensor | None:
        for mine, group in zip(self._optimizer.param_groups, self._whole_optimizer.param_groups, strict=True):
            mine["lr"] = group["lr"]
        for module, whole in zip(self.model.modules(), self._whole.modules(), strict=True):
            if isinstance(getattr(whole, "_cache", None), OperatorCache):  # with the step sizes that solvers found
                setattr(module, "_cache", getattr(whole, "_cache"))  # noqa: B009, B010 (typed as parameters)
        return super().__call__(X, y, rows, *further)

    def _is_finite(self) -> bool:
        """Of the gradients of all processes; those that FSDP2 left alone are averaged here."""
        for parameter in self.model.parameters():
            if parameter.dim() == 0 and parameter.grad is not None:
                parameter.grad.copy_(self.world.add(parameter.grad) / self.world.size)
        mine = all(bool(_local(p.grad).isfinite().all()) for p in self.model.parameters() if p.grad is not None)
        return not bool(self.world.add(torch.tensor([float(not mine)])) > 0)

    @torch.no_grad()
    def collect(self) -> None:
        """Gathers the whole model in every process, and the state of the optimizer in the first."""
        super().collect()
        with reached():
            for whole, parameter in zip(self._whole.parameters(), self.model.parameters(), strict=True):
                whole.copy_(_full(parameter))
            for mine, buffer in zip(self._whole.buffers(), self.model.buffers(), strict=True):
                mine.copy_(buffer)
            for whole, parameter in zip(_parameters(self._whole_optimizer), _parameters(self._optimizer), strict=True):
                state = self._optimizer.state.get(parameter, {})
                slots = {name: _full(state[name]) for name in sorted(state)}  # in one order: files have any, in each process
                if self.world.first and slots:
                    self._whole_optimizer.state[whole] = slots

    def release(self) -> None:
        super().release()
        del self.model


def _parameters(optimizer: Any) -> Iterator[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _full(value: Any) -> Any:
    """A copy of what is spread, or of what is not."""
    if hasattr(value, "full_tensor"):
        return value.full_tensor()
    return value.clone() if isinstance(value, Tensor) else value
