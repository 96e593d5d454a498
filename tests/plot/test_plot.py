"""Pictures draw what the record says, from plain Python, and never hide what is not known."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import matplotlib
import numpy as np
import pytest

import wellposed as wp
from wellposed import plot
from wellposed.landscape import CellStatus, Surface
from wellposed.landscape.trajectories import Projection
from wellposed.plot._files import rendered


def made(bad: CellStatus | None = CellStatus.NOT_UNIQUE) -> Surface:
    axes = (np.linspace(-1, 1, 7), np.linspace(-2, 2, 5))
    a, b = np.meshgrid(*axes, indexing="ij")
    values, status = 1 + a**2 + b**2, np.full(a.shape, CellStatus.VALID, np.int8)
    if bad is not None:
        values[0, :2], status[0, :2] = np.nan, bad
    return Surface(axes, values, status, np.zeros(a.shape), np.zeros(a.shape))


def stored(record: Any) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(record.to_dict()))


def drawn(figure: Any) -> None:
    figure.canvas.draw()


def legend(figure: Any) -> list[str]:
    legends = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend())]
    return [text.get_text() for one in legends for text in one.get_texts()]


def pixels(record: Surface, *at: tuple[float, float]) -> list[np.ndarray]:
    """The colours of a contour picture at some places."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = plot.contour(record)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    places = figure.axes[0].transData.transform(at)
    image = np.asarray(canvas.buffer_rgba())[..., :3] / 255
    return [image[int(figure.bbox.height - y), int(x)] for x, y in places]


@pytest.mark.parametrize("log", [True, False])
def test_contour_marks_what_is_not_valid(log: bool) -> None:
    figure = plot.contour([stored(made()), made(None)], names=["a", "b"], log=log)
    drawn(figure)
    assert legend(figure) == ["several equilibria", "centre"]
    hatched = [c for c in figure.axes[0].collections if c.get_hatch()]
    assert len(hatched) == 1 and len(hatched[0].get_paths()) == 2  # as many rectangles as such points
    assert not [c for c in figure.axes[1].collections if c.get_hatch()]


def test_contour_does_not_fill_what_is_not_known() -> None:
    place = (-0.97, -1.95)
    (grey,) = pixels(made(CellStatus.NOT_CONVERGED), place)
    assert np.ptp(grey) < 0.02  # grey or a hatch on it, no colour of the scale
    assert np.ptp(pixels(made(None), place)[0]) > 0.1


def test_no_grey_but_that_of_the_legend() -> None:
    """A known point beside one without a value keeps its colour up to halfway between them: no staircase without a name."""
    record, place = made(CellStatus.NOT_CONVERGED), (-0.81, -1.7)  # the rectangle of the point (-2/3, -2) begins at -5/6
    here, there = pixels(record, place, (-0.67, -1.98))
    assert np.ptp(here) > 0.1
    np.testing.assert_array_equal(here, there)  # the colour of its contour


def test_every_mark_is_in_the_legend_and_reasons_look_different() -> None:
    record = made(None)
    for i, status in enumerate(s for s in CellStatus if s is not CellStatus.VALID):
        record.status[i, 0] = status
        if status not in (CellStatus.UNCHECKED, CellStatus.NOT_PROVED):
            record.values[i, 0] = np.nan
    figure = plot.contour(record, path=[[0.0, 0.0], [0.5, 1.0]])
    drawn(figure)
    labels = legend(figure)
    assert labels[-2:] == ["training path", "centre"] and len(set(labels)) == len(labels) == 9
    assert {"equilibrium found, not proved", "failed to converge", "ill posed: no equilibrium"} <= set(labels)
    used = {c.get_hatch() for c in figure.axes[0].collections if c.get_hatch()}
    shown = {h.get_hatch() for h in figure.legends[0].legend_handles if hasattr(h, "get_hatch") and h.get_hatch()}
    assert used == shown and len(used) == 6  # all but what was not evaluated, which is plain grey


