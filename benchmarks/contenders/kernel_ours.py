"""The tangent kernel of a GaussianDEQ: the floor, wellposed's two roads, and torch.func alone."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

import wellposed as wp

from . import Run

torch.set_num_threads(2)
CHUNK = 25  # samples whose gradients torch.func holds at once: 25 x 1.8 million numbers, several times over


def network(arrays: dict) -> tuple[torch.nn.Module, Tensor]:
    W, U, a, X = (torch.from_numpy(arrays[name]) for name in ("W", "U", "a", "X"))
    model = wp.GaussianDEQ(U.shape[1], W.shape[0], rtol=float(arrays["rtol"]), dtype=X.dtype)
    with torch.no_grad():
        for parameter, value in ((model.W, W), (model.U, U), (model.a, a)):
            parameter.copy_(value)
    model.check_well_posed()  # once per parameters; kept by the model
    return model, X


def timed(compute: Callable[[], Tensor]) -> Callable[[], Run]:
    def run() -> Run:
        start = perf_counter()
        K = compute()
        seconds = perf_counter() - start
        return Run(seconds, seconds, z=K, dW=(), dU=(), da=())

    return run


def floor(arrays: dict) -> Callable[[], Run]:
    """The products nobody can avoid: one per step of the two solves, the injection, and three Gram products."""
    W, U, X = (torch.from_numpy(arrays[name]) for name in ("W", "U", "X"))
    n, m = X.shape[0], W.shape[0]
    z, c, gram = torch.relu(X @ U.T), torch.empty(n, m), torch.empty(n, n)

    def run() -> Run:
        start = perf_counter()
        torch.mm(X, U.T, out=c)
        for _ in range(int(arrays["forward_steps"])):
            torch.mm(z, W.T, out=c)
        for _ in range(int(arrays["adjoint_steps"])):
            torch.mm(z, W, out=c)
        middle = perf_counter()
        for features in (z, c, X):
            torch.mm(features, features.T, out=gram)
        return Run(middle - start, perf_counter() - start)

    return run


def closed(arrays: dict) -> Callable[[], Run]:
    model, X = network(arrays)
    return timed(lambda: wp.tangent_kernel(model, X))


def generic(arrays: dict) -> Callable[[], Run]:
    model, X = network(arrays)
    return timed(lambda: wp.tangent_kernel(model, X, method="generic"))


def torch_func(arrays: dict) -> Callable[[], Run]:
    """vmap(grad(f)) of the network unrolled to the steps that the tolerance needs, by chunks; then J J^T."""
    model, X = network(arrays)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    steps = int(arrays["forward_steps"])

    def predict(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        c = parameters["U"] @ x
        z = torch.relu(c)
        for _ in range(steps):
            z = torch.relu(parameters["W"] @ z + c)
        return parameters["a"] @ z

    gradients = torch.func.vmap(torch.func.grad(predict), in_dims=(None, 0), chunk_size=CHUNK)

    def compute() -> Tensor:
        J = gradients(parameters, X)
        K = X.new_zeros(X.shape[0], X.shape[0])
        for part in J.values():
            rows = part.flatten(1)
            K.addmm_(rows, rows.T)
        return K

    return timed(compute)


CONTENDERS = {
    "floor": floor,
    "wellposed": closed,
    "wellposed, explicit Jacobian": generic,
    "torch.func": torch_func,
}
