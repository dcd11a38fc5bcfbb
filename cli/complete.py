"""What a shell is offered for names that are no choices: files, and the shipped demos."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, which the shell knows."""
    return [CompletionItem(incomplete, type="file")]


def models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shipped demos, or files and folders."""
    from hf_geosharp import demos

    known = [f"{demos.PREFIX}{name}{twin}" for name in demos.names() for twin in ("", demos.TWIN)]
    found = [CompletionItem(name) for name in known if incomplete and name.startswith(incomplete)]
    return found or files(ctx, param, incomplete)
