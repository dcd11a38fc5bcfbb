"""What the figures of the zoos say, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.diagonal import paragraph
from benchmarks.zoo.measures import PAIRED
from benchmarks.zoo.summary import TARGETS

Row = Mapping[str, Any]


SHOWN = ("euclidean", "adaptive", "inv second", "mix second")
BESIDE = ("gap in error", "gap in loss")


def overall(results: Mapping[str, Row]) -> list[str]:
    """What comes first on the page: the zoos side by side."""
    if not results:
        return []
    return [
        paragraph(
            "Kendall's τ of worst-case sharpness, at the radius that another half of the models would choose (ρ), and "
            "of other figures, with the gap between training and test. A positive τ says that the model with the "
            "larger figure has the larger gap."
        ),
        table(results),
    ]


def table(results: Mapping[str, Row]) -> str:
    """The zoos side by side."""
    columns = [(result, target) for result in results.values() for target in BESIDE]
    heads = [f"{zoo} ({r['counts']['reached']}), {target}" for zoo, r in results.items() for target in BESIDE]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(columns)]

    def row(name: str, kept: str) -> list[Row]:
        return [next(row for row in r[kept] if row["name"] == name)[target] for r, target in columns]

    for name in SHOWN:
        lines.append(
            f"| {name} | " + " | ".join(f"{c['tau']:+.2f} ({c['rho']:g})" for c in row(name, "held_out")) + " |"
        )
    for name in (row["name"] for row in sides(next(iter(results.values())))[1]):
        lines.append(f"| {name} | " + " | ".join(f"{c['tau']:+.2f}" for c in row(name, "rows")) + " |")
    return "\n".join(lines)


def of(zoo: str, result: Row) -> list[str]:
    """What is said of one zoo."""
    sharp, plain = sides(result)
    lines = [paragraph("- " + _standing(result, sharp, plain))]
    lines += [paragraph("- " + _strongest(target, sharp, plain)) for target in TARGETS]
    lines.append(paragraph("- " + _signs(sharp)))
    lines.append(paragraph("- " + _slope(sharp)))
    lines.append(paragraph("- " + _orders(sharp)))
    lines.append(paragraph("- " + _given(sharp)))
    lines.append(paragraph("- " + _subsets(result, sharp)))
    return ["\n".join(lines)]


def sides(result: Row) -> tuple[list[Row], list[Row]]:
    """Rows of sharpness, and of other figures."""
    return [r for r in result["rows"] if "rho" in r], [r for r in result["rows"] if "rho" not in r]


def stands(row: Row, target: str) -> bool:
    """Whether the pair is significant among all."""
    return bool(row[target]["among"] < 0.05)


def _standing(result: Row, sharp: Sequence[Row], plain: Sequence[Row]) -> str:
    def signs(rows: Sequence[Row]) -> tuple[int, int]:
        taus = [row[t]["tau"] for row in rows for t in TARGETS if stands(row, t)]
        return sum(tau > 0 for tau in taus), sum(tau < 0 for tau in taus)

    (up, down), (more, less) = signs(sharp), signs(plain)
    return (
        f"Of {len(sharp) * len(TARGETS)} pairs of a sharpness and a target {up + down} are significant among all: {up} "
        f"positive (the sharper model does worse), {down} negative. Of {len(plain) * len(TARGETS)} pairs of another "
        f"figure and a target {more + less} are."
    )


def _named(row: Row) -> str:
    return f"{row['name']} at {row['rho']:g}" if "rho" in row else str(row["name"])


def _strongest(target: str, sharp: Sequence[Row], plain: Sequence[Row]) -> str:
    def most(rows: Sequence[Row]) -> str:
        row = max(rows, key=lambda r: abs(r[target]["tau"]))
        return f"{_named(row)} ({row[target]['tau']:+.2f})"

    return f"**{target}**: the strongest sharpness is {most(sharp)}, the strongest other figure {most(plain)}."


def _signs(sharp: Sequence[Row]) -> str:
    turned = []
    for name in dict.fromkeys(row["name"] for row in sharp):
        for target in TARGETS:
            own = [row[target] for row in sharp if row["name"] == name]
            if any(c["high"] < 0 for c in own) and any(c["low"] > 0 for c in own):
                turned.append(f"{name} with {target}")
    if not turned:
        return "**No sign turns over the radii**: nowhere is one interval above 0 and another below."
    return f"**The sign turns over the radii** (an interval above 0 and another below) for {', '.join(turned)}."


def _slope(sharp: Sequence[Row]) -> str:
    def most(index: int) -> str:
        own = [[row for row in sharp if row["name"] == name][index] for name in SHOWN]
        return ", ".join(f"{row['gradient norm']:+.2f}" for row in own)

    return (
        f"**Beside the gradient norm**: τ of the two rankings is {most(0)} at the smallest radius "
        f"({', '.join(SHOWN)}), and {most(-1)} at the largest."
    )


def _orders(sharp: Sequence[Row]) -> str:
    """Where another order, or the paper's symmetries, change tau most."""
    rows = {(row["name"], row["rho"]): row for row in sharp}
    parts = []
    for other in ("first", "exact", "second paper"):
        for metric in PAIRED:
            usual = f"{metric} second"
            pairs = [
                (row, rows[usual, rho], target)
                for (name, rho), row in rows.items()
                if name == f"{metric} {other}" and (usual, rho) in rows
                for target in BESIDE
            ]
            new, old, target = max(pairs, key=lambda pair: abs(pair[0][pair[2]]["tau"] - pair[1][pair[2]]["tau"]))
            parts.append(
                f"{new['name']} {new[target]['tau']:+.2f}, {usual} {old[target]['tau']:+.2f} ({target}, {new['rho']:g})"
            )
    return "**Where the order, or the paper's symmetries, change τ most**: " + "; ".join(parts) + "."


def _given(sharp: Sequence[Row]) -> str:
    def largest(target: str) -> str:
        row = max(sharp, key=lambda r: abs(r[target]["partial"]))
        return f"{row[target]['partial']:+.2f} with {target} ({_named(row)})"

    return "**Given the training loss** the largest partial taus are " + ", ".join(map(largest, TARGETS)) + "."


def _subsets(result: Row, sharp: Sequence[Row]) -> str:
    target = "gap in loss"
    both = [row for row in sharp if stands(row, target)]
    if not both:
        return f"No sharpness is significant with the {target}, so there is nothing to look for in parts of the models."
    kept = sum(row[target]["tau"] * row[target]["clean labels"] > 0 for row in both)
    row = max(both, key=lambda r: abs(r[target]["tau"]))
    return (
        f"**Without label noise** {kept} of the {len(both)} sharpnesses that are significant with the {target} keep "
        f"their sign; the strongest of them, {_named(row)}, goes from {row[target]['tau']:+.2f} to "
        f"{row[target]['clean labels']:+.2f}."
    )
