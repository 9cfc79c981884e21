"""`openmla explain`: what would run for a model on a chip, and how fast it should be."""

from typing import Annotated

import typer

from openmla.cli.options import require_simulator
from openmla.cli.plan import FORM_HELP, posed
from openmla.errors import InvalidArgument, MissingExtra, Unsupported
from openmla.explain.text import explain_text
from openmla.lab.prediction import CHIPS, predict
from openmla.planning import Plan, plan
from openmla.problem import Problem


def explain_command(
    model: Annotated[str, typer.Option(help="a model, such as deepseek-v3")] = "deepseek-v3",
    target: Annotated[str, typer.Option(help="a chip, such as b200")] = "b200",
    tokens: Annotated[int, typer.Option(help="new tokens")] = 8192,
    context: Annotated[int, typer.Option(help="all keys, new ones included; 0: as tokens")] = 0,
    tp: Annotated[int, typer.Option(help="ranks that share the heads")] = 1,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, e4m3 or a cache format")] = "bf16",
    form: Annotated[str, typer.Option(help=FORM_HELP)] = "",
    compiled: Annotated[
        bool,
        typer.Option("--compiled", help="compile its kernels, and say what they show of speed"),
    ] = False,
) -> None:
    """Say what `openmla plan --verbose` says, and predict how fast the kernel should be."""
    try:
        problem = posed(model, tokens, context, tp, 0, dtype, form)
        chosen = plan(problem, target)
    except InvalidArgument as error:
        raise typer.BadParameter(str(error)) from None
    except Unsupported as error:
        typer.echo(f"no plan: {error}", err=True)
        raise typer.Exit(1) from None
    if compiled and not isinstance(problem, Problem):
        raise typer.BadParameter("compiled: kernels of attention are executed, not the indexer's")
    if compiled:
        require_simulator("openmla explain --compiled")
    typer.echo(explain_text(chosen))
    predicted = predict(chosen)
    typer.echo("\n" + "\n".join(predicted.lines() if predicted else [_no_prediction(chosen)]))
    if compiled:
        from openmla.lab.testing.executed.facts import explained

        typer.echo("\n" + "\n".join(explained(chosen.problem, target)))


def _no_prediction(chosen: Plan) -> str:
    try:
        if chosen.backend in CHIPS:
            require_simulator("the model of its kernels")
    except MissingExtra as error:
        return f"no prediction: {error}"
    return "no prediction: attention on Hopper, Blackwell and CDNA4 is modeled, most kernels of it"
