"""A page of the documentation, taken apart."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click

from hf_geosharp.cli import main

ROOT = Path(__file__).resolve().parents[2]


def run_snippets(page: str, count: int) -> dict[str, Any]:
    """Runs the snippets of a page (README.md, or docs/...) one after another, as one program.

    Args:
        page: its path.
        count: how many there are, so that none is left out unnoticed.

    Returns:
        The names that they leave behind.
    """
    snippets = fenced((ROOT / page).read_text(encoding="utf-8"), "python")
    assert len(snippets) == count
    names: dict[str, Any] = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
    return names


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
