"""Heat maps, layers x heads, as PNG, SVG or PDF by the file's ending. Needs matplotlib, installed on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from hf_geosharp.errors import UsageError
from hf_geosharp.figures import KINDS, MISSING, WARNING, cut, require, style
from hf_geosharp.places import natural, starred

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from hf_geosharp.places import ShareTable
    from hf_geosharp.sharpness.result import PartScore
    from hf_geosharp.symmetry.health import HeadHealth

_COLOURS = "cividis"
_MOST_LABELS = 40

Scale = Literal["ratio", "part", "amount"]
"""From 1 up (bright), logarithmic; from 0 (bright) to 1; or from 0 to the largest (bright)."""


# ---------------------------------------------------------------------------------------------------- gauge health

_MEASURES: tuple[tuple[str, Callable[[HeadHealth], float | None], bool], ...] = (
    ("balance", lambda head: head.balance, False),
    ("condition", lambda head: head.condition, False),
    ("rank / columns", lambda head: head.rank / head.dim, True),
)
"""Title, value, and whether it is a share (of 1) rather than a number from 1 up."""

_MARKS = {"dead": "x", "rank-deficient": "."}


def health_figure(heads: Sequence[HeadHealth]) -> Figure:
    """What :func:`hf_geosharp.symmetry.health.health` measured, a row of heat maps for each kind of pair.

    The balance, the condition of the worse factor, and the rank as a share of the columns. Bright is what is out of the
    ordinary, grey what has no value; a cross marks a dead head, a dot one without full rank.

    Raises:
        UsageError: there is no head to show.
        GeosharpError: matplotlib is not installed.
    """
    if not heads:
        raise UsageError("there is no head to show: no attention symmetry was found, or its health was left out")
    require()
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(head.kind for head in heads))
    own = {kind: [head for head in heads if head.kind == kind] for kind in kinds}
    heights = [0.9 + max(1.0, 0.2 * len({head.site for head in own[kind]})) for kind in kinds]
    width = 1.1 + max(1.3, 0.16 * (1 + max(head.head for head in heads)))
    with style():
        # Without pyplot: no window, and no state shared with a caller's own figures.
        figure = Figure(figsize=(len(_MEASURES) * width, sum(heights)), layout="constrained")
        grid = figure.subplots(len(kinds), len(_MEASURES), squeeze=False, height_ratios=heights)
        for kind, row in zip(kinds, grid, strict=True):
            _health_row(row, own[kind])
        for axes in grid[-1]:
            axes.set_xlabel("head")
    return figure


def _health_row(row: Sequence[Axes], heads: Sequence[HeadHealth]) -> None:
    """All measures of one kind of pair."""
    sites = {head.site: head.module for head in reversed(heads)}
    places = {site: place for place, site in enumerate(reversed(sites))}
    labels = short_labels(list(reversed(sites.values())))
    kind, columns = heads[0].kind, 1 + max(head.head for head in heads)
    for axes, (title, measure, share) in zip(row, _MEASURES, strict=True):
        values: list[list[float | None]] = [[None] * columns for _ in places]
        for head in heads:
            values[places[head.site]][head.head] = measure(head)
        heat_map(axes, values, labels if axes is row[0] else [], scale="part" if share else "ratio")
        axes.set_title(f"{KINDS.get(kind, kind)}: {title}")
        for flag, marker in _MARKS.items():
            points = [(head.head, places[head.site]) for head in heads if flag in head.flags]
            if points:
                across, down = zip(*points, strict=True)
                axes.scatter(across, down, marker=marker, s=16, color=WARNING, linewidths=1)
    row[0].set_ylabel("layer")


def heat_map(
    axes: Axes, values: Sequence[Sequence[float | None]], labels: Sequence[str], *, scale: Scale = "ratio"
) -> AxesImage:
    """Values (rows x columns) as colours, with a bar beside that explains them.

    Args:
        axes: where.
        values: of each row from the top; None is grey.
        labels: of the rows; none are written if empty, and not every one if there are many.
        scale: what the colours say.
    """
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    table = np.ma.masked_invalid(np.array(values, dtype=float))
    most = float(table.max()) if table.count() else 0.0
    norms: Mapping[str, Callable[[], Normalize]] = {
        "ratio": lambda: LogNorm(1, max(10.0, most)),
        "part": lambda: Normalize(0, 1),
        "amount": lambda: Normalize(min(0.0, float(table.min())) if table.count() else 0.0, most or 1.0),
    }
    norm, cmap = norms[scale](), f"{_COLOURS}{'_r' if scale == 'part' else ''}"
    image = axes.imshow(table, norm=norm, cmap=cmap, aspect="auto", interpolation="nearest")
    axes.set_facecolor(MISSING)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    shown = range(0, len(labels), -(-len(labels) // _MOST_LABELS) or 1)
    axes.set_yticks(list(shown), [labels[place] for place in shown], parse_math=False)
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.08, pad=0.02)
    bar.outline.set_visible(False)
    return image


def short_labels(names: Sequence[str]) -> list[str]:
    """What tells dotted names apart: what is left of each without what all begin and end with."""
    if len(names) < 2:
        return [(re.findall(r"\d+", name) or [name])[0] for name in names]
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    start = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest)
    end = next((i for i in range(shortest - start) if len({p[-1 - i] for p in parts}) > 1), shortest - start)
    return [".".join(p[start : len(p) - end]) or name for p, name in zip(parts, names, strict=True)]


# ------------------------------------------------------------------------------------------------------- of one score

_WIDTH, _ROW, _TALLEST = 4.0, 0.24, 4.5
_FEW = 8
_DARK, _LIGHT = "#111111", "#fafafa"
"""Text on the colours of a map, whatever is around it."""


def share_figure(table: ShareTable, title: str = "") -> Figure:
    """Where the worst perturbation lives, modules x layers.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with style():
        figure = Figure(figsize=(_WIDTH, 0.9 + _ROW * max(3, len(table.modules))), layout="constrained")
        axes = figure.add_subplot()
        labels = [cut(module_name(module), 24) for module in table.modules]
        image = heat_map(axes, table.values, labels, scale="amount")
        _write_in(axes, image, table.values, lambda value: f"{100 * value:.0f} %" if value >= 0.005 else "")
        _columns(axes, short_labels(table.layers))
        axes.set_xlabel("layer")
        axes.set_title(title, loc="left", parse_math=False)
        image.colorbar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol=" %"))  # type: ignore[union-attr]
    return figure


