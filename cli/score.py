"""``hf-geosharp score``: the sharpness of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hf_geosharp.cli import cards, files, launch, output
from hf_geosharp.cli.errors import is_debug, say
from hf_geosharp.cli.options import (
    card_option,
    debug_option,
    json_option,
    layout_files,
    model_argument,
    processes_option,
    quiet_option,
    score_arguments,
    score_options,
)

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult

DEFAULT_MODEL = "demo:digits-vit"


@click.command("score", cls=launch.Command)
@model_argument
@score_options
@processes_option
@json_option
@card_option
@quiet_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    json_target: str | None,
    card_target: str | None,
    processes: int | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Compute the sharpness of MODEL on real data.

    MODEL is a Hub id, a folder, or a shipped demo (demo:NAME); the default is demo:digits-vit.
    """
    target, card = output.JsonTarget(json_target), cards.CardTarget(card_target)
    files.check_apart(("--json", json_target), ("--card", card.file))
    inputs = [options["data"], *layout_files()]
    target.check(inputs, models=[model])
    if launch.wanted(processes):
        ctx.exit(launch.start(ctx, processes))
    world = launch.join(ctx, options["device"], options["timeout"])
    quiet = quiet or not world.leads
    if model is None:
        model = DEFAULT_MODEL
        if not quiet:
            say(f"No MODEL given: scoring the shipped {model}.")
    card.check(inputs)
    result = take_score(model, options | {"world": world}, quiet=quiet, debug=is_debug(ctx))
    world.close()
    if not world.leads:
        return
    try:
        target.write_json(result)
    finally:
        # Also where a file could not be written: the score may have taken hours.
        if not target.is_stdout:
            _print(result)
    card.write(result, quiet)


def take_score(model: str, options: dict[str, Any], *, quiet: bool, debug: bool) -> SharpnessResult:
    """The score of ``model`` by the options of this command, with progress where somebody watches."""
    from hf_geosharp.cli import progress

    with progress.computing(progress.shown, quiet=quiet, debug=debug) as update:
        from hf_geosharp.scoring import score_pretrained

        return score_pretrained(model, progress=update, **score_arguments(options))


def _print(result: SharpnessResult) -> None:
    from hf_geosharp.cli import render

    render.show(result)
