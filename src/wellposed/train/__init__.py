"""Training exactly as the theorems assume it: full-batch gradient descent and gradient flow, with a record of everything."""

from wellposed.errors import CheckpointRefused, RunError, RunLocked
from wellposed.train.callbacks import Callback, State
from wellposed.train.descend import descend
from wellposed.train.flow import flow
from wellposed.train.history import Event, History, Stop

__all__ = [
    "Callback",
    "CheckpointRefused",
    "Event",
    "History",
    "RunError",
    "RunLocked",
    "State",
    "Stop",
    "descend",
    "flow",
]
