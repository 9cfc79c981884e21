"""DeepSeek-V3.2 and GLM-5 in vLLM's real engine on a CPU, with openmla's indexer and attention."""

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

ENGINE = Path(__file__).with_name("dsa_engine.py")
HALF_ULP = 2.0**-7  # of bf16 outputs of 2 to 4, the largest there are
FROM_TRANSFORMERS = 0.06  # whose bf16 model is 0.03 from the same in float32
PROMPTS = 5


@cache
def run(*options: str) -> dict[str, Any]:
    """What one engine generated, and how far its calls were from the references."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        done = subprocess.run(
            [sys.executable, str(ENGINE), str(result), *options],
            capture_output=True,
            text=True,
            env={**os.environ, "OPENMLA_VLLM_CPU": "sparse"},
            timeout=600,
            check=False,
        )
        log = done.stdout + done.stderr
        assert done.returncode == 0, log[-5000:]
        assert "openmla: " not in log  # nothing stood in the way
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def generated(*options: str) -> list[tuple[list[int], list[list[float]]]]:
    """Tokens and log-probabilities of every request, digit for digit."""
    return [(r["tokens"], r["logprobs"]) for r in run(*options)["results"]]


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--model", "glm5", "--kv", "fp8_ds_mla"),
        ("--kv", "fp8", "--fp8-queries"),
        ("--ngram", "3"),
        ("--fused",),
    ],
    ids=[
        *("DeepSeek-V3.2", "GLM-5 over FP8 pages", "FP8 pages and queries", "speculation"),
        "queries as on a GPU",
    ],
)
def test_every_call_of_the_engine_is_right(options: tuple[str, ...]):
    """Chunks of 96 tokens, then the same prompts again from the prefix cache."""
    found = run(*options)
    seen = found["seen"]
    print(f"{seen}, attention off by {found['out']:.2e}, lse by {found['lse']:.2e}")
    assert seen["selections that differ"] == 0 and seen["queries that select"] > 500
    assert found["out"] <= HALF_ULP and found["lse"] <= 5e-6
    assert ("FP8 queries" in seen) == ("--fp8-queries" in options)
    cached = [r["cached"] for r in found["results"]]
    assert not any(cached[:PROMPTS]) and max(cached[PROMPTS:]) >= 128


@pytest.mark.parametrize("model", ["v32", "glm5"])
def test_selecting_every_key_generates_what_transformers_does(model: str):
    """The whole model, rotary embedding included, against another engine's code."""
    found = run("--model", model, "--all-keys")
    print(f"log-probabilities off by {found['off']:.4f} from Transformers")
    assert found["off"] <= FROM_TRANSFORMERS
    assert found["seen"]["queries"] > 500 and not found["seen"]["queries that select"]


@pytest.mark.parametrize("kv", ["auto", "fp8_ds_mla"])
def test_short_prompts_may_come_again_from_the_cache(kv: str):
    """Without vLLM's option for it, prompts of fewer keys than are selected: by vLLM's dense
    prefill over bf16 pages, as selected rows over FP8 ones, which that cannot gather on a CPU."""
    found = run("--all-keys", "--dense", "--kv", kv)
    seen, cached = found["seen"], [r["cached"] for r in found["results"]]
    print(f"{seen}, attention off by {found['out']:.2e}, from Transformers {found['off']:.4f}")
    assert max(cached[PROMPTS:]) >= 128
    assert found["out"] <= HALF_ULP and found["lse"] <= 5e-6
    assert kv != "auto" or found["off"] <= FROM_TRANSFORMERS  # FP8 rows are other keys


def test_log_probabilities_do_not_depend_on_the_batch():
    """Together in chunks, from cached prefixes, alone in one piece: equal to the last digit."""
    first = generated()[:PROMPTS]
    assert generated()[PROMPTS:] == first
    assert generated("--alone", "--chunk", "512", "--unchecked") == first


def test_log_probabilities_survive_preemption_beside_an_aborted_request():
    """A cache of 6 blocks: requests lose theirs, and are prefilled again with what they had."""
    found = run("--blocks", "6")
    assert found["drafts"]["preempted"] > 0
    assert found["seen"]["selections that differ"] == 0 and found["out"] <= HALF_ULP
    assert generated("--blocks", "6") == generated()


def test_speculation_changes_nothing():
    assert generated("--ngram", "3") == generated()
    drafts = run("--ngram", "3")["drafts"]
    assert drafts["drafted"] > drafts["accepted"] > 0 and not run()["drafts"]["drafted"]
