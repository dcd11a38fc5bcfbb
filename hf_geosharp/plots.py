"""The picture of a score: value by radius, with its interval. Needs matplotlib, which is installed on request."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from hf_geosharp.figures import COLOUR, require

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult

_SIZE = (5.0, 3.2)
_DPI = 144


def curve(result: SharpnessResult, title: str) -> bytes:
    """A PNG of the score at each radius with its 95 % interval; the same bytes for the same result.

    Both axes are logarithmic, so what an interval has at or below zero is cut off at the bottom.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    require()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no window, and no state shared with a caller's own figures.
    figure = Figure(figsize=_SIZE, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(figure.add_subplot(), result, title)
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _draw(axes: Any, result: SharpnessResult, title: str) -> None:
    points = sorted(result.curve, key=lambda point: point.rho)
    values = [point.geodesic_sharpness for point in points]
    logarithmic = min(values) > 0
    if len(points) > 1:
        axes.set_xscale("log")
    if logarithmic:
        axes.set_yscale("log")
    floor = min(values) / 10 if logarithmic else None
    for point in points:
        if point.interval95 is not None:
            low, high = point.interval95
            axes.plot(
                [point.rho] * 2,
                [low if floor is None else max(low, floor), high],
                color=COLOUR,
                alpha=0.4,
                linewidth=4,
            )
    axes.plot([point.rho for point in points], values, marker="o", markersize=4, color=COLOUR)
    axes.set_xlabel("radius ρ")
    axes.set_ylabel("rise of the loss (nats)")
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
