"""``hf-geosharp demo``: what is shipped, and a copy of it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from hf_geosharp import demos
from hf_geosharp.cli.errors import say
from hf_geosharp.cli.options import Command, debug_option
from hf_geosharp.paths import path_of


@click.command("demo", cls=Command, short_help="List the shipped demos, or copy one.")
@click.argument("name", required=False)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder to copy to, empty or not yet existing.  [default: ./NAME]",
)
@debug_option
def command(name: str | None, output: Path | None) -> None:
    """List the demos that ship with the package, or copy the demo NAME (model, training and test data)."""
    if name is None:
        if output is not None:
            raise click.UsageError("--output needs the NAME of a demo to copy")
        _list()
        return
    source = demos.path(name)
    copy = demos.copy(name, Path(source.name) if output is None else path_of(output))
    click.echo(copy)
    if demos.is_model(name):
        # What looks like no path might be an id of the Hub.
        place = str(copy) if copy.is_absolute() else f"./{copy}"
        say(f"Score it with: {shlex.join(['hf-geosharp', 'score', place, '--data', f'{place}/data'])}")
    else:
        say(f"Score a model on it with: hf-geosharp score MODEL --data {shlex.quote(str(copy / 'data'))}")


def _list() -> None:
    from rich.table import Table

    from hf_geosharp.cli.pieces import console

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("accuracy", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("licence", no_wrap=True)
    for demo in map(demos.info, demos.shipped()):
        table.add_row(*_row(demo))
    out = console()
    out.print(table)
    out.print(
        "\nScore a model with 'hf-geosharp score demo:NAME'. Each model has a twin, demo:NAME-twin: the same function "
        "with other weights, computed on request.",
        highlight=False,
        markup=False,
    )


def _row(demo: dict[str, Any]) -> tuple[Any, ...]:
    from rich.text import Text

    parts = {part: demo[part]["accuracy"] for part in ("train", "test") if demo[part]}
    # Data alone have neither.
    accuracy = "\n".join(f"{value:.1%} {part}" for part, value in parts.items() if value is not None)
    parameters = "" if demo["parameters"] is None else f"{demo['parameters']:,}"
    what = f"{demo['title']}, {demo['task']}"
    return tuple(
        Text(str(cell)) for cell in (demo["name"], what, accuracy or "(data only)", parameters, demo["license"])
    )
