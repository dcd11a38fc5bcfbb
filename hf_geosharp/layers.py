"""Which layer a dotted name lies in; names alone, no models."""

from __future__ import annotations


def layer_of(name: str) -> tuple[str, int] | None:
    """The outermost numbered module that a parameter lies in, and its number; None if it is in none."""
    path = name.split(".")
    at = next((i for i, step in enumerate(path[:-1]) if step.isdecimal()), None)
    return None if at is None else (".".join(path[: at + 1]), int(path[at]))
