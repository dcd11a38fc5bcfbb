"""The tree of an inspection and its tables, made for 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hf_geosharp.cli.pieces import console, heading, listed
from hf_geosharp.heatmaps import short_labels

if TYPE_CHECKING:
    from hf_geosharp.inspection import Inspection
    from hf_geosharp.site_report import SiteReport
    from hf_geosharp.symmetry.health import HeadHealth

_STYLES = {"holds": "green", "dead": "yellow", "failed": "bold red", "unverified": "yellow"}


def show(result: Inspection, *, everything: bool = False) -> None:
    """Print ``result`` on stdout; ``everything`` leaves no layer and no head out."""
    console().print(report(result, everything=everything))


def report(result: Inspection, *, everything: bool = False) -> RenderableType:
    """``result`` as something rich can print."""
    parts: list[RenderableType] = [_tree(result, everything), Text(), _totals(result)]
    for title, lines in (("Not recognised", result.unrecognised), ("Dropped", result.dropped)):
        if lines:
            parts += [heading(f"{title} ({len(lines)})"), listed(lines)]
    if result.health:
        parts += [heading("Health of the heads"), _health(result.health, everything), *_flagged(result.health)]
    if result.warnings:
        parts += [heading("Warnings", "bold yellow"), listed(result.warnings)]
    return Group(*parts)


# ------------------------------------------------------------------------------------------------------------ tree


@dataclass
class _Node:
    """A module with its sites. One that stands for several alike has the sites of each."""

    path: str
    label: str
    sites: list[list[SiteReport]] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)


def _tree(result: Inspection, everything: bool) -> Tree:
    root = _Node("", "")
    for site in result.sites:
        node = root
        for part in site.module.split(".") if site.module else []:
            node = node.children.setdefault(part, _Node(f"{node.path}.{part}".lstrip("."), part))
        node.sites.append([site])
    if not everything:
        _fold(root)
    model = result.model
    title = Text.assemble((str(model.get("id", "")), "bold"), f"  {model.get('class', '')}")
    tree = Tree(title, guide_style="dim")
    _grow(tree, root)
    return tree


def _fold(node: _Node) -> None:
    """Children under numbers that are alike in everything but the number become one."""
    for child in node.children.values():
        _fold(child)
    kept: dict[tuple[object, ...], _Node] = {}
    numbers: dict[int, list[int]] = {}
    children: dict[str, _Node] = {}
    for name, child in node.children.items():
        first = kept.setdefault(_signature(child, child.path), child) if name.isdigit() else child
        if first is child:
            children[name] = child
        else:
            _join(first, child)
        if name.isdigit():
            numbers.setdefault(id(first), []).append(int(name))
    for child in children.values():
        alike = numbers.get(id(child), [])
        if len(alike) > 1:
            child.label = f"{_ranges(alike)} ({len(alike)} alike)"
    node.children = children


def _signature(node: _Node, within: str) -> tuple[object, ...]:
    """What is seen of a node, with names as they are inside ``within``."""
    sites = tuple(
        (s.kind, s.group, s.copies, s.total_dim, s.status, _inside(s.module, within),
         tuple(_inside(p, within) for p in s.parameters))
        for group in node.sites for s in group[:1]
    )  # fmt: skip
    return (node.label if node.path != within else "", sites, *(_signature(c, within) for c in node.children.values()))


def _inside(name: str, within: str) -> str:
    return name.removeprefix(f"{within}.")


def _join(into: _Node, other: _Node) -> None:
    """The sites of a node, and of those below it, to those of its double."""
    for mine, theirs in zip(into.sites, other.sites, strict=True):
        mine += theirs
    for child, double in zip(into.children.values(), other.children.values(), strict=True):
        _join(child, double)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _grow(branch: Tree, node: _Node) -> None:
    for group in node.sites:
        branch.add(_site(group))
    for child in node.children.values():
        label, last = child.label, child
        while not last.sites and len(last.children) == 1:  # a chain of modules with nothing of their own
            last = next(iter(last.children.values()))
            label += f".{last.label}"
        _grow(branch.add(Text(label, "bold")), last)


def _site(alike: Sequence[SiteReport]) -> Text:
    """One line of what it is and how well it holds, one of what it moves."""
    first = alike[0]
    times = "" if first.copies == 1 else f" x {first.copies:,}"
    text = Text.assemble((f"{first.kind}  ", "cyan"), f"{first.group}{times}, dim {first.total_dim:,}  ")
    text.append(first.status, _STYLES.get(first.status, ""))
    text.append(_numbers(alike), "dim")
    return text.append(f"\n{_moved(first)}", "dim")


def _numbers(alike: Sequence[SiteReport]) -> str:
    """The worst of several."""
    deviations = [s.deviation for s in alike if s.deviation is not None]
    controls = [s.control for s in alike if s.control is not None]
    if not deviations or not controls:
        return ""
    return f" {max(deviations):.1e}, control {min(controls):.2g}"


def _moved(site: SiteReport) -> str:
    """Parameters by the side of the pair they are on, named from the module or the part of the model around it."""
    sides: dict[str, list[str]] = {}
    for part in site.slices:
        name = _near(part.parameter, site.module) + part.index
        sides.setdefault(part.factor, []).append(name)
    shown = {p.parameter for p in site.slices}
    rest = [_near(p, site.module) for p in site.parameters if p not in shown]
    between = " <> " if "g" in sides else " -> "
    return between.join(", ".join(names) for names in (*sides.values(), rest) if names)


def _near(name: str, module: str) -> str:
    """A parameter's name without what it shares with the module."""
    own, near = name.split("."), module.split(".")
    shared = 0
    while shared < min(len(own) - 1, len(near)) and own[shared] == near[shared]:
        shared += 1
    return ".".join(own[shared:])


