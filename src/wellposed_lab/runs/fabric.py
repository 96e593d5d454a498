"""Several processes train one model: Lightning Fabric joins them and adds up their gradients.

One process needs nothing of this file, unless `run.precision` or `run.accumulate` ask for it.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wellposed.descent._minibatch import TOTALS, has_finite_gradients, solves
from wellposed.errors import InvalidArgument, RunError, required
from wellposed_lab.runs.losses import residual_weight
from wellposed_lab.runs.processes import NEEDED, START, Step, World

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import LossSection, RunSection
    from wellposed_lab.runs.losses import AbstractLoss

__all__ = ["FabricStep", "FabricWorld", "fabric_world", "reached"]

#: How long the other processes wait for the first one, which certifies.
PATIENCE = timedelta(hours=12)
#: Seconds to the end of a step or a certificate after SIGTERM, by which a launcher says that another process died.
GRACE = 15.0
#: What gloo and NCCL say when another process does not answer.
_LOST = re.compile(r"\bgloo\b|\bnccl\b|connection (was )?(closed|reset|refused)|broken pipe|remote process", re.IGNORECASE)


@contextmanager
def fabric_world(options: RunSection | None, size: int) -> Iterator[FabricWorld]:
    """The joined processes while the context is open.

    Args:
        options: Section `run` of the configuration; its defaults if not given.
        size: The number of processes; their variables are those that torchrun sets.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    accumulate, sharded = (1, False) if options is None else (options.accumulate, options.strategy == "fsdp")
    world = FabricWorld(_fabric(options, size), accumulate, sharded=sharded)
    try:
        yield world
    except BaseException as error:
        _clear_frames(error)
        raise
    finally:
        world.close()


class FabricWorld(World):
    """Processes that Fabric has joined.

    Args:
        fabric: Launched.
        accumulate: Pieces of a batch whose gradients are added one after the other.
        sharded: Whether gradients and the state of the optimizer are spread over the processes.
    """

    def __init__(self, fabric: Any, accumulate: int, *, sharded: bool = False) -> None:
        self.fabric, self.accumulate, self.sharded = fabric, accumulate, sharded
        self.rank, self.size, self.device = fabric.global_rank, fabric.world_size, fabric.device
        if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(signal, "setitimer"):
            self.grace = GRACE
        self._steps: list[FabricStep] = []

    def part(self, rows: Tensor) -> Tensor:
        """The rows that this process works on; possibly none."""
        return rows.tensor_split(self.size)[self.rank]

    def add(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        with reached():
            summed: Tensor = self.fabric.all_reduce(numbers.to(self.device), reduce_op="sum")
        return summed.to(numbers.device)

    def wait(self) -> None:
        """Waits for all processes."""
        self.add(torch.zeros(1))

    def agree(self, code: int) -> int:
        """The code of the first process."""
        with reached():
            return int(self.fabric.broadcast(code))

    def step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: AbstractLoss, clip: float | None, section: LossSection
    ) -> Step:
        """One step of the optimizer on (X, y, rows, *further)."""
        if section.penalty:
            raise InvalidArgument(
                f"loss.penalty={section.penalty:g} is for one process in full precision; omit it, or run.devices, "
                "run.precision and run.accumulate."
            )
        if residual_weight(model, section.residual):
            raise InvalidArgument(
                f"{type(model).__name__} trains by few steps (loss.residual) in one process in full precision only. Set "
                "loss.residual=0, or omit run.devices, run.precision and run.accumulate."
            )
        kind = FabricStep
        if self.sharded:
            from wellposed_lab.runs.sharded import ShardedStep as kind  # only here: most runs have none
        made = kind(self, model, optimizer, loss, clip)
        self._steps.append(made)
        return made

    def close(self) -> None:
        """Frees the wrapped models, and then the process group.

        A `DistributedDataParallel` that is freed after its process group may deadlock: its
        destructor joins gloo's threads while it holds the interpreter's lock that they wait for.
        """
        for step in self._steps:
            step.release()
        gc.collect()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class FabricStep:
    """One step of an optimizer on the mean loss of a batch, of which every process has a part.

    Each process divides its part into `accumulate` pieces. `DistributedDataParallel` takes the mean
    of the gradients over the processes in the backward pass of the last piece; a loss is therefore
    multiplied by the number of processes. A process without samples computes one with weight 0,
    because all must take part.

    Args:
        world: The processes.
        model, optimizer: What is trained, and by what.
        loss: What is minimised.
        clip: Greatest norm of the gradient, or None.
    """

    def __init__(
        self, world: FabricWorld, model: nn.Module, optimizer: torch.optim.Optimizer, loss: AbstractLoss, clip: float | None
    ) -> None:
        self.world, self.model, self.loss, self.clip = world, model, loss, clip
        with reached():
            self._wrapped, self._optimizer = world.fabric.setup(model, optimizer)

    def release(self) -> None:
        """Frees the wrapped model."""
        self._wrapped = self._optimizer = None

    def collect(self) -> None:
        """Makes the model the same in all processes; each has changed its buffers, and the first
        decides."""
        if self.world.size > 1:
            with reached():
                for buffer in self.model.buffers():
                    torch.distributed.broadcast(buffer, 0)

    def _is_finite(self) -> bool:
        return has_finite_gradients(self.model)

    def __call__(self, X: Tensor, y: Tensor, rows: Tensor, *further: float) -> Tensor | None:
        """Takes a step on these rows; the sums are those of `MinibatchStep`, over all processes."""
        world, fabric = self.world, self.world.fabric
        self.model.train()
        self._optimizer.zero_grad()
        items = max(self.loss.count(y[rows.to(y.device)]), 1.0)
        sums = torch.zeros(len(TOTALS) + len(further), dtype=torch.float64)
        pieces = world.part(rows).tensor_split(world.accumulate)
        for number, piece in enumerate(pieces):
            weight, chosen = (1.0, piece) if len(piece) else (0.0, rows[:1])
            target = y[chosen.to(y.device)]
            with reached(), fabric.no_backward_sync(self._wrapped, enabled=number + 1 < len(pieces)):
                total = self.loss.total(self._wrapped(X[chosen.to(X.device)]), target)
                mine = [float(total.detach()), self.loss.count(target), *solves(self.model)]
                counted = (mine if weight else [0.0] * len(TOTALS)) + [value * (number == 0) for value in further]
                sums += world.add(torch.tensor(counted, dtype=torch.float64))
                if not math.isfinite(float(sums[0])):
                    return None
                fabric.backward(total * (weight * world.size / items))
        if not self._is_finite():
            return None
        if self.clip is not None:
            fabric.clip_gradients(self._wrapped, self._optimizer, max_norm=self.clip)
        self._optimizer.step()
        return sums


