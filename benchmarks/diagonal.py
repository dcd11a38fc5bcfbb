"""Does sharpness predict on diagonal networks? Rank correlation with the test error for three metrics and three orders.

    python benchmarks/diagonal.py [--seeds 10] [--json benchmarks/data/diagonal.json] [--plot benchmarks/diagonal.svg]
                                  [--page benchmarks/DIAGONAL.md] [--work build/diagonal]

A diagonal network is f(x) = ⟨u ∘ v, x⟩: 200 pairs of numbers of which only the products β count. For each seed of the
data, networks are trained from a grid of initialisation scales and learning rates, and every one that reaches the
training loss is scored on the whole training set, as one ball. Scores come from the package's own geometry and ascent,
through a module whose pairs are numbers; only the exact geodesics of mix, which leave the package's domain where a
product changes its sign, come from their closed form. On some networks the ascent is compared with a dense search.

What is measured of a seed goes to the folder ``--work``: a run that was stopped goes on. Delete it to measure again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.geometry.metrics import ORDERS
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.secant import largest_in_ball, secant
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.views import View

WIDTH = 200
SPARSE = 20
"""Entries of the target that are not zero: one in ten."""

SAMPLES = 100
"""Fewer than entries, and enough that the sparsest interpolator is the target: a large initialisation fits without
finding it, a small one finds it, and the test errors of one grid spread over four orders of magnitude."""

LOSS = 1e-5
"""Training loss at which a network is done."""

SCALES = tuple(0.02 * 50 ** (i / 11) for i in range(12))
RATES = (0.02, 0.035, 0.06, 0.1, 0.18)
MINI_BATCH = 10
BUDGET = 24_000
"""Steps after which a network that has not reached the loss is left out."""

CHECK = 20
"""Steps between two looks at the training loss."""

METRICS = ("adaptive", "inv", "mix")
RADII = {
    "adaptive": (0.001, 0.01, 0.03, 0.1, 0.3, 1.0),
    "inv": (0.001, 0.01, 0.03, 0.1, 0.3, 1.0),
    "mix": (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1),
}
STEPS = 20
CHECKED = 5
"""Networks of the first seed on which the ascent is compared with a dense search."""

RESAMPLES = 1000
PAPER = {"adaptive": -0.68, "inv": -0.83, "mix": -0.86}

Row = dict[str, Any]


# -------------------------------------------------------------------------------------------------------- networks


@dataclass(frozen=True)
class Data:
    """Inputs (n, d) and noiseless labels (n,) of a linear target (d,)."""

    x: Tensor
    y: Tensor
    target: Tensor

    @staticmethod
    def sample(seed: int, *, width: int = WIDTH, sparse: int = SPARSE, samples: int = SAMPLES) -> Data:
        """Gaussian inputs, a target with Gaussian entries at random places."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, width, generator=generator, dtype=torch.float64)
        target = torch.zeros(width, dtype=torch.float64)
        target[torch.randperm(width, generator=generator)[:sparse]] = torch.randn(
            sparse, generator=generator, dtype=torch.float64
        )
        return Data(x, x @ target, target)

    def loss(self, products: Tensor) -> Tensor:
        """Half the mean squared error of networks with these products (..., d)."""
        return (products @ self.x.mT - self.y).square().mean(-1) / 2

    def test_loss(self, products: Tensor) -> Tensor:
        """The same over all inputs there are, in closed form: their covariance is the identity."""
        return (products - self.target).square().sum(-1) / 2


