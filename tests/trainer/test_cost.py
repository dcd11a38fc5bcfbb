"""What measurements cost is stated, and kept below a share of the training when asked."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import pytest

from hf_geosharp import GeodesicSharpnessCallback
from hf_geosharp.errors import GeosharpWarning
from hf_geosharp.trainer.cost import Cost
from tests.trainer.tiny import QUICK, evaluations, trainer

KEY = "eval_geodesic_sharpness"


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_seconds_and_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    cost = Cost()
    clock.passes(8)
    with contextlib.suppress(KeyError), cost.spent():
        clock.passes(2)
        raise KeyError
    assert (cost.seconds, cost.last, cost.share) == (2, 2, pytest.approx(0.2))
    cost.begin()
    assert cost.seconds == 0


def test_a_measurement_has_to_fit_into_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    cost = Cost(0.1)
    with cost.spent(measured=False):
        clock.passes(1)
    assert cost.affords()  # how long one takes is not known yet
    with cost.spent():
        clock.passes(2)
    for _ in range(200):
        clock.passes(1)
        if cost.affords():
            with cost.spent():
                clock.passes(2)
            assert cost.share <= 0.1 + 1e-12
    assert 0.09 < cost.share <= 0.1


@pytest.mark.slow
def test_the_end_of_the_training_states_the_sum(tmp_path: Path) -> None:
    trained = trainer(tmp_path)
    GeodesicSharpnessCallback(**QUICK).attach(trained)
    metrics = trained.train().metrics
    seconds = [record[f"{KEY}_runtime"] for record in evaluations(trained)]
    assert all(s > 0 for s in seconds)
    total = metrics["train_geodesic_sharpness_runtime"]
    assert sum(seconds) <= total + 1e-3
    assert 0 < metrics["train_geodesic_sharpness_share"] < 1
    # Of a second clock: the trainer's own, which starts a little earlier.
    assert metrics["train_geodesic_sharpness_share"] == pytest.approx(total / metrics["train_runtime"], rel=0.2)
    assert trained.state.log_history[-1]["train_geodesic_sharpness_share"] == metrics["train_geodesic_sharpness_share"]


@pytest.mark.slow
def test_measurements_beyond_the_share_are_left_out_and_said_so(tmp_path: Path) -> None:
    trained = trainer(tmp_path, num_train_epochs=4)
    callback = GeodesicSharpnessCallback(max_fraction=0.001, **QUICK).attach(trained)
    with pytest.warns(GeosharpWarning, match=r"step 12: not measured.*max_fraction is 0\.1%"):
        trained.train()
    values = [record[KEY] for record in evaluations(trained)]
    assert len(callback.results) == 1
    assert values[0] > 0
    assert all(map(math.isnan, values[1:]))
    trained.create_model_card()  # wants the same columns in each record


@pytest.mark.slow
def test_a_generous_share_leaves_nothing_out(tmp_path: Path, recwarn: Any) -> None:
    trained = trainer(tmp_path)
    callback = GeodesicSharpnessCallback(max_fraction=1.0, **QUICK).attach(trained)
    trained.train()
    assert len(callback.results) == 2