# ---------------------------------------------------------------------------------------------------------- tables


def _totals(result: Inspection) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    totals = result.totals
    kinds = ", ".join(f"{kind} {dim:,}" for kind, dim in totals.by_kind.items())
    grid.add_row("parameters", f"{totals.parameters:,}")
    grid.add_row("symmetry", Text(f"{totals.symmetry_dim:,} dimensions" + (f" ({kinds})" if kinds else "")))
    grid.add_row("effective", f"{totals.effective_parameters:,} parameters")
    grid.add_row("evidence", Text(_evidence(result)))
    return grid


def _evidence(result: Inspection) -> str:
    if result.deviation is None or result.control is None:
        return f"none: not verified; found on {result.inputs}"
    return (
        f"outputs change by {result.deviation:.1e} along the orbit, by {result.control:.2g} when the symmetry is "
        f"broken on purpose ({result.inputs})"
    )


def _health(heads: Sequence[HeadHealth], everything: bool) -> Table:
    """A row for each site, or for each head."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", overflow="fold")
    table.add_column("kind", no_wrap=True)
    for name in ("head" if everything else "heads", "rank", "condition", "balance", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    modules = list(dict.fromkeys(head.module for head in heads))
    layer = dict(zip(modules, short_labels(modules), strict=True))
    for site in dict.fromkeys(head.site for head in heads):
        own = [head for head in heads if head.site == site]
        for group, label in [([h], str(h.head)) for h in own] if everything else [(own, str(len(own)))]:
            table.add_row(Text(layer[own[0].module]), Text(own[0].kind), label, *_cells(group))
    return table


def _cells(heads: Sequence[HeadHealth]) -> Iterator[Text]:
    yield Text(f"{_span([h.rank for h in heads])}/{heads[0].dim}")
    yield Text(_middle([h.condition for h in heads if h.condition is not None]))
    yield Text(_middle([h.balance for h in heads if h.balance is not None]))
    yield Text(_middle([h.norm for h in heads]))
    counts = {flag: sum(flag in h.flags for h in heads) for flag in ("dead", "rank-deficient")}
    yield Text(", ".join(f"{n} {flag}" if len(heads) > 1 else flag for flag, n in counts.items() if n), "bold red")


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if min(ranks) == max(ranks) else f"{min(ranks)}-{max(ranks)}"


def _middle(values: Sequence[float]) -> str:
    """The median, with the largest if they differ."""
    if not values:
        return "-"
    middle, top = f"{median(values):.3g}", f"{max(values):.3g}"
    return middle if middle == top else f"{middle} (to {top})"


def _flagged(heads: Sequence[HeadHealth]) -> Iterator[RenderableType]:
    found = [
        f"{h.module} {h.kind} head {h.head}: {', '.join(h.flags)} (rank {h.rank} of {h.dim})" for h in heads if h.flags
    ]
    if found:
        yield heading(f"Flagged heads ({len(found)})", "bold red")
        yield listed(found)
