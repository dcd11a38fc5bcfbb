"""``hf-geosharp correlate``: how the scores of several models correlate with something else known about them."""

from __future__ import annotations

from pathlib import Path

import click

from hf_geosharp.cli import complete, files, libraries, output
from hf_geosharp.cli.errors import is_debug
from hf_geosharp.cli.options import Command, debug_option, json_option


@click.command("correlate", cls=Command, short_help="Correlate scores with a target over models.")
@click.argument("results", metavar="RESULTS...", nargs=-1, required=True, shell_complete=complete.files)
@click.option(
    "--target",
    shell_complete=complete.files,
    required=True,
    metavar="FILE.csv|model-index:METRIC",
    help="A table with a column 'model' and one with the target, or a metric in the model cards (METRIC@DATASET if a "
    "card has it for several data sets).",
)
@click.option("--target-column", metavar="N", help="Column with the target.  [default: value, or the only other one]")
@click.option(
    "--by",
    default="sharpness",
    show_default=True,
    metavar="F",
    help="Quantity to correlate: sharpness, base_loss, or a baseline.",
)
@click.option(
    "--force", is_flag=True, help="Correlate results even if settings or data differ; every output is marked."
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    help="Seed for the bootstrap and the permutations.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Scatter plot with names: .png, .svg or .pdf (requires matplotlib).",
)
@click.option("--token", metavar="T", help="Hub token; use HF_TOKEN to keep it out of the shell's history.")
@json_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    results: tuple[str, ...],
    target: str,
    target_column: str | None,
    by: str,
    force: bool,
    seed: int,
    plot: Path | None,
    token: str | None,
    json_target: str | None,
) -> None:
    """Correlate scores with a target over at least four models: Kendall, Spearman, Pearson.

    RESULTS are JSON files that 'hf-geosharp score --json' wrote, and folders that 'score' or 'compare' wrote with
    --output. Intervals are bootstrapped over models; p-values are computed by permutation.
    """
    json_out = output.JsonTarget(json_target)
    files.check_apart(("--json", json_target), ("--plot", plot))
    json_out.check([target], results)
    if plot is not None:
        from hf_geosharp import figures

        figures.check(plot)
    libraries.hush(debug=is_debug(ctx), bars=False)
    from hf_geosharp.comparable import read_results
    from hf_geosharp.correlation import correlate, read_target, require

    require()
    held = read_results(results)
    values, name = read_target(target, held, column=target_column, token=token)
    found = correlate(held, values, by=by, target_name=name, seed=seed, force=force)
    try:
        json_out.write_json(found)
        if plot is not None:
            from hf_geosharp import charts

            figures.save(charts.correlation_figure(found), plot)
    finally:
        # Also where a file could not be written.
        if not json_out.is_stdout:
            from hf_geosharp.cli import render_compare

            render_compare.show_correlation(found)
