"""Pictures of comparisons and correlations. Need matplotlib, which is installed on request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_geosharp.comparable import SHARPNESS, unit_of_scores
from hf_geosharp.figures import COLOUR, PALE, QUIET, SECOND, WARNING, cut, require, style, tidy
from hf_geosharp.sharpness.result import NATS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_geosharp.comparison import Comparison, Ranked, Run
    from hf_geosharp.correlation import Correlation, Statistic

_COLOURS = (COLOUR, SECOND, "#588157", "#9d4edd", "#6c757d", "#d4a373")
_WIDTH, _LINE = 5.6, 0.26
_MOST_NAMES = 40
_LONGEST = 40
_WIDE_RANGE = 10.0

_AXES = {SHARPNESS: "sharpness: rise of the loss", "base_loss": "loss at the weights"}


def comparison_figure(comparison: Comparison, width: float = _WIDTH) -> Figure:
    """The ranking as points with intervals; of checkpoints the values over the steps above the logged losses.

    Narrower than by default it has shorter names, and no title: who shows it says what the lines are.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure

    by_step = bool(comparison.runs) and all(held.step is not None for held in comparison.ranking)
    height = 4.2 if by_step else 1.1 + _LINE * len(comparison.ranking)
    with style():
        # Without pyplot: no window, and no state shared with a caller's own figures.
        figure = Figure(figsize=(width, height), layout="constrained")
        if by_step:
            _steps(figure, comparison)
        else:
            _dots(figure.add_subplot(), comparison, min(1.0, width / _WIDTH))
        _mark_forced(figure, comparison.forced)
    return figure


def correlation_figure(correlation: Correlation) -> Figure:
    """The figure over the target, a named point with its interval for each model.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    require()
    from matplotlib.figure import Figure

    with style():
        figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
        axes = figure.add_subplot()
        points = correlation.points
        for point in points:
            if point.interval95 is not None:
                axes.plot(point.interval95, [point.target] * 2, color=COLOUR, alpha=PALE, linewidth=3, zorder=1)
        axes.scatter([point.figure for point in points], [point.target for point in points], s=16, color=COLOUR)
        if len(points) <= _MOST_NAMES:
            for point in points:
                axes.annotate(
                    cut(point.name), (point.figure, point.target), (4, 3), textcoords="offset points", fontsize=7,
                    parse_math=False,
                )  # fmt: skip
        axes.set_xlabel(_axis(correlation.by, correlation.settings))
        axes.set_ylabel(correlation.target, parse_math=False)
        axes.set_title(f"{_statistic(correlation.statistics[0])}, {correlation.models} models", loc="left")
        axes.margins(x=0.15)
        tidy(axes)
        _mark_forced(figure, correlation.forced)
    return figure


def _axis(figure: str, settings: Mapping[str, Any]) -> str:
    """What stands at the axis of a figure of scores that share these settings."""
    if figure not in _AXES:
        return figure
    return _AXES[figure] + f" ({NATS})" * (unit_of_scores(settings) == NATS)


def _statistic(found: Statistic) -> str:
    interval = "" if found.interval95 is None else " ({:+.2f} to {:+.2f})".format(*found.interval95)
    return f"{found.name} {found.value:+.2f}{interval}, p = {found.p_value:.2g}"


def _dots(axes: Axes, comparison: Comparison, scale: float) -> None:
    """A row for each model, rank 1 on top."""
    ranking = comparison.ranking
    for row, held in enumerate(ranking):
        if held.interval95 is not None:
            axes.plot(held.interval95, [row] * 2, color=COLOUR, alpha=PALE, linewidth=4)
    for row, step in enumerate(comparison.next):
        if step.apart is not True:
            # Joined: which of these two is lower is not known.
            axes.plot([ranking[row].value, ranking[row + 1].value], [row, row + 1], color=QUIET, linewidth=1)
    axes.scatter([held.value for held in ranking], range(len(ranking)), s=20, color=COLOUR, zorder=3)
    names = [cut(held.name, round(scale * _LONGEST)) for held in ranking]
    axes.set_yticks(range(len(ranking)), names, parse_math=False)
    axes.set_ylim(len(ranking) - 0.4, -0.6)
    axes.set_xlabel(_axis(comparison.rank_by, comparison.settings))
    joined = any(step.apart is not True for step in comparison.next)
    title = "95 % intervals over batches" if any(held.interval95 for held in ranking) else ""
    if scale == 1:
        axes.set_title(title + "; joined neighbours cannot be told apart" * joined, loc="left")
    tidy(axes)


def _steps(figure: Figure, comparison: Comparison) -> None:
    """Values over training steps, and the losses beside them under the same axis."""
    losses = any(run.losses for run in comparison.runs)
    rows = figure.subplots(1 + losses, 1, sharex=True, squeeze=False)[:, 0]
    several = len(comparison.runs) > 1
    for number, run in enumerate(comparison.runs):
        colour = _COLOURS[number % len(_COLOURS)]
        held = sorted((h for h in comparison.ranking if h.run == run.folder), key=lambda h: h.step or 0)
        _values(rows[0], held, colour, run.folder if several else "")
        if losses:
            _losses(rows[1], run, colour, several)
    values = [held.value for held in comparison.ranking]
    if min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
        rows[0].set_yscale("log")
    rows[0].set_ylabel(_axis(comparison.rank_by, comparison.settings).replace(": ", ":\n"))
    if several:
        rows[0].legend(frameon=False, fontsize=7)
    if losses:
        rows[1].set_ylabel("logged loss")
        rows[1].legend(frameon=False, fontsize=7)
    rows[-1].set_xlabel("training step")
    for axes in rows:
        tidy(axes)


def _values(axes: Axes, held: Sequence[Ranked], colour: str, label: str) -> None:
    steps = [h.step or 0 for h in held]
    banded = [h for h in held if h.interval95 is not None]
    if banded:
        low, high = zip(*(h.interval95 for h in banded if h.interval95 is not None), strict=True)
        axes.fill_between([h.step or 0 for h in banded], low, high, color=colour, alpha=PALE, linewidth=0)
    axes.plot(steps, [h.value for h in held], marker="o", markersize=4, color=colour, label=cut(label))


def _losses(axes: Axes, run: Run, colour: str, several: bool) -> None:
    strokes: Mapping[str, str] = {"loss": "-"}
    for name, points in run.losses.items():
        steps, values = zip(*points, strict=True)
        title = "training loss" if name == "loss" else name
        axes.plot(
            steps, values, strokes.get(name, "--"), marker="." if len(steps) < _MOST_NAMES else "", color=colour,
            linewidth=1, label=f"{title} of {cut(run.folder)}" if several else title,
        )  # fmt: skip


def _mark_forced(figure: Figure, forced: Sequence[str]) -> None:
    if forced:
        more = f" (and {len(forced) - 1} more)" if len(forced) > 1 else ""
        text = f"FORCED: computed with different settings or data. {cut(forced[0], 70)}{more}"
        figure.supxlabel(text, fontsize=7, color=WARNING, parse_math=False)
