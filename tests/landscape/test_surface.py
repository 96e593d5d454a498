"""Surfaces: true values, honest marks, and a model that comes back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import wellposed as wp
from syncs import synced
from wellposed.errors import IllPosed
from wellposed.landscape import CellStatus, Surface, filter_normalized, random_direction, surface

mse = nn.functional.mse_loss


def data(n: int = 6, d: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator).double(), torch.randn(n, generator=generator).double()


def gaussian(width: int = 10, **options: Any) -> wp.GaussianDEQ:
    return wp.GaussianDEQ(3, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64, **options)


class Bistable(nn.Module):
    """z = tanh(w z + x) with one parameter w: three equilibria for w > 1 and small x, one for w <= 1."""

    def __init__(self, w: float, **options: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w], dtype=torch.float64))
        self.layer = wp.EquilibriumLayer(_TanhCell(self), wp.Picard(), max_steps=2000, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).squeeze(1)


class _TanhCell(nn.Module):
    def __init__(self, owner: Bistable) -> None:
        super().__init__()
        self.owner = (owner,)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.owner[0].w * z + x)


class Quadratic(nn.Module):
    """|theta|^2: a landscape known by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([[1.0, -2.0]], dtype=torch.float64))

    def forward(self, X: Tensor) -> Tensor:
        return (self.theta**2).sum().expand(len(X))


def test_explicit_module_on_a_grid_by_hand() -> None:
    X, _ = data()
    directions = [{"theta": torch.tensor([[1.0, 0.0]]).double()}, {"theta": torch.tensor([[0.0, 2.0]]).double()}]
    s = surface(Quadratic(), lambda p, y: p.mean(), X, None, directions=directions, num=(5, 4), radius=(1.0, 0.5))
    a, b = np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-0.5, 0.5, 4), indexing="ij")
    np.testing.assert_allclose(s.values, (1 + a) ** 2 + (-2 + 2 * b) ** 2, rtol=1e-14)
    assert s.valid.all() and (s.num_steps == 0).all()


def test_default_is_a_grid_of_51() -> None:
    s = surface(Quadratic(), lambda p, y: p.mean(), torch.zeros(1, 1), None)
    assert s.values.shape == (51, 51)
    assert s.values[25, 25] == 5.0


@pytest.mark.parametrize("warm", [True, False])
def test_values_are_those_of_the_model_itself(warm: bool) -> None:
    X, y = data()
    model = gaussian()
    s = surface(model, mse, X, y, num=(4, 3), radius=0.1, warm_start=warm)
    generator = torch.Generator().manual_seed(0)
    directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    for i, j in np.ndindex(4, 3):
        other = gaussian()
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                a, b = s.coordinates[0][i], s.coordinates[1][j]
                parameter += a * directions[0][name] + b * directions[1][name]
        assert s.values[i, j] == pytest.approx(mse(other(X), y).item(), rel=1e-10)


def test_warm_starts_save_evaluations() -> None:
    X, y = data(20)
    model = gaussian(30)
    warm, cold = (surface(model, mse, X, y, num=(2, 16), radius=0.05, warm_start=w) for w in (True, False))
    np.testing.assert_allclose(warm.values, cold.values, rtol=1e-9)
    assert warm.num_steps.sum() < 0.8 * cold.num_steps.sum()


def test_a_line_has_one_direction() -> None:
    X, y = data()
    model = gaussian()
    s = surface(model, mse, X, y, directions=[random_direction(model)], num=7, radius=0.01)
    assert s.values.shape == (7,)
    # equilibria to 1e-12 of a map that contracts by 0.88, found from different starts
    assert s.values[3] == pytest.approx(mse(model(X), y).item(), rel=1e-10)