def _fabric(options: RunSection | None, size: int) -> Any:
    """A launched Fabric: gloo on the CPU and NCCL on GPUs; LOCAL_RANK chooses the device."""
    lightning = required("lightning_fabric", NEEDED, extra="lightning")
    from lightning_fabric.plugins import MixedPrecision
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.plugins.precision import Precision
    from lightning_fabric.strategies import DDPStrategy
    from lightning_fabric.utilities.exceptions import MisconfigurationException

    class AsItIs(Precision):  # Fabric's own would make everything float32
        def convert_input(self, data: Any) -> Any:
            return data

        def convert_output(self, data: Any) -> Any:
            return data

    class FullInputs(MixedPrecision):  # Fabric's own would round the inputs, and an equilibrium is solved in float32
        def convert_input(self, data: Any) -> Any:
            return data

    logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
    name, mixed = ("cpu", False) if options is None else (options.device, options.precision != "full")
    device = torch.device(name)
    if mixed and options is not None and options.dtype != "float32":
        raise InvalidArgument(f"run.precision={options.precision} needs run.dtype=float32; got {options.dtype}.")
    if size > 1 and device.index is not None:
        raise InvalidArgument(
            f"run.device={name!r} is one device, and there are {size} processes: use run.device={device.type}, of which each "
            "process takes the one that LOCAL_RANK numbers."
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if size > 1 else 1
    plugins: list[Any] = [FullInputs("bf16-mixed", device=device.type) if mixed else AsItIs()]
    if size > 1:
        plugins.append(TorchElasticEnvironment())
    # looking for unused parameters also keeps the order of sums, which would change after the first step of a session
    strategy: Any = DDPStrategy(timeout=PATIENCE, find_unused_parameters=True) if size > 1 else "auto"
    if options is not None and options.strategy == "fsdp":
        from lightning_fabric.strategies import ModelParallelStrategy

        from wellposed_lab.runs.sharded import shard

        strategy = ModelParallelStrategy(shard, data_parallel_size=size, tensor_parallel_size=1, timeout=PATIENCE)
    devices = here if size > 1 or device.type == "cpu" else [device.index or 0]
    try:
        fabric = lightning.Fabric(
            accelerator=device.type, devices=devices, num_nodes=size // here, strategy=strategy, plugins=plugins
        )
        fabric.launch()
    except (RuntimeError, ValueError, MisconfigurationException) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        if size == 1:
            raise InvalidArgument(f"run.device={name!r} cannot be used: {reason}. Try run.device=cpu.") from error
        raise InvalidArgument(f"The other processes could not be joined ({reason}). {START}") from error
    return fabric


@contextmanager
def reached() -> Iterator[None]:
    """Turns the error of a process that lost another one into a sentence."""
    try:
        yield
    except RuntimeError as error:
        if not _LOST.search(str(error)):
            raise
        raise RunError(
            "Another process of this run ended or cannot be reached, so this one stops. Nothing is lost up to the last "
            "checkpoint; continue with --resume when the cause is removed."
        ) from error


def _clear_frames(error: BaseException | None) -> None:
    """Clears the local variables of an error's frames: they hold the wrapped model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _end_with(parent: int) -> None:
    """Interrupts this process when the launcher is killed: it would train on unseen."""
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
