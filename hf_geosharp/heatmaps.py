"""Heat maps, layers x heads, as PNG, SVG or PDF by the file's ending. Needs matplotlib, installed on request."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hf_geosharp.errors import UsageError
from hf_geosharp.figures import require, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_geosharp.symmetry.health import HeadHealth

_COLOURS, _MISSING, _MARK = "cividis", "#dddddd", "#d62728"
_MOST_LABELS = 40


# ---------------------------------------------------------------------------------------------------- gauge health

_MEASURES: tuple[tuple[str, Callable[[HeadHealth], float | None], bool], ...] = (
    ("balance", lambda head: head.balance, False),
    ("condition", lambda head: head.condition, False),
    ("rank / columns", lambda head: head.rank / head.dim, True),
)
"""Title, value, and whether it is a share (of 1) rather than a number from 1 up."""

_KINDS = {"qk": "query/key", "vo": "value/output"}
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
        heat_map(axes, values, labels if axes is row[0] else [], share=share)
        axes.set_title(f"{_KINDS.get(kind, kind)}: {title}")
        for flag, marker in _MARKS.items():
            points = [(head.head, places[head.site]) for head in heads if flag in head.flags]
            if points:
                across, down = zip(*points, strict=True)
                axes.scatter(across, down, marker=marker, s=16, color=_MARK, linewidths=1)
    row[0].set_ylabel("layer")


def heat_map(
    axes: Axes, values: Sequence[Sequence[float | None]], labels: Sequence[str], *, share: bool = False
) -> None:
    """Values (rows x columns) as colours, with a bar beside that explains them.

    Args:
        axes: where.
        values: of each row from the top; None is grey.
        labels: of the rows; none are written if empty, and not every one if there are many.
        share: the values lie from 0 (bright) to 1; else from 1 up (bright) on a logarithmic scale.
    """
    import numpy as np
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    table = np.ma.masked_invalid(np.array(values, dtype=float))
    top = max(10.0, float(table.max())) if table.count() else 10.0
    norm = Normalize(0, 1) if share else LogNorm(1, top)
    cmap = f"{_COLOURS}{'_r' if share else ''}"
    image = axes.imshow(table, norm=norm, cmap=cmap, aspect="auto", interpolation="nearest")
    axes.set_facecolor(_MISSING)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    shown = range(0, len(labels), -(-len(labels) // _MOST_LABELS) or 1)
    axes.set_yticks(list(shown), [labels[place] for place in shown])
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.08, pad=0.02)
    bar.outline.set_visible(False)


def short_labels(names: Sequence[str]) -> list[str]:
    """What tells dotted names apart: what is left of each without what all begin and end with."""
    if len(names) < 2:
        return [(re.findall(r"\d+", name) or [name])[0] for name in names]
    parts = [name.split(".") for name in names]
    shortest = min(map(len, parts))
    start = next((i for i in range(shortest) if len({p[i] for p in parts}) > 1), shortest)
    end = next((i for i in range(shortest - start) if len({p[-1 - i] for p in parts}) > 1), shortest - start)
    return [".".join(p[start : len(p) - end]) or name for p, name in zip(parts, names, strict=True)]
