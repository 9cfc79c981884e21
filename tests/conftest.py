"""Shared by all tests."""

import os
from pathlib import Path

import pytest
import torch

# So that its failures say what was compared.
pytest.register_assert_rewrite("kernels.judging")

# pytest-xdist runs one worker per core; more threads than that only wait for each other.
torch.set_num_threads(1)

# Compile reports travel with the repository, keyed by a hash of the source: an unchanged kernel
# costs nothing, a changed one is compiled and leaves its new report here to be committed.
os.environ["OPENMLA_COMPILE_CACHE"] = str(Path(__file__).parent / "compile_reports")
