"""Time tiles of the portable backward of dense attention on an H200: what a plan may choose.

PYTHONPATH=src python benchmarks/device/portable_backward_h200.py --out DIR
[--section compile|times ...]

1 x 4096 tokens, 128 heads, widths of DeepSeek-V3, causal, bf16. The query pass and the key pass are
separate launches and are timed apart, each with every tile: (queries, keys, warps, stages) of a
step. TFLOP/s of a pass count its own products (three of seven, four of seven); those of the whole
count five, as everybody does. Results are compared with those of the first tile. Caches are flushed
before every measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from backward_h200 import FLOPS, NOPE, ROPE, VALUES, Timer, attend, operands
from sections import Section, run

from openmla.backward.operands import BackwardOperands, Gradients
from openmla.dispatch import device_target, plan_for
from openmla.kernels.call import Call
from openmla.kernels.portable.backward import launch
from openmla.kernels.portable.backward.plan import Tile
from openmla.planning import Plan

TOKENS, HEADS = 4096, 128
QUERY_TILES = (
    Tile(64, 64, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(64, 64, 4, 3),
    Tile(128, 64, 8, 2),
    Tile(128, 64, 8, 3),
    Tile(128, 32, 8, 3),
    Tile(128, 128, 8, 2),
    Tile(64, 128, 4, 2),
)
KEY_TILES = (
    Tile(64, 64, 8, 2),
    Tile(64, 64, 4, 2),
    Tile(32, 64, 4, 2),
    Tile(32, 64, 4, 3),
    Tile(32, 128, 8, 2),
    Tile(32, 128, 8, 3),
    Tile(64, 128, 8, 2),
    Tile(64, 128, 8, 3),
)
TILES = {"query": QUERY_TILES, "key": KEY_TILES}
PAIRS = HEADS * TOKENS * (TOKENS + 1) // 2
OWN_FLOPS = {
    "query": 2 * (2 * (NOPE + ROPE) + VALUES),
    "key": 2 * (2 * (NOPE + ROPE) + 2 * VALUES),
}


def with_tile(plan: Plan, which: str, tile: Tile) -> Plan:
    names = ("BM", "BN", "num_warps", "num_stages")
    if which == "key":
        names = ("key_BM", "key_BN", "key_warps", "key_stages")
    return replace(plan, config=replace(plan.config, **dict(zip(names, tile, strict=True))))


class Passes:
    """Both launches of a backward, with any tile."""

    def __init__(self, tokens: int, heads: int) -> None:
        op, d_out = operands(1, tokens, heads)
        self.backward = BackwardOperands(op, *attend(op), d_out)
        self.gradients = Gradients.allocate(op)
        self.plan = plan_for(self.backward.problem(), device_target(op.q.device), "portable")

    def launch(self, which: str, tile: Tile) -> Call:
        """The launch of one pass, after all of the plan's own have run."""
        for call in launch.calls(self.plan, self.backward, self.gradients):
            call.run()
        plan = with_tile(self.plan, which, tile)
        found = list(launch.calls(plan, self.backward, self.gradients))
        query = next(c for c in found if c.kernel.__name__ == "query_pass_kernel")
        query.run()
        return next(c for c in found if c.kernel.__name__ == f"{which}_pass_kernel")

    def result(self, which: str) -> torch.Tensor:
        written = self.gradients.q if which == "query" else self.gradients.kv
        return written.float()


def compiled(group: str, _: int) -> Iterator[dict[str, Any]]:
    which, _, number = group.partition(" ")
    call = Passes(256, 16).launch(which, TILES[which][int(number)])
    kernel = call.compile()
    yield {
        "compiled": group,
        "tile": list(TILES[which][int(number)]),
        "shared": kernel.metadata.shared,
    }


def times(which: str, rounds: int) -> Iterator[dict[str, Any]]:
    passes, timer = Passes(TOKENS, HEADS), Timer()
    want = None
    for tile in TILES[which]:
        result: dict[str, Any] = {"pass": which, "tile": list(tile)}
        try:
            call = passes.launch(which, tile)
            call.run()
            got = passes.result(which)
            want = got if want is None else want
            ms = median(timer(call.run) for _ in range(rounds))
        except Exception as error:  # a tile that does not fit is a result too
            yield {**result, "error": str(error)[:300]}
            continue
        yield {
            **result,
            "ms": round(ms, 3),
            "tflops_of_its_products": round(OWN_FLOPS[which] * PAIRS / ms / 1e9),
            "differs_by": float((got - want).norm() / want.norm()),
        }


def whole(_: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The plan as it is."""
    passes, timer = Passes(TOKENS, HEADS), Timer()

    def once() -> None:
        for call in launch.calls(passes.plan, passes.backward, passes.gradients):
            call.run()

    once()
    ms = median(timer(once) for _ in range(rounds))
    yield {"plan_ms": round(ms, 3), "tflops": round(FLOPS * PAIRS / ms / 1e9)}


def line(result: dict[str, Any]) -> str:
    return "  ".join(f"{name}: {value}" for name, value in result.items())


if __name__ == "__main__":
    groups = tuple(f"{which} {i}" for which, tiles in TILES.items() for i in range(len(tiles)))
    sections = {
        "compile": Section(compiled, 90, groups, side_by_side=True),
        "times": Section(times, 40, tuple(TILES)),
        "whole": Section(whole, 30),
    }
    run(__file__, sections, line)