class DiagonalNet(nn.Module):
    """f(x) = ⟨u ∘ v, x⟩ with half the mean squared error."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u.clone()), nn.Parameter(v.clone())

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        outputs = x @ (self.u * self.v)
        return SimpleNamespace(loss=(outputs - labels).square().mean() / 2, logits=outputs)


def symmetries(width: int) -> SymmetryMap:
    """Each entry of u with the same entry of v is a pair of numbers."""
    views = [View.pattern(name, (("n",),), {"n": width}, ("n",), (), ()) for name in ("u", "v")]
    return SymmetryMap((Pair("uv", "unit", "", Group(1), (views[0],), (views[1],)),))


def train(
    data: Data, seed: int, recipes: Sequence[tuple[float, float]], budget: int = BUDGET
) -> tuple[list[Row], dict[str, int]]:
    """Networks trained by SGD from (initialisation scale, learning rate), and how many of them there are and are not.

    All start from Gaussian factors of that scale, and stop at the first look at which the training loss is reached.
    """
    generator = torch.Generator().manual_seed(1_000_003 + seed)
    width, count = len(data.target), len(recipes)
    scale, rate = torch.tensor(recipes, dtype=torch.float64).unbind(1)
    u, v = (
        scale[:, None] * torch.randn(count, width, generator=generator, dtype=torch.float64) for _ in ("u", "v")
    )
    running, steps = torch.arange(count), [0] * count
    diverged = 0
    for step in range(1, budget + 1):
        a, b = u[running], v[running]
        rows = torch.randint(len(data.y), (len(running), MINI_BATCH), generator=generator)
        x = data.x[rows]
        residual = torch.einsum("kbd,kd->kb", x, a * b) - data.y[rows]
        slope = rate[running, None] * torch.einsum("kb,kbd->kd", residual, x) / MINI_BATCH
        u[running], v[running] = a - slope * b, b - slope * a
        if step % CHECK:
            continue
        loss = data.loss(u[running] * v[running])
        done, lost = loss <= LOSS, ~(loss < 1e6)
        for k in running[done].tolist():
            steps[k] = step
        diverged += int(lost.sum())
        running = running[~(done | lost)]
        if not len(running):
            break
    nets = []
    for k, (s, r) in enumerate(recipes):
        if steps[k]:
            product = u[k] * v[k]
            nets.append(
                {"scale": s, "rate": r, "steps": steps[k], "u": u[k], "v": v[k],
                 "train_loss": float(data.loss(product)), "test_loss": float(data.test_loss(product)),
                 "l1": float(product.abs().sum()), "weights": float((u[k].square() + v[k].square()).sum())}
            )  # fmt: skip
    counts = {"trained": count, "reached": len(nets), "diverged": diverged, "too slow": count - len(nets) - diverged}
    return nets, counts


# ------------------------------------------------------------------------------------------------------- sharpness


def factor(metric: str, order: str, b: Tensor) -> Tensor:
    """By what a product is multiplied at the end of the horizontal geodesic with velocity (u b, v b).

    Exact: inv moves (u, v) to (u e^b, v e^b), mix to (u √(1 + 2b), v √(1 + 2b)), which goes on past a product of 0 as
    1 + 2b does. The adaptive metric is inv's here, with straight lines at first order and θ e^b exactly.
    """
    if order == "first":
        return (1 + b).square()
    if order == "second":
        return (1 + b + (-0.5 if metric == "mix" else 0.5) * b.square()).square()
    return 1 + 2 * b if metric == "mix" else torch.exp(2 * b)


def length(metric: str, products: Tensor) -> Tensor:
    """Of the velocity (u, v) b, for each b = 1: √2, or √2 |β| in mix."""
    root = math.sqrt(2.0)
    return root * products.abs() if metric == "mix" else torch.full_like(products, root)


def exact_mix(data: Data, products: Tensor, rho: float) -> float:
    """The worst rise along exact mix geodesics: products move by δ with ‖δ‖ = √2 ρ, and the loss is quadratic in δ."""
    n = len(data.y)
    slope = (data.x @ products - data.y) @ data.x / n
    hessian = data.x.mT @ data.x / n
    delta = largest_in_ball(slope, hessian, math.sqrt(2) * rho, torch.zeros_like(products))
    return float(slope @ delta + delta @ hessian @ delta / 2)


def climb(net: Row, data: Data, metric: str, order: str, radii: Sequence[float]) -> list[tuple[float, bool]]:
    """The rise at each radius and whether its ascent settled, by the package; each starts from the one before."""
    model = DiagonalNet(net["u"], net["v"])
    batch = {"x": data.x, "labels": data.y}
    out = []
    with borrow(model) as borrowed:
        geometry = Geometry(metric, order)  # type: ignore[arg-type]
        chart = Chart(borrowed, symmetries(len(data.target)) if geometry.paired else SymmetryMap(), geometry)
        objective = Objective(model, batch)

        def evaluate(point: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
            chart.write(point)
            value = objective.evaluate(gradient)
            return value, chart.pull() if gradient else None

        base, slope = evaluate(chart.space.zeros(), True)
        assert slope is not None
        start, given = None, (base, slope)
        for rho in sorted(radii):
            found = secant(chart.space, evaluate, rho, STEPS, start=start, base=base, given=given)
            start, given = found.u, None
            out.append((found.rise, found.converged))
    return out


def dense(net: Row, data: Data, metric: str, order: str, rho: float, starts: int = 60, steps: int = 400) -> float:
    """The largest rise that many long ascents find, from random points and along the loss's own axes: an oracle.

    It knows of the closed forms alone. In the adaptive metric both factors move on their own.
    """
    products = net["u"] * net["v"]
    d, n = len(products), len(data.y)
    free = metric == "adaptive"
    size = torch.ones(2 * d, dtype=torch.float64) if free else length(metric, products)
    generator = torch.Generator().manual_seed(0)

    def rise(z: Tensor) -> Tensor:
        b = z / size
        if free:
            moved = torch.stack([_entry(order, x) for x in (b[..., :d], b[..., d:])]).prod(0)
        else:
            moved = factor(metric, order, b)
        return data.loss(products * moved) - data.loss(products)

    bound = products if not free else torch.cat([products, products]) / 2
    stretch = 2 * bound / size
    inputs = torch.cat([data.x, data.x], 1) if free else data.x
    _, _, axes = torch.linalg.svd(inputs * stretch / math.sqrt(n), full_matrices=False)
    slope = (data.x @ products - data.y) @ inputs / n * stretch
    first = [slope / slope.norm(), -slope / slope.norm(), *axes[:4], *(-axes[:4])]
    noise = torch.randn(max(starts - len(first), 0), len(size), generator=generator, dtype=torch.float64)
    ways = torch.cat([torch.stack(first), noise / noise.norm(dim=1, keepdim=True)])
    z = rho * ways
    best = rise(z).clamp(min=0)
    step = torch.full((len(z), 1), rho, dtype=torch.float64)
    value = rise(z)
    for _ in range(steps):
        z.requires_grad_(True)
        (gradient,) = torch.autograd.grad(rise(z).sum(), z)
        z = z.detach()
        move = z + step * gradient / gradient.norm(dim=1, keepdim=True).clamp(min=1e-300)
        move = move * (rho / move.norm(dim=1, keepdim=True)).clamp(max=1.0)
        new = rise(move)
        good = (new > value).unsqueeze(1)
        z, value = torch.where(good, move, z), torch.maximum(new, value)
        step = torch.where(good, step * 1.5, step / 2).clamp(max=rho)
        best = torch.maximum(best, value)
    return float(best.max())


def _entry(order: str, b: Tensor) -> Tensor:
    """By what an entry is multiplied in the adaptive metric."""
    if order == "exact":
        return torch.exp(b)
    return 1 + b + (0.5 * b.square() if order == "second" else 0.0)


def measure(net: Row, data: Data) -> dict[str, list[float]]:
    """Metric and order -> the rise at each radius of the metric."""
    out = {}
    for metric in METRICS:
        for order in ORDERS:
            if (metric, order) == ("mix", "exact"):
                values = [exact_mix(data, net["u"] * net["v"], rho) for rho in RADII[metric]]
            else:
                values = [rise for rise, _ in climb(net, data, metric, order, RADII[metric])]
            out[f"{metric} {order}"] = values
    return out


# ----------------------------------------------------------------------------------------------------- correlation


def agreement(x: Sequence[float], y: Sequence[float]) -> Tensor:
    """(n, n): 1 where a pair is ordered alike in both, -1 where the other way round, 0 for ties."""
    signs = []
    for values in (x, y):
        t = torch.tensor(values, dtype=torch.float64)
        signs.append(torch.sign(t[:, None] - t))
    return signs[0] * signs[1]


def tau_a(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's tau-a: concordant less discordant pairs, over all pairs."""
    n = len(x)
    return float(agreement(x, y).sum()) / (n * (n - 1))


