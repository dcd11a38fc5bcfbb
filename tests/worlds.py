"""Worlds of processes for tests: functions that several ranks run, with what a launcher sets.

A rank is forked off a server that has imported the libraries: starting Python anew for each would take most of the
suite's time. What launchers themselves do is tested with launchers, in tests/cli and tests/trainer.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_geosharp.launchers import LAUNCHERS

ROOT = Path(__file__).parents[1]
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""One thread a process: also needed for forking."""

IMPORTED = [
    "datasets", "peft", "torch.distributed.fsdp", "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2", "hf_geosharp.scoring", "tests.test_parallel",
    "tests.sharpness.test_sharded",
]  # fmt: skip


class Rank:
    """One process of a world."""

    def __init__(self, module: str, function: str, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp())
        self._files = [str(self._folder / name) for name in ("out", "err")]
        self._ended: tuple[str, str] | None = None
        self._process = _server().Process(
            target=_run, args=(module, function, arguments, environment, *self._files), daemon=False
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """None as long as it runs."""
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits until it has ended; what it wrote to stdout and stderr.

        Raises:
            TimeoutError: it runs still.
        """
        if self._ended is None:
            self._process.join(timeout)
            out, err = (Path(file).read_text() if os.path.exists(file) else "" for file in self._files)
            if self.returncode is None:
                raise TimeoutError(f"a rank still runs after {timeout} s; it wrote {out} and {err}")
            self._ended = out, err
            shutil.rmtree(self._folder)
        return self._ended

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()


@cache
def _server() -> Any:
    """Of this process; it is started with the first rank."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, {**ALONE, "PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()
    return context


def _run(module: str, function: str, arguments: tuple[str, ...], environment: dict[str, str], *files: str) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    import torch

    torch.set_num_threads(1)
    getattr(importlib.import_module(module), function)(*arguments)
    sys.stdout.flush()


PORTS = range(20000, 32000)
"""Below those that a system gives to whoever asks for any, as the ranks of other worlds do at any time."""


@cache
def _own_ports() -> Iterator[int]:
    """Ports that other workers of the same run do not try, beginning anywhere."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    own = PORTS[int(worker.removeprefix("gw")) :: workers]
    start = os.getpid() % len(own)
    return cycle([*own[start:], *own[:start]])


def free_port() -> int:
    """A port on which nobody listens, nor will before the world does that it is for."""
    for port in _own_ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("ports do not end")


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What every launcher sets."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", **ALONE,
    }  # fmt: skip


def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What launchers set is not set, and what the code sets of it is taken back."""
    names = [name for names in LAUNCHERS for name in names]
    for name in (*names, "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        # Set first, so that what the code sets is taken back too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def launch(size: int, function: str, *arguments: str, module: str, ranks: range | None = None) -> list[Rank]:
    """Starts a function of a module in a world of so many processes, or only some of them."""
    port = free_port()
    each = [{**os.environ, **variables(rank, size, port)} for rank in ranks or range(size)]
    return [Rank(module, function, arguments, environment) for environment in each]


def run_script(file: str) -> None:
    """Runs a file as a program."""
    runpy.run_path(file, run_name="__main__")


def finished(ranks: list[Rank], timeout: float = 300.0) -> list[tuple[int | None, str, str]]:
    """Exit code, stdout and stderr of each, after all have ended."""
    end = time.monotonic() + timeout
    try:
        written = [rank.communicate(max(0.0, end - time.monotonic())) for rank in ranks]
        return [(rank.returncode, *both) for rank, both in zip(ranks, written, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()


def results(size: int, function: str, *arguments: str, module: str) -> list[Any]:
    """What each rank prints in its last line, as JSON."""
    done = finished(launch(size, function, *arguments, module=module))
    assert all(code == 0 for code, _, _ in done), done
    return [json.loads(out.splitlines()[-1]) for _, out, _ in done]
