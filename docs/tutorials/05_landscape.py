# %% [markdown]
# # A loss landscape where equilibria fail
#
# Pictures of loss landscapes show the loss on a plane through the parameters. For an equilibrium
# network the picture has a trap: at some of these parameters the equilibrium does not exist, is
# not found, or is not the only one. A solver returns *something* there all the same, and the
# something is drawn. In this tutorial you draw the same landscape twice, once as a careless program
# would and once with every point checked, and then look at what the solver does in the holes.
#
# You need `pip install -c constraints.txt '.[plot]'`.

# %%
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn

import wellposed as wp

BLUE, RED = "#0072B2", "#D55E00"  # distinct also for most colour-blind readers

X, y = wp.data.load("moons", n=20, noise=0.1, seed=0, dtype=torch.float64)


class Cell(nn.Module):
    """z -> tanh(A z + B x): any A is allowed, so anything may happen."""

    def __init__(self, width=6):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.A = nn.Parameter(0.6 * torch.randn(width, width, generator=generator, dtype=torch.float64) / width**0.5)
        self.B = nn.Parameter(torch.randn(width, 2, generator=generator, dtype=torch.float64))

    def forward(self, z, x):
        return torch.tanh(z @ self.A.T + x @ self.B.T)


class Network(nn.Module):
    """The equilibria of a cell, read out by a fixed vector."""

    def __init__(self, cell, **options):
        super().__init__()
        self.layer = wp.EquilibriumLayer(cell, wp.Picard(), on_failure="ignore", rtol=1e-6, max_steps=100, **options)
        self.register_buffer("a", torch.tensor([1.0, -1.0] * 3, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) @ self.a


def loss(prediction, target):
    return (prediction - target).square().mean()


net = Network(Cell(), state_shape=(6,))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    value = loss(net(X), y)
    value.backward()
    optimizer.step()
print(f"loss {value.item():.3f}, {int(net.layer.last_solution.converged.sum())} of {len(X)} equilibria found")

# %% [markdown]
# ## Two landscapes
#
# The careless way: move the parameters, call the network, take the loss. The careful way:
# `wp.landscape.surface`. It solves every point from its neighbour's equilibria, tries another start
# as well, and writes down a status for each point. Only a VALID point has a number; the rest are
# NaN, with the reason.

# %%
generator = torch.Generator().manual_seed(0)
directions = [wp.landscape.filter_normalized(net, wp.landscape.random_direction(net, generator=generator)) for _ in range(2)]
careful = wp.landscape.surface(net, loss, X, y, directions=directions, num=13, radius=0.7, num_starts=2)
print(careful.counts())

grid = np.linspace(-0.7, 0.7, 13)
careless = np.empty((13, 13))
origin = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
with torch.no_grad():
    for i, a in enumerate(grid):
        for j, b in enumerate(grid):
            for name, parameter in net.named_parameters():
                parameter.copy_(origin[name] + a * directions[0][name] + b * directions[1][name])
            careless[i, j] = loss(net(X), y)
    for name, parameter in net.named_parameters():
        parameter.copy_(origin[name])

agree = np.isfinite(careful.values)
print(f"where both have a value they differ by at most {np.abs(careful.values - careless)[agree].max():.0e}")
print(f"the careless one drew {int((~agree).sum())} of {agree.size} points that mean nothing")

# %% [markdown]
# ## The picture

# %%
figure = Figure(figsize=(5, 3.8), layout="constrained")
ax = figure.subplots()
drawn = ax.contourf(grid, grid, careless.T, levels=15, cmap="viridis")
ax.contour(grid, grid, careless.T, levels=15, colors="black", linewidths=0.4, alpha=0.6)
ax.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.5)
ax.set(xlabel="direction 1", ylabel="direction 2", title="Careless: whatever the solver returned")
figure.colorbar(drawn, label="'loss'")

# %%
figure = wp.plot.contour(careful, names=["Careful: only what is known"])

# %% [markdown]
# **What to notice.** The first picture looks like a landscape everywhere. The second says how much
# of it is real. Hatching says why a point is missing: *failed to converge* is about the solve of
# some sample, *several equilibria* means that another start led it to another equilibrium, so that
# the loss has more than one value. The careless picture depends there on the start and on the
# number of steps, and does not show it.
#
# ## What happens in a hole?
#
# Stand on one point of each kind and follow the solver. Where equilibria are not unique, take one
# sample and forty starts.


