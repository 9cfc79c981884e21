"""Tables and pictures of speed, from benchmarks/results and from nowhere else."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from results import FOLDER, again, newest, provenance

from openmla.explain.bars_picture import bars_picture

V3 = "128+64→128"
# Region -> file, section, field, format: of scripts whose rows have a figure per contestant.
BY_CONTESTANT = {
    "dense-fp8": ("hopper-dense-fp8-h200", "speed", "tflops", ".0f"),
    "fp8-queries": ("hopper-fp8-queries-h200", "queries", "milliseconds", ".3f"),
    "indexer-scores": ("peers-all-h200", "index", "us", ".1f"),
    "indexer-select": ("indexer-h200", "select", "ms", ".3f"),
    "dsa-step": ("indexer-h200", "step", "ms", ".2f"),
}
Row = dict[str, Any]


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Markdown."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def dense_rows() -> list[Row]:
    """Shapes of the dense benchmark; short ones from a later run."""
    files = (newest(name, "speed") for name in ("hopper-dense-h200", "hopper-dense-short-h200"))
    found = {row["shape"]: row for file in files for row in file.rows if "shape" in row}
    return list(found.values())


def dense_table(rows: Iterable[Row]) -> str:
    """TFLOP/s and ratios over cuDNN."""
    head = ("shape", "TFLOP/s", "over cuDNN, kernel", "over cuDNN, layer")
    return table(
        head,
        (
            (
                _named(row),
                f"{row['tflops']['openmla']:.0f}",
                _ratio(row["kernel"]),
                _ratio(row["layer"]),
            )
            for row in rows
        ),
    )


def behind() -> str:
    """Where the peer's kernel is faster."""
    slower = [
        f"{_named(row)} ({row['kernel']:.2f})" for row in dense_rows() if 0 < row["kernel"] < 1
    ]
    return f"Given its K ready made, cuDNN is ahead on: {', '.join(slower) or 'none of these'}."


def sparse_table() -> str:
    """One line per shape; two figures are two runs."""
    found = newest("hopper-sparse-h200", "speed")
    second = {row["shape"]: row for row in again(found)}
    head = ("queries, rows, heads, width", "ms", "TFLOP/s", "share of the matmul", "gathered, TB/s")
    return table(
        head,
        (
            (
                row["shape"],
                *(
                    _both(row, second.get(row["shape"]), *figure)
                    for figure in (
                        ("timings openmla median", ".2f"),
                        ("tflops", ".0f"),
                        ("share", ".2f"),
                        ("gather_tb_per_s", ".1f"),
                    )
                ),
            )
            for row in found.rows
        ),
    )


def fp8_table() -> str:
    """Sparse prefill over FP8 rows: the way the planner chose, beside bf16 rows."""
    rows = [row for row in newest("hopper-fp8-h200", "speed").rows if "shape" in row]
    head = (
        "queries, region, pool, rows per query, heads, format",
        "dequantized",
        "ms",
        "share of the matmul",
        "bf16 rows: share",
    )
    return table(
        head,
        (
            (
                _fp8_shape(row["shape"]),
                _way(row),
                f"{_chosen(row)['ms']:.3f}",
                f"{_chosen(row)['share']:.2f}",
                f"{row['bf16 rows']['share']:.2f}",
            )
            for row in rows
        ),
    )


def latent_table() -> str:
    """Chunks of whole sequences over pages."""
    head = ("chunk", "ms", "share of the matmul", "portable kernel: share")
    return table(
        head,
        (
            (
                row["chunk"],
                f"{row['milliseconds']['hopper']:.2f}",
                f"{row['share']['hopper']:.2f}",
                f"{row['share']['portable']:.2f}",
            )
            for row in newest("hopper-sparse-h200", "latent").rows
        ),
    )


def decode_table() -> str:
    """Decode over bf16 pages beside FlashMLA."""
    head = ("requests x queries", "keys", "heads", "us", "over FlashMLA", "in a row", "before")
    return table(
        head,
        (
            (
                f"{row['requests']} x {row['queries']}",
                row["keys"],
                row["heads"],
                f"{row['us']['openmla']:.0f}",
                *_over(row, "FlashMLA"),
                _ratio(row["before"]) if row["before"] else "–",
            )
            for row in newest("peers-h200", "decode").rows
        ),
    )


def decode_index_table() -> str:
    """Index scores, and selection with them, of one query a request beside DeepGEMM's scores."""
    head = ("call", "requests", "keys", "us", "over DeepGEMM's scores", "in a row")
    return table(
        head,
        (
            (
                f"`{row['call']}`",
                row["requests"],
                row["keys"],
                f"{row['us']['openmla']:.1f}",
                *_over(row, "DeepGEMM"),
            )
            for row in newest("peers-h200", "index").rows
        ),
    )


