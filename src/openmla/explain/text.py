"""A plan in words: the answer in a few lines, or with all the arithmetic that led to it."""

import textwrap
from collections.abc import Iterable

from openmla.backward.problem import BackwardProblem
from openmla.dispatch import plan_for, triton_version
from openmla.errors import Unsupported
from openmla.formats import FORMATS
from openmla.indexer.problem import DIM, IndexProblem
from openmla.planning import plan
from openmla.planning.budget import uses
from openmla.planning.evidence import WORDS, follows
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import Plan
from openmla.planning.target import TARGETS, Target, target_by_name
from openmla.problem import Problem

SIDE_BY_SIDE = ("cpu", "h200", "b200", "mi355x", "mi300x", "a100", "rtx4090")
WIDTH, INDENT = 80, 13
CALLS = {
    "dense": "mla_prefill: K and V per head",
    "latent": "mla_prefill_latent: all heads read one latent row per token",
    "sparse": "mla_prefill_sparse: each query names its latent rows",
    "attend": "mla_attend: rows of several sources in one softmax",
    "scores": "indexer_scores: how well each key fits each query",
    "select": "select_topk: the best keys of each query",
}


def short_text(chosen: Plan, asked: str, more: Iterable[tuple[str, str]] = ()) -> str:
    """The answer: what runs, how it is known to work, and what it takes; 80 columns.

    asked: the question in the asker's own words. more: further lines, each with its label.
    """
    problem = chosen.problem
    form = str(problem.form)
    if isinstance(problem, BackwardProblem):
        form = problem.forward.form
    if isinstance(problem, Problem) and problem.is_attend:
        form = "attend"
    kernel = f"{chosen.backend} {chosen.kernel_name}, {follows(chosen.backend, chosen.kernel_name)}"
    lines = [
        ("call", CALLS[form]),
        ("kernel", kernel),
        ("status", f"{chosen.status}: {chosen.meaning}"),
        *(("not", reason) for reason in chosen.passed_over),
        ("tile", tile_words(chosen)),
        *([("uses", "; ".join(_shares(chosen)))] if uses(chosen) else []),
        ("work", _work(chosen)),
        *more,
    ]
    folded = textwrap.fill(asked.split("\n")[0], WIDTH, subsequent_indent="  ")
    return "\n".join(
        [folded, *asked.split("\n")[1:], *(_row(label, text) for label, text in lines)]
    )


def _row(label: str, text: str) -> str:
    """A label and its text, folded behind it."""
    blank = " " * INDENT
    return textwrap.fill(
        text, WIDTH, initial_indent=f"  {label:<{INDENT - 2}}", subsequent_indent=blank
    )


def _shares(chosen: Plan) -> list[str]:
    """What one block takes of the chip, as people say it."""
    return [f"{use.used:,} of {use.limit:,} {use.name}" for use in uses(chosen)]


def _work(chosen: Plan) -> str:
    """What there is to compute, and the least time that the datasheet leaves for it."""
    problem, target = chosen.problem, target_by_name(chosen.target)
    if isinstance(problem, IndexProblem) and problem.form == "select":
        amount, size = f"{_score_bytes(problem) / 1e9:.3g} GB of scores", _score_bytes(problem)
        return _bounded(amount, size, target.hbm_gbps * 1e9, f"{target.hbm_gbps:g} GB/s")
    fp8 = isinstance(problem, IndexProblem) or problem.q_dtype == "e4m3"
    flops, peak = _least_flops(problem), target.fp8_tflops if fp8 else target.bf16_tflops
    few = flops < 1e11
    amount = f"{flops / 1e9:.3g} GFLOP" if few else f"{flops / 1e12:.3g} TFLOP"
    rows = _row_bytes(problem)
    # Few queries over many rows wait for memory, not for products.
    if rows and peak and target.hbm_gbps and rows / target.hbm_gbps > flops / 1e3 / peak:
        amount += f" over {rows / 1e6:.3g} MB of cache rows"
        return _bounded(amount, rows, target.hbm_gbps * 1e9, f"{target.hbm_gbps:g} GB/s")
    return _bounded(amount, flops, peak * 1e12, f"{peak:g} TFLOP/s")


def _bounded(amount: str, size: float, rate: float, named: str) -> str:
    """An amount, and the least time it takes at a rate per second; 0: the rate is not known.

    >>> _bounded("1 GB", 1e9, 4.8e12, "4800 GB/s")
    "1 GB, 0.208 ms or more at the datasheet's 4800 GB/s"
    >>> _bounded("8 MB", 8e6, 4e12, "4000 GB/s")
    "8 MB, 2 us or more at the datasheet's 4000 GB/s"
    """
    if not rate:
        return amount
    seconds = size / rate
    took = f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
    return f"{amount}, {took} or more at the datasheet's {named}"


def _row_bytes(problem: AnyProblem) -> int:
    """Bytes of the cache rows that a latent call reads once; 0 where they are not counted."""
    if not isinstance(problem, Problem) or problem.form != "latent" or problem.window:
        return 0
    known = FORMATS.get(problem.kv_dtype)
    return known.layout(problem.d_nope, problem.d_rope).row_bytes * problem.total_k if known else 0


def _score_bytes(problem: IndexProblem) -> int:
    """What a selection reads at least once."""
    return 4 * problem.total_q * problem.width


def _least_flops(problem: AnyProblem) -> int:
    """Operations of a call; the causal mask leaves about half where queries are the keys."""
    return problem.flops // 2 if _halved(problem) else problem.flops


def _halved(problem: AnyProblem) -> bool:
    return (
        isinstance(problem, Problem)
        and problem.causal
        and problem.form != "sparse"
        and problem.total_q == problem.total_k
    )


