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
from openmla.explain.text import explain_text, installed_lines
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
from openmla.planning.target import target_by_name
from openmla.problem import Problem

FORM_HELP = "dense, latent or sparse, or scores or select of the indexer; default: the model's"


def plan_command(
    model: Annotated[str, typer.Option(help="a model, such as deepseek-v3")] = "deepseek-v3",
    target: Annotated[str, typer.Option(help="a chip, such as h200, b200, mi355x")] = "h200",
    tokens: Annotated[int, typer.Option(help="new tokens")] = 4096,
    context: Annotated[int, typer.Option(help="all keys, new ones included; 0: as tokens")] = 0,
    tp: Annotated[int, typer.Option(help="ranks that share the heads")] = 1,
    page_size: Annotated[int, typer.Option(help="rows per cache page; 0: not paged")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, e4m3 or an FP8 cache format")] = "bf16",
    form: Annotated[str, typer.Option(help=FORM_HELP)] = "",
    backend: Annotated[str, typer.Option(help="one kernel family, never replaced")] = "auto",
    world: Annotated[int, typer.Option(help="ranks that share the tokens")] = 1,
    layout: Annotated[str, typer.Option(help="how they do: zigzag or contiguous")] = "zigzag",
    html: Annotated[Path | None, typer.Option(help="write a page with pictures")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Say what would run for a model on a chip, with the arithmetic that led to it."""
    writable_file("html", html)
    try:
        problem = posed(model, tokens, context, tp, page_size, dtype, form)
        shard = split([tokens], world, 0, cast(Layout, layout), cached=[max(context - tokens, 0)])
        chosen = plan(_of_one_rank(problem, shard), target, backend)
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
        shares = ["", *share_lines(shard, model_by_name(model), tp)] if world > 1 else []
        here = installed_lines(chosen, backend)
        typer.echo("\n".join([explain_text(chosen), *here, *shares]))
        if isinstance(problem, Problem):
            heads = problem.heads if masks_keys(target_by_name(chosen.target)) else 0
            typer.echo(_form_of_layer(model_by_name(model), tokens, context or tokens, heads))
    if html is not None:
        write_file("html", html, explain_html(chosen, f"{model} on {chosen.target}"))
        typer.echo(f"wrote {html}", err=True)


def posed(
    model: str, tokens: int, context: int, tp: int, page_size: int, dtype: str, form: str
) -> AnyProblem:
    """What a model poses on one of `tp` ranks: a call of attention, or a step of its indexer."""
    if form in INDEX_FORMS:
        return index_problem_for_model(
            model, tokens=tokens, context=context, page_size=page_size, form=form
        )
    return problem_for_model(
        model, tokens=tokens, context=context, tp=tp, page_size=page_size, dtype=dtype, form=form
    )


def _form_of_layer(model: Model, tokens: int, keys: int, heads: int) -> str:
    """Which form `openmla.nn` and `openmla.integrations` choose for these lengths, and why."""
    if model.one_row:
        return "\nform of a layer\n  sparse: K and V are one row, and there is no other"
    dims = LayerDims(model.kv_lora, model.nope, model.rope, model.v)
    choice = choose_form(dims, [tokens], [keys], model.topk, heads)
    return f"\nform of a layer\n  {choice.reason}"


def _of_one_rank(problem: AnyProblem, shard: ContextShard) -> AnyProblem:
    """The problem of rank 0: its tokens, and in dense form the keys of its parts."""
    if shard.world == 1:
        return problem
    problem = replace(problem, total_q=shard.tokens)
    if not isinstance(problem, Problem) or problem.form != "dense":
        return problem
    parts = shard.parts
    return replace(problem, batch=len(parts), total_k=sum(part.keys for part in parts))
