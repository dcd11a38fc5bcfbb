"""Kendall's tau-a over models: its interval, its p-value among many, its part beside a third figure, and held out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.diagonal import agreement, bootstrap, tau_a

Array = NDArray[np.float64]

PERMUTATIONS = 9999
SPLITS = 1000


@dataclass(frozen=True)
class Tau:
    """Tau-a with its bootstrap 95 % interval over models."""

    tau: float
    low: float
    high: float


def tau(x: Sequence[float], y: Sequence[float]) -> Tau:
    """Of two figures of the same models."""
    low, high = bootstrap([agreement(x, y)])
    return Tau(tau_a(x, y), low, high)


def partial_tau(x: Sequence[float], y: Sequence[float], given: Sequence[float]) -> float:
    """Kendall's partial tau of x and y given a third figure; NaN where that says all of one of them."""
    xy, xz, yz = tau_a(x, y), tau_a(x, given), tau_a(y, given)
    rest = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / math.sqrt(rest) if rest > 0 else math.nan


def p_values(
    figures: Mapping[str, Sequence[float]],
    targets: Mapping[str, Sequence[float]],
    permutations: int = PERMUTATIONS,
    seed: int = 0,
) -> dict[tuple[str, str], tuple[float, float]]:
    """Two-sided p-value of each figure with each target: alone, and among all of them.

    Targets are given to the models in another order, the same for all targets and against all figures. A value is how
    often abs(tau) is as large then: that of the pair itself, and the largest of all pairs (Westfall and Young 1993),
    which keeps what goes together together and so loses less than a factor for their number.
    """
    n = len(next(iter(figures.values())))
    left = np.stack([_signs(x) for x in figures.values()]).reshape(len(figures), -1) / (n * (n - 1))
    signs = {name: _signs(y) for name, y in targets.items()}
    seen = {name: np.abs(left @ s.ravel()) for name, s in signs.items()}
    alone = {name: np.ones(len(figures)) for name in targets}
    among = {name: np.ones(len(figures)) for name in targets}
    chance = np.random.default_rng(seed)
    for _ in range(permutations):
        order = chance.permutation(n)
        drawn = {name: np.abs(left @ s[np.ix_(order, order)].ravel()) for name, s in signs.items()}
        most = max(float(values.max()) for values in drawn.values())
        for name in targets:
            alone[name] += drawn[name] >= seen[name] - 1e-12
            among[name] += most >= seen[name] - 1e-12
    return {
        (figure, name): (float(alone[name][i]) / (permutations + 1), float(among[name][i]) / (permutations + 1))
        for i, figure in enumerate(figures)
        for name in targets
    }


def _signs(x: Sequence[float]) -> Array:
    values = np.asarray(x, dtype=np.float64)
    return np.sign(values[:, None] - values)


@dataclass(frozen=True)
class HeldOut:
    """Tau at the radius that the other half of the models would have chosen.

    Mean over random halves, its spread over them (5 % and 95 % quantile), the radius chosen most often, and how often.
    """

    tau: float
    low: float
    high: float
    rho: float
    share: float


def held_out(
    curve: Mapping[float, Sequence[float]], target: Sequence[float], splits: int = SPLITS, seed: int = 0
) -> HeldOut:
    """The radius with the largest abs(tau) on one half, and tau at it on the other."""
    n = len(target)
    radii = list(curve)
    tables = np.stack([_signs(curve[rho]) * _signs(target) for rho in radii])
    chance = np.random.default_rng(seed)
    taus, chosen = [], Counter[float]()
    for _ in range(splits):
        order = chance.permutation(n)
        first, second = np.sort(order[: n // 2]), np.sort(order[n // 2 :])
        best = int(np.abs(_within(tables, first)).argmax())
        chosen[radii[best]] += 1
        taus.append(float(_within(tables[best : best + 1], second)[0]))
    low, high = np.quantile(taus, [0.05, 0.95])
    rho, times = chosen.most_common(1)[0]
    return HeldOut(float(np.mean(taus)), float(low), float(high), rho, times / splits)


def _within(tables: Array, rows: NDArray[np.intp]) -> Array:
    part: Array = tables[:, rows][:, :, rows].sum((1, 2)) / (len(rows) * (len(rows) - 1))
    return part
