"""SGLang's real engine on a CPU, its attention by openmla: every call is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
HALF_ULP = 2.0**-6  # of bf16 outputs of 4 to 8, the largest there are
FROM_TRANSFORMERS = 0.06  # of log-probabilities; its bf16 model is 0.03 from the same in float32
PROMPTS = 5


@cache
def run(wish: str, *options: str) -> dict[str, Any]:
    """What one engine generated, and what the plug-in of `stubs` saw."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, str(FOLDER / "engine.py"), str(result), *options],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(FOLDER / "stubs"),
                "OPENMLA_SGLANG": wish,
                "OPENMLA_CHECKS": folder,
            },
            timeout=900,
            check=False,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-5000:]
        assert "openmla: " not in log  # nothing stood in the way
        found: dict[str, Any] = json.loads(result.read_text())
        return found | json.loads((Path(folder) / "seen.json").read_text())


def generated(wish: str, *options: str) -> list[tuple[list[int], list[list[float]]]]:
    """Tokens and log-probabilities of every request, digit for digit."""
    return [(r["tokens"], r["logprobs"]) for r in run(wish, *options)["results"]]


@pytest.mark.parametrize("wish", ["", "latent"], ids=["both forms", "latent form"])
def test_every_call_of_the_engine_is_right(wish: str):
    """Chunks of 160 tokens, then the same prompts again from the radix cache."""
    found = run(wish)
    seen = found["seen"]
    print(f"{seen}, off by {found['off']}")
    assert ("fresh" in seen) == (wish == "")
    assert seen["invariant"] == (seen["latent"] if wish else 0)
    assert seen["latent"] > 100 and seen["EXTEND"] > 3 and seen["DECODE"] > 10
    cached = [r["cached"] for r in found["results"]]
    assert not any(cached[:PROMPTS]) and max(cached[PROMPTS:]) >= 256


def test_the_attention_is_float64s_and_the_model_transformers():
    for wish in ("", "latent"):
        found = run(wish)
        assert max(found["off"].values()) <= HALF_ULP
        assert found["from_transformers"] <= FROM_TRANSFORMERS


def test_log_probabilities_do_not_depend_on_the_batch():
    """In latent form, prompts in one piece: together, alone, and over other pages."""
    together = generated("latent", "--chunk", "1024")[:PROMPTS]
    assert generated("latent", "--alone", "--chunk", "1024", "--page", "32") == together
