"""EquilibriumMonitor: a Lightning callback that watches the solves and re-certifies along
training."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.certify import Certificate, certify
from wellposed.certify._dispatch import has_certificate
from wellposed.certify.well_posedness import well_posed
from wellposed.errors import InvalidArgument, MissingPackage, how_to_install
from wellposed.nn import EquilibriumLayer
from wellposed.nn.families import is_theory_network
from wellposed.solve import Solution

Callback: Any = object  # without lightning the module can still be imported and read
_MISSING = importlib.util.find_spec("lightning") is None
if not _MISSING:
    Callback = importlib.import_module("lightning.pytorch").Callback

__all__ = ["EquilibriumMonitor"]


@dataclass
class _Health:
    """Sums over the solves of an epoch, of equilibria or of adjoints."""

    solved: int = 0
    unconverged: int = 0
    steps: int = 0
    worst: float = 0.0

    def see(self, solution: Solution) -> None:
        self.solved += solution.num_steps.numel()
        self.unconverged += int((~solution.converged).sum())
        self.steps += int(solution.num_steps.sum())
        largest = float(solution.residual.max()) if solution.num_steps.numel() else 0.0
        self.worst = max(self.worst, math.inf if math.isnan(largest) else largest)

    def over_processes(self, device: torch.device) -> _Health:
        """The same of all processes together; all of them must call it."""
        counts = torch.tensor([self.solved, self.unconverged, self.steps], device=device)
        worst = torch.tensor(self.worst, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(counts)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        solved, unconverged, steps = (int(count) for count in counts)
        return _Health(solved, unconverged, steps, float(worst))

    def report(self, name: str) -> dict[str, float]:
        count = max(self.solved, 1)
        return {
            f"{name}/unconverged": self.unconverged / count,
            f"{name}/steps": self.steps / count,
            f"{name}/worst_residual": self.worst,
        }


class EquilibriumMonitor(Callback):
    """Solver health and certificates of the equilibrium networks inside a LightningModule.

    After every training epoch it logs, for equilibria and for the adjoints of backward, the share
    of samples that did not converge (`equilibrium/unconverged`, `adjoint/unconverged`), the mean
    number of evaluations (`.../steps`) and the largest relative residual (`.../worst_residual`);
    every so many epochs also `certificate/certified`, 1 or 0, and `certificate/rate` if one is
    certified. Numbers are those of all processes together, so that all of them stop together.

    Args:
        X: (n, d) inputs that the certificate is about. A theory network without data is only
            checked for well-posedness.
        y: (n,) their targets.
        every: Epochs between certificates; the last epoch that is planned has one as well.
        theorem: As in `wellposed.certify`, with data; without, and for other networks, "auto".
        stop: Whether training stops as soon as the verdict is CERTIFIED.
        max_unconverged: The share of equilibria or adjoints of an epoch above which training stops;
            None never stops.

    Attributes:
        records: One dict an epoch: epoch, what was logged, the verdict where there was one. Kept in
            checkpoints.
        certificate: The last one, or None, with the `reason`.
        first: The first epoch whose verdict was CERTIFIED, or None. Kept in checkpoints.
        stopped: Why the monitor stopped the training, or None.
    """

    def __init__(
        self,
        X: Tensor | None = None,
        y: Tensor | None = None,
        *,
        every: int = 1,
        theorem: str = "auto",
        stop: bool = False,
        max_unconverged: float | None = None,
    ) -> None:
        if _MISSING:
            raise MissingPackage(f"EquilibriumMonitor needs lightning; install it with: {how_to_install('lightning')}.")
        super().__init__()
        check_positive_integer("EquilibriumMonitor", "every", every)
        if (X is None) != (y is None):
            raise InvalidArgument("EquilibriumMonitor needs both X and y for a certificate about training, or neither.")
        if max_unconverged is not None and not 0 <= max_unconverged <= 1:
            raise InvalidArgument(f"max_unconverged is a share, in [0, 1]; got {max_unconverged!r}.")
        self.X, self.y = X, y
        self.every, self.theorem, self.stop, self.max_unconverged = every, theorem, stop, max_unconverged
        self.records: list[dict[str, Any]] = []
        self.certificate: Certificate | None = None
        self.reason: str | None = None
        self.first: int | None = None
        self.stopped: str | None = None
        self._equilibrium, self._adjoint = _Health(), _Health()
        self._layers: list[EquilibriumLayer] = []
        self._hooks: list[Any] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._layers = [module for module in pl_module.modules() if isinstance(module, EquilibriumLayer)]
        if not self._layers:
            raise InvalidArgument(f"{type(pl_module).__name__} holds no EquilibriumLayer, so there is nothing to watch.")
        # a hook sees every solve of a step, also if the network is called more than once
        self._hooks = [layer.register_forward_hook(self._after_solve) for layer in self._layers]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._equilibrium, self._adjoint = _Health(), _Health()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        for layer in self._layers:
            layer.last_adjoint = None  # so that none is counted twice

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for layer in self._layers:
            if layer.last_adjoint is not None:
                self._adjoint.see(layer.last_adjoint)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        equilibrium, adjoint = self._equilibrium, self._adjoint
        if trainer.world_size > 1:
            equilibrium, adjoint = (health.over_processes(pl_module.device) for health in (equilibrium, adjoint))
        logged = equilibrium.report("equilibrium") | adjoint.report("adjoint")
        record: dict[str, Any] = {"epoch": trainer.current_epoch}
        last = trainer.max_epochs is not None and trainer.current_epoch + 1 == trainer.max_epochs
        if (trainer.current_epoch + 1) % self.every == 0 or last:
            self.certificate, self.reason = self._certify(pl_module)
            if self.certificate is not None:
                record["verdict"] = self.certificate.verdict.value
                logged["certificate/certified"] = float(self.certificate.certified)
                if self.certificate.rate is not None:
                    logged["certificate/rate"] = float(self.certificate.rate)
                if self.certificate.certified and self.first is None:
                    self.first = trainer.current_epoch
        self.records.append(record | logged)
        pl_module.log_dict(logged, sync_dist=trainer.world_size > 1)
        self._decide(trainer, logged)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"records": self.records, "first": self.first}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        self.records, self.first = list(state_dict["records"]), state_dict["first"]

    def _after_solve(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if layer.training and isinstance(layer, EquilibriumLayer) and layer.last_solution is not None:
            self._equilibrium.see(layer.last_solution)

    def _certify(self, pl_module: nn.Module) -> tuple[Certificate | None, str | None]:
        network = next((module for module in pl_module.modules() if is_theory_network(module)), None)
        if network is not None:
            if self.X is None or self.y is None:
                return well_posed(network), None
            like = next(network.parameters())
            return certify(network, self.X.to(like), self.y.to(like), theorem=self.theorem), None
        if has_certificate(pl_module):
            like = next(pl_module.parameters())
            nothing = like.new_zeros(0)  # well-posedness is about the network alone
            return certify(pl_module, nothing, nothing, theorem=self.theorem), None
        return None, f"no theorem covers the training of {type(pl_module).__name__}; wp.certify(module) looks at its equilibria"

    def _decide(self, trainer: Any, logged: dict[str, float]) -> None:
        worst = max(logged["equilibrium/unconverged"], logged["adjoint/unconverged"])
        if self.stop and self.first is not None:
            self.stopped = f"certified in epoch {self.first}"
        elif self.max_unconverged is not None and worst > self.max_unconverged:
            self.stopped = f"{worst:.1%} of the solves of epoch {trainer.current_epoch} did not converge"
        if self.stopped is not None:
            trainer.should_stop = True
