"""Many processes: how much faster two are than one for the same work, and how much slower for twice the work.

    python -m benchmarks.scaling [--processes 2] [--quick]

The processes are started once, with one thread each, and everything runs in them, in turn: a score of rank 0 alone
while the other ranks wait, the same score by all, twice the batches by all. Loading is not timed. The first row has no
score in it: passes of the model alone, by one process and by all at once, which is as much as the machine gives.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks import subjects
from benchmarks.clock import spread
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.estimate import Settings, estimate
from hf_geosharp.sharpness.objective import Objective

DEMO = "vader-bert"
FULL = (64, 16, 40, 3)
QUICK = (8, 2, 4, 1)
"""Samples a batch, batches, passes of the model alone, repeats."""

PATIENCE = 6 * 3600.0
"""Seconds that a rank waits while another works alone; a rank that dies ends all at once."""

Row = dict[str, Any]
Work = Callable[[World, int], None]
"""A world and how much there is to do in all."""

SCORES = {
    "ascents alone, Auto-PGD, 6 steps": Settings(ascent="apgd", steps=6, reproducibility=False, verify=False),
    "score by default, with its evidence": Settings(),
}
"""Batches that all take equally long; and what a user gets, with a proof and a re-run that do not spread."""


def measure(quick: bool = False, processes: int = 2) -> dict[str, Any]:
    """Starts the processes, and returns what they measured.

    Raises:
        RuntimeError: they failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scaling.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "benchmarks.scaling", "--worker", str(out), *(["--quick"] if quick else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if ended.returncode or not out.exists():
            raise RuntimeError(f"the processes of the scaling benchmark failed:\n{ended.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def work(out: Path, quick: bool) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    world = World.find("cpu", timeout=PATIENCE)
    with world.together():
        found = compare(world, *(QUICK if quick else FULL))
    if world.leads:
        out.write_text(json.dumps(found))
        for row in found["rows"]:
            ratios = ", ".join(f"{name} {row[name]['median']:.2f}" for name in ("strong", "computing", "weak"))
            print(f"  {row['what']}: {ratios}", flush=True)


def compare(world: World, samples: int, count: int, passes: int, repeats: int) -> dict[str, Any]:
    """Strong and weak scaling of each kind of work."""
    model, batches = subjects.demo(DEMO, samples, 2 * count)
    unit = Objective(model, batches[0])

    def plain(world: World, times: int) -> None:
        # Every process its own share of the passes.
        for _ in range(len(world.share(range(times)))):
            unit.evaluate(True)

    def scored(settings: Settings) -> Work:
        def run(world: World, times: int) -> None:
            estimate(model, batches[:times], settings, world=world)

        return run

    jobs: list[tuple[str, Work, int]] = [("passes of the model alone", plain, passes)]
    jobs += [(title, scored(settings), count) for title, settings in SCORES.items()]
    rows = [{"what": title, **_ratios(world, run, size, repeats)} for title, run, size in jobs]
    return {"processes": world.size, "model": DEMO, "samples": samples, "batches": count, "rows": rows}


def _ratios(world: World, run: Work, size: int, repeats: int) -> Row:
    found: dict[str, list[float]] = {"seconds": [], "strong": [], "computing": [], "weak": []}
    run(world, min(size, 2 * world.size))
    for _ in range(repeats):
        one, computing = _together(world, lambda: run(World(), size) if world.leads else None)
        shared, most = _together(world, lambda: run(world, size))
        more, _ = _together(world, lambda: run(world, world.size * size))
        found["seconds"].append(one)
        found["strong"].append(one / shared)
        found["computing"].append(computing / most)
        found["weak"].append(one / more)
    return {name: spread(values) for name, values in found.items()}


def _together(world: World, run: Callable[[], None]) -> tuple[float, float]:
    """Seconds from when all are there to when all are done, and the most that any of them computed meanwhile."""
    world.barrier()
    start, computed = time.perf_counter(), time.process_time()
    run()
    computed = time.process_time() - computed
    world.barrier()
    passed = time.perf_counter() - start
    return float(world.broadcast(passed)), max(world.gather(computed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="little work, to see that it runs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if arguments.worker:
        work(arguments.worker, arguments.quick)
    else:
        measure(arguments.quick, arguments.processes)


if __name__ == "__main__":
    main()
