"""Timing that holds where other work goes on: each job is timed between two runs of a plain pass, in one process."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

Spread = dict[str, float]
"""``median``, ``low`` and ``high`` (the least and the most) of ``repeats`` values."""


@dataclass(frozen=True)
class Job:
    """Something to time. It runs in every ``every``-th repeat: what takes long is repeated less often."""

    name: str
    run: Callable[[], Any]
    every: int = 1


@dataclass(frozen=True)
class Sample:
    """One run of a job: in which repeat, its seconds, these over those of a pass beside it, and what it returned."""

    repeat: int
    seconds: float
    units: float
    value: Any


def seconds(run: Callable[[], Any], device: str = "cpu") -> tuple[float, Any]:
    """How long a call takes, and what it returns; what a device still has to do is waited for."""
    wait(device)
    start = time.perf_counter()
    value = run()
    wait(device)
    return time.perf_counter() - start, value


def wait(device: str) -> None:
    """Until everything given to the device is done."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def paired(unit: Callable[[], Any], jobs: Sequence[Job], repeats: int, least: float = 0.2) -> dict[str, list[Sample]]:
    """Runs all jobs so often, each repeat in another order, each job between two measurements of the unit.

    A measurement of the unit takes at least ``least`` seconds and is the median of its runs.
    """
    order = random.Random(0)
    found: dict[str, list[Sample]] = {job.name: [] for job in jobs}
    unit()
    for repeat in range(repeats):
        chosen = [job for job in jobs if repeat % job.every == 0]
        order.shuffle(chosen)
        before = _several(unit, least)
        for job in chosen:
            taken, value = seconds(job.run)
            after = _several(unit, least)
            found[job.name].append(Sample(repeat, taken, 2 * taken / (before + after), value))
            before = after
    return found


def _several(unit: Callable[[], Any], least: float) -> float:
    times: list[float] = []
    while len(times) < 3 or sum(times) < least:
        times.append(seconds(unit)[0])
        if sum(times) > 5 * least and times:
            break
    return statistics.median(times)


def ratios(own: Sequence[Sample], other: Sequence[Sample]) -> list[float]:
    """Seconds over those of another job, in each repeat that has both."""
    by_repeat = {sample.repeat: sample.seconds for sample in other}
    return [sample.seconds / by_repeat[sample.repeat] for sample in own if sample.repeat in by_repeat]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and most.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values to take the median of")
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "repeats": len(values)}


def fit(points: Mapping[float, float]) -> dict[str, float]:
    """The exponent b of y = a x^b by least squares of the logarithms, and its standard error.

    Raises:
        ValueError: fewer than three points, or one that is not positive.
    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} points: an exponent with its error needs 3")
    if any(not (x > 0 and y > 0) for x, y in points.items()):
        raise ValueError("an exponent needs positive values")
    x, y = [math.log(k) for k in points], [math.log(v) for v in points.values()]
    mean_x, mean_y = statistics.fmean(x), statistics.fmean(y)
    total = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / total
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return {"exponent": slope, "stderr": math.sqrt(rest / (len(x) - 2) / total)}


def rounded(value: Any, digits: int = 5) -> Any:
    """The same with fewer digits, in nested lists and dicts: what a file of measurements needs."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {k: rounded(v, digits) for k, v in value.items()}
    return [rounded(v, digits) for v in value] if isinstance(value, (list, tuple)) else value


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
