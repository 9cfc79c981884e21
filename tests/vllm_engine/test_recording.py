"""The programs that record calls for `make test` still make what is replayed there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
REPLAYED = HERE.parent / "integrations/vllm"


def shape(value: Any) -> Any:
    """A recording without its numbers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {name: shape(part) for name, part in value.items()}
    return [shape(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("program", "wish", "replayed"),
    [
        ("recording.py", "", "calls.pt"),
        ("dsa_recording.py", "sparse", "selected_calls.pt"),
        ("v4_recording.py", "", "v4_calls.pt"),
    ],
)
def test_what_is_recorded_is_what_is_replayed(
    program: str, wish: str, replayed: str, tmp_path: Path
):
    path = tmp_path / replayed
    done = subprocess.run(
        [sys.executable, str(HERE / program), str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OPENMLA_VLLM_CPU": wish},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    new, kept = (torch.load(file, weights_only=True) for file in (path, REPLAYED / replayed))
    assert shape(new) == shape(kept)
