"""``hf-geosharp register``: where evaluate and the ``hf`` command find this package."""

from __future__ import annotations

import click

from hf_geosharp import registration
from hf_geosharp.cli.errors import say
from hf_geosharp.cli.options import Command, debug_option, quiet_option

_CALL = f'evaluate.load("{registration.METRIC}")'
_COMMAND = "hf geosharp"


@click.command("register", cls=Command, short_help='Make evaluate.load("geodesic_sharpness") or `hf geosharp` work.')
@click.option("--check", is_flag=True, help="Only report whether it works: exit code 0 if it does, 1 if not.")
@click.option("--unregister", is_flag=True, help="Remove what was written.")
@click.option(
    "--hf-cli",
    is_flag=True,
    help="Set up the command `hf geosharp ...` instead (same options and exit codes as hf-geosharp).",
)
@quiet_option
@debug_option
def command(check: bool, unregister: bool, hf_cli: bool, quiet: bool) -> None:
    """Make evaluate.load("geodesic_sharpness") find this package, in any folder and without a network.

    This writes one small file into the cache that evaluate loads metrics from (HF_MODULES_CACHE, or modules/ under
    HF_HOME). Importing hf_geosharp in Python writes it as well, unless HF_GEOSHARP_NO_REGISTER=1.
    """
    if check and unregister:
        raise click.UsageError("--check and --unregister cannot be combined")
    notes = _hf(check, unregister) if hf_cli else _evaluate(check, unregister)
    if not quiet:
        for note in notes:
            say(note)


def _evaluate(check: bool, unregister: bool) -> list[str]:
    """Does what is asked, prints the file concerned, and returns what to say about it."""
    if unregister:
        removed = registration.unregister()
        if not removed:
            return ["There was nothing to remove."]
        for folder in removed:
            click.echo(folder)
        return [f"Removed. Importing hf_geosharp writes it again, unless {registration.OPT_OUT}=1."]
    click.echo(registration.registered() if check else registration.register())
    return [
        f"{_CALL} finds this package.",
        "evaluate asks the Hub first, which needs a network or a while; HF_EVALUATE_OFFLINE=1 avoids that.",
    ]


def _hf(check: bool, unregister: bool) -> list[str]:
    if unregister:
        removed = registration.unregister_hf_cli()
        for folder in removed:
            click.echo(folder)
        return ["Removed."] if removed else ["There was nothing to remove."]
    click.echo(registration.registered_hf_cli() if check else registration.register_hf_cli())
    return [f"`{_COMMAND}` runs this installation."]
