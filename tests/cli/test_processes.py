"""``hf-geosharp score --processes N``: one of many prints and writes, one failure ends all, Ctrl-C loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from hf_geosharp import errors
from hf_geosharp.cli import errors as cli_errors
from hf_geosharp.cli import launch, progress
from hf_geosharp.parallel import World

Run = Callable[..., Result]

QUICK = ("--samples", "96", "--batch-size", "32", "--steps", "3", "--baselines", "--rho", "0.1", "--rho", "0.03")
SLOW = ("--samples", "1024", "--batch-size", "64", "--steps", "200")


# -------------------------------------------------------------------------------------------- without real processes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Plays Accelerate's launcher: keeps what it is started with."""
    calls: list[Any] = []
    monkeypatch.setattr("accelerate.commands.launch.multi_gpu_launcher", calls.append)
    return calls


def test_the_same_command_is_started_again(run: Run, scoring: Any, launched: list[Any]) -> None:
    line = ["score", "a model", "--processes", "3", "--rho", "0.1", "--json", "-", "-q"]
    done = run("--debug", *line)
    assert done.exit_code == 0
    assert scoring.calls == []
    (call,) = launched
    assert (call.num_processes, call.num_machines, call.multi_gpu, call.module) == (3, 1, True, True)
    assert [call.training_script, *call.training_script_args] == ["hf_geosharp.cli", "--debug", *line]
    assert int(os.environ["OMP_NUM_THREADS"]) == call.num_cpu_threads_per_process >= 1


def test_one_process_is_this_one(run: Run, scoring: Any, launched: list[Any]) -> None:
    assert run("score", "--processes", "1").exit_code == 0
    assert len(scoring.calls) == 1
    assert launched == []


