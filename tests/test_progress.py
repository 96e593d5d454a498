"""The progress display: lines now and then, a bar on a terminal, nothing if not wanted; always on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed import _progress
from wellposed._progress import ProgressDisplay, announced, progress_display
from wellposed.linalg.verified_cholesky import norm_is_below, norm_upper_by_test


@pytest.mark.parametrize("rich", [True, False])
def test_lines_where_stderr_is_not_a_terminal(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress_display("work", 4, line="{title}: {percent} % {text}") as display:
        display.update(1, "too early for the next line")
        display.advance(2)
        display.update(4, lambda: "the end")
    assert capsys.readouterr() == ("", "work: 100 % the end\n")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take a pipe for a terminal
    with progress_display("work", bar="{done:.0f}/{total:.0f} {text}") as display:
        display.update(1, total=7)
        display.update(7, "[the end]")
    shown = capsys.readouterr()
    assert shown.out == "" and "work" in shown.err and "7/7 [the end]" in shown.err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_heading_is_written_once_and_text_stands_alone(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        pytest.importorskip("rich")
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(_progress, "SECONDS_BETWEEN_UPDATES", -1.0)
    with progress_display("work", line="{text}", bar=None, heading="[names]") as display:
        display.update(1, "one")
        display.update(2, "two")
    shown = capsys.readouterr().err
    assert shown.count("[names]") == 1 and shown.index("[names]") < shown.index("two") and "work" not in shown
    assert terminal or shown == "[names]\none\ntwo\n"


def test_nothing_if_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display("work", 2, show=False) as display:
        display.update(2, "the end")
    assert capsys.readouterr() == ("", "")


def test_a_text_is_made_only_if_it_is_shown() -> None:
    shown: list[tuple[float, float | None, str]] = []
    display = ProgressDisplay(3, 60.0, lambda *line: shown.append(line))
    for done in range(3):
        display.update(done, lambda: pytest.fail("nothing is shown yet"))
    display.update(3, lambda: "end")
    ProgressDisplay(3, 60.0, lambda *line: shown.append(line), ends=False).update(3, "end")
    assert shown == [(3, 3, "end")]


class Clock:
    """Stands for `threading.Timer`: rings at once if the work is said to be long."""

    long = True

    def __init__(self, seconds: float, ring: Callable[[], None]) -> None:
        assert seconds == 2.0
        self.ring, self.daemon = ring, False

    def start(self) -> None:
        assert self.daemon  # a program that ends does not wait for it
        if self.long:
            self.ring()

    def cancel(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[Clock]:
    monkeypatch.delenv("WELLPOSED_QUIET", raising=False)
    monkeypatch.setattr(_progress, "LITTLE_WORK", 0.0)
    kind: type[Clock] = type("Patched", (Clock,), {})
    monkeypatch.setattr(_progress.threading, "Timer", kind)
    return kind


def wide() -> tuple[wp.GaussianDEQ, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    return wp.GaussianDEQ(3, 30, dtype=torch.float64, generator=generator), X, torch.ones(4, dtype=torch.float64)


LONG: dict[str, tuple[Callable[[], Any], str]] = {
    "first pass": (lambda: wide()[0](wide()[1]), "bounding the singular values of a 30 x 30 matrix"),
    "test": (lambda: norm_is_below(torch.eye(5, 3), 2.0), "testing the norm of a 5 x 3 matrix"),
    "bound": (lambda: norm_upper_by_test(torch.eye(5, 3)), "bounding the norm of a 5 x 3 matrix"),
    "kernel": (lambda: wp.tangent_kernel(*wide()[:2]), "computing the tangent kernel of GaussianDEQ at 4 inputs"),
    "norm": (lambda: wp.linalg.spectral_norm_upper(torch.eye(5, 3)), "bounding the singular values of a 5 x 3 matrix"),
    "eigenvalue": (lambda: wp.linalg.least_eigenvalue_lower(torch.eye(5)), "bounding the least eigenvalue of a 5 x 5 matrix"),
    "certify": (lambda: wp.certify(*wide()), "certifying GaussianDEQ by theorem='auto'"),
    "layer": (
        lambda: wp.certify(wp.EquilibriumLayer(torch.nn.Bilinear(2, 2, 2)), torch.zeros(1, 2)),
        "certifying EquilibriumLayer by theorem='auto'",
    ),
}


@pytest.mark.parametrize("what", LONG)
def test_long_work_says_what_it_is_and_short_work_is_silent(
    what: str, clock: type[Clock], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, line = LONG[what]
    run()
    out, err = capsys.readouterr()
    assert out == "" and f"wellposed: {line} ...\n" in err
    clock.long = False
    run()
    assert capsys.readouterr() == ("", "")
    clock.long = True
    monkeypatch.setenv("WELLPOSED_QUIET", "1")
    run()
    assert capsys.readouterr() == ("", "")


def test_a_real_clock_is_stopped_at_the_end_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WELLPOSED_QUIET", raising=False)
    before = set(_progress.threading.enumerate())
    with announced("little work", work=1.0):
        assert set(_progress.threading.enumerate()) <= before
    with pytest.raises(KeyError), announced("work"):
        new = set(_progress.threading.enumerate()) - before
        assert len(new) == 1
        raise KeyError
    for thread in new:
        thread.join(timeout=60)
        assert not thread.is_alive()
