"""What the tables of all commands are made of."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


def console(narrowest: int = 0) -> Console:
    """One for stdout, at least so wide: a narrower terminal breaks lines, where a narrower table would lose columns."""
    # A terminal that cannot show a character gets '?' rather than a traceback.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    found = Console()
    found.width = max(found.width, narrowest)
    return found


def heading(text: str, style: str = "bold") -> Text:
    """A heading, with an empty line before it."""
    return Text.assemble("\n", (text, style))


def listed(lines: Iterable[str]) -> Table:
    """A line for each, behind a dash; what is too long is folded."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", Text(" ".join(line.split())))
    return grid


def number(value: float) -> str:
    """Six significant digits, trailing zeros kept: they are digits that two scores may agree in."""
    return f"{value:#.6g}"


def interval(bounds: tuple[float, float] | None) -> str:
    """An interval in words; nothing for None."""
    return "" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"
