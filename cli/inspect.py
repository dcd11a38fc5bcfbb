"""``hf-geosharp inspect``: the symmetries of one model, and the health of its heads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hf_geosharp.cli import files, output
from hf_geosharp.cli.errors import is_debug, say
from hf_geosharp.cli.options import (
    Command,
    debug_option,
    inspect_arguments,
    inspect_options,
    json_option,
    model_argument,
    quiet_option,
)
from hf_geosharp.cli.score import DEFAULT_MODEL

if TYPE_CHECKING:
    from hf_geosharp.inspection import Inspection


@click.command("inspect", cls=Command, short_help="Show the symmetries of a model and the health of its heads.")
@model_argument
@inspect_options
@click.option(
    "--all", "everything", is_flag=True, help="Show every layer and head; by default identical layers are merged."
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Heat map of the heads' health, layers x heads: .png, .svg or .pdf (requires matplotlib).",
)
@json_option
@quiet_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    everything: bool,
    plot: Path | None,
    json_target: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Show the continuous symmetries of MODEL, proved on its weights, and the health of its heads.

    MODEL is a Hub id, a folder, or a shipped demo (demo:NAME); the default is demo:digits-vit. No data are needed if
    inputs can be made up from the config.
    """
    if plot is not None and (options["random_init"] or not options["health"]):
        raise click.UsageError("--plot shows the health of the heads, which --random-init and --no-health leave out")
    target = output.JsonTarget(json_target)
    files.check_apart(("--json", json_target), ("--plot", plot))
    target.check([options["data"], *options["layouts"]], models=[model])
    if plot is not None:
        from hf_geosharp import figures

        figures.check(plot)
    if model is None:
        model = DEFAULT_MODEL
        if not quiet:
            say(f"No MODEL given: inspecting the shipped {model}.")
    result = _inspect(model, options, quiet=quiet, debug=is_debug(ctx))
    try:
        target.write_json(result)
        if plot is not None:
            from hf_geosharp import heatmaps

            figures.save(heatmaps.health_figure(result.health), plot)
            if not quiet:
                say(f"Heat map: {plot}")
    finally:
        # Also where a file could not be written: it may have taken minutes.
        if not target.is_stdout:
            _print(result, everything)


def _inspect(model: str, options: dict[str, Any], *, quiet: bool, debug: bool) -> Inspection:
    from hf_geosharp.cli import progress

    with progress.computing(progress.stages, quiet=quiet, debug=debug) as update:
        from hf_geosharp.inspection import inspect_pretrained

        return inspect_pretrained(model, progress=update, **inspect_arguments(options))


def _print(result: Inspection, everything: bool) -> None:
    from hf_geosharp.cli import render_inspect

    render_inspect.show(result, everything=everything)
