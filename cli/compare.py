"""``hf-geosharp compare``: models, or the checkpoints of a run, on the same batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hf_geosharp.cli import complete, files, output
from hf_geosharp.cli.errors import is_debug, say
from hf_geosharp.cli.options import (
    Command,
    debug_option,
    json_option,
    layout_files,
    quiet_option,
    score_arguments,
    score_options,
)

if TYPE_CHECKING:
    from hf_geosharp.comparison import Comparison

F = TypeVar("F", bound=Callable[..., Any])

# Options of a score that are about several processes.
_OF_PROCESSES = {"shard", "timeout"}


def _one_process(function: F) -> F:
    """The options of a score without those that only several processes need."""
    decorated: Any = score_options(function)
    kept = [option for option in decorated.__click_params__ if option.name not in _OF_PROCESSES]
    decorated.__click_params__ = kept
    result: F = decorated
    return result


@click.command("compare", cls=Command, short_help="Rank models, or the checkpoints of a run, on the same batches.")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, shell_complete=complete.models)
@click.option(
    "--rank-by",
    default="sharpness",
    show_default=True,
    metavar="F",
    help="Quantity to rank by: sharpness, base_loss, or a baseline computed with --baselines.",
)
@click.option("--force", is_flag=True, help="Compare results even if settings or data differ; every output is marked.")
@click.option(
    "--csv",
    "csv_file",
    type=click.Path(path_type=Path),
    metavar="FILE|-",
    help="Write the ranking as CSV, one line per model, to FILE, or to stdout instead of the table.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Picture of the ranking, or of the run: .png, .svg or .pdf (requires matplotlib).",
)
@_one_process
@json_option
@quiet_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    models: tuple[str, ...],
    rank_by: str,
    force: bool,
    csv_file: Path | None,
    plot: Path | None,
    json_target: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Rank MODELs by their sharpness on the same batches, and show which differences are not significant.

    MODEL is a Hub id (owner/name@revision for a branch, tag or commit), a folder, a shipped demo (demo:NAME), a folder
    with checkpoints of a Trainer (checkpoint-100, ...), which stands for all of them, or a JSON file that
    'hf-geosharp score --json' wrote.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise click.UsageError(
            "compare runs as one process, but a launcher has started several (WORLD_SIZE). Score each model with "
            "'hf-geosharp score --processes N --json FILE', then compare the files"
        )
    target, table = output.JsonTarget(json_target), files.Target("--csv", csv_file)
    if target.is_stdout and table.is_stdout:
        raise click.UsageError("--json - and --csv - cannot be combined: there is only one stdout")
    files.check_apart(("--json", json_target), ("--csv", csv_file), ("--plot", plot))
    for file in (target, table):
        file.check([options["data"], *layout_files()], models, models)
    if plot is not None:
        from hf_geosharp import figures

        figures.check(plot)
    result = _compare(models, rank_by, force, options, quiet=quiet, debug=is_debug(ctx))
    try:
        target.write_json(result)
        table.write(result.to_csv())
        if plot is not None:
            from hf_geosharp import charts

            figures.save(charts.comparison_figure(result), plot)
    finally:
        # Also where a file could not be written: the scores may have taken hours.
        if not (target.is_stdout or table.is_stdout):
            from hf_geosharp.cli import render_compare

            render_compare.show(result)


def _compare(
    models: tuple[str, ...], rank_by: str, force: bool, options: dict[str, Any], *, quiet: bool, debug: bool
) -> Comparison:
    from hf_geosharp.cli import progress

    with progress.computing(progress.shown, quiet=quiet, debug=debug) as update:
        from hf_geosharp.comparison import compare_pretrained

        return compare_pretrained(
            models,
            rank_by=rank_by,
            force=force,
            told=None if quiet else say,
            progress=update,
            **score_arguments(options),
        )
