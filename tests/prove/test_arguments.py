"""Arguments of `prove`, `verify` and of a proof that are nothing of the kind end in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from exact_descent import problem


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[wp.Proof, Path]:
    proof = wp.prove(*problem(2, 16, 4, 1), max_steps=150)
    assert proof.verdict is wp.Verdict.CERTIFIED
    return proof, proof.save(tmp_path_factory.mktemp("proof"))


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "20", None])
def test_verify_computes_at_least_one_step_again(steps: Any, stored: tuple[wp.Proof, Path]) -> None:
    with pytest.raises(wp.InvalidArgument, match="'steps' parameter of verify must be an integer of at least 1"):
        wp.verify(stored[1], steps=steps)


@pytest.mark.parametrize("folder", [3, None, ["a"]])
def test_a_folder_is_a_path(folder: Any, stored: tuple[wp.Proof, Path]) -> None:
    for called in (wp.verify, wp.Proof.load, stored[0].save):
        with pytest.raises(wp.InvalidType, match=r"The folder of a proof must be a path; got (int|NoneType|list)\.$"):
            called(folder)


def test_only_proofs_and_folders_are_continued() -> None:
    with pytest.raises(wp.InvalidType, match=r"resume must be a proof or the folder of one; got int\.$"):
        wp.prove(*problem(2, 16, 4, 1), resume=3)


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", torch.tensor(1)])
def test_a_bound_is_about_a_step(step: Any, stored: tuple[wp.Proof, Path]) -> None:
    with pytest.raises(wp.InvalidArgument, match="step must be an integer of at least 0"):
        stored[0].loss_bound(step)


def test_an_undecided_proof_bounds_no_later_loss() -> None:
    proof = wp.prove(*problem(2, 16, 4, 1), max_steps=2)
    assert proof.loss_bound(1) > 0
    with pytest.raises(wp.InvalidArgument, match=r"undecided, so step must be from 0 to 1; got 2\."):
        proof.loss_bound(2)


def test_the_families_with_proofs_are_named() -> None:
    _, X, y = problem(2, 16, 4, 1)
    with pytest.raises(wp.InvalidType, match=r"there are proofs for GaussianDEQ, SkipDEQ and ImplicitOnlyDEQ; got Linear\.$"):
        wp.prove(torch.nn.Linear(4, 1).double(), X, y)


def test_a_proof_is_not_blamed_for_a_package_that_is_missing(
    stored: tuple[wp.Proof, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(wp.errors.MissingPackage, match=r"^Storing proofs needs safetensors: pip install"):
        wp.Proof.load(stored[1])
