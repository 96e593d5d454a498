"""The Lightning callback, with the real Lightning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import wellposed as wp
from wellposed.lightning import EquilibriumMonitor

L: Any = pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")


class Task(L.LightningModule):
    def __init__(self, network: torch.nn.Module, lr: float = 1e-2, calls: int = 1) -> None:
        super().__init__()
        self.network, self.lr, self.calls = network, lr, calls

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        outputs = [self.network(x) for _ in range(self.calls)]
        return (torch.stack(outputs).mean(0).reshape(len(y), -1)[:, 0] - y).square().mean() / 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Validated(Task):
    def validation_step(self, batch: Any, index: int) -> None:
        self.network(batch[0])


def problem(n: int = 8, d: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, d, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)


def gaussian(width: int = 24, **options: Any) -> wp.GaussianDEQ:
    return wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64, **options)


def quiet_trainer(folder: Path, epochs: int, *callbacks: Any) -> Any:
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )


def fit(task: Any, monitor: Any, folder: Path, *, epochs: int = 2, batch: int = 4, validate: bool = False, **more: Any) -> Any:
    trainer = quiet_trainer(folder, epochs, monitor)
    data = TensorDataset(*problem())
    loaders = [DataLoader(data, batch_size=batch)] + ([DataLoader(data, batch_size=8)] if validate else [])
    trainer.fit(task, *loaders, **more)
    return trainer


def test_health_is_counted_and_logged(tmp_path: Path) -> None:
    network = gaussian()
    seen: list[int] = []  # an independent count
    network.layer.register_forward_hook(
        lambda layer, args, out: seen.append(int(layer.last_solution.num_steps.sum())) if layer.training else None
    )
    monitor = EquilibriumMonitor()
    trainer = fit(Validated(network), monitor, tmp_path, validate=True)
    assert len(monitor.records) == 2
    for epoch, record in enumerate(monitor.records):
        assert record["epoch"] == epoch
        assert record["equilibrium/steps"] == sum(seen[2 * epoch : 2 * epoch + 2]) / 8
        assert record["equilibrium/unconverged"] == record["adjoint/unconverged"] == 0
        assert 0 < record["equilibrium/worst_residual"] <= 1e-12
        assert record["adjoint/steps"] > 0
    for name in ("equilibrium/unconverged", "adjoint/steps", "certificate/certified"):
        assert float(trainer.callback_metrics[name]) == pytest.approx(monitor.records[-1][name], rel=1e-6)


def test_every_call_of_a_step_counts(tmp_path: Path) -> None:
    once, twice = EquilibriumMonitor(), EquilibriumMonitor()
    fit(Task(gaussian()), once, tmp_path, epochs=1)
    fit(Task(gaussian(), calls=2), twice, tmp_path, epochs=1)
    assert (once._equilibrium.solved, twice._equilibrium.solved) == (8, 16)


def test_hooks_are_gone_afterwards(tmp_path: Path) -> None:
    network = gaussian()
    fit(Task(network), EquilibriumMonitor(), tmp_path, epochs=1)
    assert not network.layer._forward_hooks


def test_failures_are_counted_and_stop_the_training(tmp_path: Path) -> None:
    monitor = EquilibriumMonitor(max_unconverged=0.5)
    trainer = fit(Task(gaussian(max_steps=2, on_failure="ignore")), monitor, tmp_path, epochs=5)
    assert monitor.records[0]["equilibrium/unconverged"] == 1
    assert trainer.current_epoch == 1
    assert monitor.stopped is not None and "100.0%" in monitor.stopped


def test_certificate_is_that_of_certify(tmp_path: Path) -> None:
    X, y = problem()
    network = gaussian()
    monitor = EquilibriumMonitor(X, y, theorem="radius")
    fit(Task(network), monitor, tmp_path, epochs=1)
    expected = wp.certify(network, X, y, theorem="radius")
    assert monitor.certificate is not None
    assert monitor.certificate.verdict is expected.verdict
    assert monitor.certificate.measured == expected.measured
    assert monitor.records[0]["verdict"] == expected.verdict.value


def test_certified_training_stops(tmp_path: Path) -> None:
    X, y = problem(8)
    network = gaussian(64)
    with torch.no_grad():
        y = network(X) + 1e-9 * y  # nearly fitted: the radius certificate holds at once
    monitor = EquilibriumMonitor(X, y, theorem="radius", stop=True)
    trainer = fit(Task(network, lr=1e-12), monitor, tmp_path, epochs=4)
    assert monitor.first == 0 and trainer.current_epoch == 1
    assert monitor.records[0]["certificate/certified"] == 1.0


def test_every_skips_epochs_and_keeps_the_last(tmp_path: Path) -> None:
    monitor = EquilibriumMonitor(every=2)
    fit(Task(gaussian()), monitor, tmp_path, epochs=3)
    assert ["verdict" in record for record in monitor.records] == [False, True, True]


@pytest.mark.parametrize("family", ["monotone", "dense", "opteq", "unknown"])
def test_other_networks(tmp_path: Path, family: str) -> None:
    made: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float64}
    cell = wp.nn.DenseCell(3, 6, weight=wp.nn.Spectral(0.9), **made)
    network = {
        "monotone": lambda: wp.MonotoneDEQ(3, 6, **made),
        "dense": lambda: wp.EquilibriumLayer(cell),
        "opteq": lambda: wp.OptEq(3, 6, **made),
        "unknown": lambda: wp.EquilibriumLayer(torch.nn.Bilinear(3, 3, 3, dtype=torch.float64)),
    }[family]()
    if family == "unknown":
        with torch.no_grad():
            network.cell.weight.mul_(0.01)
    monitor = EquilibriumMonitor()
    fit(Task(network), monitor, tmp_path, epochs=1)
    if family == "unknown":
        assert monitor.certificate is None and monitor.reason is not None and "no theorem" in monitor.reason
    else:
        assert monitor.certificate is not None and monitor.certificate.certified


def test_checkpoints_keep_the_records(tmp_path: Path) -> None:
    monitor = EquilibriumMonitor()
    trainer = fit(Task(gaussian()), monitor, tmp_path, epochs=2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = EquilibriumMonitor()
    fit(Task(gaussian()), again, tmp_path, epochs=3, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert again.records[:2] == monitor.records and len(again.records) == 3


def test_mistakes_are_explained(tmp_path: Path) -> None:
    X, _ = problem()
    with pytest.raises(wp.InvalidArgument, match="both X and y"):
        EquilibriumMonitor(X)
    with pytest.raises(wp.InvalidArgument, match="share"):
        EquilibriumMonitor(max_unconverged=2.0)
    with pytest.raises(wp.InvalidArgument, match="no EquilibriumLayer"):
        fit(Task(torch.nn.Linear(3, 1, dtype=torch.float64)), EquilibriumMonitor(), tmp_path)


def test_without_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellposed.lightning._MISSING", True)
    with pytest.raises(wp.errors.MissingPackage, match=r"wellposed\[lightning\]"):
        EquilibriumMonitor()


class Witness(L.Callback):
    """Keeps what `last_solution` and `last_adjoint` say after every step, on its own."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, list[Any]]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append({"equilibrium": [], "adjoint": []})

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        layer = pl_module.network.layer
        self.epochs[-1]["equilibrium"].append(layer.last_solution)
        self.epochs[-1]["adjoint"].append(layer.last_adjoint)


