"""Where a perturbation lives: the places that a result names, by layer and by module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_geosharp.layers import layer_of

OTHERS = "others"
"""What the modules with the smallest shares are called together."""

_PAIRS = ("qk", "vo", "mlp", "lora")
_MOST_MODULES = 8


@dataclass(frozen=True)
class ShareTable:
    """Shares of a perturbation, which add up to 1 with ``outside``: what lies in none of the layers.

    ``values`` has a row for each of ``modules``, the largest first, and in it a number for each of ``layers``, None
    where a layer has no such module.
    """

    layers: tuple[str, ...]
    modules: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    outside: float


def share_table(share: Mapping[str, float]) -> ShareTable | None:
    """Takes the places of a perturbation apart; None where their names tell of no layers.

    A layer is the outermost numbered module. What is numbered inside of it (blocks, experts) counts together, and so do
    weights and biases of a module.
    """
    sums: dict[tuple[str, str], float] = {}
    totals: dict[str, float] = {}
    outside = 0.0
    for name, value in share.items():
        place = layer_of(name)
        if place is None:
            outside += value
            continue
        layer, _ = place
        module = _module(name[len(layer) + 1 :])
        sums[layer, module] = sums.get((layer, module), 0.0) + value
        totals[module] = totals.get(module, 0.0) + value
    if not sums:
        return None
    layers = sorted({layer for layer, _ in sums}, key=natural)
    modules = sorted(totals, key=lambda module: -totals[module])
    rows = [(module, [sums.get((layer, module)) for layer in layers]) for module in modules]
    if len(rows) > _MOST_MODULES:
        rest = [_sum(column) for column in zip(*(row for _, row in rows[_MOST_MODULES - 1 :]), strict=True)]
        rows = [*rows[: _MOST_MODULES - 1], (OTHERS, rest)]
    return ShareTable(tuple(layers), tuple(module for module, _ in rows), tuple(tuple(row) for _, row in rows), outside)


def natural(name: str) -> list[tuple[int, str]]:
    """A key for sorting: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def starred(name: str) -> str:
    """A dotted name without its numbers, the same for all that differ in nothing else."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _module(rest: str) -> str:
    """Pairs are called by their module and kind; parameters lose their last part, which says weight or bias."""
    module, _, last = rest.rpartition(".")
    return starred(rest if last in _PAIRS or not module else module)


def _sum(values: Sequence[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) if there else None
