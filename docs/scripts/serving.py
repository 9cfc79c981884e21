"""The table of a server under load, from the newest file of benchmarks/device/serve_h200.py."""

from __future__ import annotations

from typing import Any

from performance import table
from results import newest

PAGE = "docs/performance.md"
COMMAND = "timeout 150 python benchmarks/device/serve_h200.py serve-h200-DATE.json"


def pictures() -> dict[str, str]:
    """None."""
    return {}


def regions() -> dict[tuple[str, str], str]:
    """What stands in the page: a table, or that nothing was measured."""
    try:
        found = newest("serve-h200", "loads")
    except FileNotFoundError:
        return {(PAGE, "serving"): f"Not measured yet: `{COMMAND}` makes the file."}
    words = f"{loads_table(found.record)}\n\n{checks(found.record)}\n\n{found.source}"
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
                f"{load['new_tokens_per_s']:.0f}",
                f"{first['p50_ms'] / 1e3:.2f}, {first['p99_ms'] / 1e3:.2f} s",
                f"{between['p50_ms']:.1f}, {between['p99_ms']:.1f} ms",
                _gib(load["cache_bytes"]),
                _gib(load["peak_bytes"]),
            )
        )
    return table(head, rows)


def checks(record: dict[str, Any]) -> str:
    """What was compared, in sentences; of steps that did not fit the time, nothing."""
    said = []
    if record.get("bars"):
        bars = record["bars"]
        said.append(
            f"Even load: {bars['speed']:.1f} times the tokens/s of the expanded cache, "
            f"{bars['cache']:.3f} of its bytes."
        )
    for load in record["loads"]:
        if "requests_with_openmlas_tokens" in load:
            equal = load["requests_with_openmlas_tokens"]
            said.append(
                f"{equal} of {load['requests']} requests have the same tokens with the expanded "
                "cache: of random weights, one digit of bf16 changes the greedy choice."
            )
    if "again" in record:
        same = "the same tokens" if record["again"]["same"] else "OTHER tokens"
        more = record["again"]["bytes_more"]
        said.append(f"The mixed load a second time: {same}, {more} bytes more held.")
    if "failures" in record:
        failed = record["failures"]
        same = "their tokens are unchanged" if failed["same"] else "their tokens CHANGED"
        said.append(
            f"{failed['failed']} of {failed['bad']} bad requests beside good ones failed, {same}."
        )
    for how, count in record.get("neighbors", {}).items():
        said.append(
            f"Alone and together, {how}: {count['same']} of {count['requests']} requests equal."
        )
    if record["skipped"]:
        said.append(f"Did not fit the time: {', '.join(record['skipped'])}.")
    return "\n".join(said)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