def test_lost_contraction_is_marked() -> None:
    X, y = data()
    model = gaussian()
    ray = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    ray["W"] = model.W.detach().clone()  # a = 0 is W, a = 5 is 6 W
    s = surface(model, mse, X, y, directions=[ray], num=11, radius=5.0)
    norm = np.linalg.norm(model.W.detach().numpy(), 2)
    expected = np.abs(1 + s.coordinates[0]) * norm < 1
    assert 0 < expected.sum() < 11
    np.testing.assert_array_equal(s.valid, expected)
    found = s.status == CellStatus.NOT_PROVED  # beyond the bound nothing is proved, and much is found all the same
    assert found.any() and set(s.status[~expected]) <= {CellStatus.NOT_PROVED, CellStatus.NOT_CONVERGED, CellStatus.NOT_UNIQUE}
    np.testing.assert_array_equal(np.isfinite(s.values), expected | found)
    model.on_ill_posed = "ignore"
    origin = model.W.detach().clone()
    for a, value in zip(s.coordinates[0][found], s.values[found], strict=True):
        with torch.no_grad():
            model.W.copy_((1 + a) * origin)
        assert value == pytest.approx(mse(model(X), y).item(), rel=1e-6)  # two solves, each to the tolerance of the layer


@pytest.mark.parametrize("policy", ["warn", "raise"])
def test_lost_contraction_is_marked_under_both_policies(policy: str) -> None:
    X, y = data()
    model = gaussian(on_ill_posed=policy, max_steps=50)
    ray = {name: torch.zeros_like(p) for name, p in model.named_parameters()} | {"W": model.W.detach().clone()}
    s = surface(model, mse, X, y, directions=[ray], num=2, radius=50.0)
    assert not s.valid.any() and (s.status != CellStatus.ILL_POSED).all()
    assert model.on_ill_posed == policy


def test_a_model_that_refuses_is_ill_posed() -> None:
    class Refusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise IllPosed("There is no equilibrium.")

    s = surface(Refusing(), mse, torch.ones(2, 1), torch.ones(2), directions=[{"w": torch.ones(1)}], num=2)
    assert (s.status == CellStatus.ILL_POSED).all() and np.isnan(s.values).all()


def test_equilibria_that_are_not_unique_are_marked() -> None:
    x = torch.linspace(-0.05, 0.05, 12, dtype=torch.float64).unsqueeze(1) + 1e-3
    model = Bistable(1.0)
    s = surface(model, lambda p, y: p.square().mean(), x, None, directions=[{"w": torch.ones(1).double()}], num=9, radius=0.8)
    w = 1 + s.coordinates[0]
    assert (s.status[w > 1.15] == CellStatus.NOT_UNIQUE).all()
    assert (s.failed[w > 1.15] > 0).all() and (s.failed[w > 1.15] <= 1).all()
    assert np.isnan(s.values[w > 1.15]).all()
    assert s.valid[w < 0.95].all()


def test_unchecked_is_not_valid() -> None:
    x = torch.full((4, 1), 0.01, dtype=torch.float64)
    line = [{"w": torch.ones(1).double()}]
    s = surface(Bistable(1.0), lambda p, y: p.mean(), x, None, directions=line, num=3, radius=0.5, num_starts=0)
    assert (s.status[s.coordinates[0] != 0] == CellStatus.UNCHECKED).all()
    assert not s.valid.any()


def test_probes_check_a_part_of_the_samples() -> None:
    x = torch.full((200, 1), 0.01, dtype=torch.float64)
    line = [{"w": torch.ones(1).double()}]
    loss = lambda p, y: p.mean()  # noqa: E731
    parts, whole = (surface(Bistable(1.5), loss, x, None, directions=line, num=2, radius=0.2, probes=k) for k in (20, None))
    assert (parts.status == CellStatus.NOT_UNIQUE).all() and (whole.status == CellStatus.NOT_UNIQUE).all()
    proper = surface(Bistable(0.5), loss, x, None, directions=line, num=3, radius=0.2, probes=20)
    full = surface(Bistable(0.5), loss, x, None, directions=line, num=3, radius=0.2, probes=None)
    assert proper.valid.all()
    assert proper.num_steps.sum() < full.num_steps.sum()


