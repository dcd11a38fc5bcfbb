"""The mean of a few values, how well it is known, and Student's t distribution, which that follows."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean_with_error(values: Sequence[float]) -> tuple[float, float | None, tuple[float, float] | None]:
    """Mean, its standard error, and Student's 95 % interval; the latter two are None for fewer than two values."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None, None
    stderr = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = student_quantile(0.975, n - 1) * stderr
    return mean, stderr, (mean - half, mean + half)


def student_quantile(p: float, dof: int) -> float:
    """The p-quantile (p > 1/2) of Student's t with ``dof`` degrees of freedom, by bisection.

    The distribution function is the closed form for whole ``dof`` (Abramowitz & Stegun 26.7.3 and 26.7.4).
    """
    lo, hi = 0.0, 1.0
    while _student_cdf(hi, dof) < p:
        hi *= 2
    for _ in range(80):
        mid = (lo + hi) / 2
        lo, hi = (mid, hi) if _student_cdf(mid, dof) < p else (lo, mid)
    return (lo + hi) / 2


def _student_cdf(t: float, dof: int) -> float:
    theta = math.atan(t / math.sqrt(dof))
    cos2 = math.cos(theta) ** 2
    term = total = 1.0
    if dof % 2:
        for k in range(2, dof - 1, 2):
            term *= cos2 * k / (k + 1)
            total += term
        series = math.sin(theta) * math.cos(theta) * total if dof > 1 else 0.0
        inside = 2 / math.pi * (theta + series)
    else:
        for k in range(1, dof - 2, 2):
            term *= cos2 * k / (k + 1)
            total += term
        inside = math.sin(theta) * total
    return 0.5 + inside / 2
