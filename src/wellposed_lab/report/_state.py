"""What only the network of a run can tell: its tangent kernel, its predictions, how far its parameters went."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from wellposed.kernel import tangent_kernel
from wellposed.nn import AbstractNetwork
from wellposed_lab.runs._threads import on_threads, threads_for
from wellposed_lab.runs.checkpoint import newest, restore
from wellposed_lab.runs.losses import Segmentation, Squared
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import Problem, prepare

__all__ = ["NetworkState", "ParameterNorm", "network_state"]

#: Samples of the kernel, where it has a closed form; elsewhere samples times outputs, each of which costs a gradient.
KERNEL_SAMPLES, KERNEL_GRADIENTS = 256, 64
#: Samples of each part whose predictions are shown, and how many are evaluated at once.
PREDICTED, BATCH = 1000, 100
#: Images whose pixels are counted.
PREDICTED_IMAGES = 16


@dataclass(frozen=True)
class ParameterNorm:
    """Frobenius norms of a parameter: at the start, now, and of the difference."""

    name: str
    shape: tuple[int, ...]
    start: float
    now: float
    distance: float


@dataclass
class NetworkState:
    """The network at its last checkpoint.

    Attributes:
        epoch: After which it stands; None at the start.
        parameters: Norms.
        spectra: By moment ("at the start", "after epoch 20"), eigenvalues of the tangent kernel, largest first.
        kernel_samples: Training samples that the kernel is of, and how many there are.
        kind: "signs", "numbers" or "classes".
        predictions: By part (y_hat, y) for signs and numbers, as plain lists.
        confusion: By part: row true class, column predicted class.
        remarks: What could not be had, a sentence each.
    """

    epoch: int | None = None
    parameters: list[ParameterNorm] = field(default_factory=list)
    spectra: dict[str, list[float]] = field(default_factory=dict)
    kernel_samples: tuple[int, int] = (0, 0)
    kind: str = ""
    predictions: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    confusion: dict[str, list[list[int]]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def network_state(folder: Path) -> NetworkState:
    """Loads the network of a run and looks at it; what fails becomes a remark."""
    state = NetworkState()
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        try:
            with on_threads():
                _fill(state, folder)
        except Exception as error:  # the data are a file of any origin, and the records can be shown without them
            text = " ".join(str(error).split()) or type(error).__name__
            state.remarks.append(f"The network could not be loaded or evaluated. {text}")
    state.remarks += sorted({" ".join(str(warning.message).split()) for warning in caught})
    return state


def _fill(state: NetworkState, folder: Path) -> None:
    config = read_config(folder)
    problem = prepare(config)
    model = problem.model
    torch.set_num_threads(threads_for(model, problem.parts.train[0]))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    earlier = config.earlier_fingerprints()
    checkpoint = newest(folder / "checkpoints", fingerprint=config.fingerprint(), earlier=earlier, say=state.remarks.append)
    if checkpoint is None:
        state.remarks.append("There is no checkpoint; the network is shown as it was at the start.")
    X = _kernel_inputs(state, problem)
    if X is not None:
        state.spectra["at the start"] = _eigenvalues(model, X)
    if checkpoint is not None:
        restore(checkpoint, model)
        state.epoch = checkpoint.epoch
        if X is not None:
            state.spectra[f"after epoch {checkpoint.epoch}"] = _eigenvalues(model, X)
    for name, parameter in model.named_parameters():
        now = parameter.detach()
        norms = (float(tensor.double().norm()) for tensor in (start[name], now, now - start[name]))
        state.parameters.append(ParameterNorm(name, tuple(now.shape), *norms))
    _predict(state, problem)


def _kernel_inputs(state: NetworkState, problem: Problem) -> Tensor | None:
    X, _ = problem.parts.train
    with torch.no_grad():
        outputs = problem.model(X[:1]).numel()
    closed = isinstance(problem.model, AbstractNetwork)
    n = min(len(X), KERNEL_SAMPLES if closed else KERNEL_GRADIENTS // outputs)
    state.kernel_samples = (n, len(X))
    if n < 2:
        state.remarks.append(
            f"The tangent kernel is left out: with {outputs} outputs a sample, two samples take more than {KERNEL_GRADIENTS} "
            "gradients."
        )
        return None
    return X[:n]


def _eigenvalues(model: nn.Module, X: Tensor) -> list[float]:
    """Of K_ij = <df(x_i), df(x_j)>, largest first; several outputs count as several rows."""
    K = tangent_kernel(model, X).double().cpu()
    values: list[float] = torch.linalg.eigvalsh(K).flip(0).tolist()
    return values


def _predict(state: NetworkState, problem: Problem) -> None:
    loss = problem.loss
    state.kind = "classes" if not isinstance(loss, Squared) else ("signs" if loss.signs else "numbers")
    limit = PREDICTED_IMAGES if isinstance(loss, Segmentation) else PREDICTED
    for part, (X, y) in problem.parts.items():
        X, y = X[:limit], y[:limit].cpu()
        with torch.no_grad():
            output = torch.cat([problem.model(batch).cpu() for batch in X.split(min(BATCH, limit))])
        if state.kind != "classes":
            state.predictions[part] = (output.double().tolist(), y.double().tolist())
            continue
        classes = output.shape[1]
        counted = y != loss.ignore_index if isinstance(loss, Segmentation) else torch.ones_like(y, dtype=torch.bool)
        pairs = y[counted] * classes + output.argmax(dim=1)[counted]
        state.confusion[part] = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).tolist()
