# %% [markdown]
# # An equilibrium layer in your own model
#
# A usual layer applies a map once. An equilibrium layer applies one map `f(z, x)` *until nothing
# changes any more*: its output is the `z` with `z = f(z, x)`. That is a network of unlimited depth
# with the parameters of one layer, and its gradient needs no stored steps. But `z` has to be found,
# and it may not exist, or not be found. In this tutorial you put an equilibrium layer between two
# ordinary ones, train it, look at what it costs, and then break it on purpose.
#
# You need `pip install -c constraints.txt '.[plot]'`. The data are made up, and everything runs in
# seconds on one core.

# %%
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import wellposed as wp

BLUE, RED = "#0072B2", "#D55E00"  # distinct also for most colour-blind readers

X, y = wp.data.load("moons", n=200, noise=0.15, seed=0, dtype=torch.float64)
print(X.shape, y.shape)

# %% [markdown]
# ## The code
#
# The map may be any module or function of `(z, x)` that keeps the rows apart. This one is yours:
# nothing in it comes from `wellposed`. The layer has to be told the shape of `z` once, because the
# cell does not say it. `on_failure="raise"` stops the training if an equilibrium, or the linear
# solve behind a gradient, is not found.


# %%
class Cell(nn.Module):
    """z -> tanh(A z + B x + c)."""

    def __init__(self, width: int, gain: float = 0.5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.A = nn.Parameter(gain * torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5)
        self.B = nn.Parameter(torch.randn(width, 2, generator=generator, dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, z, x):
        return torch.tanh(z @ self.A.T + x @ self.B.T + self.c)


def network(cell, **options):
    """Equilibrium, then a linear read-out of one number a sample."""
    torch.manual_seed(0)
    layer = wp.EquilibriumLayer(cell, on_failure="raise", rtol=1e-8, **options)
    return nn.Sequential(layer, nn.Linear(20, 1, dtype=torch.float64), nn.Flatten(0))


# %% [markdown]
# Training is as usual. After each step the layer reports how its solves went: `last_solution` for
# the equilibria, `last_adjoint` for the linear equations of backward, one number for each sample.


# %%
def train(model, steps):
    """Losses, evaluations of the map and the norm of its weights at every step; ends early if an
    equilibrium is not found."""
    layer, losses, evaluations, norms = model[0], [], [], []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        try:
            loss = nn.functional.binary_cross_entropy_with_logits(model(X), (y > 0).double())
            loss.backward()
        except wp.NotConverged as error:
            print(f"step {len(losses)}: {error}")
            break
        optimizer.step()
        losses.append(loss.item())
        evaluations.append(layer.last_solution.num_steps.double())
        A = layer.cell.A if isinstance(layer.cell, Cell) else layer.cell.recurrent()
        norms.append(torch.linalg.matrix_norm(A.detach(), 2).item())
    return losses, torch.stack(evaluations).numpy(), norms


free = network(Cell(20), state_shape=(20,))
free_run = train(free, 100)
print(f"loss {free_run[0][0]:.3f} -> {free_run[0][-1]:.3f}")

# %% [markdown]
# The loss fell for a while, and then training stopped, with the number of the sample, its residual,
# and what to try. Here an equilibrium exists (tanh is bounded), but the solver did not find it
# within 200 evaluations. This is the first thing to learn about equilibrium layers: **training
# makes the map steeper, and the steeper the map, the more evaluations its equilibrium takes, until
# it is not found, not unique, or does not exist.** With the last iterate in the place of the
# equilibrium, training would continue with wrong features and wrong gradients.
#
# So constrain the cell. A `DenseCell` is the same map `tanh(W z + U x + b)`, and its
# `weight=` says how W is made of free parameters: `Spectral(bound=0.95)` keeps the norm of W at
# 0.95 or less whatever the optimizer does, so there is always exactly one equilibrium.

# %%
cell = wp.nn.DenseCell(
    2, 20, wp.nn.Tanh(), weight=wp.nn.Spectral(bound=0.95), generator=torch.Generator().manual_seed(1), dtype=torch.float64
)
model = network(cell)
run = train(model, 100)
layer = model[0]

accuracy = ((model(X) > 0) == (y > 0)).double().mean().item()
print(f"loss {run[0][0]:.3f} -> {run[0][-1]:.3f}, training accuracy {accuracy:.1%}")
print(layer.last_solution)
print(layer.last_adjoint)

# %% [markdown]
# ## The picture

# %%
figure = Figure(figsize=(8.4, 2.9), layout="constrained")
panels = figure.subplots(1, 3)
named = (("free weights", free_run, RED, "-"), ("Spectral(bound=0.95)", run, BLUE, "--"))
for name, (losses, evaluations, norms), color, style in named:
    steps = range(len(losses))
    panels[0].plot(steps, losses, color=color, linestyle=style, linewidth=1.8, label=name)
    panels[1].plot(steps, evaluations.mean(axis=1), color=color, linestyle=style, linewidth=1.8)
    panels[1].fill_between(steps, evaluations.min(axis=1), evaluations.max(axis=1), color=color, alpha=0.15, linewidth=0)
    panels[2].plot(steps, norms, color=color, linestyle=style, linewidth=1.8)
stop = len(free_run[0]) - 1
for ax, value in zip(panels, (free_run[0][-1], float(free_run[1][-1].mean()), free_run[2][-1]), strict=True):
    ax.plot(stop, value, "x", color=RED, markersize=9, markeredgewidth=2.5)
    ax.set_xlabel("step of Adam")
    ax.grid(alpha=0.3)
panels[0].set(ylabel="cross entropy", title="The loss", ylim=(0, None))
panels[1].set(ylabel="evaluations of the map", title="Cost: mean, least to most", ylim=(0, None))
panels[2].set(ylabel="spectral norm", title="The recurrent weights", ylim=(0, None))
panels[0].legend(fontsize=8)

# %% [markdown]
# **What to notice.** The cross marks where an equilibrium of the free network was not found. Its
# loss did not show this before: it fell faster than that of the bounded network up to the last
# step. The norm of its weights and the cost of its slowest sample (the upper edge of the band) did
# show it. If you train without a bound, watch these two.
#
# The cost also depends on the input. A sample that has converged leaves the computation, so a slow
# sample does not make the others slower:

# %%
horizontal, vertical = np.linspace(-1.8, 2.8, 90), np.linspace(-1.3, 1.8, 70)
grid = torch.tensor(np.stack(np.meshgrid(horizontal, vertical), axis=-1).reshape(-1, 2))  # (6300, 2)
with torch.no_grad():
    logits = model(grid).reshape(70, 90).numpy()
cost = layer.last_solution.num_steps.reshape(70, 90).numpy()

figure = Figure(figsize=(8.4, 3.1), layout="constrained")
panels = figure.subplots(1, 2, sharey=True)
drawn = panels[0].pcolormesh(horizontal, vertical, 1 / (1 + np.exp(-logits)), cmap="cividis", vmin=0, vmax=1, rasterized=True)
figure.colorbar(drawn, ax=panels[0], label="predicted probability of class 1")
drawn = panels[1].pcolormesh(horizontal, vertical, cost, cmap="viridis", rasterized=True)
figure.colorbar(drawn, ax=panels[1], label="evaluations of the map")
panels[0].set(title="What the network predicts", xlabel="first feature", ylabel="second feature")
panels[1].set(title="What it costs", xlabel="first feature")
for ax in panels:
    ax.contour(horizontal, vertical, logits, levels=[0.0], colors="white", linewidths=1.2)
    ax.plot(*X[y > 0].T.numpy(), "^", color="white", markeredgecolor="black", markersize=4, linewidth=0, label="class 1")
    ax.plot(*X[y <= 0].T.numpy(), "o", color="black", markeredgecolor="white", markersize=4, linewidth=0, label="class 0")
panels[0].legend(fontsize=7, loc="lower left")

# %% [markdown]
# ## Is the gradient right?
#
# `ImplicitGradient`, the default, solves one linear equation for each sample and is exact at the
# equilibrium. The same derivative by going back through every step of the iteration
# (`UnrolledGradient`) needs memory for all of them, and approaches it as their number grows:

# %%
raw = next(layer.cell.parameters())


def gradient(mode):
    other = wp.EquilibriumLayer(layer.cell, wp.Picard(), mode, on_failure="ignore", rtol=1e-12, max_steps=400)
    return torch.autograd.grad(model[1:](other(X)).square().mean(), raw)[0]


exact = gradient(wp.ImplicitGradient())
for k in (2, 5, 10, 20, 40, 80):
    error = (gradient(wp.UnrolledGradient(k)) - exact).norm() / exact.norm()
    print(f"{k:3d} unrolled steps: relative difference {error:.1e}")

# %% [markdown]
# ## What else can go wrong
#
# The failure above was reported. Another one is not: a solve that converges, to one of *several*
# equilibria. Take the free cell with weights six times as large as at our start, one input, and
# forty places to begin:

# %%
wild = wp.EquilibriumLayer(Cell(20, 3.0), state_shape=(20,), on_failure="ignore", rtol=1e-8, max_steps=2000)
starts = torch.randn(40, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
ends = wild.solve(X[:1].expand(40, 2), starts)
values = ends.value[ends.converged]
different = {tuple(round(v, 3) for v in row.tolist()) for row in values}
print(f"one input, 40 starts: {len(values)} converged, to {len(different)} different equilibria")

# %% [markdown]
# No residual can tell you that; all of them are tiny. Only a property of the map can, and that is
# what the parametrizations are for. `Monotone` keeps uniqueness for weights of any norm:

# %%
for weight in (wp.nn.Spectral(bound=0.95), wp.nn.Monotone(margin=0.1)):
    cell = wp.nn.DenseCell(2, 20, wp.nn.Tanh(), weight=weight, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.mul_(5)  # as an optimizer may do
    norm = torch.linalg.matrix_norm(cell.recurrent().detach(), 2).item()
    ends = wp.EquilibriumLayer(cell, on_failure="raise", rtol=1e-10, max_steps=2000).solve(X[:1].expand(40, 2), starts)
    spread = (ends.value - ends.value[0]).norm(dim=1).max().item()
    print(
        f"{type(weight).__name__:9s} |W| = {norm:6.2f}: {int(ends.converged.sum())} of 40 converged, {spread:.0e} apart at most"
    )

# %% [markdown]
# ## Where to read on
#
# - [Solving](../solving.md): which solver to take, and what is promised about it.
# - [Gradients](../gradients.md): exact, phantom, Jacobian-free and unrolled, and what they compose
#   with.
# - [Monotone networks](../monotone.md): one equilibrium by construction, also for convolutions.
# - [The next tutorial](02_certified_training.md): a network that proves that its own training will
#   succeed.
