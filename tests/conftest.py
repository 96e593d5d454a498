"""One thread for the whole suite: its problems are small, and two threads on two busy cores wait for each other."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
