"""The table of a result, made for 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hf_geosharp.cli.pieces import console, heading, interval, listed, number
from hf_geosharp.sharpness.choices import search, title_of

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import Profile, SharpnessResult

_TOP_SHARES = 5
_TOP_PARTS = 12
# The first of these that an identity has is its name; the rest follows.
_NAMES = ("id", "name", "path", "data")
_LONGEST = 60
_NARROWEST = 40


def show(result: SharpnessResult) -> None:
    """Print ``result`` on stdout."""
    # Below this the values would be left out rather than wrapped.
    out = console(_NARROWEST)
    out.print(table(result, plus_minus="±" if out.encoding.startswith("utf") else "+/-"))


def table(result: SharpnessResult, plus_minus: str = "±") -> RenderableType:
    """``result`` as something rich can print."""
    parts: list[RenderableType] = [_headline(result, plus_minus), Text(), _facts(result)]
    if len(result.curve) > 1:
        parts += [heading("Curve"), _curve(result, plus_minus)]
    if result.share:
        parts += [heading(f"Where the {_perturbation(result)} perturbation lives"), _shares(result)]
    if result.per:
        parts += [
            heading(f"When only one {result.per[0].by} is perturbed (the values do not add up)"),
            _parts(result, plus_minus),
        ]
    if result.profile is not None:
        parts += [
            heading(f"Rise on the way to the first batch's worst perturbation, rho {result.profile.radius:g}"),
            _profile(result.profile),
        ]
    if result.warnings:
        parts += [heading("Warnings", "bold yellow"), listed(result.warnings)]
    return Group(*parts)


def _headline(result: SharpnessResult, plus_minus: str) -> Text:
    title = title_of(result.metric)
    if result.lost:
        lost = f"in {result.lost} of {len(result.per_batch)} batches no finite loss was found: use a smaller radius"
        return Text.assemble((f"{title}  ", "bold"), ("no measurement", "bold red"), f" ({lost})")
    text = Text.assemble((f"{title}  ", "bold"), (number(result.geodesic_sharpness), "bold green"))
    if result.stderr is not None:
        text.append(f" {plus_minus} {result.stderr:.2g}")
    if result.interval95 is not None:
        text.append(f"  (95 % interval {interval(result.interval95)})")
    return text


def _facts(result: SharpnessResult) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(result):
        grid.add_row(name, value)
    return grid


def _rows(result: SharpnessResult) -> Iterator[tuple[str, Text]]:
    yield "model", _identity(result.model)
    yield "data", _identity(result.data)
    yield "samples", Text(_samples(result))
    yield "base loss", Text(f"{number(result.base_loss)} {result.unit}")
    yield "rho", Text(f"{result.rho:g}")
    yield "metric", Text(f"{result.metric}, geodesic {result.geodesic}, {result.mode} case, seed {result.seed}")
    if result.mode == "worst":
        yield "search", Text(f"{search(result.ascent, result.steps, result.starts)}; {result.converged}")
    if result.params != "all":
        yield "perturbed", Text(f"the adapter alone ({result.params})")
    yield "symmetries", _symmetries(result)
    yield "reproducible", _reproducible(result)
    for name, value in result.baselines.items():
        yield "baseline", Text(f"{name} {number(value)}")
    passes = result.passes
    yield "cost", Text(f"{passes.forwards} forwards, {passes.backwards} backwards, {result.seconds:.1f} s")


def _samples(result: SharpnessResult) -> str:
    count = len(result.per_batch)
    return f"{result.samples} in {count} {_plural('batch', 'batches', count)} of {result.batch_size}"


def _symmetries(result: SharpnessResult) -> Text:
    pairs = result.pairs
    text = Text(f"{result.symmetries}: {_counted('pair', 'pairs', pairs.count)}")
    if pairs.by_kind:
        text.append(f" ({_by_kind(pairs.by_kind)})")
    text.append(f", {pairs.symmetry_dim:,} dimensions divided out")
    if pairs.folded:
        text.append(f"; folded {_by_kind(pairs.folded)}")
    if pairs.reduced:
        text.append(f"; {len(pairs.reduced)} of reduced rank")
    if pairs.dropped:
        text.append(f"; dropped {len(pairs.dropped)}: {', '.join(pairs.dropped)}", "yellow")
    return text


def _reproducible(result: SharpnessResult) -> Text:
    check = result.reproducible
    if check.ok is None:
        return Text("not checked")
    text = Text("yes", "green") if check.ok else Text("NO", "bold red")
    details = [] if check.spread is None else [f"spread {check.spread:.2g}"]
    return text.append(f" ({'; '.join([*details, check.how])})", "none")


def _curve(result: SharpnessResult, plus_minus: str) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("rho", "sharpness", "95 % interval", "reproducible"):
        grid.add_column(name, justify="left" if name == "reproducible" else "right")
    for point in result.curve:
        error = "" if point.stderr is None else f" {plus_minus} {point.stderr:.2g}"
        grid.add_row(
            f"{point.rho:g}",
            f"{number(point.geodesic_sharpness)}{error}",
            interval(point.interval95),
            {True: Text("yes", "green"), False: Text("NO", "bold red"), None: Text("not checked")}[point.reproducible],
        )
    return grid


def _shares(result: SharpnessResult) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    ranked = sorted(result.share.items(), key=lambda item: -item[1])
    for name, share in ranked[:_TOP_SHARES]:
        grid.add_row(f"{share:.1%}", Text(name))
    rest = ranked[_TOP_SHARES:]
    if rest:
        count = _counted("other place", "other places", len(rest))
        grid.add_row(f"{sum(share for _, share in rest):.1%}", Text(count, "dim"))
    return grid


def _parts(result: SharpnessResult, plus_minus: str) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    ranked = sorted(result.per, key=lambda part: -part.value)
    for part in ranked[:_TOP_PARTS]:
        error = "" if part.stderr is None else f" {plus_minus} {part.stderr:.2g}"
        name = Text(part.part)
        if part.reproducible is False:
            name.append("  NOT reproducible", "bold red")
        grid.add_row(f"{number(part.value)}{error}", name)
    if rest := ranked[_TOP_PARTS:]:
        count = _counted("other", "others", len(rest))
        grid.add_row(f"at most {number(rest[0].value)}", Text(f"{count}; --json has all", "dim"))
    return grid


def _profile(profile: Profile) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("share of the way", "along the geodesic", "along the straight line"):
        grid.add_column(name, justify="right")
    for t, geodesic, straight in zip(profile.t, profile.geodesic, profile.straight, strict=True):
        grid.add_row(f"{t:.0%}", number(geodesic), number(straight))
    return grid


def _identity(what: dict[str, Any]) -> Text:
    """A name and what else is known, the plain values only; the JSON has the rest."""
    name = next((key for key in _NAMES if what.get(key)), None)
    text = Text("" if name is None else str(what[name]), "bold")
    for key, value in what.items():
        if key != name and isinstance(value, (str, int, float)) and value != "":
            text.append(f"{', ' if text else ''}{key.replace('_', ' ')} {_plain(value)}", "none")
    return text


def _plain(value: str | int | float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _perturbation(result: SharpnessResult) -> str:
    return "worst" if result.mode == "worst" else result.mode


def _by_kind(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())


def _counted(one: str, many: str, count: int) -> str:
    return f"{count:,} {_plural(one, many, count)}"


def _plural(one: str, many: str, count: int) -> str:
    return one if count == 1 else many