def test_a_sample_that_strayed_once_is_probed_at_all_points_that_follow() -> None:
    x = torch.full((400, 1), 5.0, dtype=torch.float64)
    x[7] = 1e-3  # the only one with several equilibria
    line = [{"w": torch.ones(1).double()}]
    s = surface(Bistable(1.5), lambda p, y: p.mean(), x, None, directions=line, num=200, radius=0.01, probes=8)
    marked = np.flatnonzero(s.status == CellStatus.NOT_UNIQUE)
    assert marked.size
    # with 8 of 400 samples drawn anew at each point it would be found at 1 of 100 points (half of its starts go elsewhere)
    assert marked.size > 0.25 * (200 - marked[0])


def test_a_solve_that_fails_is_marked() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: 2 * z + x, wp.Picard(), max_steps=5)
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64, bias=False), layer)
    s = surface(model, mse, torch.ones(3, 2).double(), torch.ones(3, 2).double(), num=2)
    assert (s.status == CellStatus.NOT_CONVERGED).all() and np.isnan(s.values).all()


def test_the_part_of_samples_to_blame_is_recorded() -> None:
    layer = wp.EquilibriumLayer(lambda z, x: torch.where(x > 0, 2 * z + x, 0.5 * z + x), wp.Picard(), max_steps=60, rtol=1e-6)
    model = nn.Sequential(nn.Linear(1, 1, dtype=torch.float64, bias=False), layer)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    X = torch.tensor([[1.0], [-1.0], [-2.0], [-3.0]], dtype=torch.float64)  # the first has no equilibrium that Picard finds
    s = surface(model, mse, X, X, num=2, radius=0.1)
    assert (s.status == CellStatus.NOT_CONVERGED).all() and (s.failed == 0.25).all()
    fine = surface(model, mse, -X.abs(), X, num=2, radius=0.1)
    assert fine.valid.all() and (fine.failed == 0).all()


def test_a_solve_of_ones_own_that_warns_is_marked() -> None:
    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return wp.fixed_point(lambda z: 2 * z + self.weight.sum(), x, wp.Picard(), max_steps=3).value

    s = surface(Own(2, 2), mse, torch.ones(3, 2), torch.ones(3, 2), num=2)
    assert (s.status == CellStatus.NOT_CONVERGED).all()


def test_a_loss_that_is_not_finite_is_marked() -> None:
    s = surface(Quadratic(), lambda p, y: p.mean() / 0.0, torch.zeros(1, 1), None, num=2)
    assert (s.status == CellStatus.NOT_FINITE).all() and np.isnan(s.values).all()


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_the_model_comes_back_whatever_happens(error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), wp.EquilibriumLayer(wp.nn.DenseCell(4, 5)), nn.Dropout(0.5))
    model.train()
    model[2](torch.ones(2, 4))
    record = model[2].last_solution
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise error

    with pytest.raises(error):
        surface(model, lambda p, y: p.sum(), torch.ones(6, 3), None, num=4, progress=interrupt)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(module.training for module in model.modules())
    assert model[2].on_failure == "warn" and model[2].last_solution is record
    assert not model[2]._forward_pre_hooks and not model[2]._forward_hooks


def test_resumes_after_an_interruption(tmp_path: Path) -> None:
    X, y = data()
    model, file = gaussian(), tmp_path / "surface.npz"
    whole = surface(model, mse, X, y, num=4, radius=0.2)
    evaluated = 0

    def loss(p: Tensor, t: Tensor) -> Tensor:
        nonlocal evaluated
        evaluated += 1
        if evaluated == 7:
            raise KeyboardInterrupt
        return mse(p, t)

    with pytest.raises(KeyboardInterrupt):
        surface(model, loss, X, y, num=4, radius=0.2, file=file)
    part = Surface.load(file)
    assert part.counts() == {"PENDING": 10, "VALID": 6} and not part.complete
    done = surface(model, loss, X, y, num=4, radius=0.2, file=file)
    assert evaluated == 17  # the interrupted point once more, no other
    np.testing.assert_allclose(done.values, whole.values, rtol=1e-10)
    assert [p.name for p in tmp_path.iterdir()] == ["surface.npz"]


