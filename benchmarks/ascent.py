"""The ascents against each other, over the demos and a zoo of tiny models, from small radii to large ones.

    python benchmarks/ascent_zoo.py FOLDER --models 48
    python benchmarks/ascent.py FOLDER [--models 48] [--geodesic second] [--metrics mix]
                                       [--json benchmarks/data/ascent.json]

For each model, metric and radius: one ball around the first 64 training samples, in float32.
What each ascent finds with 20 steps, the default one from two and three starts as well, is compared with the best of
60 steps of Auto-PGD (which is no upper bound). Passes are the mean of forward and backward passes, those at
the model's own weights among them: a point that is not better than those before has a forward pass alone, and so has
the last one of Auto-PGD.

Pairs move along the default geodesics of a metric; with --geodesic along these, in inv and mix alike.

What is measured goes to FOLDER/ascent.jsonl (ascent-second.jsonl and so on) line by line: a run that was stopped goes
on. Delete the file to measure again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from ascent_zoo import DEMOS, KINDS, everything, sort, training_data
from make_demos import take

from hf_geosharp import demos
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.ascent import Climb
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart
from hf_geosharp.sharpness.choices import ASCENTS, GEODESICS, METRICS
from hf_geosharp.sharpness.objective import Objective, Reach
from hf_geosharp.sharpness.result import Passes
from hf_geosharp.sharpness.settings import CLIMBS, Settings
from hf_geosharp.sharpness.starts import Ways, peaks
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap

RADII = {"inv": (0.03, 0.1, 0.3), "mix": (0.003, 0.01, 0.03), "adaptive": (0.05, 0.1, 0.5)}
SAMPLES = 64
STEPS = 20
MUCH = 1.0
"""A rise of the loss, in nats."""

REFERENCE = ("reference", "apgd", 60, 1)
RUNS = (
    REFERENCE,
    *((name, name, STEPS, 1) for name in ASCENTS),
    *((f"auto, {starts} starts", "auto", STEPS, starts) for starts in (2, 3)),
)
"""Name of a row, ascent, steps, starts."""

MORE = (1.01, 1.03, 1.1)
"""How many times as much as the reference: found by several starts, or by another way up."""

Row = dict[str, Any]
Key = tuple[str, str, float, str]


def key(row: Mapping[str, Any]) -> Key:
    return row["model"], row["metric"], row["rho"], row["run"]


def load(name: str, folder: Path) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of the zoo or a demo, and its batch."""
    if name in DEMOS.values():
        kind = next(k for k, demo in DEMOS.items() if demo == name)
        place, data = demos.path(name), everything(kind)[0]
    else:
        kind, index = name.split("-")
        place, data = folder / name, training_data(sort(kind, int(index)))
    classes = {
        "vit": transformers.AutoModelForImageClassification,
        "bert": transformers.AutoModelForSequenceClassification,
    }
    return classes[kind].from_pretrained(place).eval(), take(data, torch.arange(SAMPLES))


def measure(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    metric: str,
    wanted: Sequence[tuple[float, str, str, int, int]],
    geodesic: Order | None = None,
) -> Iterator[tuple[float, str, Climb, Passes]]:
    """The climbs asked for as (rho, name, ascent, steps, starts), the first from the base point, whose passes count."""
    geometry = Settings(metric=metric, geodesic=geodesic if METRICS[metric].paired else None).geometry
    symmetries = find_symmetries(model) if geometry.paired else SymmetryMap()
    with borrow(model) as borrowed:
        chart = Chart(borrowed, symmetries, geometry)
        objective = Objective(model, batch)
        chart.widen()
        with Reach(model) as reach:
            base = objective.evaluate(True)
        owners = {n: id(leaf.members[0][0]) for n, leaf in borrowed.leaves.items()}
        chart.focus({n: reach.rows[k] for n, k in owners.items() if k in reach.rows})
        g = chart.pull()
        evaluate = partial(loss_at, chart, objective)
        for rho, name, ascent, steps, starts in wanted:
            objective.forwards = objective.backwards = 1
            ends: list[Tangent] = []
            slope = [(base, g.clone())]

            def climb(
                ascent: str, steps: int, *, rho: float = rho, ends: list[Tangent] = ends,
                slope: list[tuple[float, Tangent]] = slope,
            ) -> Climb:  # fmt: skip
                start, given = (ends.pop() if ends else None), (slope.pop() if slope else None)
                return CLIMBS[ascent](chart.space, evaluate, rho, steps, start=start, given=given, base=base)

            asked, seed = Settings(ascent=ascent, steps=steps), torch.Generator().manual_seed(0)
            rough = asked.rough and partial(climb, *asked.rough)
            ways = Ways(partial(climb, *asked.first), partial(climb, *asked.further), rough)
            found = peaks(ways, ends, slope, evaluate, chart.space, rho, starts, seed)
            yield rho, name, found.highest, Passes(objective.forwards, objective.backwards)


