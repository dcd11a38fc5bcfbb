"""The command line ``hf-geosharp``.

Each command lives in a module of its own that is imported when the command is looked up; what is heavy (torch,
transformers, datasets) is imported only once a command really runs, so that help and completion answer at once.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from hf_geosharp.cli.errors import EXIT_CODES, INTERRUPTED, fail, let_rank_0_tell, report_interrupt
from hf_geosharp.cli.options import debug_option

_COMMANDS = ("score", "compare", "correlate", "report", "inspect", "card", "demo", "register")


class _Commands(click.Group):
    """Finds commands by module name, and ends every failure with a message and the documented exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"hf_geosharp.cli.{cmd_name}"), "command")  # noqa: B009
        return command if isinstance(command, click.Command) else None

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError:
            let_rank_0_tell()
            raise

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            # Before click sees it: click would end with 1.
            report_interrupt()
            ctx.exit(INTERRUPTED)
        except Exception as error:
            ctx.exit(fail(error, ctx))


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)
@click.version_option(package_name="hf-geosharp", prog_name="hf-geosharp")
@debug_option
def main() -> None:
    """Sharpness of transformers that does not change when the weights move along the model's symmetries."""
