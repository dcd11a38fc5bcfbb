"""The pictures of a score: which ones there are data for, and what each shows, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_geosharp import heatmaps, plots
from hf_geosharp.cards.section import alt_text, number
from hf_geosharp.places import ShareTable, share_table
from hf_geosharp.report.words import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_geosharp.sharpness.result import PartScore, SharpnessResult

_NAMED = 5


@dataclass(frozen=True)
class Picture:
    """One picture: ``key`` names its file, ``alt`` says what it shows; ``draw`` takes the title to write over it."""

    key: str
    title: str
    alt: str
    draw: Callable[[str], Figure]


def pictures(result: SharpnessResult) -> dict[str, Picture]:
    """The pictures that a result has the data for, by their keys."""
    return {picture.key: picture for picture in _pictures(result)}


def parts_by(result: SharpnessResult, by: str) -> list[PartScore]:
    """The scores of the layers, of the heads, or of the kinds of weights."""
    return [part for part in result.per if part.by == by]


def where(result: SharpnessResult) -> str:
    """What the shares of a perturbation are about."""
    return f"Where the {'worst ' * (result.mode == 'worst')}perturbation lives"


def _pictures(result: SharpnessResult) -> Iterator[Picture]:
    if len(result.curve) > 1:
        yield Picture("curve", "Sharpness by radius", alt_text(result), lambda title: plots.curve_figure(result, title))
    table = share_table(result.share)
    if table is not None:
        yield Picture("share", where(result), _share_alt(table), lambda title: heatmaps.share_figure(table, title))
    yield from _parts(result)
    profile = result.profile
    if profile is not None:
        alt = (
            "Rise of the loss of the first batch on the way to its worst perturbation. At the end it is "
            f"{number(profile.geodesic[-1])} {result.unit} along the geodesic and {number(profile.straight[-1])} along "
            "the straight line."
        )
        yield Picture(
            "profile",
            "The way to the worst perturbation",
            alt,
            lambda title: plots.profile_figure(profile, title, result.unit),
        )
    if len(result.per_batch) > 1:
        yield Picture(
            "batches", "Batch by batch", _batches_alt(result), lambda title: plots.batches_figure(result, title)
        )


def _parts(result: SharpnessResult) -> Iterator[Picture]:
    for by, title in (("layer", "Only one layer perturbed"), ("kind", "Only one kind of weights perturbed")):
        parts = parts_by(result, by)
        if parts:
            yield _dots(by, title, parts, result)
    heads = parts_by(result, "head")
    if heads:
        yield Picture(
            "heads", "Only one head perturbed", _parts_alt(heads), lambda title: heatmaps.heads_figure(heads, title)
        )


def _dots(by: str, title: str, parts: list[PartScore], result: SharpnessResult) -> Picture:
    return Picture(f"{by}s", title, _parts_alt(parts), lambda over: plots.parts_figure(parts, result, over))


def _share_alt(table: ShareTable) -> str:
    cells = [
        (value, f"{heatmaps.module_name(module)} of {layer}")
        for module, row in zip(table.modules, table.values, strict=True)
        for layer, value in zip(table.layers, row, strict=True)
        if value is not None
    ]
    largest = sorted(cells, reverse=True)[:_NAMED]
    text = "; ".join(f"{name} {percent(value)}" for value, name in largest)
    return (
        f"Heat map, {len(table.modules)} modules by {len(table.layers)} layers. Largest: {text}. Outside of layers: "
        f"{percent(table.outside)}."
    )


def _parts_alt(parts: list[PartScore]) -> str:
    largest = sorted(parts, key=lambda part: -part.value)[:_NAMED]
    names = plots.part_names(largest)
    text = "; ".join(f"{name} {part.value:.3g}" for name, part in zip(names, largest, strict=True))
    return f"Sharpness when only one part is perturbed, {len(parts)} parts. Largest: {text}."


def _batches_alt(result: SharpnessResult) -> str:
    values = [batch.value for batch in result.per_batch]
    return (
        f"The value of each of {len(values)} batches: from {min(values):.4g} to {max(values):.4g}, mean "
        f"{number(result.geodesic_sharpness)}."
    )
