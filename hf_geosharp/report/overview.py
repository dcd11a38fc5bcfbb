"""Several results at a glance: ranked where they were taken alike, else side by side with what they differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_geosharp.comparable import check_comparable
from hf_geosharp.comparison import compare

if TYPE_CHECKING:
    from hf_geosharp.comparable import Named
    from hf_geosharp.comparison import Comparison, Ranked
    from hf_geosharp.sharpness.result import SharpnessResult

_APART = {True: "yes", False: "no", None: "unknown"}


@dataclass(frozen=True)
class Line:
    """One result: ``place`` is its position among those given; ``rank`` and ``apart`` are empty without a ranking.

    ``apart`` says whether it can be told apart from the line before.
    """

    place: int
    name: str
    result: SharpnessResult
    rank: str = ""
    apart: str = ""


@dataclass(frozen=True)
class Overview:
    """All results, and their comparison unless ``differences`` says why there is none."""

    lines: tuple[Line, ...]
    comparison: Comparison | None
    differences: tuple[str, ...] = ()


def overview(items: Sequence[Named]) -> Overview:
    """Ranks results by their sharpness, if they were all taken alike.

    Raises:
        DataError: a result with a number that is NaN or infinite.
    """
    differences = check_comparable(items, force=True)
    if differences:
        lines = [Line(place, item.name, item.result) for place, item in enumerate(items)]
        return Overview(tuple(lines), None, tuple(differences))
    comparison = compare(items)
    places = {item.name: place for place, item in enumerate(items)}
    apart = ["", *(_APART[step.apart] for step in comparison.next)]
    return Overview(
        tuple(
            Line(places[held.name], held.name, items[places[held.name]].result, _rank(held), text)
            for held, text in zip(comparison.ranking, apart, strict=True)
        ),
        comparison,
    )


def _rank(held: Ranked) -> str:
    """With the ranks that it may have as well."""
    if held.best_rank == held.worst_rank:
        return str(held.rank)
    return f"{held.rank} ({held.best_rank} to {held.worst_rank})"
