"""`openmla plan`: what would run for a model on a chip, and why."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import typer

from openmla.cli.options import writable_file, write_file
from openmla.distributed.shard import ContextShard, Layout, split
from openmla.errors import InvalidArgument, Unsupported
from openmla.explain.html import explain_html
from openmla.explain.shares import share_lines, share_report
from openmla.explain.text import explain_text, known_elsewhere, runs_here, short_text
from openmla.indexer.problem import INDEX_FORMS
from openmla.planning import plan
from openmla.planning.form import LayerDims, choose_form
from openmla.planning.models import (
    Model,
    index_problem_for_model,
    model_by_name,
    problem_for_model,
)
from openmla.planning.problems import AnyProblem
from openmla.planning.registry import masks_keys
from openmla.planning.target import alias_of, target_by_name
from openmla.problem import Backend, Problem

RATIO_HELP = "tokens per compressed row, of a layer of DeepSeek-V4; default: one that selects rows"
RANGE_HELP = "keys of a range, of a latent call; 0: each request's rows and keys decide"
FORM_HELP = (
    "dense, latent (decode too) or sparse, or scores or select of the indexer; default: the model's"
)


def plan_command(
    model: Annotated[str, typer.Option(help="a model, such as deepseek-v3")] = "deepseek-v3",
    target: Annotated[str, typer.Option(help="a chip, such as h200, b200, mi355x")] = "h200",
    tokens: Annotated[int, typer.Option(help="new tokens")] = 4096,
    context: Annotated[int, typer.Option(help="all keys, new ones included; 0: as tokens")] = 0,
    tp: Annotated[int, typer.Option(help="ranks that share the heads")] = 1,
    page_size: Annotated[int, typer.Option(help="rows per cache page; 0: not paged")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, e4m3 or a cache format")] = "bf16",
    form: Annotated[str, typer.Option(help=FORM_HELP)] = "",
    ratio: Annotated[int | None, typer.Option(help=RATIO_HELP)] = None,
    window: Annotated[int, typer.Option(help="keys that a query sees at most; 0: all")] = 0,
    range_keys: Annotated[int, typer.Option(help=RANGE_HELP)] = 0,
    turned_back: Annotated[int, typer.Option(help="columns of results that are turned back")] = 0,
    backend: Annotated[str, typer.Option(help="one kernel family, never replaced")] = "auto",
    world: Annotated[int, typer.Option(help="ranks that share the tokens")] = 1,
    layout: Annotated[str, typer.Option(help="how they do: zigzag or contiguous")] = "zigzag",
    html: Annotated[Path | None, typer.Option(help="write a page with pictures")] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="all the arithmetic, and memory by its bytes")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Say which kernel a model gets on a chip, how it is known to work there, and what it takes."""
    writable_file("html", html)
    try:
        problem = posed(model, tokens, context, tp, page_size, dtype, form, ratio)
        problem = _with_option(problem, "window", window)
        problem = _with_option(problem, "range_keys", range_keys, invariant=True)
        problem = _with_option(problem, "turned_back", turned_back)
        shard = split([tokens], world, 0, cast(Layout, layout), cached=[max(context - tokens, 0)])
        chosen = plan(_of_one_rank(problem, shard), target, cast(Backend, backend))
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    except Unsupported as error:
        typer.echo(f"no plan: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        extra = (
            {"context_parallel": share_report(shard, model_by_name(model), tp)} if world > 1 else {}
        )
        typer.echo(json.dumps({**chosen.to_json(), **extra}, indent=2))
    else:
        keys = context or tokens
        asked = _question(model_by_name(model), target, problem, tokens, keys)
        layer = _form_of_layer(model_by_name(model), problem, chosen.target, tokens, keys)
        here, kinds = runs_here(chosen, backend), model_by_name(model).describe_layers()
        if verbose:
            tail = [f"here: {here}"] if here else []
            tail += [f"model: {kinds}"] if kinds else []
            tail += ["", "form of a layer", f"  {layer}"] if layer else []
            typer.echo("\n".join([asked, explain_text(chosen), *tail]))
        else:
            known = ("here", here), ("layer", layer), ("model", kinds)
            rows = [(label, text) for label, text in known if text]
            typer.echo(short_text(chosen, asked, [*rows, *known_elsewhere(chosen)]))
        if world > 1:
            typer.echo("\n".join(["", *share_lines(shard, model_by_name(model), tp)]))
    if html is not None:
        write_file("html", html, explain_html(chosen, f"{model} on {chosen.target}"))
        typer.echo(f"wrote {html}", err=True)


def posed(
    model: str,
    tokens: int,
    context: int,
    tp: int,
    page_size: int,
    dtype: str,
    form: str,
    ratio: int | None = None,
) -> AnyProblem:
    """What a model poses on one of `tp` ranks: a call of attention, or a step of its indexer."""
    if form in INDEX_FORMS:
        return index_problem_for_model(
            model, tokens=tokens, context=context, page_size=page_size, form=form, ratio=ratio
        )
    return problem_for_model(
        model,
        tokens=tokens,
        context=context,
        tp=tp,
        page_size=page_size,
        dtype=dtype,
        form=form,
        ratio=ratio,
    )


def _with_option(problem: AnyProblem, name: str, value: int, **beside: bool) -> AnyProblem:
    """The problem with an option of attention, and with what it comes with; 0: without."""
    if not value:
        return problem
    if not isinstance(problem, Problem):
        raise InvalidArgument(name, "0: a step of the indexer has none", value)
    return Problem(**{**problem.to_json(), name: value, **beside})


def _question(model: Model, target: str, problem: AnyProblem, tokens: int, keys: int) -> str:
    """What was asked, with the counts that were asked for; a chip that stands for another says so.

    Keys of a cache fill whole pages: the problem has their rows.
    """
    alias, chip = alias_of(target), target_by_name(target)
    page = problem.page_size
    pages = f" in {-(-keys // page)} pages of {page}" if page else ""
    heads = f"{problem.heads} heads, " if problem.heads else ""
    named = f"{model.name} on {chip.name if alias is None else target}"
    new = f"{tokens} new token" + "s" * (tokens != 1)
    asked = f"{named}: {heads}{new}, {keys} keys{pages}"
    return asked if alias is None else f"{asked}\n  planned as {alias.target}: {alias.why}"


def _form_of_layer(model: Model, problem: AnyProblem, target: str, tokens: int, keys: int) -> str:
    """Which form `openmla.nn` and `openmla.integrations` choose for these lengths, and why."""
    if not isinstance(problem, Problem):
        return ""
    if model.one_row:
        return "sparse: K and V are one row, and there is no other"
    dims = LayerDims(model.kv_lora, model.nope, model.rope, model.v)
    heads = problem.heads if masks_keys(target_by_name(target)) else 0
    choice = choose_form(dims, [tokens], [keys], model.topk, heads)
    if choice.form == "latent" and problem.form == "dense":
        return f"{choice.reason}; --form latent plans that call"
    return choice.reason


def _of_one_rank(problem: AnyProblem, shard: ContextShard) -> AnyProblem:
    """The problem of rank 0: its tokens, and in dense form the keys of its parts."""
    if shard.world == 1:
        return problem
    problem = replace(problem, total_q=shard.tokens)
    if not isinstance(problem, Problem) or problem.form != "dense":
        return problem
    parts = shard.parts
    return replace(problem, batch=len(parts), total_k=sum(part.keys for part in parts))