def known_elsewhere(chosen: Plan) -> list[tuple[str, str]]:
    """This problem on other chips, by how their kernels are known to work."""
    found: dict[str, list[str]] = {}
    for name in SIDE_BY_SIDE:
        if name == chosen.target:
            continue
        try:
            other = plan(chosen.problem, name)
        except Unsupported:
            found.setdefault("no plan", []).append(name)
        else:
            found.setdefault(other.word, []).append(name)
    named = ((word, found[word]) for word in (*WORDS, "no plan") if word in found)
    return [("elsewhere", "; ".join(f"{word}: {', '.join(names)}" for word, names in named))]


def explain_text(chosen: Plan) -> str:
    """The plan, its work, its budget, its memory, and the same problem elsewhere."""
    parts = [chosen.explain(), "", *work_lines(chosen)]
    taken = uses(chosen)
    if taken:
        parts += ["", "budget", *(f"  {use}" for use in taken)]
    smem = chosen.block.memory if chosen.block else None
    if smem is not None:
        parts += ["", "shared memory, by byte offset", *smem.explain()]
    parts += ["", "the same problem elsewhere"]
    parts += [f"  {name:8} {summary}" for name, summary in elsewhere(chosen).items()]
    return "\n".join(parts)


def runs_here(chosen: Plan, backend: str = "auto") -> str:
    """What a call with the Triton that is installed would run, where it is something else.

    A plan says what could run; calls also ask whether its kernel is there, needs a later Triton, or
    runs only when its backend is named.
    """
    try:
        version = "Triton " + ".".join(map(str, triton_version()))
    except ImportError:
        on_gpu = target_by_name(chosen.target).vendor != "cpu"
        return "no Triton is installed, so no GPU kernel runs" if on_gpu else ""
    try:
        runs = plan_for(chosen.problem, target_by_name(chosen.target), backend)
    except Unsupported as error:
        return f"with {version} nothing runs: {error.reason}"
    planned = (chosen.backend, chosen.kernel_name, chosen.config)
    if (runs.backend, runs.kernel_name, runs.config) == planned:
        return ""
    why = "; ".join(reason for reason in runs.passed_over if reason not in chosen.passed_over)
    return f"with {version} a call runs {runs.backend}, {tile_words(runs)} ({why})"


def work_lines(chosen: Plan) -> list[str]:
    """How much there is to compute, and the least time it can take."""
    problem, target = chosen.problem, target_by_name(chosen.target)
    if isinstance(problem, IndexProblem):
        return _index_work(problem, target)
    keys = (
        f"{problem.most_rows} rows each" if problem.form == "sparse" else f"{problem.total_k} keys"
    )
    widths = f"({problem.d_qk} + {problem.d_v})"
    lines = [
        f"work: 2 x {problem.heads} heads x {problem.total_q} queries x {keys} x {widths} = "
        f"{problem.flops / 1e12:.3g} TFLOP at most"
    ]
    flops = _least_flops(problem)
    if _halved(problem):
        lines.append(f"  the causal mask leaves about half: {flops / 1e12:.3g} TFLOP")
    return lines + _floor(flops, target, fp8=problem.q_dtype == "e4m3")


def _index_work(problem: IndexProblem, target: Target) -> list[str]:
    """Products of scores; a selection reads every score once at least."""
    if problem.form == "scores":
        work = (
            f"2 x {problem.heads} heads x {problem.total_q} queries x {problem.width} keys x {DIM}"
        )
        lines = [f"work: {work} = {problem.flops / 1e12:.3g} TFLOP at most"]
        return lines + _floor(problem.flops, target, fp8=True)
    size = _score_bytes(problem)
    lines = [f"work: {problem.total_q} rows x {problem.width} scores = {size / 1e9:.3g} GB at most"]
    if target.hbm_gbps:
        took = f"{1e3 * size / (target.hbm_gbps * 1e9):.3g} ms or more"
        lines.append(f"  at the datasheet's {target.hbm_gbps:g} GB/s: {took}")
    return lines


def _floor(flops: int, target: Target, fp8: bool) -> list[str]:
    peak = target.fp8_tflops if fp8 else target.bf16_tflops
    if not peak:
        return []
    lines = [f"  at the datasheet's {peak:g} TFLOP/s: {1e3 * flops / (peak * 1e12):.3g} ms or more"]
    measured = target.measured_bf16_tflops
    if measured and not fp8:
        took = 1e3 * flops / (measured * 1e12)
        lines.append(f"  at a measured matrix product's {measured:g} TFLOP/s: {took:.3g} ms")
    return lines


def elsewhere(chosen: Plan) -> dict[str, str]:
    """One line per target for the same problem."""
    return {name: _summary(chosen, name) for name in SIDE_BY_SIDE if name in TARGETS}


def _summary(chosen: Plan, target: str) -> str:
    try:
        other = plan(chosen.problem, target)
    except Unsupported as error:
        return f"no plan: {error.reason}"
    smem = other.block.memory if other.block else None
    size = f", {smem.used} of {smem.limit} bytes" if smem else ""
    return f"{other.backend} ({other.status}), {tile_words(other)}{size}"


def tile_words(chosen: Plan) -> str:
    """The tile in a few words: "128 rows x 128 keys, 2 stages"; a pair of CTAs has one tile."""
    block = chosen.block
    if target_by_name(chosen.target).vendor == "cpu":
        return "no tiles of a GPU"
    if block is None:
        return chosen.config_lines()[0]
    tail = f", {block.stages} stage{'s' * (block.stages != 1)}"
    tail += ", a pair of CTAs" * chosen.kernel_name.endswith("pair")
    return f"{block.tile_rows} row{'s' * (block.tile_rows != 1)} x {block.tile_keys} keys{tail}"
