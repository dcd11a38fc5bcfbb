"""Something measured on every model type of transformers, in processes of their own that nothing can take along.

Each type has its own limits of time and memory. What comes out is one line of a file for each, so that a run that was
stopped goes on. Scripts hand in what to measure, and what to make of all records.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CPU_SECONDS, WALL_SECONDS, MEMORY = 120, 900, 12 << 30
"""Limits of one type: what it may compute, how long it may take, how much memory its process may have."""

CHUNK = 40
"""Types that one process does in turn; it is begun anew after a crash."""

BUFFER = 1 << 20
"""Bytes that are written at once: no line is written in two parts, for several processes append to one file."""

Record = dict[str, Any]


class OutOfTime(BaseException):
    """The limit of one type is reached. No Exception, so that nobody takes it for one of the model's own."""


def work(types: Sequence[str], out: Path, examine: Callable[[str], Record]) -> None:
    """Examines types in this process, one record a line."""
    import torch
    import transformers

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))

    def out_of_time(*_: Any) -> None:
        raise OutOfTime(f"more than {CPU_SECONDS} s of CPU time")

    signal.signal(signal.SIGPROF, out_of_time)
    with out.open("a", buffering=BUFFER) as lines:
        for model_type in types:
            print(json.dumps({"type": model_type, "status": "started"}), file=lines, flush=True)
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS, 5)
            try:
                record = examine(model_type)
            except OutOfTime as error:  # between the lines that catch it
                record = {"type": model_type, "status": "failed", "reason": str(error)}
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(record), file=lines, flush=True)


def results(cache: Path) -> dict[str, Record]:
    """The last record of each type."""
    if not cache.exists():
        return {}
    # What follows the last line break is still being written.
    return {r["type"]: r for r in map(json.loads, cache.read_text().split("\n")[:-1])}


def run(types: Sequence[str], cache: Path, script: str) -> None:
    """Examines types by a module in processes of their own, whatever happens to one of them."""
    left = list(types)
    while left:
        command = [sys.executable, "-m", script, "--work", ",".join(left[:CHUNK]), "--cache", str(cache)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
        moved = time.monotonic()
        seen: list[Any] = []
        while process.poll() is None:
            time.sleep(2)
            now = [results(cache).get(t) for t in left[:CHUNK]]
            if now != seen:
                seen, moved = now, time.monotonic()
            elif time.monotonic() - moved > WALL_SECONDS:
                process.kill()
                process.wait()
        done = results(cache)
        for t in left[:CHUNK]:
            if done.get(t, {}).get("status") == "started":
                how = f"its process ended with {process.returncode}"
                with cache.open("a", buffering=BUFFER) as lines:
                    print(json.dumps({"type": t, "status": "failed", "reason": how}), file=lines, flush=True)
        left = [t for t in left if results(cache).get(t, {}).get("status", "started") == "started"]


def every_type() -> list[str]:
    from transformers import CONFIG_MAPPING

    return list(CONFIG_MAPPING.keys())


def main(
    text: str | None, script: str, cache: Path, examine: Callable[[str], Record], types: Callable[[], Sequence[str]],
    kept: tuple[Path, Path, Callable[[list[Record]], str]],
) -> None:  # fmt: skip
    """The command line of a module, ``script``.

    ``examine`` makes the record of a type; those of all ``types`` are ``kept``: files of data and of a page, and the
    text of that.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="types, separated by commas")
    parser.add_argument("--limit", type=int, help="at most so many types that are not done yet")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="forget earlier results of these types")
    parser.add_argument("--again-status", help="forget those that ended like this, e.g. failed")
    parser.add_argument("--cache", type=Path, default=cache)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cache.parent.mkdir(parents=True, exist_ok=True)
    if options.work:
        return work(options.work.split(","), options.cache, examine)
    asked = options.only.split(",") if options.only else types()
    done = results(options.cache)
    forget = set(asked) if options.again else {t for t, r in done.items() if r["status"] == options.again_status}
    if forget & set(done):
        kept = [r for t, r in done.items() if t not in forget]
        options.cache.write_text("".join(json.dumps(r) + "\n" for r in kept))
        done = results(options.cache)
    left = [t for t in asked if done.get(t, {}).get("status", "started") == "started"][: options.limit]
    with ThreadPoolExecutor(options.workers) as pool:
        list(pool.map(lambda i: run(left[i :: options.workers], options.cache, script), range(options.workers)))
    records = [r for r in results(options.cache).values() if r["status"] != "started"]
    if not options.only and not options.limit:
        data, page, text_of = kept
        data.write_text(json.dumps(sorted(records, key=lambda r: r["type"]), indent=1) + "\n")
        page.write_text(text_of(records))
    for status, n in Counter(r["status"] for r in records).most_common():
        print(f"{n:5} {status}")
