"""A page of the documentation, taken apart."""

from __future__ import annotations

import re
import shlex

import click

from hf_geosharp.cli import main


def fenced(page: str, language: str) -> list[str]:
    """The text of each fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def parse(line: str) -> None:
    """A command as it is typed after ``hf-geosharp``: click takes its options, nothing runs."""
    name, *options = shlex.split(line)
    command = main.get_command(click.Context(main), name)
    assert command is not None, line
    command.make_context(name, options, parent=click.Context(main))


def anchors(page: str) -> set[str]:
    """What a link to a heading of a page ends with."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
