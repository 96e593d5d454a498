"""The record of a run: columns, rates, and the way to JSON and back."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wellposed as wp
from wellposed.descent import Stop

number = st.floats(allow_nan=True, allow_infinity=True)


def row(step: int, loss: float, *, time: float | None = None, grad: float = 1.0) -> dict[str, Any]:
    at = {"step": step} if time is None else {"step": step, "time": time, "integrator_steps": 4 * step}
    return at | {
        "loss": loss,
        "residual_norm": math.sqrt(2 * loss),
        "total_path_length": 0.1,
        "equilibrium_steps": None,
        "adjoint_steps": 3.5,
        "wall_time": 0.5 * step,
        "gradient_norm": {"W": grad, "a": 4.0},
        "distance": {"W": 3.0 * step, "a": 4.0 * step},
        "path_length": {"W": 3.0 * step, "a": 5.0 * step},
    }


def history() -> wp.History:
    return wp.History("descent", {"W": 0.1, "a": 0.2}, [row(0, 8.0), row(2, 2.0), row(3, 0.5)], stop=Stop.STEPS)


def test_columns() -> None:
    found = history()
    assert found["step"].tolist() == [0, 2, 3] and found["step"].dtype == torch.float64
    assert found.loss.tolist() == [8.0, 2.0, 0.5] and found.residual_norm.tolist() == [4.0, 2.0, 1.0]
    assert found["equilibrium_steps"].isnan().all() and found["adjoint_steps"].tolist() == [3.5] * 3
    assert found["distance"]["a"].tolist() == [0.0, 8.0, 12.0]
    assert found.total("distance").tolist() == [0.0, 10.0, 15.0]
    assert len(found) == 3
    for column in found.columns:
        assert found[column] is not None


def test_rates() -> None:
    found = history()
    assert found.measured_rate().tolist() == pytest.approx([math.sqrt(0.5), 0.5])
    assert found.certified_residual(0.9).tolist() == pytest.approx([4.0, 4 * 0.81, 4 * 0.729])
    flow = wp.History("flow", {"W": 1.0, "a": 1.0}, [row(0, 8.0, time=0.0), row(5, 2.0, time=0.5)])
    assert flow.measured_rate().tolist() == pytest.approx([math.log(2) / 0.5])
    assert flow.certified_residual(1.2).tolist() == pytest.approx([4.0, 4 * math.exp(-0.6)])


def test_numpy() -> None:
    arrays = history().as_numpy()
    assert arrays["distance.W"].tolist() == [0.0, 6.0, 9.0]
    assert all(isinstance(array, np.ndarray) and array.shape == (3,) for array in arrays.values())
    assert "time" not in arrays and {"loss", "gradient_norm.a", "path_length.W", "wall_time"} <= set(arrays)


def test_complaints() -> None:
    with pytest.raises(wp.InvalidArgument, match=r"no column 'los'.*Did you mean 'loss'"):
        history()["los"]
    with pytest.raises(wp.InvalidArgument, match="descent has no column 'time'"):
        history()["time"]
    with pytest.raises(wp.InvalidArgument, match="no certificate with a rate"):
        history().certified_residual()
    with pytest.raises(wp.InvalidArgument, match="'path_length'"):
        history().total("path_length")
    with pytest.raises(wp.InvalidArgument, match=r"not a history.*'kind'"):
        wp.History.from_dict({"speeds": {}})


def test_repr() -> None:
    assert repr(history()) == "History(descent, 3 rows to step 3, loss 8 -> 0.5, 1.50 s, stopped: steps)"
    assert repr(wp.History("flow", {})) == "History(flow, no rows)"
    assert all(stop.message for stop in Stop)


@given(grad=number, loss=st.floats(0, 1e300), time=st.floats(0, 1e6), note=st.text())
@settings(deadline=None, max_examples=25)
def test_json_round_trip(grad: float, loss: float, time: float, note: str) -> None:
    found = wp.History("flow", {"W": 0.1, "a": 0.2}, [row(0, loss, time=time, grad=grad)], stop=Stop.CALLBACK)
    found.add_event("note", {"text": note, "grad": grad}, step=0, time=time)
    again = wp.History.from_json(found.to_json())
    assert again.to_dict() == found.to_dict()
    assert json.loads(again.to_json()) == found.to_dict()
    for name, array in found.as_numpy().items():
        np.testing.assert_array_equal(again.as_numpy()[name], array)
    assert again.stop is Stop.CALLBACK and again.speeds == found.speeds
    assert again.events["note"][0].value["text"] == note


def test_objects_become_dictionaries() -> None:
    class Told:
        def to_dict(self) -> dict[str, Any]:
            return {"rate": math.inf, "radii": (1.0, 2.0)}

    found = history()
    found.add_event("certificate", Told(), step=2, time=None)
    again = wp.History.from_json(found.to_json())
    assert again.events["certificate"][0].value == {"rate": "inf", "radii": [1.0, 2.0]}
    assert again.events["certificate"][0].step == 2