def few_pages_table() -> str:
    """Few queries over many keys: the shapes of `openmla bench few`."""
    head = ("requests x queries on keys, heads", "us", "share of the matmul", "TB/s")
    return table(
        head,
        (
            (row["shape"], f"{row['us']:.0f}", f"{row['share']:.2f}", f"{row['tb_per_s']:.1f}")
            for row in newest("few-h200", "pages").rows
            if row["backend"] == "hopper"
        ),
    )


def few_lists_table() -> str:
    """Lists of few queries, replayed once and in a row."""
    head = ("rows", "queries", "us", "in a row", "in one launch")
    names = ("planned us", "planned us in a row", "one launch us")
    return table(
        head,
        (
            (row["rows"], row["queries"], *(f"{row[name]:.1f}" for name in names))
            for row in newest("few-h200", "few").rows
        ),
    )


def fp8_ways_table() -> str:
    """Share of the matmul of the plan's way to read FP8 rows, and of the others."""
    head = ("queries", "pool", "lists", "plan", "share of the matmul", "others", "behind the best")
    lines = []
    for row in newest("few-fp8-h200", "fp8").rows:
        if "queries" not in row:
            continue
        shares = {n.removeprefix("share "): v for n, v in row.items() if n.startswith("share ")}
        others = ", ".join(f"{n} {v:.2f}" for n, v in shares.items() if n != row["plan"])
        lists, planned = "clustered" if row["clustered"] else "random", shares[row["plan"]]
        behind_best = f"{max(shares.values()) / planned - 1:.0%}"
        place = (row["queries"], row["pool"], lists, row["plan"])
        lines.append((*place, f"{planned:.2f}", others, behind_best))
    return table(head, lines)


def portable_table() -> str:
    """Each shape with the tile that the planner takes: it is timed first."""
    planned: dict[str, Row] = {}
    for row in newest("portable-h200", "time", "times").rows:
        if "ms" in row:
            planned.setdefault(row["shape"], row)
    head = ("shape", "ms", "TFLOP/s", "share of the matmul", "gathered, TB/s")
    return table(
        head,
        (
            (
                name,
                f"{row['ms']:.2f}",
                f"{row['tflops']:.0f}",
                f"{row['share']:.2f}",
                f"{row['gathered_tbps']:.1f}" if row["gathered_tbps"] else "–",
            )
            for name, row in planned.items()
        ),
    )


def cpu_table(file: str, case: str = "") -> str:
    """How many times faster than each peer; of the cases with these words."""
    found = newest(file, "rows")
    head = ("case", "dtype", "ms", "times as fast as")
    return table(
        head,
        (
            (
                row["case"],
                row["dtype"],
                f"{row['seconds'] * 1e3:.0f}",
                ", ".join(f"{p['name']}: {p['times_faster']:.2f}" for p in row["peers"]),
            )
            for row in found.rows
            if case in row["case"]
        ),
    )


def ranks_table() -> str:
    """One rank's attention of a prompt that eight ranks share."""
    head = ("share of 131072 tokens, 128 heads", "ms", "TFLOP/s", "over an eighth of the whole")
    return table(
        head,
        (
            (
                row["share"],
                f"{row['ms']['median']:.0f}",
                f"{row['tflops']:.0f}",
                f"{row['of_an_eighth']['median']:.2f}",
            )
            for row in newest("context-parallel-h200", "shares").rows
        ),
    )


def contestants_table(prefix: str, section: str, field: str, form: str) -> str:
    """Rows of a device script that have a figure per contestant; they are named by their label."""
    try:
        found = newest(prefix, section)
    except FileNotFoundError:
        return "Not measured yet."
    rows = [row for row in found.rows if isinstance(row.get(field), dict)]
    names = list(dict.fromkeys(name for row in rows for name in row[field]))
    figures = (
        (
            next(v for v in row.values() if isinstance(v, str)),
            *(format(row[field][n], form) if n in row[field] else "–" for n in names),
        )
        for row in rows
    )
    return f"{table((section, *names), figures)}\n\n{found.source}"


def files_table() -> str:
    """Every result file, and how to make it again."""
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        given = provenance(json.loads(path.read_text()))
        commit = given.get("commit", "not kept").removesuffix("-dirty")[:7].replace("not kep", "–")
        link = f"[`{path.name}`](../benchmarks/results/{path.name})"
        date = given.get("date", path.stem[-10:])[:10]
        rows.append((link, date, commit, f"`{given['command']}`" if "command" in given else "–"))
    return table(("file", "date", "commit", "command"), rows)


