"""One self-contained page about a plan: pictures, arithmetic, and the same problem elsewhere.

No scripts, no fonts, no links: the file can be mailed. Light and dark follow the reader's system.
"""

from html import escape

from openmla.errors import Unsupported
from openmla.explain.bank_picture import v227_picture
from openmla.explain.memory_picture import smem_picture, tmem_picture
from openmla.explain.pipeline_picture import pipeline_picture
from openmla.explain.schedule import schedule
from openmla.explain.style import CSS
from openmla.explain.text import SIDE_BY_SIDE, tile_words, work_lines
from openmla.planning import plan
from openmla.planning.budget import uses
from openmla.planning.evidence import follows
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import Plan
from openmla.planning.target import TARGETS, target_by_name
from openmla.problem import Problem


def explain_html(chosen: Plan, title: str = "") -> str:
    """The whole page."""
    what = str(chosen.problem.form).capitalize() + " prefill" * _is_attention(chosen)
    heading = title or f"{what} on {chosen.target}"
    sections = [
        _header(chosen, heading),
        _memory(chosen),
        _tensor_memory(chosen),
        _pipeline(chosen),
        _banks(chosen),
        _arithmetic(chosen),
        _targets(chosen.problem, chosen.target),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(heading)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _is_attention(chosen: Plan) -> bool:
    return isinstance(chosen.problem, Problem)


def _header(chosen: Plan, heading: str) -> str:
    design = follows(chosen.backend, chosen.kernel_name)
    cards = [("kernel", f"{chosen.backend} {chosen.kernel_name}"), ("tile", tile_words(chosen))]
    cards += [(use.name, f"{use.used:,} of {use.limit:,}") for use in uses(chosen)]
    shown = "\n".join(
        f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>'
        for name, value in cards
    )
    return (
        f"<header>\n<h1>{escape(heading)}</h1>\n<p>{escape(str(chosen.problem))}</p>\n"
        f"<p>on {escape(str(target_by_name(chosen.target)))} "
        f"{_badge(chosen)}</p>\n<p>{escape(chosen.word)}: {escape(chosen.meaning)}. Its design: "
        f"{escape(design)}.</p>\n"
        f'<dl class="cards">\n{shown}\n</dl>\n</header>'
    )


def _badge(chosen: Plan) -> str:
    """The word for the kernel on its chip, in the word's color."""
    color = chosen.word if chosen.runs_today else "planned"
    return f'<span class="badge {color}">{escape(chosen.status)}</span>'


def _section(name: str, intro: str, content: str) -> str:
    key = name.lower().replace(" ", "-")
    return (
        f'<section aria-labelledby="{key}">\n<h2 id="{key}">{escape(name)}</h2>\n'
        f"<p>{escape(intro)}</p>\n{content}\n</section>"
    )


def _figure(svg: str) -> str:
    return f'<figure><div class="scroll">{svg}</div></figure>'


def _memory(chosen: Plan) -> str:
    smem = chosen.block.memory if chosen.block else None
    if smem is None:
        return ""
    amd = target_by_name(chosen.target).vendor == "amd"
    what = "LDS" if amd else "Shared memory"
    estimate = " These are estimates; the compiler decides." if chosen.backend == "portable" else ""
    intro = f"To scale: the bar is what one block may use.{estimate}"
    return _section(what, intro, _figure(smem_picture(smem, what)))


def _tensor_memory(chosen: Plan) -> str:
    columns = chosen.block.tensor_memory if chosen.block else ()
    if not columns:
        return ""
    limit = target_by_name(chosen.target).tmem_cols
    purpose = "Scores and outputs live here; P overwrites its scores." * _is_attention(chosen)
    intro = f"512 columns of 128 lanes. {purpose}".strip()
    return _section("Tensor memory", intro, _figure(tmem_picture(columns, limit)))


def _pipeline(chosen: Plan) -> str:
    steps = schedule(chosen)
    if not steps:
        return ""
    intro = (
        "Who loads, who multiplies, who waits. A simple model of tile sizes, ring depth and unit "
        "rates; not a measurement. The number in a box is its key block."
    )
    return _section("Pipeline of one tile", intro, _figure(pipeline_picture(steps)))


def _banks(chosen: Plan) -> str:
    if chosen.backend != "cdna4" or not _is_attention(chosen):
        return ""
    intro = (
        "One transposing read of V before (left) and after (right) the v227 layout: which of the "
        "64 banks each lane asks, and how many words each bank must serve."
    )
    return _section("LDS banks", intro, _figure(v227_picture()))


def _arithmetic(chosen: Plan) -> str:
    lines = [*(f"passed over: {reason}" for reason in chosen.passed_over)]
    lines += [*chosen.config_lines(), *(line.strip() for line in work_lines(chosen))]
    items = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    intro = "Every number above, with the sum or the limit it came from."
    return _section("How the numbers came about", intro, f"<ol>\n{items}\n</ol>")


def _targets(problem: AnyProblem, here: str) -> str:
    names = [here, *(name for name in SIDE_BY_SIDE if name != here)]
    rows = "\n".join(_target_row(problem, name, name == here) for name in names)
    table = (
        '<div class="scroll"><table>\n<thead><tr><th scope="col">target</th>'
        '<th scope="col">kernel</th><th scope="col">status</th><th scope="col">tile</th>'
        '<th scope="col">memory of a block</th></tr></thead>'
        f"\n<tbody>\n{rows}\n</tbody></table></div>"
    )
    return _section("The same problem on every target", "What would serve it, and how.", table)


def _target_row(problem: AnyProblem, name: str, here: bool) -> str:
    mark = ' class="here"' if here else ""
    head = f'<tr{mark}><th scope="row">{escape(name)}</th>'
    try:
        other = plan(problem, name)
    except Unsupported as error:
        return f'{head}<td colspan="4">no plan: {escape(error.reason)}</td></tr>'
    reasons = "".join(f"<small>{escape(reason)}</small>" for reason in other.passed_over)
    return (
        f"{head}<td>{escape(other.backend)}{reasons}</td><td>{_badge(other)}</td>"
        f"<td>{escape(tile_words(other))}</td><td>{_meter(other)}</td></tr>"
    )


def _meter(other: Plan) -> str:
    """A bar on one scale for all targets, so that the room they offer can be compared."""
    smem = other.block.memory if other.block else None
    if smem is None:
        return "–"
    most = max(target.smem_per_block for target in TARGETS.values())
    full, used = 100 * min(1.0, smem.limit / most), 100 * smem.used / most
    words = f"{smem.used:,} of {smem.limit:,} bytes"
    return (
        f'<div class="meter" role="img" aria-label="{words}">'
        f'<i style="width:{full:.1f}%"></i><b style="width:{used:.1f}%"></b></div>'
        f"<small>{words}</small>"
    )
