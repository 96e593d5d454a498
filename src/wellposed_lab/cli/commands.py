"""All commands: each module registers its own with `app` when it is imported."""

from wellposed_lab.cli import bench, certify, data, doctor, landscape, papers, prove, report, sweep, train
from wellposed_lab.cli._app import app

__all__ = ["app", "bench", "certify", "data", "doctor", "landscape", "papers", "prove", "report", "sweep", "train"]