# %%
def stand_on(name):
    """Moves the network to the point of this status at which most samples failed."""
    failed = np.where(careful.status == wp.landscape.CellStatus[name], careful.failed, -1)
    i, j = np.unravel_index(failed.argmax(), failed.shape)
    with torch.no_grad():
        for key, parameter in net.named_parameters():
            parameter.copy_(origin[key] + grid[i] * directions[0][key] + grid[j] * directions[1][key])


stand_on("VALID")
ways = [wp.landscape.trajectory(net, X)]
stand_on("NOT_CONVERGED")
ways.append(wp.landscape.trajectory(net, X))
stand_on("NOT_UNIQUE")
starts = torch.randn(40, 6, generator=generator, dtype=torch.float64)
ends = [net.layer.solve(sample.expand(40, 2), starts) for sample in X]
spread = [(end.value[end.converged] - end.value[end.converged][0]).norm(dim=1).max().item() for end in ends]
chosen = int(np.argmax(spread))
ways.append(wp.landscape.trajectory(net, X[chosen].expand(40, 2), z0=starts))
print(f"sample {chosen} has equilibria {spread[chosen]:.2f} apart")
plane = wp.landscape.project(ways, names=["valid", "not converged", "not unique: one sample, 40 starts"])
figure = wp.plot.trajectories(plane, samples=40, columns=3)
figure.set_size_inches(8.4, 3.1)

# %%
figure = wp.plot.residuals(plane, samples=40)
figure.axes[0].set_title("Residuals: thin lines are samples, thick ones medians", fontsize=10)

# %% [markdown]
# **What to notice.** At the point in the middle samples jump back and forth for ever, while one
# converges as if nothing were wrong. That is why the status belongs to samples and not to batches.
# At the point that is not unique the same sample ends in different places, and its residuals are as
# small as they should be: from one start nothing looks wrong.
#
# ## The remedy
#
# Put the parameters back. The same network with |W| <= 0.95 by parametrization, trained the same
# way, over the same range. It proves its uniqueness, so no second start is needed and every point
# is valid.

# %%
with torch.no_grad():
    for name, parameter in net.named_parameters():
        parameter.copy_(origin[name])

cell = wp.nn.DenseCell(
    2,
    6,
    wp.nn.Tanh(),
    weight=wp.nn.Spectral(bound=0.95),
    bias=False,
    generator=torch.Generator().manual_seed(4),
    dtype=torch.float64,
)
safe = Network(cell)
optimizer = torch.optim.Adam(safe.parameters(), lr=0.01)
for _ in range(25):
    optimizer.zero_grad()
    value = loss(safe(X), y)
    value.backward()
    optimizer.step()
whole = wp.landscape.surface(safe, loss, X, y, num=13, radius=0.7, generator=torch.Generator().manual_seed(0))
print(f"loss {value.item():.3f};", whole.counts())
figure = wp.plot.contour(whole, names=["|W| <= 0.95: no holes"])

# %% [markdown]
# ## What can go wrong
#
# **A picture is a plane.** Two random directions out of many show little of the whole space; holes
# may lie elsewhere. `path_directions` and `hessian_directions` choose planes that training has
# visited or that curve the most.
#
# **Uniqueness is refuted, not proved, by starts.** VALID means "by proof" for networks that have
# one and "all starts agreed" for others. With one start less, some of the holes would have been
# overlooked:

# %%
for starts in (0, 1, 2):
    counted = wp.landscape.surface(net, loss, X, y, directions=directions, num=7, radius=0.7, num_starts=starts).counts()
    print(f"num_starts={starts}: {counted}")

# %% [markdown]
# **Holes are not always a fault of the network.** NOT_CONVERGED depends on the solver: a stronger
# one finds equilibria that plain iteration circles around. Whether they are unique is still another
# question.

# %%
net.layer.solver = wp.Auto()
stronger = wp.landscape.surface(net, loss, X, y, directions=directions, num=7, radius=0.7, num_starts=2)
print("Auto:  ", stronger.counts())

# %% [markdown]
# ## Where to read on
#
# - [Landscapes](../landscapes.md): directions, sharpness, basins, files that survive an
#   interruption.
# - [Solving](../solving.md): which solver finds what.
# - [An equilibrium layer in your own model](01_equilibrium_layer.md): how training itself runs into
#   a hole.