def test_does_not_resume_something_else(tmp_path: Path) -> None:
    X, y = data()
    file = tmp_path / "surface.npz"
    surface(gaussian(), mse, X, y, num=2, radius=0.2, file=file)
    with pytest.raises(wp.InvalidArgument, match="digest differ"):
        surface(gaussian(), mse, X + 1, y, num=2, radius=0.2, file=file)
    with pytest.raises(wp.InvalidArgument, match="coordinates differ"):
        surface(gaussian(), mse, X, y, num=3, radius=0.2, file=file)
    file.write_bytes(b"nonsense")
    with pytest.raises(wp.InvalidArgument, match="holds no record"):
        surface(gaussian(), mse, X, y, num=2, file=file)


def test_batches_change_nothing() -> None:
    X, y = data(7)
    model = gaussian()
    one, many = (surface(model, mse, X, y, num=3, radius=0.2, batch_size=b) for b in (None, 3))
    np.testing.assert_allclose(one.values, many.values, rtol=1e-9)
    x = torch.linspace(-0.05, 0.05, 7, dtype=torch.float64).unsqueeze(1) + 1e-3
    line = [{"w": torch.ones(1).double()}]
    options: dict[str, Any] = {"directions": line, "num": 6, "radius": 0.1}
    whole, parts = (
        surface(Bistable(1.5), lambda p, y: p.mean(), x, None, probes=2, batch_size=b, **options) for b in (None, 3)
    )
    np.testing.assert_array_equal(whole.status, parts.status)  # the same samples are probed, from the same starts
    s = surface(Bistable(1.5), lambda p, y: p.mean(), x, None, batch_size=3, probes=None, **options)
    assert (s.status == CellStatus.NOT_UNIQUE).all()


