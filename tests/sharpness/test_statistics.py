"""Means, their errors and Student's t, against SciPy."""

from __future__ import annotations

import pytest
from scipy import stats

from hf_geosharp.sharpness.statistics import mean_with_error, student_quantile


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 7, 8, 15, 30, 127])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.975, 0.9995])
def test_student_quantiles_are_those_of_scipy(dof: int, p: float) -> None:
    assert student_quantile(p, dof) == pytest.approx(stats.t.ppf(p, dof), rel=1e-9)


def test_mean_and_error_are_the_textbook_ones() -> None:
    data = [0.3, 0.1, 0.8, 0.25]
    mean, stderr, interval = mean_with_error(data)
    assert mean == pytest.approx(sum(data) / 4)
    assert stderr == pytest.approx(float(stats.sem(data)))
    assert interval == pytest.approx(stats.t.interval(0.95, 3, mean, stderr))
    assert mean_with_error([2.0]) == (2.0, None, None)
