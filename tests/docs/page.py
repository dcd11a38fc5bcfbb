"""A page of the documentation, taken apart."""

from __future__ import annotations

import re


def fenced(page: str, language: str) -> list[str]:
    """The text of each fenced block of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