def bootstrap(tables: Sequence[Tensor], resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over data seeds of tau-a, networks of each seed drawn again with replacement.

    A network drawn twice makes no pair with itself.
    """
    generator = torch.Generator().manual_seed(seed)
    means = torch.zeros(resamples, dtype=torch.float64)
    for table in tables:
        n = len(table)
        draws = torch.randint(n, (resamples, n), generator=generator)
        weight = torch.zeros(resamples, n, dtype=torch.float64)
        weight.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))
        pairs = n**2 - weight.square().sum(1)
        means += ((weight @ table) * weight).sum(1) / pairs / len(tables)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def cell(seeds: Sequence[Row], of: Callable[[Row], float]) -> Row:
    """Tau-a of a measure with the test loss: mean over data seeds, its interval, and each seed's own."""
    tables = [agreement([of(n) for n in s["nets"]], [n["test_loss"] for n in s["nets"]]) for s in seeds]
    taus = [float(t.sum()) / (len(t) * (len(t) - 1)) for t in tables]
    low, high = bootstrap(tables)
    return {"tau": _round(statistics.fmean(taus)), "low": _round(low), "high": _round(high),
            "seeds": [_round(t) for t in taus]}  # fmt: skip


def _round(x: float, digits: int = 4) -> float:
    return round(x, digits) + 0.0


def summary(seeds: Sequence[Row]) -> dict[str, Any]:
    """What the page and the picture are made of."""
    cells = []
    for metric in METRICS:
        for order in ORDERS:
            for i, rho in enumerate(RADII[metric]):
                key = f"{metric} {order}"
                rise = statistics.median(n["sharpness"][key][i] for s in seeds for n in s["nets"])
                found = cell(seeds, lambda n, key=key, i=i: n["sharpness"][key][i])
                cells.append({"metric": metric, "order": order, "rho": rho, **found, "rise": float(f"{rise:.3g}")})
    others = {
        title: cell(seeds, lambda n, key=key: n[key])
        for title, key in (
            ("Σ |β|", "l1"), ("Σ u² + v²", "weights"), ("training loss", "train_loss"), ("learning rate", "rate"),
            ("steps", "steps"),
        )
    }  # fmt: skip
    return {
        "setting": {"width": WIDTH, "sparse": SPARSE, "samples": SAMPLES, "loss": LOSS, "mini_batch": MINI_BATCH,
                    "budget": BUDGET, "steps": STEPS, "scales": [min(SCALES), max(SCALES), len(SCALES)],
                    "rates": list(RATES)},
        "counts": [s["counts"] for s in seeds],
        "test_loss": [float(f"{f(n['test_loss'] for s in seeds for n in s['nets']):.3g}") for f in (min, max)],
        "cells": cells,
        "others": others,
        "check": seeds[0]["check"],
        "nets": [
            {"scale": float(f"{n['scale']:.4g}"), "rate": n["rate"], "test_loss": float(f"{n['test_loss']:.4g}"),
             **{m: float(f"{n['sharpness'][f'{m} exact'][SHOWN[m]]:.4g}") for m in METRICS}}
            for n in seeds[0]["nets"]
        ],
    }  # fmt: skip


SHOWN = {"adaptive": 3, "inv": 3, "mix": 3}
"""Index of the radius that the scatter plots show."""


# ------------------------------------------------------------------------------------------------------------- run


def one_seed(seed: int, recipes: Sequence[tuple[float, float]], checked: int = 0, budget: int = BUDGET) -> Row:
    """Networks of one seed of the data, with their scores."""
    data = Data.sample(seed)
    nets, counts = train(data, seed, recipes, budget)
    rows = []
    for net in nets:
        row = {k: x for k, x in net.items() if k not in ("u", "v")}
        rows.append({**row, "sharpness": measure(net, data)})
    chosen = [round(i * (len(nets) - 1) / max(checked - 1, 1)) for i in range(checked)]
    return {"seed": seed, "counts": counts, "nets": rows, "check": compare(nets, rows, data, chosen)}


def compare(nets: Sequence[Row], rows: Sequence[Row], data: Data, chosen: Sequence[int]) -> list[Row]:
    """The score over what a dense search finds, least and largest over some networks."""
    out = []
    for metric in METRICS if chosen else ():
        for order in ORDERS:
            for i, rho in enumerate(RADII[metric]):
                ratios = []
                for k in chosen:
                    value, most = rows[k]["sharpness"][f"{metric} {order}"][i], dense(nets[k], data, metric, order, rho)
                    ratios.append(value / most)
                out.append({"metric": metric, "order": order, "rho": rho, "least": float(f"{min(ratios):.4g}"),
                            "most": float(f"{max(ratios):.4g}")})  # fmt: skip
    return out


def table(result: Mapping[str, Any]) -> list[str]:
    """Tau of every cell, as Markdown."""
    lines = []
    for metric in METRICS:
        own = {(c["order"], c["rho"]): c for c in result["cells"] if c["metric"] == metric}
        radii = list(dict.fromkeys(rho for _, rho in own))
        lines += [f"| {metric}, ρ | " + " | ".join(f"{o} order" if o != "exact" else o for o in ORDERS) + " |",
                  "| ---: |" + " ---: |" * len(ORDERS)]  # fmt: skip
        lines += [
            f"| {rho:g} | " + " | ".join(_with_interval(own[order, rho]) for order in ORDERS) + " |" for rho in radii
        ]
        lines.append("")
    return lines[:-1]


def _with_interval(c: Mapping[str, Any]) -> str:
    return f"{c['tau']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--work", type=Path, default=Path("build/diagonal"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--page", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipes = [(s, r) for s in SCALES for r in RATES]
    arguments.work.mkdir(parents=True, exist_ok=True)
    seeds = []
    for seed in range(arguments.seeds):
        kept = arguments.work / f"seed-{seed}.json"
        if not kept.exists():
            started = time.perf_counter()
            row = one_seed(seed, recipes, CHECKED if seed == 0 else 0)
            part = kept.with_suffix(".part")
            part.write_text(json.dumps(row))
            part.replace(kept)
            print(f"seed {seed}: {row['counts']}, {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        seeds.append(json.loads(kept.read_text()))
    result = summary(seeds)
    print("\n".join(table(result)))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
