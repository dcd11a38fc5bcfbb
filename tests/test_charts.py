"""What the pictures of comparisons and correlations show."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_geosharp.comparable import Named
from hf_geosharp.comparison import Run, compare
from hf_geosharp.correlation import correlate
from tests.results import DATA, many, result_of

pytest.importorskip("matplotlib")

from hf_geosharp import charts, figures

TARGETS = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 4.0}


def test_a_row_for_each_model_and_lines_between_those_that_are_alike() -> None:
    found = compare(many(a=[1.0, 1.2, 1.4], b=[1.1, 1.3, 1.2], c=[3.0, 3.2, 3.4]))
    (axes,) = charts.comparison_figure(found).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    points = axes.collections[0].get_offsets()
    assert [tuple(point) for point in points] == [(held.value, row) for row, held in enumerate(found.ranking)]
    joined = [line for line in axes.lines if line.get_ydata()[0] != line.get_ydata()[1]]
    assert [list(line.get_ydata()) for line in joined] == [[0, 1]]
    assert "cannot be told apart" in axes.get_title(loc="left")


def test_a_run_over_its_steps_above_its_losses() -> None:
    values = {100: [2.0, 2.2], 300: [1.0, 1.1], 200: [3.0, 3.3]}
    items = [
        Named(f"checkpoint-{step}", result_of(f"checkpoint-{step}", own), run="run", step=step)
        for step, own in values.items()
    ]
    run = Run("run", 3, losses={"loss": ((50, 1.0), (250, 0.5)), "eval_loss": ((300, 0.7),)})
    found = compare(items, runs=[run])
    above, below = charts.comparison_figure(found).axes
    assert [list(data) for data in above.lines[0].get_data()] == [[100, 200, 300], pytest.approx([2.1, 3.15, 1.05])]
    assert [line.get_label() for line in below.lines] == ["training loss", "eval_loss"]
    assert list(below.lines[0].get_xdata()) == [50, 250]
    assert [held.losses for held in found.ranking] == [
        {"loss": 0.5, "eval_loss": 0.7},
        {"loss": 1.0},
        {"loss": 1.0},
    ]


def test_the_axis_says_nats_where_it_is_nats() -> None:
    numbers = {"data": {**DATA, "labels": "regression"}}
    for changes, label in (({}, "rise of the loss (nats)"), (numbers, "rise of the loss")):
        items = [Named(name, result_of(name, [value, 1.1 * value], **changes)) for name, value in TARGETS.items()]
        drawn = (
            charts.comparison_figure(compare(items)),
            charts.correlation_figure(correlate(items, TARGETS, target_name="gap", resamples=99)),
        )
        assert [figure.axes[0].get_xlabel() for figure in drawn] == [f"sharpness: {label}"] * 2


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    # Dollars would be mathematics, and undo the picture.
    items = many(**{"a$x_$": [1.0, 1.1], "b$\\frac": [2.0, 2.1], "c": [3.0, 3.1], "d": [4.0, 4.1]})
    drawn = [
        charts.comparison_figure(compare(items)),
        charts.correlation_figure(
            correlate(items, {"a$x_$": 1, "b$\\frac": 3, "c": 2, "d": 4}, target_name="$\\gap", resamples=99)
        ),
    ]
    for figure in drawn:
        figures.save(figure, tmp_path / "names.svg")
        text = (tmp_path / "names.svg").read_text()
        assert "a$x_$" in text
        assert "b$\\frac" in text


def test_a_long_name_keeps_its_end() -> None:
    assert figures.cut("x" * 50 + "/checkpoint-100").endswith("/checkpoint-100")
    assert len(figures.cut("x" * 60)) == 40
