"""Two processes that train one model: one value everywhere, and a training that does not notice."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.versions import needs_fully_shard

ROOT = Path(__file__).resolve().parents[2]
SETUPS = (
    "with", "without", "with-half", "without-half", "with-accumulate", "without-accumulate", "with-best",
    "with-failing", "with-raising", "with-overridden", "with-sharded", "without-sharded",
    "with-sharded-adapter", "without-sharded-adapter", "with-sharded-penalty",
)  # fmt: skip

# In one worker: the trainings are done once.
pytestmark = [needs_fully_shard, pytest.mark.slow, pytest.mark.xdist_group("two processes that train")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
        str(Path(__file__).with_name("two_processes.py")), str(out), *SETUPS,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {setup: [json.loads((out / f"{setup}-{rank}.json").read_text()) for rank in (0, 1)] for setup in SETUPS}


def test_two_processes_trained(reports: Any) -> None:
    assert all(report["world"] == 2 for both in reports.values() for report in both)


@pytest.mark.parametrize(
    "setup", ["with", "with-half", "with-accumulate", "with-best", "with-sharded", "with-sharded-adapter"]
)
def test_the_value_is_the_same_on_both(reports: Any, setup: str) -> None:
    first, second = reports[setup]
    assert first["values"] == second["values"]
    assert len(first["values"]) == 2
    assert all(value > 0 for value in first["values"])
    assert first["heard"] == first["values"]


@pytest.mark.parametrize("setup", ["", "-half", "-accumulate", "-sharded", "-sharded-adapter"])
def test_the_weights_are_those_of_a_training_without(reports: Any, setup: str) -> None:
    """In half precision the gradients would no longer be shared if the weights themselves were widened."""
    both = reports[f"with{setup}"] + reports[f"without{setup}"]
    assert len({report["weights"] for report in both}) == 1
    assert len({report["random"] for report in both}) == 1


@pytest.mark.parametrize("setup", ["with-sharded", "with-sharded-adapter"])
def test_the_value_of_sharded_weights_is_that_of_whole_ones(reports: Any, setup: str) -> None:
    for report in reports[setup]:
        assert report["values"][-1] == pytest.approx(report["again"], rel=1e-4)


def test_a_penalty_on_sharded_weights_is_refused_before_the_training(reports: Any) -> None:
    for report in reports["with-sharded-penalty"]:
        assert "depends on the weights themselves, as a penalty on them does" in report["error"]
        assert report["steps"] == 0


def test_the_best_model_and_the_end_are_the_same_on_both(reports: Any) -> None:
    first, second = reports["with-best"]
    assert first["best"] == second["best"] == [min(first["values"]), 4]
    assert first["steps"] == second["steps"] < 16
    assert first["weights"] == second["weights"]


def test_only_the_first_process_speaks(reports: Any) -> None:
    assert reports["with-half"][0]["said"]
    assert all(both[1]["said"] == [] for both in reports.values())


def test_a_failure_on_one_process_is_one_on_both(reports: Any) -> None:
    first, second = reports["with-failing"]
    assert all(map(math.isnan, first["values"] + second["values"]))
    assert any("process 1: MemoryError: too little" in text for text in first["said"])
    assert first["weights"] == reports["without"][0]["weights"]


def test_it_ends_the_training_on_both_when_asked(reports: Any) -> None:
    first, second = reports["with-raising"]
    assert "process 1" in first["error"]
    assert "too little" in second["error"]


def test_an_evaluation_that_only_one_process_logs(reports: Any) -> None:
    first, second = reports["with-overridden"]
    assert len(first["own"]) == 2
    assert first["own"] == second["own"] == first["heard"]
