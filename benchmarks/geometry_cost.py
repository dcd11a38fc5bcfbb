"""Cost of the geometry: passes of a score, and time of a step on top of its forward and backward pass.

    python -m benchmarks.geometry_cost [--threads 2] [--quick]

A real ascent is timed: its model passes, and all the rest of it, in turn in one process. The rest, what it takes to
begin included, is divided by the number of passes. Ratios are over the median pass of the same ascent, and medians over
ascents (one for exact geodesics and for BERT-base).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from benchmarks import subjects
from benchmarks.clock import spread, wait
from benchmarks.subjects import Batch, Subject
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.sharpness.ascent import Wanted, is_wanted
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.objective import Objective, Reach
from hf_geosharp.sharpness.precision import full_float32
from hf_geosharp.sharpness.settings import CLIMBS, Settings
from hf_geosharp.symmetry.find import find_symmetries

RHO = 0.01
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One kind of ascent on one case."""

    metric: str
    geodesic: Order
    ascent: str
    repeats: int


@dataclass(frozen=True)
class Case:
    """A model with random weights, the shape of its batch, and what is run on it."""

    title: str
    rows: int
    tokens: int
    steps: int
    runs: tuple[Run, ...]
    sizes: dict[str, Any]

    def build(self) -> Subject:
        return subjects.bert(self.rows, self.tokens, **self.sizes)


SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 512}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}

QUICK = Case("BERT, 1 layer, hidden 32, 8 x 8 tokens", 8, 8, 4, (Run("inv", "second", "apgd", 1),), TINY)
CASES = (
    Case(
        "BERT, 4 layers, hidden 128, 32 x 64 tokens",
        32,
        64,
        20,
        (
            *(Run(metric, "second", ascent, 3) for metric in ("inv", "mix") for ascent in CLIMBS),
            Run("inv", "exact", "apgd", 1),
            Run("mix", "exact", "secant", 3),
        ),
        SMALL,
    ),
    Case(
        "BERT-base, 32 x 128 tokens",
        32,
        128,
        2,
        (Run("inv", "second", "secant", 1), Run("mix", "second", "secant", 1), Run("mix", "exact", "secant", 1)),
        {},
    ),
)


class Stopwatch(Objective):
    """An objective that keeps the seconds of each of its passes.

    What an ascent does when it is asked whether it wants the gradient is not among them.
    """

    def __init__(self, model: nn.Module, batch: Batch, device: str = "cpu") -> None:
        super().__init__(model, batch)
        self.device = device
        self.seconds: list[float] = []
        self.both: list[float] = []
        """Of those that were forward and backward."""

    def evaluate(self, gradient: Wanted) -> float:
        thinking = 0.0
        before = self.backwards

        def asked(loss: float) -> bool:
            nonlocal thinking
            wait(self.device)
            start = time.perf_counter()
            wanted = is_wanted(gradient, loss)
            wait(self.device)
            thinking = time.perf_counter() - start
            return wanted

        wait(self.device)
        start = time.perf_counter()
        value = super().evaluate(asked if gradient else False)
        wait(self.device)
        self.seconds.append(time.perf_counter() - start - thinking)
        if self.backwards > before:
            self.both.append(self.seconds[-1])
        return value


@dataclass(frozen=True)
class Timed:
    """One ascent: seconds of a forward and backward pass, of all else that comes to one pass, and of the whole."""

    one_pass: float
    rest: float
    total: float
    steps: int
    rise: float


def ascend(chart: Chart, model: nn.Module, batch: Batch, ascent: str, steps: int, device: str = "cpu") -> Timed:
    """One ascent as a score takes it, from the loss at the model's own weights on."""
    watch = Stopwatch(model, batch, device)
    names = {id(p): n for n, p in model.named_parameters()}
    wait(device)
    start = time.perf_counter()
    chart.widen()
    with Reach(model) as reach:
        base = watch.evaluate(True)
    chart.focus({names[key]: rows for key, rows in reach.rows.items()})
    climb = CLIMBS[ascent](chart.space, partial(loss_at, chart, watch), RHO, steps, given=(base, chart.pull()))
    wait(device)
    total = time.perf_counter() - start
    # The first pass warms up.
    one_pass = statistics.median(watch.both[1:] or watch.both)
    passes = (watch.forwards + watch.backwards) / 2
    return Timed(one_pass, (total - sum(watch.seconds)) / passes, total, climb.steps, climb.rise)


def timed(
    model: nn.Module, batch: Batch, runs: Sequence[Run], steps: int, device: str = "cpu"
) -> list[tuple[Run, list[Timed]]]:
    """All repeats of each run."""
    symmetries = find_symmetries(model)
    found = []
    for run in runs:
        with full_float32(), borrow(model) as borrowed:
            chart = Chart(borrowed, symmetries, Geometry(run.metric, run.geodesic))
            times = [ascend(chart, model, batch, run.ascent, steps, device) for _ in range(run.repeats)]
        found.append((run, times))
    return found


def step_cost(case: Case) -> list[Row]:
    """What a step costs beside its pass, for each run of a case."""
    model, batch = case.build()
    rows = []
    for run, times in timed(model, batch, case.runs, case.steps):
        rows.append(
            {"case": case.title, "parameters": subjects.parameters(model), "metric": run.metric,
             "geodesic": run.geodesic, "ascent": run.ascent,
             "pass_seconds": statistics.median(t.one_pass for t in times),
             "step_seconds": statistics.median(t.rest for t in times),
             "ratio": spread([t.rest / t.one_pass for t in times])}
        )  # fmt: skip
        row = rows[-1]
        print(
            f"  {case.title}: {run.metric:4} {run.geodesic:7} {run.ascent:7} pass {row['pass_seconds']:7.3f} s  rest of"
            f" a step {row['step_seconds']:7.3f} s  {row['ratio']['median']:6.1%}", flush=True,
        )  # fmt: skip
    return rows


def passes(case: Case) -> list[Row]:
    """Passes over one batch that a score takes, with its default number of steps at most."""
    model, batch = case.build()
    rows = []
    for ascent in CLIMBS:
        result = estimate(model, [batch], Settings(ascent=ascent, reproducibility=False))
        rows.append(
            {"case": case.title, "ascent": ascent, "steps": result.steps, "forwards": result.passes.forwards,
             "backwards": result.passes.backwards}
        )  # fmt: skip
    return rows


def measure(quick: bool = False) -> dict[str, list[Row]]:
    cases = (QUICK,) if quick else CASES
    return {"passes": passes(cases[0]), "steps": [row for case in cases for row in step_cost(case)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a tiny case, to see that it runs")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    for row in measure(arguments.quick)["passes"]:
        print(
            f"  passes over one batch, {row['ascent']}, at most {row['steps']} steps: {row['forwards']} forwards, "
            f"{row['backwards']} backwards"
        )


if __name__ == "__main__":
    main()
