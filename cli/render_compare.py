"""The tables of a comparison and of a correlation, made for 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_geosharp.cli.pieces import console, heading, interval, listed, number
from hf_geosharp.sharpness.choices import search

if TYPE_CHECKING:
    from hf_geosharp.comparison import Comparison, Ranked, Skipped
    from hf_geosharp.correlation import Correlation

_WIDTH = 80
_APART = {True: Text("yes", "green"), False: Text("NO", "bold red"), None: Text("unknown", "yellow")}


def show(comparison: Comparison) -> None:
    """Print a comparison on stdout."""
    console(_WIDTH).print(table(comparison))


def show_correlation(correlation: Correlation) -> None:
    """Print a correlation on stdout."""
    console(_WIDTH).print(correlation_table(correlation))


def table(comparison: Comparison) -> RenderableType:
    """A comparison as something rich can print."""
    parts: list[RenderableType] = [*_forced(comparison.forced), _ranking(comparison)]
    parts += [heading(f"Each compared with the next, by {comparison.rank_by}"), _neighbours(comparison)]
    parts.append(Text(_told_apart(comparison), "dim"))
    if any(held.step is not None for held in comparison.ranking):
        parts += [heading("Over training"), _steps(comparison)]
    parts += [Text(), Text(_settings(comparison.settings), "dim")]
    if comparison.skipped:
        parts += [heading(f"Skipped ({len(comparison.skipped)})", "bold yellow")]
        parts.append(listed([_reason(skipped) for skipped in comparison.skipped]))
    return Group(*parts, *_notes(comparison.notes))


def correlation_table(correlation: Correlation) -> RenderableType:
    """A correlation as something rich can print."""
    head = Text.assemble((f"{correlation.by} and {correlation.target}", "bold"), f", {correlation.models} models")
    grid = _grid("", "value", "95 % interval", "p")
    for found in correlation.statistics:
        interval = "none" if found.interval95 is None else f"{found.interval95[0]:+.3f} to {found.interval95[1]:+.3f}"
        p_value = f"{found.p_value:.2g}" + (" (exact)" if found.exact else "")
        grid.add_row(Text(found.name), f"{found.value:+.3f}", interval, p_value)
    points = _grid("model", correlation.by, correlation.target)
    for point in sorted(correlation.points, key=lambda point: point.figure):
        points.add_row(Text(point.name), number(point.figure), f"{point.target:.6g}")
    resamples = f"intervals: {correlation.resamples} bootstrap samples of the models; "
    if all(found.interval95 is None for found in correlation.statistics):
        resamples = ""
    how = (
        f"{resamples}p: two-sided, by permutation; "
        f"seed {correlation.seed}; pairs of equal models: {correlation.ties['figure']} in {correlation.by}, "
        f"{correlation.ties['target']} in {correlation.target}"
    )
    parts: list[RenderableType] = [*_forced(correlation.forced), head, Text(), grid, Text(), points, Text()]
    parts += [Text(how, "dim"), Text(_settings(correlation.settings), "dim")]
    return Group(*parts, *_notes(correlation.notes))


def _ranking(comparison: Comparison) -> Table:
    other = comparison.rank_by not in ("sharpness", "base_loss")
    grid = _grid("rank", "model", *([comparison.rank_by] if other else []), "sharpness", "95 % interval", "base loss")
    for held in comparison.ranking:
        figure = [number(held.value)] if other else []
        grid.add_row(
            _rank(held), Text(held.name), *figure, number(held.sharpness), interval(held.sharpness_interval95),
            f"{held.base_loss:.4g}",
        )  # fmt: skip
    return grid


def _reason(skipped: Skipped) -> str:
    """Most messages begin with the model's name anyway."""
    return skipped.reason if skipped.name in skipped.reason else f"{skipped.name}: {skipped.reason}"


def _rank(held: Ranked) -> str:
    """With the ranks that it may have as well."""
    if held.best_rank == held.worst_rank:
        return str(held.rank)
    return f"{held.rank} ({held.best_rank}-{held.worst_rank})"


def _neighbours(comparison: Comparison) -> Table:
    grid = _grid("", "model", "higher by", "95 % interval", "told apart")
    for held, step in zip(comparison.ranking[1:], comparison.next, strict=True):
        grid.add_row(str(held.rank), Text(held.name), f"{step.mean:.4g}", interval(step.interval95), _APART[step.apart])
    return grid


def _told_apart(comparison: Comparison) -> str:
    batches = {step.batches for step in comparison.next}
    if all(step.apart is None for step in comparison.next):
        return f"{comparison.rank_by}: no interval, so it is unknown which can be told apart"
    unsure = [step for step in comparison.next if step.apart is not True]
    what = f"{len(unsure)} of {len(comparison.next)} neighbours cannot be told apart. " if unsure else ""
    return f"{what}Differences are paired over {_range(sorted(batches))} batches; ranks in brackets are also possible."


def _steps(comparison: Comparison) -> Table:
    """In the order of the training, with what the Trainer logged."""
    held = sorted((h for h in comparison.ranking if h.step is not None), key=lambda h: (h.run, h.step or 0))
    losses = list(dict.fromkeys(name for h in held for name in h.losses))
    several = len({h.run for h in held}) > 1
    grid = _grid(*(["run"] if several else []), "step", comparison.rank_by, *(_logged(name) for name in losses))
    for h in held:
        run = [Text(h.run)] if several else []
        logged = (f"{h.losses[name]:.4g}" if name in h.losses else "" for name in losses)
        grid.add_row(*run, str(h.step), number(h.value), *logged)
    return grid


def _logged(name: str) -> str:
    return "training loss" if name == "loss" else name


def _settings(settings: Any) -> str:
    data = settings["data"]
    where = data.get("id") or "batches in memory"
    split = f" ({data['split']})" if data.get("split") else ""
    average = settings["mode"] == "average"
    how = search(settings["ascent"], settings["steps"], settings["starts"])
    if average:
        how = f"{settings['steps']} draws"
    moved = "" if settings["params"] == "all" else f", {settings['params']} weights alone"
    return (
        f"{settings['metric']}, rho {settings['rho']:g}, geodesic {settings['geodesic']}, symmetries "
        f"{settings['symmetries']}{moved}, {settings['mode']} case, {how}, seed {settings['seed']}; "
        f"{settings['samples']} samples in batches of {settings['batch_size']} of {where}{split}"
    )


def _forced(differences: Sequence[str]) -> list[RenderableType]:
    if not differences:
        return []
    head = Text("FORCED: these results are not comparable: they were computed with different settings", "bold red")
    return [head, listed(differences), Text()]


def _notes(notes: Sequence[str]) -> list[RenderableType]:
    return [heading("Notes", "bold yellow"), listed(notes)] if notes else []


def _grid(*headings: str) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in headings:
        is_text = name in ("", "rank", "model", "run", "told apart")
        grid.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text,
            overflow="fold" if is_text else "ellipsis",
        )  # fmt: skip
    return grid


def _range(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
