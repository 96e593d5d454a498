"""Stored weights: what is written is read, and everything else is refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed.tasks import _store
from wellposed.tasks._store import ARCHITECTURES, INCLUDED

pytest.importorskip("safetensors", reason="safetensors is not installed")


def saved(folder: Path, name: str = "sudoku") -> torch.nn.Module:
    model = ARCHITECTURES[name].build()
    assert wp.tasks.save(model, name, folder, card={"measured": 0.5}) == folder / "config.json"
    return model


def change_card(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def store(folder: Path, content: bytes) -> None:
    """Puts other tensors in place, with a card that states their size and checksum."""
    import hashlib

    (folder / "model.safetensors").write_bytes(content)
    change_card(folder, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def store_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    import safetensors.torch

    tensors = safetensors.torch.load((folder / "model.safetensors").read_bytes())
    change(tensors)
    store(folder, safetensors.torch.save(tensors))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_is_saved_is_loaded(name: str, tmp_path: Path) -> None:
    model = saved(tmp_path, name)
    again = wp.tasks.load(name, tmp_path)
    assert not again.training and again.card["measured"] == 0.5
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_that_come_with_the_package_are_small_and_load(name: str) -> None:
    if not (INCLUDED / name / "config.json").exists():
        with pytest.raises(wp.CheckpointRefused, match=r"not part of this package. Make them .* by `python examples/\w+.py"):
            wp.tasks.load(name)
        return
    assert (INCLUDED / name / "model.safetensors").stat().st_size < 2 * 10**6
    card = wp.tasks.load(name).card
    assert card["license"] == "MIT" and card["data"] and card["steps"] > 0


def test_the_command_in_the_error_exists() -> None:
    for architecture in ARCHITECTURES.values():
        script = architecture.command.split()[1]
        assert (Path(__file__).parents[2] / script).is_file()


def test_weights_are_not_blamed_for_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(wp.errors.MissingPackage, match=r"^Stored weights need safetensors; install it with: pip install"):
        wp.tasks.load("chains")


def test_missing_weights_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(wp.CheckpointRefused, match=f"are not in {tmp_path}. Make them .* --save {tmp_path}`"):
        wp.tasks.load("chains", tmp_path)
    with pytest.raises(wp.InvalidArgument, match="Unknown task 'sudokus'; known are .* Did you mean 'sudoku'"):
        wp.tasks.load("sudokus")
    with pytest.raises(wp.InvalidArgument, match="Unknown task '../sudoku'"):
        wp.tasks.load("../sudoku", tmp_path)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"model_type": "other"}, "not of a wellposed network, version 1: it has model_type 'other'"),
        ({"version": 2}, "version 2"),
        ({"version": True}, "version True"),
        ({"architectures": ["mazes"]}, r"is of .'mazes'.; expected .'sudoku'."),
        ({"arguments": 3}, "has no table of arguments"),
        ({"arguments": {"width": 10**9}}, "another architecture: .'width': 1000000000"),
        ({"bytes": 10**12}, "states 1000000000000 bytes"),
        ({"bytes": True}, "states True bytes"),
        ({"sha256": None}, "bytes of tensors"),
        ({"sha256": "0" * 64}, "size or checksum"),
    ],
)
def test_a_changed_card_is_refused(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    saved(tmp_path)
    change_card(tmp_path, **entries)
    with pytest.raises(wp.CheckpointRefused, match=says):
        wp.tasks.load("sudoku", tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update({"head.weight": torch.zeros(1, 31)}), r"head.weight is torch.float32 \(1, 31\), expected"),
        (lambda t: t.update({"head.weight": t["head.weight"].double()}), "is torch.float64"),
        (lambda t: t.pop("head.bias"), "head.bias is nothing, expected"),
        (lambda t: t.update(more=torch.zeros(1)), r"more is torch.float32 \(1,\), expected nothing"),
        (lambda t: t["head.bias"].fill_(torch.nan), "head.bias that are not finite"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], says: str) -> None:
    saved(tmp_path)
    store_tensors(tmp_path, change)
    with pytest.raises(wp.CheckpointRefused, match=says):
        wp.tasks.load("sudoku", tmp_path)


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("harm").touch, ())


def test_a_pickle_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    store(tmp_path, pickle.dumps(Harm()).ljust(size, b"\0"))
    with pytest.raises(wp.CheckpointRefused, match="does not hold tensors"):
        wp.tasks.load("sudoku", tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_are_refused(tmp_path: Path, seed: int) -> None:
    saved(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    place = int(torch.randint(len(content), (), generator=torch.Generator().manual_seed(seed)))
    content[place] ^= 1 << (seed % 8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(wp.CheckpointRefused, match="size or checksum"):
        wp.tasks.load("sudoku", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(wp.CheckpointRefused, match="size or checksum"):
        wp.tasks.load("sudoku", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(wp.CheckpointRefused, match="is missing"):
        wp.tasks.load("sudoku", tmp_path)


def test_a_header_with_damage_and_a_fitting_checksum_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[0:8] = (2**40).to_bytes(8, "little")
    store(tmp_path, bytes(content))
    with pytest.raises(wp.CheckpointRefused, match="does not hold tensors"):
        wp.tasks.load("sudoku", tmp_path)


def test_a_changed_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    wider = {"sudoku": _store.Architecture("wellposed.tasks.puzzles:PuzzleSolver.sudoku", {"width": 40}, (), "python x")}
    monkeypatch.setattr(_store, "ARCHITECTURES", wider)
    with pytest.raises(wp.CheckpointRefused, match="another architecture: .'width': 32.; 'sudoku' has .'width': 40"):
        wp.tasks.load("sudoku", tmp_path)


def test_another_network_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(wp.InvalidArgument, match="not the one of 'chains'"):
        wp.tasks.save(torch.nn.Linear(2, 2), "chains", tmp_path)
    with pytest.raises(wp.InvalidType, match="got dict"):
        wp.tasks.save({}, "chains", tmp_path)
    with pytest.raises(wp.InvalidArgument, match="config.json would have"):
        wp.tasks.save(ARCHITECTURES["chains"].build(), "chains", tmp_path, card={"text": "x" * 10**5})
    assert not list(tmp_path.iterdir())


def test_names_folders_and_cards_of_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(wp.errors.InvalidType, match="name of a task is a text.*got list"):
        wp.tasks.load(["chains"])  # type: ignore[arg-type]
    with pytest.raises(wp.errors.InvalidType, match="must be a path; got int"):
        wp.tasks.load("sudoku", 5)  # type: ignore[arg-type]
    model = saved(tmp_path)
    for value in (float("nan"), object(), {(1, 2): 3}):
        with pytest.raises(wp.errors.InvalidArgument, match="can hold finite numbers"):
            wp.tasks.save(model, "sudoku", tmp_path, card={"value": value})
    change_card(tmp_path, version=True)
    with pytest.raises(wp.CheckpointRefused, match="version 1: it has .*version True"):
        wp.tasks.load("sudoku", tmp_path)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({"sha256": "0"}, "A card cannot have the key 'sha256': give it a text other than model_type"),
        ({1: 2}, "A card cannot have the key 1:"),
        ([1], "A card is a table of texts and simple values; got list"),
    ],
)
def test_a_card_cannot_replace_what_the_library_writes(card: Any, message: str, tmp_path: Path) -> None:
    model = wp.tasks.load("chains")
    with pytest.raises(wp.errors.WellposedError, match=message):
        wp.tasks.save(model, "chains", tmp_path / "folder", card=card)
    assert not (tmp_path / "folder").exists()
    wp.tasks.save(model, "chains", tmp_path / "folder", card={"folder": "mine", "tensors": 3})
    assert wp.tasks.load("chains", tmp_path / "folder").card["tensors"] == 3
