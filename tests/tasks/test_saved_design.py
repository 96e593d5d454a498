"""`tasks.save` refuses every network that `load` would not give back."""

from __future__ import annotations

import hashlib
import json
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.tasks._store import ARCHITECTURES
from wellposed.tasks.puzzles import SudokuCell

pytest.importorskip("safetensors", reason="safetensors is not installed")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Other(SudokuCell):
    """The same weights, another map."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(z, x))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def changed(name: str, change: Callable[[Any], Any]) -> Any:
    model = ARCHITECTURES[name].build()
    change(model)
    return model


def by_hand(model: Any) -> None:
    model.forward = types.MethodType(lambda self, x: type(self).forward(self, 2 * x), model)


def another_head(model: Any) -> None:
    model.head = Doubled(64, 20)


def nan(model: Any) -> None:
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan


def sharper(model: Any) -> None:
    model.layer.cell.operator.kernel.mul_(1.001)


REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "bound": ("deblurring", lambda: wp.tasks.deblurrer(40, bound=0.95), r"network.bound is 0.95, expected 0.5\. Make it by"),
    "sigma": ("deblurring", lambda: wp.tasks.deblurrer(40, sigma=1.5), r"kernel, which is not trained, differs by up to 0.\d+"),
    "kernel": ("deblurring", lambda: changed("deblurring", sharper), "kernel, which is not trained, differs by up to 0.0"),
    "rtol": ("deblurring", lambda: wp.tasks.deblurrer(40, rtol=1e-6), "layer.rtol is 1e-06, expected 0.001"),
    "max_steps": ("deblurring", lambda: wp.tasks.deblurrer(40, max_steps=500), "layer.max_steps is 500, expected 60"),
    "condition": (
        "chains",
        lambda: wp.tasks.NodeClassifier(20, 64, 20, condition="perron_frobenius"),
        "layer.cell.condition is 'perron_frobenius', expected 'norm'",
    ),
    "eps": ("chains", lambda: changed("chains", lambda m: setattr(m.norm, "eps", 1e-5)), "norm.eps is 1e-05, expected 1e-12"),
    "head": ("chains", lambda: changed("chains", another_head), "its part head is Doubled, expected Linear"),
    "cell": ("sudoku", lambda: wp.tasks.PuzzleSolver(Other(32)), "its part layer.cell is Other, expected SudokuCell"),
    "steps": ("mazes", lambda: wp.tasks.PuzzleSolver.mazes(gradient_steps=8), "gradient_steps is 8, expected 16"),
    "forward": ("chains", lambda: changed("chains", by_hand), "forward is set on the object, expected that of its class"),
    "hook": (
        "mazes",
        lambda: changed("mazes", lambda m: m.head.register_forward_hook(lambda *a: 2 * a[2])),
        "its part head with a forward hook is changed by it, expected no hook",
    ),
    "solver": (
        "mazes",
        lambda: changed("mazes", lambda m: setattr(m.layer, "solver", wp.Picard(damping=0.5))),
        r"layer.solver is Picard\(damping=0.5\), expected Picard\(damping=1.0\)",
    ),
    "nan": ("chains", lambda: changed("chains", nan), "head.weight that are not finite"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_would_come_back_as_another_is_refused(case: str, tmp_path: Path) -> None:
    name, make, says = REFUSED[case]
    with pytest.raises(wp.InvalidArgument, match=says):
        wp.tasks.save(make(), name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_private_change_shows_in_the_output(tmp_path: Path) -> None:
    """Compared are outputs too: here only a private setting of a convolution differs."""
    model = ARCHITECTURES["mazes"].build()
    convolution: Any = model.layer.cell.inner  # type: ignore[union-attr]
    convolution._conv_forward = types.MethodType(
        lambda self, x, w, b: 2 * nn.functional.conv2d(x, w, b, padding=1), convolution
    )
    with pytest.raises(wp.InvalidArgument, match="not the one of 'mazes'"):
        wp.tasks.save(model, "mazes", tmp_path)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_used_network_of_the_name_is_saved_and_left_as_it_is(name: str, training: bool, tmp_path: Path) -> None:
    model: Any = ARCHITECTURES[name].build().train(training)
    model.layer.on_failure = "ignore"
    model.note = "of a user"
    x = torch.rand(ARCHITECTURES[name].shape, generator=draw())
    model(x).sum().backward()
    before = model.layer.last_solution
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wp.tasks.save(model, name, tmp_path)
    assert model.training is training and model.layer.last_solution is before
    again: Any = wp.tasks.load(name, tmp_path)
    model.eval()
    model.layer.on_failure = again.layer.on_failure = "ignore"
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    wp.tasks.save(again, name, tmp_path)


def test_a_kernel_of_a_stranger_is_refused(tmp_path: Path) -> None:
    import safetensors.torch

    wp.tasks.save(ARCHITECTURES["deblurring"].build(), "deblurring", tmp_path)
    tensors = safetensors.torch.load((tmp_path / "model.safetensors").read_bytes())
    tensors["layer.cell.operator.kernel"] *= 10
    content = safetensors.torch.save(tensors)
    (tmp_path / "model.safetensors").write_bytes(content)
    card = json.loads((tmp_path / "config.json").read_text())
    card |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "config.json").write_text(json.dumps(card))
    with pytest.raises(wp.CheckpointRefused, match="kernel, which is not trained, differs by up to"):
        wp.tasks.load("deblurring", tmp_path)


def test_a_network_with_nan_is_not_written(tmp_path: Path) -> None:
    model = wp.GaussianDEQ(4, 8)
    with torch.no_grad():
        model.W[0, 0] = torch.inf
    with pytest.raises(wp.InvalidArgument, match="The network has numbers in W that are not finite"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
