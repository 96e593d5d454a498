"""Pictures of saved records; the only importer of matplotlib, and only when something is drawn.

Every function takes a record (what a `to_dict()` gave, also after JSON, or the object itself) and
returns a matplotlib `Figure` that no window holds: `figure.savefig("picture.png")`. For a PDF of a
paper set `matplotlib.rcParams["pdf.fonttype"] = 42` before: many journals refuse the Type 3 fonts
that are the default.
"""

from wellposed.plot.curves import experiment, losses, residuals, spectrum, trajectories
from wellposed.plot.surfaces import contour, line, surface

__all__ = ["contour", "experiment", "line", "losses", "residuals", "spectrum", "surface", "trajectories"]
