"""Full-batch gradient descent and gradient flow, as the theorems assume them."""

from wellposed.descent._descend import descend
from wellposed.descent._flow import flow
from wellposed.descent.history import History, Stop
from wellposed.descent.recorder import Callback, State

__all__ = ["Callback", "History", "State", "Stop", "descend", "flow"]
