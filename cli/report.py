"""``hf-geosharp report``: results as one page for a browser, and their pictures as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hf_geosharp.cli import complete, files, libraries
from hf_geosharp.cli.errors import is_debug, say
from hf_geosharp.cli.options import Command, debug_option, quiet_option
from hf_geosharp.paths import path_of

if TYPE_CHECKING:
    from hf_geosharp.comparable import Named


@click.command("report", cls=Command, short_help="Write results as one page for a browser, and their pictures.")
@click.argument("results", metavar="RESULT.json|DIR...", nargs=-1, required=True, shell_complete=complete.files)
@click.option(
    "-o",
    "--output",
    metavar="FILE|-",
    shell_complete=complete.files,
    help="Write the page (HTML) to FILE, or print it.",
)
@click.option(
    "--plots",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write every picture as PNG and as SVG into DIR.",
)
@quiet_option
@debug_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    results: tuple[str, ...],
    output: str | None,
    plots: Path | None,
    quiet: bool,
) -> None:
    """Write results as one page that needs no network, for a screen, a phone or paper (requires matplotlib).

    RESULT.json is a file that 'hf-geosharp score --json' wrote; DIR is a folder that 'score' or 'compare' wrote with
    --output, or one with such files. Several results are ranked on the same page if they are comparable.
    """
    if output is None and plots is None:
        raise click.UsageError("say where to write: -o report.html (or -o - to print the page), or --plots DIR")
    page = files.Target("-o", None if output is None else Path(output))
    page.check(results=results)
    libraries.hush(debug=is_debug(ctx), bars=False)
    from hf_geosharp import figures
    from hf_geosharp.report.gather import gather

    figures.require()
    items, left_out = gather(results)
    for file in left_out:
        say(f"warning: left out {file}: it is JSON, but not the result of a score")
    wrote: list[str] = []
    if output is not None:
        page.write(_render(items))
        wrote += [output] if output != "-" else []
    if plots is not None:
        from hf_geosharp.report.files import save_pictures

        wrote.append(f"{len(save_pictures(items, path_of(plots)))} pictures in {plots}")
    if wrote and not quiet:
        say(f"Wrote {' and '.join(wrote)}.")


def _render(items: Sequence[Named]) -> str:
    from hf_geosharp.report.page import render

    return render(items)
