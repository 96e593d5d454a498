"""Full-batch descent of one network, with a proof of its contraction at every step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.data import Dataset
from wellposed.descent import State, Stop
from wellposed.errors import DivergedWarning
from wellposed.kernel import tangent_kernel
from wellposed.nn import AbstractContraction
from wellposed.nn.families import NormBound, may_be_ill_posed
from wellposed_lab.papers.whole_descent import whole_descent

__all__ = ["TrainingRecorder", "largest_eigenvalue", "train"]


def largest_eigenvalue(model: AbstractContraction, X: Tensor) -> float:
    """Of the tangent kernel: descent with steps below 2 over this is stable at first order."""
    return float(torch.linalg.eigvalsh(tangent_kernel(model, X).double())[-1])


class TrainingRecorder:
    """Losses, errors and the contraction factor every so many steps, and at the last.

    Args:
        data: With its test part.
        every: How many steps.
        last: The last step.
        start: (n_test,) what is subtracted from the predictions of test samples.
    """

    def __init__(self, data: Dataset, every: int, last: int, start: Tensor | float = 0.0) -> None:
        self.data, self.every, self.last, self.start = data, every, last, start
        self.unsolved, self.norm_throughout, self._bound = 0, 0.0, NormBound()
        self.columns: dict[str, list[Any]] = {
            name: [] for name in ("step", "loss", "train_error", "test_loss", "test_error", "norm")
        }

    def on_step(self, state: State) -> None:
        """Called at every point of the descent."""
        assert state.point is not None
        solved = state.point.solution.converged & state.point.adjoint_solution.converged
        self.unsolved += int((~solved).sum())
        assert may_be_ill_posed(state.model)
        # cheap while it is below 1, and sharp as soon as it would not be: so 1 or more is no fault of the bound
        self.norm_throughout = max(self.norm_throughout, self._bound(state.model.recurrent(), below=1.0))
        if state.step % self.every and state.step != self.last:
            return
        assert self.data.X_test is not None and self.data.y_test is not None
        prediction = state.model(self.data.X_test) - self.start
        row = {
            "step": state.step,
            "loss": state.loss / len(state.y),
            "train_error": _error(state.r + self.data.y, self.data.y),
            "test_loss": float(((prediction - self.data.y_test) ** 2).double().mean()) / 2,
            "test_error": _error(prediction, self.data.y_test),
            "norm": state.model.contraction_upper(),
        }
        for name, value in row.items():
            self.columns[name].append(value)


def train(
    make: Callable[[int], AbstractContraction],
    data: Dataset,
    *,
    width: int,
    reference: int,
    step: float,
    steps: int,
    points: int,
    centred: bool = False,
) -> dict[str, Any]:
    """Full-batch descent with one fixed step.

    Args:
        make: (width) -> a network, the same one each time.
        data: To train and to test.
        width: Of the network that is trained.
        reference: The step is `step`/lambda_max of the tangent kernel of a network of this width,
            at its start.
        step: In units of 1/lambda_max.
        steps: How many.
        points: About how many times to look.
        centred: Whether the function of the network at its start is subtracted from its output, so
            that the output is 0 at first.

    Returns:
        Columns `step`, `loss` (|r|^2/(2n)), `train_error`, `test_loss` (|r|^2/(2 n_test)),
            `test_error`, `norm` (upper bounds
        of the contraction factor); `norm_throughout`, an upper bound over *all* steps, None if it
            did not go to its end;
        `unsolved`, equilibria and adjoints that did not converge; `gram_change`, |G(end) -
            G(0)|_F/|G(0)|_F of G = Z Z^T;
        `step_size`, `eigenvalue`, `stop`.
    """
    largest = largest_eigenvalue(make(reference), data.X)
    model = make(width)
    assert data.X_test is not None
    with torch.no_grad():
        start, start_test = (model(X) if centred else 0.0 for X in (data.X, data.X_test))
    recorder = TrainingRecorder(data, max(1, steps // points), steps, start_test)
    size = step / largest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergedWarning)  # it is in the record as `stop`
        before = _gram(model, data.X)
        history = whole_descent(model, data.X, data.y + start, step_size=size, steps=steps, callbacks=[recorder])
    return {
        **recorder.columns,
        "norm_throughout": recorder.norm_throughout if history.stop is Stop.STEPS else None,
        "gram_change": float(torch.linalg.norm(_gram(model, data.X) - before) / torch.linalg.norm(before)),
        "unsolved": recorder.unsolved,
        "step_size": size,
        "eigenvalue": largest,
        "stop": None if history.stop is None else history.stop.value,
        "data": list(data.steps),
    }


def _gram(model: AbstractContraction, X: Tensor) -> Tensor:
    Z = model.solve(X).value.double()
    return Z @ Z.t()


def _error(prediction: Tensor, y: Tensor) -> float | None:
    """The part of wrong signs, if the targets are signs."""
    if bool((y.abs() != 1).any()):
        return None
    return float((torch.sign(prediction) != y).double().mean())
