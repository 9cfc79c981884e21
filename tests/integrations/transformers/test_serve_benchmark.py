"""benchmarks/device/serve_h200.py, whose figures need a GPU, does on a CPU what it says it does."""

from __future__ import annotations

import gc
import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from openmla.aot.warmup import kernels_of
from openmla.integrations.transformers import optimize
from openmla.planning.target import target_by_name
from openmla.problem import Problem

FOLDER = Path(__file__).parents[3] / "benchmarks/device"
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The program as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("serve_h200")
    finally:
        sys.path.remove(str(FOLDER))


def test_loads_are_those_that_were_asked_for(bench: Any):
    (even, mixed, many), _ = bench.loads_of(tiny=False)
    assert [len(p) for p in even.prompts] == [2048] * 64 and even.new_tokens == [64] * 64
    assert even.rows == 64 * (2048 + 64)
    for load, count in ((mixed, 64), (many, 256)):
        lengths = [len(p) for p in load.prompts]
        assert len(lengths) == count and min(lengths) >= 128 and 4096 < max(lengths) <= 8192
        assert 128 < max(load.new_tokens) <= 256
        assert all(5 <= token < bench.VOCABULARY for p in load.prompts for token in p[:9])
    again, _ = bench.loads_of(tiny=False)
    assert again[1] == mixed


@pytest.mark.long
def test_a_load_that_takes_too_long_is_cut_and_harms_none_after_it(bench: Any):
    model = optimize(bench.make_model(2, 4, 128, "cpu"))
    _, few = bench.loads_of(tiny=True)
    whole = bench.serve(model, few)
    assert not whole.is_cut and [len(t) for t in whole.tokens] == few.new_tokens
    assert all(len(a.times) == 4 and a.times[0] > whole.start for a in whole.answers)
    cut = bench.serve(model, few, seconds=0.0)
    assert cut.is_cut and cut.seconds < whole.seconds
    assert not any(a.is_finished or a.error for a in cut.answers)
    for some, all_ in zip(cut.tokens, whole.tokens, strict=True):
        assert some == all_[: len(some)]
    assert bench.serve(model, few).tokens == whole.tokens


def test_what_was_found_survives_what_fails_and_what_does_not_fit(bench: Any, tmp_path: Path):
    report = bench.Report(tmp_path / "r.json", {}, seconds=50)

    def fails() -> dict[str, Any]:
        raise MemoryError("none left")

    report.step("first", 10, lambda: {"same": True})
    report.step("second", 10, fails)
    report.step("third", 100, fails)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["first"] == {"same": True}
    assert found["second"] == {"error": "MemoryError: none left"}
    assert found["skipped"] == ["third"] and "third" not in found


def test_bars_compare_the_even_load_alone(bench: Any):
    times = {"first_token": {"p50_ms": 10.0, "p99_ms": 40.0}, "new_tokens": 8}
    ours = {"load": "even", "contestant": "openmla", "new_tokens_per_s": 30.0, "cache_bytes": 3}
    theirs = {"load": "even", "contestant": "expanded", "new_tokens_per_s": 10, "cache_bytes": 60}
    found = {"loads": [ours | times, ours | times | {"load": "mixed", "new_tokens_per_s": 1.0}]}
    assert bench.bars(found) == {}
    found["loads"].append(theirs | times | {"new_tokens": 0})  # one that failed
    assert bench.bars(found) == {}
    found["loads"][-1] = theirs | times
    bars = bench.bars(found)
    assert (bars["speed"], bars["cache"], bars["first_token_p50"]) == (3.0, 0.05, 1.0)


@pytest.mark.long
def test_the_whole_program_on_a_tiny_model(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, engine = tmp_path / "result.json", logging.getLogger("ContinuousBatchingLogger")
    monkeypatch.setattr(engine, "level", engine.level)  # these three are put back
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(sys, "argv", ["serve_h200.py", str(path), "abc1234", "--tiny"])
    bench.main()
    found = json.loads(path.read_text())
    done = [(f["load"], f["contestant"]) for f in found["loads"]]
    names = ("even", "mixed", "mixed 256")
    assert done == [(name, by) for name in names for by in ("openmla", "expanded")]
    for figures in found["loads"]:
        assert figures["finished"] == figures["requests"] and not figures["failed"]
        assert figures["new_tokens"] == figures["asked_new_tokens"] and not figures["is_cut"]
    assert found["skipped"] == [] and found["provenance"]["commit"] == "abc1234"
    assert found["failures"] == {"failed": 3, "bad": 3, "same": True}
    assert found["again"] == {"load": "mixed", "same": True, "bytes_more": 0}
    assert [n["same"] for n in found["neighbors"].values()] == [4, 4]


@pytest.mark.long
def test_every_kernel_of_a_batch_is_compiled_before(bench: Any):
    """On an H200, whatever its size: for a part that expands, and for one that reads pages."""
    kernels, target = importlib.import_module("serving_kernels"), target_by_name("h200")
    asked = kernels.distinct(target)
    compiled = frozenset().union(*(kernels_of(problem, target) for problem in asked))
    assert len(compiled) >= 8
    for requests, tokens, keys in (
        (3, 3, 5000),
        (17, 1000, 1024),
        (200, 200, 2048),
        (48, 4090, 64),
    ):
        shared: dict[str, Any] = {"heads": 128, "batch": requests, "total_q": tokens}
        dense = Problem(
            form="dense", **shared, d_nope=128, d_rope=64, d_v=128, total_k=max(keys, tokens)
        )
        latent = Problem(
            form="latent",
            **shared,
            **{"d_nope": 512, "d_rope": 64, "d_v": 512, "page_size": 64},
            total_k=140_000 // 64 * 64,
            table_keys=max(keys, 16 * 64),
        )
        for problem in (dense, latent):
            assert kernels_of(problem, target) <= compiled
