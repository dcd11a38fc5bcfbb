"""How pages that are rendered from measured data are written: tables, paragraphs, values with their spread."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

GENERATED = "Made by `make bench` from {sources}; not to be edited by hand."


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose first ``left`` columns are text and whose others are figures."""
    rule = [*["---"] * left, *["---:"] * (len(head) - left)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def paragraph(text: str, first: str = "", rest: str = "") -> str:
    """Broken at 120 characters."""
    return textwrap.fill(
        text, 120, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def ranged(spread: Mapping[str, float], form: str = ".3g") -> str:
    """A median, and the range if there is one."""
    low, middle, high = (f"{spread[key]:{form}}" for key in ("low", "median", "high"))
    return middle if low == high else f"{middle} ({low} to {high})"
