"""Pictures of one score: its curve, its batches, its parts, the way to its worst perturbation.

They need matplotlib, which is installed on request.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hf_geosharp.figures import COLOUR, ENDINGS, KINDS, PALE, QUIET, SECOND, cut, require, style, tidy
from hf_geosharp.sharpness.result import NATS
from hf_geosharp.sharpness.statistics import student_quantile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from hf_geosharp.sharpness.result import PartScore, Profile, SharpnessResult

SIZE = (4.0, 2.7)
"""Width and height: the text stays legible where a phone shows the picture as wide as its screen."""

MOST_PARTS = 40
_MOST_TICKS = 6
_LINE = 0.2
_BATCHES_WITH_MARKS = 200


def curve(result: SharpnessResult, title: str) -> bytes:
    """A PNG of the score at each radius with its 95 % interval; the same bytes for the same result.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    figure = curve_figure(result, title)
    file = io.BytesIO()
    with style():
        figure.savefig(file, format="png", metadata=ENDINGS[".png"])
    return file.getvalue()


def curve_figure(result: SharpnessResult, title: str = "") -> Figure:
    """The score at each radius with its 95 % interval.

    Both axes are logarithmic, so what an interval has at or below zero is cut off at the bottom.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    return _drawn(lambda axes: _curve(axes, result), title)


def batches_figure(result: SharpnessResult, title: str = "") -> Figure:
    """The value of each batch, with their mean and its 95 % interval; hollow where the search had not settled.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    return _drawn(lambda axes: _batches(axes, result), title)


def profile_figure(profile: Profile, title: str = "", unit: str = NATS) -> Figure:
    """The rise of the loss on the way to the worst perturbation, along the geodesic and along the straight line.

    ``unit`` is the result's.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    return _drawn(lambda axes: _profile(axes, profile, unit), title)


def parts_figure(parts: Sequence[PartScore], whole: SharpnessResult, title: str = "") -> Figure:
    """A row for each part with its score and 95 % interval, beside the score of the whole.

    Of more than :data:`MOST_PARTS` the largest are drawn.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    shown = largest(parts)
    return _drawn(lambda axes: _parts(axes, shown, whole), title, height=0.8 + _LINE * len(shown))


def largest(parts: Sequence[PartScore], most: int = MOST_PARTS) -> list[PartScore]:
    """The parts with the largest scores, in the order in which they were given."""
    if len(parts) <= most:
        return list(parts)
    kept = sorted(range(len(parts)), key=lambda i: -parts[i].value)[:most]
    return [parts[i] for i in sorted(kept)]


def part_interval(part: PartScore, batches: int) -> tuple[float, float] | None:
    """Student's 95 % interval of the score of a part; None where it has no error."""
    if part.stderr is None or batches < 2:
        return None
    half = student_quantile(0.975, batches - 1) * part.stderr
    return part.value - half, part.value + half


def _rise(unit: str) -> str:
    return f"rise of the loss ({unit})" if unit == NATS else "rise of the loss"


def _drawn(draw: Callable[[Axes], None], title: str, height: float = SIZE[1]) -> Figure:
    require()
    from matplotlib.figure import Figure

    with style():
        # Without pyplot: no window, and no state shared with a caller's own figures.
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left", parse_math=False)
        tidy(axes)
    return figure


def _curve(axes: Axes, result: SharpnessResult) -> None:
    points = sorted(result.curve, key=lambda point: point.rho)
    values = [point.geodesic_sharpness for point in points]
    floor = min(values) / 10 if min(values) > 0 else None
    for point in points:
        if point.interval95 is not None:
            low, high = point.interval95
            low = low if floor is None else max(low, floor)
            axes.plot([point.rho] * 2, [low, high], color=COLOUR, alpha=PALE, linewidth=4)
    axes.plot([point.rho for point in points], values, marker="o", markersize=4, color=COLOUR)
    if len(points) > 1:
        axes.set_xscale("log")
        _ticks_at(axes.xaxis, [point.rho for point in points])
    if floor is not None:
        axes.set_yscale("log")
        _plain_logarithm(axes.yaxis)
    axes.set_xlabel("radius ρ")
    axes.set_ylabel(_rise(result.unit))


