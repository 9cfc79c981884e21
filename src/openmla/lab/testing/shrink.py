"""Make a failing case as small as it stays failing.

Greedy: try each simplification in turn, keep the first that still fails, start over; stop when none
does. Every step makes the case strictly simpler, so it ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from openmla.formats import BF16, FORMATS
from openmla.lab.testing.case import Case, CaseSource

SIMPLEST: dict[str, Any] = {
    "layout": "contiguous",
    "fp32_out": False,
    "out": "fresh",
    "spare": 0,
    "sink": "none",
    "q_scale": False,
    "k_scale": False,
    "key_mask": "none",
    "return_max_logits": False,
    "window": 0,
    "turned": 0,
    "group": 1,
    "causal": False,
    "invariant": False,
    "range_keys": 0,
    "values": "normal",
    "default_dtype": "fp32",
    "default_device": "",
    "side_dtype": "",
    "topk_lengths": "none",
    "index_kind": "distinct",
    "kv": "plain",
}
"""The plain choice of each option."""
SIMPLEST_SOURCE: dict[str, Any] = {
    "kv": "bf16",
    "index_kind": "distinct",
    "topk_lengths": "none",
}
SIZES = ("heads", "d_nope", "d_rope", "d_v", "topk", "page_size")


def shrink(case: Case, fails: Callable[[Case], bool], attempts: int = 300) -> Case:
    """The smallest case found for which `fails` holds; `case` itself must fail.

    >>> big = Case("dense", heads=16, d_nope=8, d_rope=4, d_v=8, q_lens=(9, 4), k_lens=(9, 4))
    >>> small = shrink(big, lambda c: max(c.q_lens, default=0) > 2)
    >>> small.heads, small.q_lens, small.k_lens
    (1, (3,), (0,))
    """
    tried = {case}
    improved = True
    while improved:
        improved = False
        for simpler in _simpler(case):
            if simpler in tried:
                continue
            if len(tried) > attempts:
                return case
            tried.add(simpler)
            if fails(simpler):
                case, improved = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Every case one step simpler, the largest steps first; impossible ones are left out."""
    for change in _changes(case):
        try:
            yield replace(case, **change)
        except ValueError:
            continue


def _changes(case: Case) -> Iterator[dict[str, Any]]:
    for b in range(len(case.q_lens)):
        yield {
            "q_lens": case.q_lens[:b] + case.q_lens[b + 1 :],
            "k_lens": case.k_lens[:b] + case.k_lens[b + 1 :],
        }
    for name in ("q_lens", "k_lens"):
        lens = getattr(case, name)
        for b, n in enumerate(lens):
            for smaller in _smaller(n):
                yield {name: (*lens[:b], smaller, *lens[b + 1 :])}
    yield from _simpler_sources(case)
    for name in SIZES:
        least = 0 if name in ("d_rope", "topk") else 1
        for smaller in _smaller(getattr(case, name)):
            if smaller >= least:
                yield _resized(case, name, smaller)
    for name, plain in SIMPLEST.items():
        if getattr(case, name) != plain:
            yield {name: plain} | ({"rope": "shared"} if case.rope == "cache" else {})
    if case.rope in ("shared_3d", "per_head"):
        yield {"rope": "shared"}


def _simpler_sources(case: Case) -> Iterator[dict[str, Any]]:
    """One source less, or one that is simpler."""
    for i, source in enumerate(case.sources):
        before, after = case.sources[:i], case.sources[i + 1 :]
        if before or after:
            yield {"sources": before + after}
        for name in ("topk", "rows", "page_size"):
            for smaller in _smaller(getattr(source, name)):
                if smaller or name != "page_size":
                    yield {"sources": (*before, _with(source, name, smaller), *after)}
        for name, plain in SIMPLEST_SOURCE.items():
            if getattr(source, name) != plain:
                yield {"sources": (*before, _with(source, name, plain), *after)}


def _with(source: CaseSource, name: str, value: Any) -> CaseSource:
    changed: dict[str, Any] = {name: value}
    return replace(source, **changed)


def _smaller(n: int) -> Iterator[int]:
    """0, half, one less.

    >>> list(_smaller(9)), list(_smaller(1))
    ([0, 4, 8], [0])
    """
    yield from sorted({0, n // 2, n - 1} - {n, -1}) if n > 0 else ()


def _resized(case: Case, name: str, size: int) -> dict[str, Any]:
    """Widths depend on each other: V lies inside the latent, and no rope columns mean no rope."""
    change: dict[str, Any] = {name: size}
    if name == "d_nope" and case.form != "dense":
        change["d_v"] = min(case.d_v, size)
        change["turned"] = min(case.turned, size // 2 * 2)
    if name == "d_v":
        change["turned"] = min(case.turned, size // 2 * 2)
    if name == "d_rope" and size == 0 and case.form == "dense":
        change |= {"rope": "none", "kv": "plain"}
    if name in ("d_nope", "d_rope") and FORMATS.get(case.kv, BF16).widths:
        change["kv"] = "fp8_token"  # the format exists at few widths
    if name in ("d_nope", "d_rope"):
        change["sources"] = tuple(
            replace(source, kv="fp8_token") if FORMATS.get(source.kv, BF16).widths else source
            for source in case.sources
        )
    return change