def regions() -> dict[tuple[str, str], str]:
    """What stands in the pages."""
    page = "docs/performance.md"
    tables = {
        "dense": (dense_table(dense_rows()), newest("hopper-dense-h200", "speed")),
        "sparse": (sparse_table(), newest("hopper-sparse-h200", "speed")),
        "fp8": (fp8_table(), newest("hopper-fp8-h200", "speed")),
        "latent": (latent_table(), newest("hopper-sparse-h200", "latent")),
        "decode": (decode_table(), newest("peers-h200", "decode")),
        "decode-index": (decode_index_table(), newest("peers-h200", "index")),
        "few-pages": (few_pages_table(), newest("few-h200", "pages")),
        "few-lists": (few_lists_table(), newest("few-h200", "few")),
        "fp8-ways": (fp8_ways_table(), newest("few-fp8-h200", "fp8")),
        "portable": (portable_table(), newest("portable-h200", "time", "times")),
        "cpu": (cpu_table("cpu"), newest("cpu", "rows")),
        "cpu-shared": (cpu_table("cpu-shared", "shared"), newest("cpu-shared", "rows")),
        "attend-cpu": (cpu_table("attend-cpu"), newest("attend-cpu", "rows")),
        "ranks": (ranks_table(), newest("context-parallel-h200", "shares")),
    }
    found = {(page, name): f"{text}\n\n{file.source}" for name, (text, file) in tables.items()}
    short = newest("hopper-dense-short-h200", "speed").source
    found[page, "dense"] += f"\n\nShort prompts: {short}"
    found[page, "behind"] = behind()
    found |= {(page, name): contestants_table(*what) for name, what in BY_CONTESTANT.items()}
    return found | {(page, "files"): files_table(), (page, "in-short"): in_short()}


def in_short() -> str:
    """The figures that people ask for first, as a paragraph."""
    profile = newest("hopper-dense-h200", "ncu").record["ncu"]["causal 1x16384 h128"]
    busy = profile["tensor_pipe_active_pct_of_elapsed"]
    sparse = newest("hopper-sparse-h200", "speed").rows[0]
    latent = newest("hopper-sparse-h200", "latent").rows[0]
    fp8 = newest("hopper-fp8-h200", "speed").rows[0]
    few = next(row for row in newest("few-h200", "few").rows if row["rows"] == "fp8_656")
    mixed = newest("hopper-dense-fp8-h200", "speed").rows[0]["over_bf16_sustained"]["mixed"]
    words = (
        f"At 16384 tokens the tensor cores are busy for {busy:.0f} % of the cycles (ncu). "
        f"Sparse prefill, {sparse['shape']}: {sparse['tflops']:.0f} TFLOP/s, "
        f"{sparse['share']:.2f} of a bf16 matmul timed in between; over FP8 rows scattered in a "
        f"pool of a million, all work counted, {_chosen(fp8)['share']:.2f}. "
        f"Latent prefill over pages, {latent['chunk']}: {latent['share']['hopper']:.2f} of the "
        f"matmul, where the portable kernel reaches {latent['share']['portable']:.2f}. "
        f"One query of 128 heads over 2048 FP8 rows takes {few['planned us']:.0f} microseconds. "
        f"With e4m3 queries and keys, dense prefill of 8192 tokens sustains {mixed:.2f} times the "
        f"speed of bf16."
    )
    return textwrap.fill(words, 120)


def pictures() -> dict[str, str]:
    """Bars of the dense and the sparse benchmark."""
    names = {"openmla": "openmla", "cudnn": "cuDNN", "cudnn layer": "cuDNN + assembling K"}
    dense = {
        _named(row): {
            words: row["tflops"][name] for name, words in names.items() if name in row["tflops"]
        }
        for row in dense_rows()
    }
    sparse = {
        row["shape"]: {"openmla": row["tflops"], "8192³ matmul": row["matmul_tflops"]}
        for row in newest("hopper-sparse-h200", "speed").rows
    }
    return {
        "speed-dense.svg": bars_picture("Dense prefill, bf16, one H200", dense, "TFLOP/s"),
        "speed-sparse.svg": bars_picture("Sparse prefill, bf16, one H200", sparse, "TFLOP/s"),
    }


def _named(row: Row) -> str:
    """A shape, without the widths that most have."""
    return str(row["shape"].removesuffix(" " + V3))


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value else "–"


def _over(row: Row, peer: str) -> tuple[str, str]:
    """Speed over a peer, cold and in a row."""
    times = row["us"], row["in_a_row_us"]
    return _ratio(times[0][peer] / times[0]["openmla"]), _ratio(
        times[1][peer] / times[1]["openmla"]
    )


def _both(row: Row, second: Row | None, path: str, form: str) -> str:
    """A figure of one run, or of two."""
    values = []
    for value in filter(None, (row, second)):
        for key in path.split():
            value = value[key]
        values.append(format(value, form))
    return ", ".join(values)


def _way(row: Row) -> str:
    return row["plan"].replace("_", " ") if isinstance(row["plan"], str) else "as planned"


def _chosen(row: Row) -> Row:
    return row[row["plan"]] if isinstance(row["plan"], str) else row["plan"]


def _fp8_shape(words: str) -> str:
    """ "…: Shape(queries=64, region=8192, …)" -> "64, 8192, …"."""
    return ", ".join(re.findall(r"=['\"]?([\w]+)", words))