@pytest.mark.parametrize("epochs", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_what_is_logged_are_the_numbers_of_every_step(tmp_path: Path, epochs: int) -> None:
    """Five steps an epoch (40 epochs: 200) with batches of random size, of which some do not converge in 12 evaluations."""
    g = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(5):
        n = int(torch.randint(1, 7, (), generator=g))
        x = 10 ** (2 * torch.rand(n, 1, generator=g, dtype=torch.float64) - 1) * torch.randn(
            n, 3, generator=g, dtype=torch.float64
        )
        batches.append((x, torch.randn(n, generator=g, dtype=torch.float64)))
    network = gaussian(on_failure="ignore", max_steps=12)
    monitor, witness = EquilibriumMonitor(every=1000), Witness()
    trainer = quiet_trainer(tmp_path, epochs, monitor, witness)
    trainer.fit(Task(network, lr=1e-4), DataLoader(batches, batch_size=None, shuffle=True))  # type: ignore[arg-type]
    assert len(monitor.records) == len(witness.epochs) == epochs
    unconverged = 0.0
    for record, seen in zip(monitor.records, witness.epochs, strict=True):
        for name, solutions in seen.items():
            assert len(solutions) == 5
            converged = torch.cat([s.converged for s in solutions])
            steps, residual = torch.cat([s.num_steps for s in solutions]), torch.cat([s.residual for s in solutions])
            assert record[f"{name}/unconverged"] == int((~converged).sum()) / len(converged)
            assert record[f"{name}/steps"] == int(steps.sum()) / len(steps)
            assert record[f"{name}/worst_residual"] == float(residual.max())
            unconverged += record[f"{name}/unconverged"]
    assert unconverged > 0
    for name, value in monitor.records[-1].items():
        if "/" in name:
            assert float(trainer.callback_metrics[name]) == pytest.approx(value, rel=1e-6)  # Lightning keeps float32


TWO_PROCESSES = """
import json, logging, os, pathlib, sys, warnings
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset
import wellposed as wp
from wellposed.lightning import EquilibriumMonitor

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Task(L.LightningModule):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        options = {"dtype": torch.float64, "on_failure": "ignore", "max_steps": 5}
        self.network = wp.GaussianDEQ(3, 24, generator=generator, **options)

    def training_step(self, batch, index):
        return (self.network(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


g = torch.Generator().manual_seed(0)
X, y = torch.randn(8, 3, generator=g, dtype=torch.float64), torch.randn(8, generator=g, dtype=torch.float64)
mine = slice(int(os.environ.get("LOCAL_RANK", 0)), None, 2)
X[::2] = 0  # those of the first process: z = 0, found at once
monitor = EquilibriumMonitor(every=1000, max_unconverged=0.4)
quiet = {name: False for name in ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")}
two = {"accelerator": "cpu", "devices": 2, "strategy": "ddp_find_unused_parameters_true", "use_distributed_sampler": False}
trainer = L.Trainer(max_epochs=50, callbacks=[monitor], **two, **quiet)
trainer.fit(Task(), DataLoader(TensorDataset(X[mine], y[mine]), batch_size=4))
found = {"records": monitor.records, "stopped": monitor.stopped, "logged": float(trainer.callback_metrics["equilibrium/steps"])}
(pathlib.Path(sys.argv[1]) / f"{trainer.global_rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_have_the_numbers_of_both_and_stop_together(tmp_path: Path) -> None:
    """No solve of the second process converges, and all of the first do. If one of them stopped alone, the other would wait for
    it until the test is over."""
    (tmp_path / "script.py").write_text(TWO_PROCESSES)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second and len(first["records"]) == 1
    assert first["stopped"] == "50.0% of the solves of epoch 0 did not converge"
    record = first["records"][0]
    assert record["equilibrium/unconverged"] == 0.5 and record["equilibrium/worst_residual"] > 1e-6
    assert 1 <= record["equilibrium/steps"] <= 5 and first["logged"] == pytest.approx(record["equilibrium/steps"], rel=1e-6)