def test_inside_a_launched_world_no_more_are_started(
    run: Run, scoring: Any, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    done = run("score", "--processes", "2")
    assert done.exit_code == 2
    assert "this is already one of 4 processes that a launcher has started" in " ".join(done.stderr.split())
    assert (scoring.calls, launched) == ([], [])


@pytest.fixture
def rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(World, "find", lambda *_: World(1, 2))
    monkeypatch.setattr(cli_errors, "PATIENCE", 0.0)


@pytest.mark.usefixtures("rank_1")
def test_only_rank_0_prints_and_writes(run: Run, scoring: Any, tmp_path: Path) -> None:
    done = run("score", "--json", str(tmp_path / "result.json"))
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert len(scoring.calls) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("rank_1")
def test_what_rank_0_has_told_is_not_told_again(run: Run, scoring: Any) -> None:
    error = errors.DataError("row 7 is empty")
    scoring.fails_with(error)
    done = run("score")
    assert (done.exit_code, done.stderr) == (1, "Error: rank 1: row 7 is empty\n")
    error.reported = True  # type: ignore[attr-defined]
    done = run("score")
    assert (done.exit_code, done.stderr) == (1, "")
    scoring.fails_with(KeyboardInterrupt())
    done = run("score")
    assert (done.exit_code, done.stderr) == (130, "")


@pytest.mark.parametrize("ranks", [("WORLD_SIZE", "RANK"), ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID")])
@pytest.mark.parametrize(
    "line",
    [
        "--no-such-option",
        "score --no-such-option",
        "score --average --ascent secant",
        "score --json no/such/place.json",
    ],
)
def test_rank_0_is_first_to_tell_of_a_wrong_command(
    run: Run, scoring: Any, monkeypatch: pytest.MonkeyPatch, line: str, ranks: tuple[str, str]
) -> None:
    """All processes of torchrun told of it. The others wait, until the launcher ends them."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(launch, "join", lambda *_: World())
    monkeypatch.setenv(ranks[0], "2")
    for rank, waits in (("0", []), ("1", [cli_errors.PATIENCE])):
        monkeypatch.setenv(ranks[1], rank)
        waited.clear()
        done = run(*line.split())
        assert (waited, done.exit_code) == (waits, 1 if "--json" in line else 2)
        # Where it is not ended, it is the only one that something is wrong with.
        assert "Error: " in done.stderr
    assert scoring.calls == []


@pytest.mark.slow
def test_under_torchrun_a_wrong_option_is_told_once() -> None:
    program = str(Path(sys.executable).with_name("hf-geosharp"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", program]
    done = subprocess.run(
        [*command, "score", "--no-such-option"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert done.stderr.count("No such option") == 1


@pytest.mark.parametrize(
    ("codes", "expected", "message"),
    [
        # (exit code, time) by rank; the launcher ends the others by SIGTERM.
        ({0: (-15, 9), 1: (3, 8)}, 3, ""),
        ({0: (1, 9), 1: (4, 8)}, 4, ""),
        ({0: (-15, 8), 2: (-9, 8)}, 1, "rank 2 was killed by SIGKILL"),
        ({1: (-11, 8)}, 1, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_the_exit_code_is_that_of_the_first_that_failed(
    capsys: pytest.CaptureFixture[str], codes: dict[int, tuple[int, int]], expected: int, message: str
) -> None:
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=when) for rank, (code, when) in codes.items()}
    assert launch._exit_code(failures) == expected
    assert message in capsys.readouterr().err


def test_progress_tells_of_all_processes() -> None:
    state = SimpleNamespace(
        stage="score", batch=3, batches=8, step=4, steps=20, rho=0.05, value=0.123456, done=1, total=2, ranks=4
    )
    assert progress._describe(state) == "scoring batch 3/8 step 4/20 rho 0.05: 0.1235 (4 processes)"
    state.stage = "baseline"
    assert progress._describe(state) == "baseline (4 processes)"


# --------------------------------------------------------------------------------------------------- real processes


def start(*args: str, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "hf_geosharp.cli", "score", *args]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, **options)


def score(*args: str) -> tuple[int, str, str]:
    process = start(*args)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


@pytest.mark.slow
def test_two_processes_print_what_one_prints() -> None:
    found = []
    for processes in ("1", "2"):
        code, out, err = score(*QUICK, "--json", "-", "--processes", processes)
        assert code == 0, err
        assert err == "No MODEL given: scoring the shipped demo:digits-vit.\n"
        found.append(json.loads(out) | {"seconds": 0.0})
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "code"), [("demo:vader-bert", 1), ("demo:digits-vit", 2)])
def test_a_failure_is_told_once_and_its_code_is_kept(model: str, code: int) -> None:
    """Data without the column fail; a column that the task does not read is a mistake in the command."""
    found, out, err = score(model, "--processes", "2", "--text-column", "absent")
    assert (found, out) == (code, "")
    assert err.count("Error: ") == 1
    assert "Traceback" not in err


def running(tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A long run on two processes that has begun to score, and the numbers of its processes."""
    process = start("-q", *SLOW, "--processes", "2", "--output", str(tmp_path))
    until = time.monotonic() + 300
    while time.monotonic() < until and sum(p.read_bytes().count(b"\n") for p in tmp_path.glob("*.jsonl")) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(children) >= 2
    return process, [int(pid) for pid in children]


def whole(tmp_path: Path) -> bool:
    return all(p.read_bytes().endswith(b"\n") for p in tmp_path.glob("*.jsonl"))


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 60
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


linux = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks into /proc")


@linux
@pytest.mark.slow
def test_ctrl_c_ends_all_and_leaves_the_journal_whole(tmp_path: Path) -> None:
    process, children = running(tmp_path)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out, err) == (130, "", "Interrupted.\n")
    assert gone(children)
    assert whole(tmp_path)


@linux
@pytest.mark.slow
def test_a_killed_process_ends_the_others_with_a_message(tmp_path: Path) -> None:
    process, children = running(tmp_path)
    os.kill(children[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert "was killed by SIGKILL" in err
    assert gone(children)
