"""Shared by all tests."""

import torch

# pytest-xdist runs one worker per core; more threads than that only wait for each other.
torch.set_num_threads(1)