def test_a_value_that_is_not_proved_is_drawn() -> None:
    record = made(None)
    record.status[:] = CellStatus.NOT_PROVED
    colors = pixels(record, *((a, b) for a in (-0.8, -0.79, -0.78) for b in (-1.9, -1.88, -1.86)))
    assert max(np.ptp(color) for color in colors) > 0.1  # between the dots


def test_contour_of_nothing_known_and_of_a_constant() -> None:
    record = made()
    record.values[:], record.status[:] = np.nan, CellStatus.ILL_POSED
    figure = plot.contour(record)
    drawn(figure)
    assert legend(figure) == ["ill posed: no equilibrium", "centre"]
    flat = made(None)
    flat.values[:] = 2.0
    drawn(plot.contour(flat, path=[[0.0, 0.0], [0.5, 1.0]]))


def test_surface_leaves_holes() -> None:
    figure = plot.surface(stored(made()), title="t", log=True, clip=4.0)
    drawn(figure)
    assert legend(figure) == ["several equilibria"]
    whole = plot.surface(made(None))
    drawn(whole)
    faces = [len(f.axes[0].collections[0].get_facecolor()) for f in (figure, whole)]
    assert faces[0] == 24 - 2 and faces[1] == 24  # two of the 6 x 4 faces have a corner that is not known


def test_line_shades_what_is_not_valid() -> None:
    values, status = np.array([3.0, 1.0, np.nan]), np.array([1, 1, CellStatus.NOT_CONVERGED], np.int8)
    one = Surface((np.array([-1.0, 0.0, 1.0]),), values, status, np.zeros(3), np.zeros(3))
    figure = plot.line({"model": stored(one)}, log=True)
    drawn(figure)
    assert "model failed to converge" in legend(figure) and len(figure.axes[0].patches) == 1
    one.values[0], one.status[0] = 2.0, CellStatus.NOT_PROVED
    both = plot.line(one)
    assert legend(both) == ["failed to converge", "equilibrium found, not proved"]
    assert len({patch.get_hatch() for patch in both.axes[0].patches}) == 2
    drawn(plot.line(one))
    with pytest.raises(wp.InvalidArgument, match="one direction"):
        plot.line({"x": {**stored(made()), "coordinates": [[0.0, 1.0]]}})


def projection(k: int = 2) -> Projection:
    rng = np.random.default_rng(0)
    points = [rng.normal(size=(6, 4, k)), rng.normal(size=(5, 4, k))]
    points[0][4:, 2] = np.nan
    residuals = [10.0 ** -np.arange(6)[:, None] * np.ones(4), 10.0 ** -np.arange(5)[:, None] * np.ones(4)]
    residuals[0][4:, 2] = np.nan
    return Projection(points, residuals, np.array([0.7, 0.2])[:k], ["small", "unit"])


def test_trajectories_draw_every_sample() -> None:
    p = projection()
    figure = plot.trajectories(stored(p), labels=[0, 1, 1, 3])
    drawn(figure)
    lines = figure.axes[0].get_lines()
    np.testing.assert_allclose(lines[4].get_xydata(), p.points[0][:4, 2])  # the third sample, only while it moved
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["0", "1", "3"]
    assert [ax.get_title() for ax in figure.axes[:2]] == ["small", "unit"]
    with pytest.raises(wp.InvalidArgument, match="one class for each of 4"):
        plot.trajectories(p, labels=[0])
    with pytest.raises(wp.InvalidArgument, match="two components"):
        plot.trajectories(projection(1))


def test_residual_curves() -> None:
    p = projection()
    figure = plot.residuals(stored(p))
    drawn(figure)
    assert legend(figure) == ["small", "unit"]
    median = next(line for line in figure.axes[0].get_lines() if line.get_label() == "small")
    np.testing.assert_allclose(median.get_ydata(), 10.0 ** -np.arange(4))  # while all samples take part
    drawn(plot.residuals(p.residuals, names=["a", "b"]))


