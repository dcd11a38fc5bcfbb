"""From what was measured of the models of a zoo to what its page and picture are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.diagonal import tau_a
from benchmarks.zoo.measures import (
    ABLATIONS,
    BATCH_SIZE,
    BATCHES,
    DRAWS,
    HESSIAN_DRAWS,
    RADII,
    STEPS,
    WIDER,
    Cell,
    grid,
)
from benchmarks.zoo.tau import PERMUTATIONS, held_out, p_values, partial_tau, tau
from benchmarks.zoo.training import ACCURACY

Row = dict[str, Any]

TARGETS: Mapping[str, Callable[[Row], float]] = {
    "gap in error": lambda m: m["test"]["error"] - m["train"]["error"],
    "gap in loss": lambda m: m["test"]["loss"] - m["train"]["loss"],
    "test error": lambda m: m["test"]["error"],
    "error elsewhere": lambda m: sum(part["error"] for part in m["other"].values()) / len(m["other"]),
}
SUBSETS: Mapping[str, Callable[[Row], bool]] = {
    "clean labels": lambda m: m["recipe"]["noise"] == 0,
    "AdamW": lambda m: m["recipe"]["optimizer"] == "adamw",
}


def setting(zoo: str) -> Row:
    """What was measured, and how."""
    return {
        "accuracy": ACCURACY[zoo], "batches": BATCHES, "batch_size": BATCH_SIZE, "steps": STEPS, "draws": DRAWS,
        "hessian_draws": HESSIAN_DRAWS, "permutations": PERMUTATIONS,
        "radii": {metric: list(radii) for metric, radii in RADII[zoo].items()}, "wider": WIDER[zoo],
        "cells": [cell.name for cell in grid(zoo)],
    }  # fmt: skip


def model_row(trained: Row, found: Mapping[str, Any]) -> Row:
    """One model: its recipe, how it does, and all that was measured of it."""
    tests = {name: trained[name] for name in trained if name not in ("index", "recipe", "train", "test")}
    return {
        "index": trained["index"], "recipe": trained["recipe"], "train": trained["train"], "test": trained["test"],
        "other": tests, "others": found["others"], "cells": {n: v for n, v in found.items() if n != "others"},
    }  # fmt: skip


def figures(zoo: str, models: Sequence[Row]) -> tuple[dict[str, list[float]], list[Row]]:
    """Each figure over the models, by a name of its own, and what it is.

    A cell and radius at which a model has no score is left out.
    """
    found: dict[str, list[float]] = {"training loss": [m["train"]["loss"] for m in models]}
    for name in models[0]["others"]:
        found[name] = [m["others"][name] for m in models]
    rows: list[Row] = [{"name": name} for name in found]
    for cell in grid(zoo):
        for i, rho in enumerate(cell.radii):
            values = [m["cells"][cell.name][i] for m in models]
            if None not in values:
                found[f"{cell.name}, {rho:g}"] = values
                rows.append({"name": cell.name, "metric": cell.metric, "rho": rho})
    return found, rows


def summary(zoo: str, models: Sequence[Row], trained: int) -> Row:
    """Everything that is told of a zoo."""
    found, rows = figures(zoo, models)
    targets = {name: [of(m) for m in models] for name, of in TARGETS.items()}
    loss = found["training loss"]
    chances = p_values(found, targets)
    for (key, values), row in zip(found.items(), rows, strict=True):
        row["gradient norm"] = round(tau_a(values, found["gradient norm"]), 4)
        for name, target in targets.items():
            alone, among = chances[key, name]
            row[name] = {
                **_rounded(asdict(tau(values, target))), "p": round(alone, 4), "among": round(among, 4),
                "partial": None if key == "training loss" else round(partial_tau(values, target, loss), 4),
            }  # fmt: skip
            for subset, inside in SUBSETS.items():
                chosen = [i for i, m in enumerate(models) if inside(m)]
                row[name][subset] = round(tau([values[i] for i in chosen], [target[i] for i in chosen]).tau, 4)
    return {
        "zoo": zoo,
        "setting": setting(zoo),
        "counts": {"trained": trained, "reached": len(models)} | {
            name: sum(map(inside, models)) for name, inside in SUBSETS.items()
        },
        "ranges": {name: [round(f(values), 4) for f in (min, _median, max)] for name, values in targets.items()},
        "train_loss": [round(f(loss), 4) for f in (min, _median, max)],
        "rise": {cell.name: _rises(models, cell) for cell in grid(zoo)},
        "rows": rows,
        "held_out": _held_out(zoo, found, targets),
        "ablations": ablations(zoo, models),
        "models": list(models),
    }  # fmt: skip


def _held_out(zoo: str, found: Mapping[str, Sequence[float]], targets: Mapping[str, Sequence[float]]) -> list[Row]:
    out = []
    for cell in grid(zoo):
        curve = {rho: found[key] for rho in cell.radii if (key := f"{cell.name}, {rho:g}") in found}
        if curve:
            out.append(
                {"name": cell.name} | {name: _rounded(asdict(held_out(curve, y))) for name, y in targets.items()}
            )
    return out


def ablations(zoo: str, models: Sequence[Row]) -> list[Row]:
    """Settings that only some models were measured at, against the usual one of the same metric on the same models.

    At each radius: tau between the two rankings, the median ratio of the scores, and tau with the gap in loss of both.
    """
    out = []
    for cell in (cell.at(zoo) for cell in ABLATIONS):
        part = [m for m in models if cell.name in m["cells"]]
        for i, rho in enumerate(cell.radii) if len(part) >= 4 else ():
            pairs = [(m["cells"][cell.name][i], m["cells"][cell.usual.name][i]) for m in part]
            if any(None in pair for pair in pairs):
                continue
            new, old = zip(*pairs, strict=True)
            gap = [TARGETS["gap in loss"](m) for m in part]
            out.append(
                {"name": cell.name, "metric": cell.metric, "rho": rho, "models": len(part),
                 "ranking": round(tau(new, old).tau, 4), "ratio": round(_median([a / b for a, b in pairs]), 4),
                 "tau": _rounded(asdict(tau(new, gap))), "usual": round(tau(old, gap).tau, 4)}
            )  # fmt: skip
    return out


def _rises(models: Sequence[Row], cell: Cell) -> list[float | None]:
    """The median score at each radius."""
    columns = zip(*(m["cells"][cell.name] for m in models), strict=True)
    return [None if None in column else float(f"{_median(column):.4g}") for column in columns]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _rounded(row: Row) -> Row:
    return {name: round(value, 4) + 0.0 if isinstance(value, float) else value for name, value in row.items()}