def run(
    folder: Path, names: Sequence[str], metrics: Sequence[str] = tuple(RADII), geodesic: Order | None = None
) -> list[Row]:
    """Measures what is not measured yet; returns the rows of these models and metrics."""
    path = folder / (f"ascent-{geodesic}.jsonl" if geodesic else "ascent.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {key(row) for row in rows}
    with path.open("a") as file:
        for name in names:
            todo = {
                metric: [
                    (rho, *one) for rho in radii for one in RUNS if (name, metric, rho, one[0]) not in known
                ]
                for metric, radii in RADII.items() if metric in metrics
            }  # fmt: skip
            if not any(todo.values()):
                continue
            model, batch = load(name, folder)
            for metric, wanted in todo.items():
                if not wanted:
                    continue
                for rho, what, climb, taken in measure(model, batch, metric, wanted, geodesic):
                    rows.append(
                        {"model": name, "metric": metric, "rho": rho, "run": what, "base_loss": climb.base,
                         "rise": climb.rise, "forwards": taken.forwards, "backwards": taken.backwards,
                         "passes": (taken.forwards + taken.backwards) / 2, "stopped": climb.stopped,
                         "history": [float(f"{h:.6g}") for h in climb.history]}
                    )  # fmt: skip
                    file.write(json.dumps(rows[-1]) + "\n")
                    file.flush()
            print(name, flush=True)
    return [row for row in rows if row["model"] in names and row["metric"] in metrics]


def summary(rows: Sequence[Row], name: str, reference: Mapping[Key, float]) -> dict[str, Any]:
    """Passes and values of one ascent over these rows."""
    own = [row for row in rows if row["run"] == name]
    passes = sorted(row["passes"] for row in own)
    ratios = sorted(row["rise"] / reference[(*key(row)[:3], "reference")] for row in own)
    return {
        "ascent": name, "cells": len(own), "median_passes": statistics.median(passes),
        "p90_passes": passes[min(len(passes) - 1, int(0.9 * len(passes)))], "mean_passes": statistics.fmean(passes),
        "min_ratio": ratios[0], "p5_ratio": ratios[int(0.05 * len(ratios))], "median_ratio": statistics.median(ratios),
        "below_99": sum(r < 0.99 for r in ratios), "below_97": sum(r < 0.97 for r in ratios),
        "higher": {f"{more:g}": sum(r > more for r in ratios) for more in MORE},
    }  # fmt: skip


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A summary for each metric and radius, each metric, by how far the loss rises, and for all; for each ascent."""
    reference = {key(row): row["rise"] for row in rows if row["run"] == "reference"}
    tests: list[tuple[str, Callable[[Row], bool]]] = [("all", lambda row: True)]
    # A loss that rises by much has left the valley that it was in: there is more than one way up.
    for where, most in (("up to 1 nat", MUCH), ("more", math.inf)):
        least = 0.0 if most == MUCH else MUCH
        tests.append((where, lambda row, a=least, b=most: a < reference[(*key(row)[:3], REFERENCE[0])] <= b))
    for kind in KINDS:
        tests.append((kind, lambda row, kind=kind: row["model"].startswith(kind) or row["model"] == DEMOS[kind]))
    for metric, radii in RADII.items():
        tests.append((metric, lambda row, metric=metric: row["metric"] == metric))
        for rho in radii:
            tests.append((f"{metric} {rho:g}", lambda row, m=metric, r=rho: row["metric"] == m and row["rho"] == r))
    chosen = [(where, [row for row in rows if test(row)]) for where, test in tests]
    return [{"where": where, **summary(own, name, reference)} for where, own in chosen if own for name, *_ in RUNS[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the zoo")
    parser.add_argument("--models", type=int, default=20, help="number of models of each kind")
    parser.add_argument("--geodesic", choices=GEODESICS)
    parser.add_argument("--metrics", nargs="+", choices=list(RADII), default=list(RADII))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    names = [*DEMOS.values(), *(sort(kind, i).name for i in range(arguments.models) for kind in KINDS)]
    rows = run(arguments.folder, names, arguments.metrics, arguments.geodesic)
    lines = table(rows)
    print(
        f"{'':15} {'':16} cells  passes: median  90 %   mean   of 60 steps: least   5 %  median  < 99 %  < 97 %  "
        "> 101 %  > 103 %  > 110 %"
    )
    for line in lines:
        print(
            f"{line['where']:15} {line['ascent']:16} {line['cells']:5} {line['median_passes']:15g} "
            f"{line['p90_passes']:5g} {line['mean_passes']:6.1f} {line['min_ratio']:20.3f} {line['p5_ratio']:5.3f} "
            f"{line['median_ratio']:7.4f} {line['below_99']:7} {line['below_97']:7}  "
            + "  ".join(f"{count:7}" for count in line["higher"].values())
        )
    if arguments.json:
        kept = ("model", "metric", "rho", "run", "base_loss", "rise", "forwards", "backwards", "stopped")
        shown = [{k: row[k] for k in kept} for row in rows]
        content = {"samples": SAMPLES, "steps": STEPS, "summary": lines, "rows": shown}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        # One row a line.
        arguments.json.write_text(json.dumps(content, separators=(",", ":")).replace("},{", "},\n{") + "\n")


if __name__ == "__main__":
    main()
