"""Many processes: how much faster two are than one for the same work, and how much slower for twice the work.

    python -m benchmarks.scaling [--processes 2] [--quick]

The processes are started once, with one thread each, and everything runs in them, in turn: a score of rank 0 alone
while the other ranks wait, the same score by all together, by each of them for itself at the same time (which is as
much as the machine gives: cores share memory and heat), and twice the batches by all together. Each is a call of
``estimate`` as a user makes it, with its set-up, proof and evidence; until the processes stand there with model and
data it takes another time, which is told by itself. The first row has no score in it: passes of the model alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from benchmarks import subjects
from benchmarks.clock import spread
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.settings import Settings

DEMO = "vader-bert"
FULL = (64, 16, 40, 3)
QUICK = (4, 1, 2, 1)
"""Samples a batch, batches, passes of the model alone, repeats."""

PATIENCE = 6 * 3600.0
"""Seconds that a rank waits while another works alone; a rank that dies ends all at once."""

Row = dict[str, Any]
Work = Callable[[World, int], None]
"""A world and how much there is to do in all."""

ALIKE, DEFAULT = Settings(ascent="apgd", steps=6, reproducibility=False, verify=False), Settings()
SCORES = (
    ("ascents alone, Auto-PGD, 6 steps", ALIKE, 1),
    ("score by default, with its evidence", DEFAULT, 1),
    ("score by default, with its evidence", DEFAULT, 4),
)
"""Batches that all take equally long; and what a user gets, with a proof, and the worst batch run a second time.

The last number says how many times the batches: what is not spread, the second run, is less of a longer score.
"""

COLUMNS = ("machine", "strong", "computing", "weak")


def measure(quick: bool = False, processes: int = 2) -> dict[str, Any]:
    """Starts the processes, and returns what they measured.

    Raises:
        RuntimeError: they failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "scaling.json"
        started = {count: _launched(count, out, "--load-only") for count in (1, processes)}
        found = _launched(processes, out, "--quick") if quick else _launched(processes, out)
    return {**found, "start": {"one": started[1]["start"], "all": started[processes]["start"]}}


def _launched(processes: int, out: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", "benchmarks.scaling", "--worker", str(out), "--launched", str(time.time()), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if ended.returncode or not out.exists():
        raise RuntimeError(f"the processes of the scaling benchmark failed:\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def work(out: Path, quick: bool, launched: float, load_only: bool) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    samples, count, passes, repeats = QUICK if quick else FULL
    world = World.find("cpu", timeout=PATIENCE)
    with world.together():
        model, batches = subjects.demo(DEMO, samples, 2 * count)
        found: dict[str, Any] = {"start": max(world.gather(time.time() - launched))}
        if not load_only:
            found = compare(world, model, batches, passes, repeats)
            found |= {"model": DEMO, "samples": samples, "batches": count}
    if world.leads:
        out.write_text(json.dumps(found))
        for row in found.get("rows", ()):
            ratios = ", ".join(f"{column} {row[column]['median']:.2f}" for column in COLUMNS)
            print(f"  {row['what']}: {ratios}", flush=True)


def compare(world: World, model: nn.Module, batches: Sequence[subjects.Batch], passes: int, repeats: int) -> Row:
    """Strong and weak scaling of each kind of work on the first half of the batches."""
    unit = Objective(model, batches[0])
    count = len(batches) // 2

    def plain(world: World, times: int) -> None:
        # Every process its own share of the passes.
        for _ in range(len(world.share(range(times)))):
            unit.evaluate(True)

    def scored(settings: Settings) -> Work:
        def run(world: World, times: int) -> None:
            # Where there are more than two processes, from the start again.
            estimate(model, [batches[i % len(batches)] for i in range(times)], settings, world=world)

        return run

    jobs: list[tuple[str, Work, int]] = [("passes of the model alone", plain, passes)]
    jobs += [
        (f"{title}, {count * times} batches", scored(settings), count * times) for title, settings, times in SCORES
    ]
    return {
        "processes": world.size,
        "rows": [{"what": title, **_ratios(world, run, size, repeats)} for title, run, size in jobs],
    }


def _ratios(world: World, run: Work, size: int, repeats: int) -> Row:
    found: dict[str, list[float]] = {name: [] for name in ("seconds", *COLUMNS)}
    run(world, min(size, 2 * world.size))
    for _ in range(repeats):
        one, computing = _together(world, lambda: run(World(), size) if world.leads else None)
        each, _ = _together(world, lambda: run(World(), size))
        shared, most = _together(world, lambda: run(world, size))
        more, _ = _together(world, lambda: run(world, world.size * size))
        found["seconds"].append(one)
        found["machine"].append(world.size * one / each)
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
    parser.add_argument("--launched", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--load-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if arguments.worker:
        work(arguments.worker, arguments.quick, arguments.launched, arguments.load_only)
    else:
        found = measure(arguments.quick, arguments.processes)
        print(f"  ready after {found['start']['one']:.1f} s (one), {found['start']['all']:.1f} s (all)")


if __name__ == "__main__":
    main()
