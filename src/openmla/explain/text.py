"""A plan in words, with the arithmetic that led to it: what `openmla plan` prints."""

from openmla.dispatch import plan_for, triton_version
from openmla.errors import Unsupported
from openmla.indexer.problem import DIM, IndexProblem
from openmla.planning import plan
from openmla.planning.budget import uses
from openmla.planning.registry import Plan
from openmla.planning.target import TARGETS, Target, target_by_name

SIDE_BY_SIDE = ("cpu", "h200", "b200", "mi355x", "mi300x", "a100", "rtx4090")


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


def installed_lines(chosen: Plan, backend: str = "auto") -> list[str]:
    """One line where a call with the Triton that is installed would run something else.

    A plan says what could run; calls also ask whether its kernel is there, needs a later Triton, or
    runs only when its backend is named.
    """
    try:
        version = "Triton " + ".".join(map(str, triton_version()))
    except ImportError:
        on_gpu = target_by_name(chosen.target).vendor != "cpu"
        return ["here: no Triton is installed, so no GPU kernel runs"] if on_gpu else []
    try:
        runs = plan_for(chosen.problem, target_by_name(chosen.target), backend)
    except Unsupported as error:
        return [f"here: with {version} nothing runs: {error.reason}"]
    planned = (chosen.backend, chosen.kernel_name, chosen.config)
    if (runs.backend, runs.kernel_name, runs.config) == planned:
        return []
    why = "; ".join(reason for reason in runs.passed_over if reason not in chosen.passed_over)
    return [f"here: with {version} a call runs {runs.backend}, {tile_words(runs)} ({why})"]


def work_lines(chosen: Plan) -> list[str]:
    """How much there is to compute, and the least time it can take."""
    problem, target = chosen.problem, target_by_name(chosen.target)
    if isinstance(problem, IndexProblem):
        return _index_work(problem, target)
    keys = f"{problem.topk} rows each" if problem.form == "sparse" else f"{problem.total_k} keys"
    widths = f"({problem.d_qk} + {problem.d_v})"
    lines = [
        f"work: 2 x {problem.heads} heads x {problem.total_q} queries x {keys} x {widths} = "
        f"{problem.flops / 1e12:.3g} TFLOP at most"
    ]
    if problem.causal and problem.form != "sparse" and problem.total_q == problem.total_k:
        lines.append(f"  the causal mask leaves about half: {problem.flops / 2e12:.3g} TFLOP")
    whole = not problem.causal or problem.form == "sparse" or problem.total_q != problem.total_k
    flops = problem.flops if whole else problem.flops // 2
    return lines + _floor(flops, target, fp8=problem.q_dtype == "e4m3")


def _index_work(problem: IndexProblem, target: Target) -> list[str]:
    """Products of scores; a selection reads every score once at least."""
    if problem.form == "scores":
        work = (
            f"2 x {problem.heads} heads x {problem.total_q} queries x {problem.width} keys x {DIM}"
        )
        lines = [f"work: {work} = {problem.flops / 1e12:.3g} TFLOP at most"]
        return lines + _floor(problem.flops, target, fp8=True)
    size = 4 * problem.total_q * problem.width
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
    status = "runs today" if other.runs_today else "planned"
    smem = other.block.memory if other.block else None
    size = f", {smem.used} of {smem.limit} bytes" if smem else ""
    return f"{other.backend} ({status}), {tile_words(other)}{size}"


def tile_words(chosen: Plan) -> str:
    """The tile in a few words: "128 rows x 128 keys, 2 stages"."""
    block = chosen.block
    if target_by_name(chosen.target).vendor == "cpu":
        return "no tiles of a GPU"
    if block is None:
        return chosen.config_lines()[0]
    tail = f", {block.stages} stage{'s' * (block.stages != 1)}"
    return f"{block.tile_rows} row{'s' * (block.tile_rows != 1)} x {block.tile_keys} keys{tail}"