def test_round_trips(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = data()
    model = gaussian()
    ray = {name: torch.zeros_like(p) for name, p in model.named_parameters()} | {"W": model.W.detach().clone()}
    s = surface(model, mse, X, y, directions=[ray, ray], num=3, radius=5.0)
    assert 0 < s.valid.sum() < 9
    # what a killed process left is removed, and the file is on the disk before it has its name
    (tmp_path / ".s.npz.123.tmp").touch()
    assert synced(monkeypatch, lambda: s.save(tmp_path / "s.npz")) == ["fsync file", "replace", "fsync folder"]
    assert [path.name for path in tmp_path.iterdir()] == ["s.npz"]
    for other in (Surface.from_dict(s.to_dict()), Surface.load(tmp_path / "s.npz")):
        for name in ("values", "status", "num_steps", "failed"):
            np.testing.assert_array_equal(getattr(other, name), getattr(s, name))
        assert other.info == s.info and other.counts() == s.counts() and other.seconds == s.seconds
    assert len(s.counts()) > 1 and all(name in repr(s) for name in s.counts())


def test_structured_states_are_warm_started() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(2, 2, dtype=torch.float64)
            self.layer = wp.EquilibriumLayer(lambda z, x: (0.5 * torch.tanh(z[1]) + x, 0.5 * torch.tanh(z[0])), wp.Picard())

        def forward(self, x: Tensor) -> Tensor:
            x = self.lin(x)
            return self.layer(x, (torch.zeros_like(x), torch.zeros_like(x)))[1].sum(dim=1)

    torch.manual_seed(0)
    X, y = torch.ones(4, 2).double(), torch.ones(4).double()
    model = Pair()
    line = [random_direction(model)]
    warm, cold = (
        surface(model, mse, X, y, directions=line, num=21, radius=0.2, warm_start=w, num_starts=0) for w in (True, False)
    )
    np.testing.assert_allclose(warm.values, cold.values, rtol=1e-9)
    assert warm.num_steps.sum() < cold.num_steps.sum()


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 10**6), radius=st.floats(0.01, 1.5))
def test_a_value_is_valid_or_nan(seed: int, radius: float) -> None:
    X, y = data(seed=seed)
    model = gaussian()
    s = surface(model, mse, X, y, num=3, radius=radius, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_array_equal(np.isfinite(s.values), s.valid | (s.status == CellStatus.NOT_PROVED))
    again = surface(model, mse, X, y, num=3, radius=radius, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_array_equal(again.values, s.values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num": 0}, "'num' parameter"),
        ({"radius": -1.0}, "'radius' parameter"),
        ({"num": (3, 3, 3)}, "must fit the 2 directions"),
        ({"num_starts": -1}, "'num_starts' parameter"),
        ({"agreement": 2.0}, "'agreement' parameter"),
        ({"probes": 0}, "'probes' parameter"),
        ({"directions": []}, "one or two directions"),
        ({"directions": [{"W": torch.zeros(2, 2)}]}, "no entry for U, a"),
        ({"progress": 3}, "progress must be"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    X, y = data()
    with pytest.raises((wp.InvalidArgument, wp.InvalidType), match=message):
        surface(gaussian(), mse, X, y, **options)


#: The whole message, so that nothing of numpy's own text is in it.
REFUSED = (
    r"junk.npz holds no record of a surface: it is damaged, or was not written by `save`. Give another file or delete it.$"
)


@pytest.mark.parametrize("X", [(torch.zeros(2, 3),), torch.zeros(0, 3), 3.0])
def test_inputs_that_are_no_samples_are_refused(X: Any) -> None:
    with pytest.raises(wp.InvalidType, match="one row for each sample"):
        surface(gaussian(), mse, X, None)


@pytest.mark.parametrize("number", [4, 1])
def test_labels_of_other_samples_are_refused(number: int) -> None:
    X, _ = data()
    for y in (torch.zeros(number), np.zeros(number)):
        with pytest.raises(wp.InvalidArgument, match=rf"one row for each sample; got 3 rows of X and {number} of y"):
            surface(gaussian(), mse, X[:3], y, num=2)


def test_files_without_a_record_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        wp.InvalidArgument, match=r"no.npz does not exist; expected the .npz file that `save` wrote of a surface"
    ):
        Surface.load(tmp_path / "no.npz")
    with pytest.raises(wp.InvalidArgument, match=r" is a folder; expected the .npz file"):
        Surface.load(tmp_path)
    file = tmp_path / "junk.npz"
    for junk in (b"nonsense", b"", b"PK\x03\x04 nonsense"):
        file.write_bytes(junk)
        with pytest.raises(wp.InvalidArgument, match=REFUSED):
            Surface.load(file)
    np.savez(file, values=np.zeros(3))
    with pytest.raises(wp.InvalidArgument, match=REFUSED):
        Surface.load(file)
    with open(file, "wb") as opened:
        np.save(opened, np.zeros(3))
    with pytest.raises(wp.InvalidArgument, match=REFUSED):
        Surface.load(file)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"axis1": None}, "it has no 'axis1'"),
        ({"status": np.zeros((3, 2), np.int8)}, "shapes of its arrays do not fit"),
        ({"values": np.zeros((2, 2, 2))}, "it has no 'axis2'"),
        ({"status": np.full((2, 2), 99, np.int8)}, "a status is none of those"),
        ({"values": np.array([["a", "b"], ["c", "d"]])}, "holds no record"),
        ({"__record__": np.array('{"kind": "surface", "seconds": [], "info": {}}')}, "damaged record"),
        ({"__record__": np.array('{"kind": "surface", "seconds": 1}')}, "it has no 'info'"),
        ({"__record__": np.array("[" * 5000)}, "holds no record"),
    ],
)
def test_a_forged_record_is_one_sentence(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    good = {name: np.zeros((2, 2)) for name in ("values", "num_steps", "failed")} | {"status": np.zeros((2, 2), np.int8)}
    good |= {"axis0": np.zeros(2), "axis1": np.zeros(2)}
    good["__record__"] = np.array('{"kind": "surface", "seconds": 1.0, "info": {}}')
    np.savez(tmp_path / "good.npz", **good)
    assert Surface.load(tmp_path / "good.npz").values.shape == (2, 2)
    np.savez(tmp_path / "bad.npz", **{name: part for name, part in (good | changes).items() if part is not None})
    with pytest.raises(wp.InvalidArgument, match=says):
        Surface.load(tmp_path / "bad.npz")


def test_a_loss_with_many_numbers_is_refused() -> None:
    X, y = data()
    with pytest.raises(wp.InvalidArgument, match="must be one number"):
        surface(gaussian(), lambda p, t: p - t, X, y, num=2, radius=0.1)
