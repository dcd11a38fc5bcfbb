"""What the pictures of a score show."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hf_geosharp import plots
from hf_geosharp.sharpness.result import PartScore
from hf_geosharp.sharpness.statistics import mean_with_error
from tests.report.results import VALUES, full

pytest.importorskip("matplotlib")


def part(name: str, value: float, layer: int | None = None, **more: float | None) -> PartScore:
    return PartScore(name, "layer", layer, None, None, value, more.get("stderr"))


def test_the_curve_is_in_the_order_of_the_radii_with_an_interval_at_each() -> None:
    (axes,) = plots.curve_figure(full(), "a$x_$").axes
    *intervals, line = axes.lines
    assert list(line.get_xdata()) == [0.01, 0.03, 0.1]
    assert list(line.get_ydata()) == [0.005, 0.015, pytest.approx(0.18)]
    assert [list(interval.get_ydata()) for interval in intervals[:2]] == [[0.0025, 0.01], [0.0075, 0.03]]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.01", "0.03", "0.1"]
    assert axes.get_title(loc="left") == "a$x_$"


def test_what_an_interval_has_below_zero_is_cut_off() -> None:
    result = full()
    low = replace(result.curve[0], interval95=(-1.0, 1.0))
    (axes,) = plots.curve_figure(replace(result, curve=[low, *result.curve[1:]])).axes
    assert min(min(line.get_ydata()) for line in axes.lines) > 0


def test_the_same_score_gives_the_same_png() -> None:
    first, second = (plots.curve(full(), "title") for _ in range(2))
    assert first == second
    assert first.startswith(b"\x89PNG")


def test_batches_whose_search_had_not_settled_are_hollow() -> None:
    result = full()
    batches = [replace(batch, converged=batch.index != 2) for batch in result.per_batch]
    (axes,) = plots.batches_figure(replace(result, per_batch=batches)).axes
    filled, hollow = axes.collections
    assert [tuple(point) for point in filled.get_offsets()] == [(0, 0.2), (1, 0.15), (3, 0.16)]
    assert [tuple(point) for point in hollow.get_offsets()] == [(2, 0.21)]
    assert len(hollow.get_facecolors()) == 0
    (axes,) = plots.batches_figure(replace(result, per_batch=batches, mode="average")).axes
    assert len(axes.collections) == 1


def test_the_way_to_the_worst_perturbation() -> None:
    profile = full().profile
    assert profile is not None
    (axes,) = plots.profile_figure(profile).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert lines["along the geodesic"] == [0.0, 0.05, 0.2]
    assert lines["along the straight line"] == [0.0, 0.06, 0.15]


def test_the_axis_says_nats_where_it_is_nats() -> None:
    for data, label in (({}, "rise of the loss (nats)"), ({"labels": "regression"}, "rise of the loss")):
        result = replace(full(), data=data)
        assert result.profile is not None
        across = (plots.parts_figure(result.per, result),)
        up = (
            plots.curve_figure(result), plots.batches_figure(result),
            plots.profile_figure(result.profile, unit=result.unit),
        )  # fmt: skip
        assert [figure.axes[0].get_xlabel() for figure in across] == [label]
        assert [figure.axes[0].get_ylabel() for figure in up] == [label] * 3


def test_a_row_for_each_part_beside_the_whole() -> None:
    parts = [part("m.layers.0", 0.1, 0, stderr=0.01), part("m.layers.1", 0.2, 1), part("head", 0.05)]
    (axes,) = plots.parts_figure(parts, full()).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 0", "layer 1", "head"]
    assert [tuple(point) for point in axes.collections[0].get_offsets()] == [(0.1, 0), (0.2, 1), (0.05, 2)]
    whole = next(line for line in axes.lines if line.get_label() == "all weights perturbed")
    assert list(whole.get_xdata()) == pytest.approx([0.18] * 2)


def test_the_interval_of_a_part_is_that_of_a_score_with_its_error() -> None:
    mean, stderr, interval = mean_with_error(VALUES)
    assert plots.part_interval(part("a", mean, stderr=stderr), len(VALUES)) == pytest.approx(interval)
    assert plots.part_interval(part("a", mean), len(VALUES)) is None
    assert plots.part_interval(part("a", mean, stderr=stderr), 1) is None


def test_layers_of_one_number_keep_their_names() -> None:
    parts = [part("encoder.layers.0", 1.0, 0), part("decoder.layers.0", 1.0, 0), part("decoder.layers.1", 1.0, 1)]
    assert plots.part_names(parts) == ["encoder.layers.0", "decoder.layers.0", "layer 1"]


def test_the_largest_parts_keep_their_order() -> None:
    parts = [part(str(i), float(value)) for i, value in enumerate((3, 1, 5, 2, 4))]
    assert [p.value for p in plots.largest(parts, 3)] == [3, 5, 4]
    assert plots.largest(parts) == parts