@pytest.mark.parametrize("kind", ["descent", "flow"])
def test_losses_against_certified(kind: str) -> None:
    rows = [{"step": k, "time": 0.5 * k, "loss": 4.0 * 0.5**k} for k in range(5)]
    record = {"kind": kind, "rows": rows, "certificate": {"rate": 0.9}}
    figure = plot.losses({"run": record, "bare": {**record, "certificate": None}})
    drawn(figure)
    curves = {line.get_label(): line for line in figure.axes[0].get_lines()}
    k = np.arange(5)
    expected = 4.0 * (0.9 ** (2 * k) if kind == "descent" else np.exp(-2 * 0.9 * 0.5 * k))
    np.testing.assert_allclose(curves["run, certified bound"].get_ydata(), expected)
    np.testing.assert_allclose(curves["run, measured"].get_ydata(), 4.0 * 0.5**k)
    assert "bare, certified bound" not in curves
    assert "loss, certified bound" in legend(plot.losses({**record, "certificate": None}, rates={"loss": 0.5}))


def test_a_real_history() -> None:
    import torch

    model = wp.SkipDEQ(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    history = wp.descend(model, torch.eye(2).double(), torch.ones(2).double(), step_size=1e-3, steps=3)
    drawn(plot.losses(history))
    drawn(plot.losses(json.loads(history.to_json())))


def test_spectrum_counts_what_is_not_positive() -> None:
    figure = plot.spectrum({"K": [1.0, 10.0, -1e-3], "G": np.array([2.0, 1.0])}, lower_bounds={"G": 0.5})
    drawn(figure)
    assert legend(figure) == ["K (1 not positive)", "G", "G, proved lower bound of the least"]
    np.testing.assert_allclose(figure.axes[0].get_lines()[0].get_ydata(), [10.0, 1.0])
    with pytest.raises(wp.InvalidArgument, match="eigenvalues of K"):
        plot.spectrum({"K": np.eye(2)})


def test_bad_records() -> None:
    with pytest.raises(wp.InvalidType, match="as its to_dict"):
        plot.contour(3)
    with pytest.raises(wp.InvalidArgument, match="has no coordinates"):
        plot.contour({"values": []})
    with pytest.raises(wp.InvalidArgument, match="positive losses"):
        negative = made()
        negative.values -= 10
        plot.contour(negative, log=True)
    with pytest.raises(wp.InvalidArgument, match="no surface to draw"):
        plot.contour([])
    with pytest.raises(wp.InvalidArgument, match="lies on one surface"):
        plot.contour([made(), made()], path=[[0, 0]])


def test_a_sentence_says_that_matplotlib_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(wp.errors.MissingPackage, match=r"'\.\[plot\]' in the source tree"):
        plot.spectrum([1.0])


@pytest.mark.slow
def test_matplotlib_is_only_needed_to_draw() -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import wellposed as wp\n"
        "try:\n    wp.plot.spectrum([1.0])\n"
        "except wp.errors.MissingPackage as error:\n    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install -c constraints.txt '.[plot]'" in out.stdout


def test_files_for_papers_hold_fonts_that_journals_take() -> None:
    """TrueType in the PDF, not Type 3; the settings of the caller stay."""
    before = dict(matplotlib.rcParams)
    files = rendered(plot.contour(made(), path=[[0.0, 0.0], [0.5, 1.0]]))
    fonts = set(re.findall(rb"/Subtype /(Type\w+|CIDFontType\w+)", files[".pdf"]))
    assert b"CIDFontType2" in fonts and b"Type3" not in fonts
    assert b"<text" not in files[".svg"]  # shapes: it looks the same without the font
    assert files == rendered(plot.contour(made(), path=[[0.0, 0.0], [0.5, 1.0]]))
    assert dict(matplotlib.rcParams) == before
