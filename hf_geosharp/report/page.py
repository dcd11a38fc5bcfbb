"""One page of HTML about one result or several: everything is in the file, and nothing in it asks for more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from hf_geosharp.cards import entry
from hf_geosharp.cards.reproduce import Recipe, recipe
from hf_geosharp.cards.section import number
from hf_geosharp.figures import require
from hf_geosharp.plots import SIZE, part_interval, part_names
from hf_geosharp.report import words
from hf_geosharp.report.inline import inline
from hf_geosharp.report.overview import Overview, overview
from hf_geosharp.report.pictures import Picture, parts_by, pictures, where

if TYPE_CHECKING:
    from hf_geosharp.comparable import Named
    from hf_geosharp.sharpness.result import PartScore, SharpnessResult

_TOP_PLACES = 8
_MOST_ROWS = 200


@dataclass(frozen=True)
class Shown:
    """A picture as it stands on the page."""

    title: str
    alt: str
    svg: Markup


@dataclass(frozen=True)
class Chapter:
    """What the page says of one result; what there are no data for is empty."""

    anchor: str
    name: str
    result: SharpnessResult
    checks: tuple[words.Check, ...]
    figures: dict[str, Shown]
    places: tuple[tuple[str, float], ...]
    places_left: tuple[int, float]
    parts: dict[str, tuple[tuple[str, PartScore, str], ...]]
    on: str
    model: tuple[words.Row, ...]
    data: tuple[words.Row, ...]
    recipe: Recipe


def render(items: Sequence[Named]) -> str:
    """The page; the same for the same results, whenever it is made.

    Args:
        items: at least one, with names that tell them apart (:func:`hf_geosharp.report.gather.gather`).

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    require()
    chapters = [_chapter(f"result-{place}", item, alone=len(items) == 1) for place, item in enumerate(items, start=1)]
    above = overview(items) if len(items) > 1 else None
    return _template().render(
        style=Markup(_file("page.css")),
        chapters=chapters,
        overview=above,
        ranking=None if above is None else _ranking(above),
        words=words,
        where=where,
        most_rows=_MOST_ROWS,
    )


def _chapter(anchor: str, item: Named, *, alone: bool) -> Chapter:
    result = item.result
    places = sorted(result.share.items(), key=lambda place: -place[1])
    left = places[_TOP_PLACES:]
    return Chapter(
        anchor=anchor,
        name=public_name(item) if alone else item.name,
        result=result,
        checks=tuple(words.checks(result)),
        figures={key: _shown(found, anchor) for key, found in pictures(result).items()},
        places=tuple(places[:_TOP_PLACES]),
        places_left=(len(left), sum(share for _, share in left)),
        parts={by: rows for by in ("layer", "head", "kind") if (rows := _part_rows(result, by))},
        on=words.on(result.data),
        model=tuple(words.identity(result.model)),
        data=tuple(words.identity(result.data)),
        recipe=recipe(result, entry.public_name(result.model)),
    )


def _shown(picture: Picture, anchor: str) -> Shown:
    # What a picture says was escaped when it was written as SVG.
    svg = inline(picture.draw(""), f"{anchor}-{picture.key}", picture.alt)
    return Shown(picture.title, picture.alt, Markup(svg))


def _part_rows(result: SharpnessResult, by: str) -> tuple[tuple[str, PartScore, str], ...]:
    """The largest parts, with their names and intervals."""
    parts = parts_by(result, by)
    rows = zip(part_names(parts), parts, strict=True)
    ranked = sorted(rows, key=lambda row: -row[1].value)[:_MOST_ROWS]
    return tuple(
        (
            f"{name} (not reproducible)" if part.reproducible is False else name,
            part,
            words.interval(part_interval(part, len(result.per_batch))),
        )
        for name, part in ranked
    )


def _ranking(above: Overview) -> Shown | None:
    if above.comparison is None:
        return None
    from hf_geosharp.charts import comparison_figure

    names = ", ".join(f"{line.rank} {line.name} {number(line.result.geodesic_sharpness)}" for line in above.lines)
    alt = f"The results by their sharpness, with 95 % intervals: {names}"
    return Shown("Ranking", alt, Markup(inline(comparison_figure(above.comparison, SIZE[0]), "ranking", alt)))


def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters |= {
        "number": number, "interval": words.interval, "percent": words.percent, "breakable": _breakable,
        "plain": _plain,
    }  # fmt: skip
    return environment.from_string(_file("page.html"))


def _breakable(name: str) -> Markup:
    """A dotted name that a narrow screen breaks where its parts end."""
    return Markup("<wbr>").join(re.split(r"(?<=[._/-])(?=.)", name))


def _plain(text: str) -> str:
    """Markdown of a sentence without the marks of code."""
    return text.replace("`", "")


def _file(name: str) -> str:
    return resources.files("hf_geosharp.report").joinpath(name).read_text(encoding="utf-8")


def public_name(item: Named) -> str:
    """What a result is called where it stands alone: of folders only the last part."""
    return entry.public_name(item.result.model) or item.name
