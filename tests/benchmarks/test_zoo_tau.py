"""Correlations of the zoos against SciPy, closed forms and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.zoo.tau import held_out, p_values, partial_tau, tau


def draw(count: int, seed: int) -> list[float]:
    found: list[float] = np.random.default_rng(seed).standard_normal(count).tolist()
    return found


def test_tau_is_scipys_where_nothing_is_tied() -> None:
    x, y = draw(40, 0), draw(40, 1)
    y = [b + 0.5 * a for a, b in zip(x, y, strict=True)]
    found = tau(x, y)
    assert found.tau == pytest.approx(stats.kendalltau(x, y).statistic)
    assert found.low < found.tau < found.high


def test_partial_tau_by_hand() -> None:
    # Pairs of four models: tau is 4/6 with y, 4/6 with z, and 2/6 between y and z.
    x, y, z = [1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3]
    assert partial_tau(x, y, z) == pytest.approx((2 / 3 - 2 / 3 * 1 / 3) / math.sqrt((1 - 4 / 9) * (1 - 1 / 9)))


def test_partial_tau_is_the_correlation_of_what_is_left_of_the_signs() -> None:
    x, y, z = draw(15, 0), draw(15, 1), draw(15, 2)
    pairs = list(itertools.combinations(range(15), 2))
    a, b, c = (np.array([np.sign(s[i] - s[j]) for i, j in pairs]) for s in (x, y, z))
    left, right = (s - c * (s @ c) / (c @ c) for s in (a, b))
    expected = left @ right / math.sqrt((left @ left) * (right @ right))
    assert partial_tau(x, y, z) == pytest.approx(expected)


def test_a_figure_that_is_the_given_one_has_no_partial_tau() -> None:
    x, y = draw(8, 0), draw(8, 1)
    assert math.isnan(partial_tau(x, y, x))


def test_a_p_value_is_that_of_all_permutations() -> None:
    x, y = draw(6, 3), draw(6, 4)
    own = abs(stats.kendalltau(x, y).statistic)
    every = [abs(stats.kendalltau(x, order).statistic) for order in itertools.permutations(y)]
    expected = np.mean([value >= own - 1e-12 for value in every])
    alone, among = p_values({"x": x}, {"y": y}, permutations=4000)["x", "y"]
    assert alone == among == pytest.approx(expected, abs=4 * math.sqrt(expected / 4000))


def test_a_p_value_among_many_is_honest_of_noise_and_finds_what_is_there() -> None:
    figures = {f"noise {k}": draw(30, 10 + k) for k in range(20)}
    target = draw(30, 99)
    figures["signal"] = [t + 0.2 * e for t, e in zip(target, draw(30, 98), strict=True)]
    found = p_values(figures, {"target": target, "other": draw(30, 97)}, permutations=999)
    assert found["signal", "target"] == (0.001, 0.001)
    noise = [values for (name, _), values in found.items() if name != "signal"]
    assert min(alone for alone, _ in noise) < 0.05 < min(among for _, among in noise)
    assert all(alone <= among for alone, among in found.values())


def test_equal_figures_count_once_among_many() -> None:
    x, y = draw(12, 0), draw(12, 1)
    alone, among = p_values({f"copy {k}": x for k in range(50)}, {"y": y}, permutations=500)["copy 0", "y"]
    assert alone == among


def test_the_radius_is_chosen_on_one_half_and_told_of_the_other() -> None:
    target = draw(40, 0)
    noise = draw(40, 1)
    good = [-t for t in target]
    found = held_out({0.1: noise, 0.3: good}, target, splits=50)
    assert (found.tau, found.low, found.high, found.rho, found.share) == (-1.0, -1.0, -1.0, 0.3, 1.0)


def test_the_best_of_many_radii_of_noise_is_nothing_held_out() -> None:
    target = draw(60, 0)
    curve = {float(k): draw(60, k + 1) for k in range(30)}
    assert abs(held_out(curve, target, splits=300).tau) < 0.05 < max(abs(tau(x, target).tau) for x in curve.values())
