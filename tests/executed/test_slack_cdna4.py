"""Copies of keys and values are in flight while a block is multiplied: counted in compiled code."""

from __future__ import annotations

from collections import defaultdict
from statistics import median_low

import pytest

from executed.cases import dense, latent, sparse
from gluon_sim.compiled import EQUAL, Location, execute, parse
from openmla.errors import Unsupported
from openmla.lab.testing.case import Case
from openmla.lab.testing.executed.prepare import prepare

_LONG = {"heads": 1, "causal": False}
_ROWS = {"heads": 64, "q_lens": (1,), "k_lens": (330,)}
CASES = {
    "dense bf16": dense(32, 400, **_LONG),
    "dense, rope in pages": dense(32, 400, rope="cache", kv="bf16", page_size=16, **_LONG),
    "dense 192+64->256": dense(32, 400, d_nope=192, d_v=256, **_LONG),
    "dense 256+0->256": dense(32, 400, d_nope=256, d_rope=0, d_v=256, rope="none", **_LONG),
    "dense 128+0->128": dense(32, 400, d_rope=0, rope="none", **_LONG),
    "dense 64+32->64": dense(32, 700, d_nope=64, d_rope=32, d_v=64, **_LONG),
    "dense fp8": dense(32, 700, dtype="e4m3", **_LONG),
    "dense fp8, v bf16, scales": dense(
        32,
        700,
        dtype="e4m3",
        side_dtype="bf16",
        rope_dtype="e4m3",
        q_scale=True,
        k_scale=True,
        **_LONG,
    ),
    "dense fp8 192+64->256": dense(32, 700, dtype="e4m3", d_nope=192, d_v=256, **_LONG),
    "dense key mask": dense(32, 400, key_mask="half", **_LONG),
    "sparse bf16": sparse("bf16", topk=320, **_ROWS),
    "sparse rows": sparse("plain", topk=320, **_ROWS),
    "sparse 656": sparse("fp8_656", topk=320, **_ROWS),
    "sparse token": sparse("fp8_token", topk=320, **_ROWS),
    "sparse e4m3": sparse("plain", topk=320, dtype="e4m3", **_ROWS),
    "latent bf16": latent("bf16", **_ROWS),
    "latent 656": latent("fp8_656", **_ROWS),
    "latent block64": latent("fp8_block64", **_ROWS),
}
QUICK = ("dense, rope in pages", "sparse bf16")
REGISTERS = 0.65
"""Share of a block's products that loads to registers overlap: at least the 36 of scores, of 52.
Rows are dequantized between the others."""


def check(case: Case) -> None:
    try:
        (launch,) = prepare(case, "mi355x").launches
    except Unsupported as error:
        pytest.skip(error.reason)
    report = execute(
        launch.compiled,
        launch.programs,
        launch.arguments,
        outputs=launch.outputs,
        schedule=EQUAL,
        trace=True,
    )
    report.raise_if_bad()
    assert report.trace is not None
    (loop,) = report.trace.loops(parse(launch.compiled))
    assert loop.products >= 20 and loop.iterations >= 4
    transfers: dict[Location, list[int]] = defaultdict(list)
    for slack in report.trace.slack:
        if "load" in slack.copy.text:
            transfers[slack.copy].append(slack.products)
    # What is issued in every turn of the loop by all 8 waves; the last turns' copies bring nothing.
    found = {where: median_low(n) for where, n in transfers.items() if len(n) > 4 * loop.iterations}
    assert len(found) > 2
    short = [
        f"{products} of {loop.products} products: {where}"
        for where, products in found.items()
        if products < loop.products * (1 if "lds" in where.text else REGISTERS)
    ]
    assert not short, "\n".join(short)


@pytest.mark.compile
@pytest.mark.parametrize("name", QUICK)
def test_a_block_of_products_between_a_copy_and_its_wait(name: str) -> None:
    check(CASES[name])


@pytest.mark.executed
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_in_every_form(name: str) -> None:
    check(CASES[name])