def heads_figure(parts: Sequence[PartScore], title: str = "") -> Figure:
    """The scores of single heads, modules x heads, a map for each kind of module (as encoder and decoder have several).

    Raises:
        UsageError: none of the parts is a head.
        GeosharpError: matplotlib is not installed.
    """
    maps: dict[str, dict[str, dict[int, float]]] = {}
    for part in parts:
        if part.head is not None:
            module = part.part.removesuffix(f"head {part.head}").strip()
            maps.setdefault(starred(module), {}).setdefault(module, {})[part.head] = part.value
    if not maps:
        raise UsageError("there is no head to show: none of the parts is a head")
    require()
    from matplotlib.figure import Figure

    heights = [0.8 + min(_ROW * max(3, len(rows)), _TALLEST) for rows in maps.values()]
    with style():
        figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
        grid = figure.subplots(len(maps), squeeze=False, height_ratios=heights)[:, 0]
        names = short_labels(list(maps)) if len(maps) > 1 else [""]
        for axes, name, rows in zip(grid, names, maps.values(), strict=True):
            modules = sorted(rows, key=natural)
            columns = range(1 + max(head for own in rows.values() for head in own))
            values = [[rows[module].get(head) for head in columns] for module in modules]
            image = heat_map(axes, values, [cut(label, 24) for label in short_labels(modules)], scale="amount")
            _write_in(axes, image, values, lambda value: f"{value:.2g}")
            axes.set_ylabel("layer")
            axes.set_xlabel("head")
            axes.set_title(": ".join(text for text in (title, name) if text), loc="left", parse_math=False)
    return figure


def module_name(module: str) -> str:
    """A module of a layer as a reader knows it."""
    return KINDS.get(module.rpartition(".")[2], module)


def _columns(axes: Axes, labels: Sequence[str]) -> None:
    every = -(-len(labels) // _FEW)
    axes.set_xticks(range(0, len(labels), every), list(labels[::every]), parse_math=False)


def _write_in(
    axes: Axes, image: AxesImage, values: Sequence[Sequence[float | None]], text: Callable[[float], str]
) -> None:
    """The numbers themselves, where there is room for them."""
    if len(values[0]) > _FEW:
        return
    low, high = image.get_clim()
    middle = ((low or 0.0) + (high or 0.0)) / 2
    for row, held in enumerate(values):
        for column, value in enumerate(held):
            if value is not None:
                colour = _DARK if value > middle else _LIGHT
                axes.text(column, row, text(value), ha="center", va="center", color=colour, fontsize="small")
