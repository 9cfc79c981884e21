"""Table and picture of a server under load, from the newest result of serve_h200.py.

Files from before the loads were warmed up have fewer fields; what they lack is not said of them.
"""

from __future__ import annotations

from typing import Any

from performance import table
from results import newest

from openmla.explain.bars_picture import bars_picture

PAGE = "docs/performance.md"
PICTURE = "serving.svg"
# The matrix products around attention, by which a request's bits may depend on its neighbors.
PRODUCTS = {
    "blocks of 64 rows": "the model's matrix products in blocks of 64 rows, whatever their number",
    "cuBLAS as it likes": "cuBLAS choosing its kernels by the number of rows, as it does by itself",
}
COMMAND = "timeout 280 python benchmarks/device/serve_h200.py serve-h200-DATE.json"


def pictures() -> dict[str, str]:
    """Tokens/s of every load, by contestant."""
    try:
        found = newest("serve-h200", "loads")
    except FileNotFoundError:
        return {}
    groups: dict[str, dict[str, float]] = {}
    for load in found.record["loads"]:
        bars = groups.setdefault(f"{load['load']}, {load['requests']} requests", {})
        bars[load["contestant"]] = load["new_tokens_per_s"]
    title = "Continuous batching in Transformers, four layers, one H200"
    return {PICTURE: bars_picture(title, groups, "new tokens/s")}


def regions() -> dict[tuple[str, str], str]:
    """What stands in the page: a table, or that nothing was measured."""
    try:
        found = newest("serve-h200", "loads")
    except FileNotFoundError:
        return {(PAGE, "serving"): f"Not measured yet: `{COMMAND}` makes the file."}
    picture = f"![Bars of new tokens/s: openmla and expanded](pictures/{PICTURE})"
    words = f"{loads_table(found.record)}\n\n{picture}\n\n{checks(found.record)}\n\n{found.source}"
    return {(PAGE, "serving"): f"{words}, Transformers {found.record['transformers']}"}


def loads_table(record: dict[str, Any]) -> str:
    """One line for each load and contestant."""
    head = (
        *("load", "by", "requests", "prompt tokens", "new tokens/s"),
        *("first token p50, p99", "between tokens p50, p99", "cache", "most memory"),
    )
    rows = []
    for load in record["loads"]:
        first, between = load["first_token"], load["between_tokens"]
        rows.append(
            (
                load["load"],
                load["contestant"],
                load["requests"],
                f"{load['prompt_tokens']:,}",
                f"{load['new_tokens_per_s']:.0f}" + " (cut)" * load.get("is_cut", False),
                f"{first['p50_ms'] / 1e3:.2f}, {first['p99_ms'] / 1e3:.2f} s",
                f"{between['p50_ms']:.1f}, {between['p99_ms']:.1f} ms",
                _gib(load["cache_bytes"]),
                _gib(load["peak_bytes"]),
            )
        )
    return table(head, rows)


def checks(record: dict[str, Any]) -> str:
    """What was compared, in sentences; of steps that did not fit the time, nothing."""
    said = [warmth(record)]
    if record.get("bars"):
        bars = record["bars"]
        said.append(
            f"Even load: {bars['speed']:.1f} times the tokens/s of the expanded cache, "
            f"{bars['cache']:.3f} of its bytes, {bars['first_token_p50']:.2f} of its median time "
            f"to the first token and {bars['first_token_p99']:.2f} of its p99."
        )
    said += [cut(load) for load in record["loads"] if load.get("is_cut")]
    for load in record["loads"]:
        if "requests_with_openmlas_tokens" in load:
            equal = load["requests_with_openmlas_tokens"]
            said.append(
                f"{equal} of {load['requests']} requests have the same tokens with the expanded "
                "cache: of random weights, one digit of bf16 changes the greedy choice."
            )
    if "same" in record.get("again", {}):
        same = "the same tokens" if record["again"]["same"] else "OTHER tokens"
        more = record["again"]["bytes_more"]
        said.append(f"The mixed load a second time: {same}, {more} bytes more held.")
    said += [
        f"The step {name} failed: {record[name]['error']}."
        for name in ("again", "failures", "neighbors")
        if "error" in record.get(name, {})
    ]
    if "same" in record.get("failures", {}):
        failed = record["failures"]
        same = "their tokens are unchanged" if failed["same"] else "their tokens CHANGED"
        said.append(
            f"{failed['failed']} of {failed['bad']} bad requests beside good ones failed, {same}."
        )
    for how, count in record.get("neighbors", {}).items():
        if how == "error":
            continue
        said.append(
            f"Alone and together, {PRODUCTS[how]}: {count['same']} of {count['requests']} requests "
            "have the same tokens."
        )
    if record["skipped"]:
        said.append(f"Did not fit the time: {', '.join(record['skipped'])}.")
    return "\n".join(said)


def warmth(record: dict[str, Any]) -> str:
    """Whether first launches are in the figures."""
    if "warm_after_s" not in record:
        return (
            "The even load of openmla ran first in its process, so the first launch of every "
            "kernel is inside its time to the first token."
        )
    met = {f"{x['load']} {x['contestant']}": x["kernels_met_first"] for x in record["loads"]}
    where = ", ".join(f"{name} {count}" for name, count in met.items() if count)
    return (
        f"Before the loads, kernels were compiled ({record['compiling']}) and each load but the "
        f"largest was served once with few new tokens; {sum(met.values())} kernels were met for "
        "the first time inside a load, whose figures have what it waited for them "
        f"({where or 'none'})."
    )


def cut(load: dict[str, Any]) -> str:
    """What a load that took too long had done."""
    return (
        f"{load['load']}, {load['contestant']}: cut after {load['seconds']:.0f} s, with "
        f"{load['new_tokens']:,} of {load['asked_new_tokens']:,} new tokens; {load['began']} of "
        f"{load['requests']} requests had begun, and its times are of these; its cache had room "
        f"for {load['cache_rows']:,} of {load['cache_rows_wanted']:,} rows."
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