def _ticks_at(axis: Axis, places: Sequence[float]) -> None:
    """Marks at the radii themselves, as far as there is room."""
    every = -(-len(places) // _MOST_TICKS)
    shown = places[::every]
    axis.set_ticks(shown, [f"{place:g}" for place in shown])
    axis.set_ticks([], minor=True)


def _plain_logarithm(axis: Axis) -> None:
    """0.02 rather than 2 x 10^-2, and more than one mark where less than a decade is shown."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    near = math.log10(high / low) < 2.5
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if near else (1,), numticks=_MOST_TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _batches(axes: Axes, result: SharpnessResult) -> None:
    from matplotlib.ticker import MaxNLocator

    if result.interval95 is not None:
        axes.axhspan(*result.interval95, color=COLOUR, alpha=PALE / 2, linewidth=0, label="95 % interval of the mean")
    axes.axhline(result.geodesic_sharpness, color=COLOUR, linewidth=1, label="mean")
    size = 22 if len(result.per_batch) <= _BATCHES_WITH_MARKS else 6
    settled = [batch for batch in result.per_batch if batch.converged or result.mode != "worst"]
    open_ended = [batch for batch in result.per_batch if batch not in settled]
    axes.scatter([b.index for b in settled], [b.value for b in settled], s=size, color=COLOUR, zorder=3)
    if open_ended:
        axes.scatter(
            [b.index for b in open_ended], [b.value for b in open_ended], s=size, facecolors="none", edgecolors=SECOND,
            zorder=3, label="search not settled",
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("batch")
    axes.set_ylabel(_rise(result.unit))
    axes.figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize="small", handlelength=1.2)


def _profile(axes: Axes, profile: Profile, unit: str) -> None:
    axes.axhline(0, color=QUIET, linewidth=0.8)
    axes.plot(profile.t, profile.geodesic, color=COLOUR, label="along the geodesic")
    axes.plot(profile.t, profile.straight, color=SECOND, linestyle="--", label="along the straight line")
    axes.set_xlabel("fraction of the way to the worst perturbation")
    axes.set_ylabel(_rise(unit))
    axes.legend(frameon=False, fontsize="small")


def _parts(axes: Axes, parts: Sequence[PartScore], whole: SharpnessResult) -> None:
    from matplotlib.ticker import MaxNLocator

    for row, part in enumerate(parts):
        interval = part_interval(part, len(whole.per_batch))
        if interval is not None:
            axes.plot(interval, [row] * 2, color=COLOUR, alpha=PALE, linewidth=4)
    axes.scatter([part.value for part in parts], range(len(parts)), s=20, color=COLOUR, zorder=3)
    axes.axvline(whole.geodesic_sharpness, color=SECOND, linewidth=1, linestyle="--", label="all weights perturbed")
    axes.set_yticks(range(len(parts)), [cut(name, 28) for name in part_names(parts)], parse_math=False)
    axes.set_ylim(len(parts) - 0.4, -0.6)
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel(_rise(whole.unit))
    axes.figure.legend(loc="outside upper right", frameon=False, fontsize="small", handlelength=1.6)


def part_names(parts: Sequence[PartScore]) -> list[str]:
    """What a reader calls the parts: "layer 3" rather than "bert.encoder.layer.3", where that says which one."""
    names = [_part_name(part) for part in parts]
    counts = Counter(names)
    return [part.part if counts[name] > 1 else name for part, name in zip(parts, names, strict=True)]


def _part_name(part: PartScore) -> str:
    if part.by == "kind":
        return KINDS.get(part.part, part.part)
    if part.layer is None or (part.by == "head" and part.head is None):
        return part.part
    return f"layer {part.layer}" + (f" head {part.head}" if part.by == "head" else "")
