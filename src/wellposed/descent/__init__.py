"""Training exactly as the theorems assume it: full-batch gradient descent and gradient flow, with a record of everything."""

from wellposed.descent._descend import descend
from wellposed.descent._flow import flow
from wellposed.descent.history import Event, History, Stop
from wellposed.descent.recorder import Callback, State

__all__ = ["Callback", "Event", "History", "State", "Stop", "descend", "flow"]
