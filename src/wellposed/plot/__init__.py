"""Pictures of saved records; the only importer of matplotlib, and only when something is drawn.

Every function takes a record (what a `to_dict()` gave, also after JSON, or the object itself) and returns a matplotlib
`Figure` that no window holds: `figure.savefig("picture.png")`.
"""

from wellposed.plot.experiments import experiment
from wellposed.plot.paths import residuals, trajectories
from wellposed.plot.spectra import spectrum
from wellposed.plot.surfaces import contour, line, surface
from wellposed.plot.training import losses

__all__ = ["contour", "experiment", "line", "losses", "residuals", "spectrum", "surface", "trajectories"]
