"""What launchers say: how many processes there are, which one this is, and where they meet."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from hf_geosharp.errors import WorldError
from hf_geosharp.launchers import launched_size
from hf_geosharp.parallel import World
from tests.worlds import finished, launch, without_launcher


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


@pytest.mark.parametrize("rank", ["0", None])
def test_a_launcher_of_one_process_is_no_world(monkeypatch: pytest.MonkeyPatch, rank: str | None) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert World.find().size == 1
    assert not dist.is_initialized()


def test_a_size_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match=r"WORLD_SIZE is 2, but RANK is not set.*unset WORLD_SIZE"):
        World.find()


def test_a_size_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(WorldError, match="have to be numbers"):
        World.find()


@pytest.mark.parametrize(
    ("hosts", "first"),
    [("node[03-07,9],other", "node03"), ("gpu-a,gpu-b", "gpu-a"), ("n[1,3]", "n1"), ("one", "one"), ("", "127.0.0.1")],
)
def test_a_slurm_step_is_a_world(monkeypatch: pytest.MonkeyPatch, hosts: str, first: str) -> None:
    step = {"STEP_NUM_TASKS": "8", "PROCID": "5", "LOCALID": "1", "STEP_TASKS_PER_NODE": "4(x2)", "JOB_ID": "70123"}
    for name, value in (step | {"STEP_NODELIST": hosts}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert launched_size() == 8
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["8", "5", "1", "4", first, "30123"]


def test_a_launcher_inside_a_slurm_step_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "WORLD_SIZE": "8", "RANK": "6"}.items():
        monkeypatch.setenv(name, value)
    assert launched_size() == 8
    assert os.environ["RANK"] == "6"


def waiting() -> None:
    World.find("cpu", timeout=4.0)


@pytest.mark.slow
def test_a_world_that_does_not_come_together_is_given_up() -> None:
    ((code, _, err),) = finished(launch(2, "waiting", module="tests.test_launchers", ranks=range(1)))
    assert code == 1
    assert "WorldError: the 2 processes that the launcher announced did not all meet at 127.0.0.1:" in err
