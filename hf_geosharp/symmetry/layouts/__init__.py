"""Declarative descriptions of where attention modules keep their projections: data, read from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources

ROLES = ("q", "k", "v", "o")


@dataclass(frozen=True)
class Layout:
    """One way to arrange an attention module.

    ``paths`` gives the submodule of each role, ``patterns`` the axes of its output (of its input for "o"),
    ``select`` the part of a fused projection, ``parts`` how many there are.
    """

    name: str
    paths: Mapping[str, str]
    patterns: Mapping[str, str]
    select: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    parts: int = 1


@dataclass(frozen=True)
class Layouts:
    """All layouts, and the configuration attributes that give the number of heads."""

    layouts: tuple[Layout, ...]
    query_heads: tuple[str, ...]
    key_heads: tuple[str, ...]


@lru_cache(maxsize=1)
def shipped() -> Layouts:
    """The layouts that come with the package."""
    data = json.loads(resources.files(__name__).joinpath("attention.json").read_text(encoding="utf-8"))
    layouts = tuple(
        Layout(
            entry["name"],
            {r: entry[r] for r in ROLES},
            {**data["patterns"], **entry.get("patterns", {})},
            entry.get("select", {}),
            entry.get("parts", 1),
        )
        for entry in data["layouts"]
    )
    return Layouts(layouts, tuple(data["heads"]["query"]), tuple(data["heads"]["key"]))
