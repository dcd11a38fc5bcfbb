"""All costs in one run: measures, writes ``benchmarks/data/bench.json``, and renders the pages from it.

    python -m benchmarks.bench [--only peers --only scaling] [--quick --json FILE --pages FOLDER]

About twelve minutes on two idle cores. What is measured is written after each section, so a run that was stopped, or
one with ``--only``, leaves the other sections as they were. A section that fails is told at the end (exit code 1) and
keeps its old figures; one that this machine does not allow says so on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import geometry_cost, memory, peers, results, scaling, sweeps, units
from benchmarks.clock import rounded

SECTIONS: dict[str, tuple[str, Callable[[bool], Any]]] = {
    "memory": ("peak memory by size", memory.measure),
    "scaling": ("two processes", scaling.measure),
    "units": ("unit costs", units.measure),
    "sweeps": ("growth with samples, steps, heads", sweeps.measure),
    "peers": ("other measures", peers.measure),
    "geometry": ("geometry of a step", geometry_cost.measure),
}
"""In the order in which they run: what starts processes first, while this one is small."""


def run(wanted: Sequence[str], quick: bool, path: Path, pages: Path) -> list[str]:
    """Measures these sections and writes them; returns those that failed."""
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"environment": {}}
    failed = []
    for name in wanted:
        title, measure = SECTIONS[name]
        print(f"\n{name}: {title}", flush=True)
        start = time.perf_counter()
        try:
            data[name] = rounded(measure(quick))
        except memory.NotHereError as error:
            data[name] = {"skipped": str(error)}
            print(f"  left out: {error}")
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        data["environment"][name] = environment()
        save(data, path, pages)
        print(f"  {time.perf_counter() - start:.0f} s", flush=True)
    return failed


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }


def save(data: dict[str, Any], path: Path, pages: Path) -> None:
    """The data, and the pages once there is all that they show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the order of SECTIONS, whatever was measured last.
    whole = {key: data[key] for key in ("environment", *SECTIONS) if key in data}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if all(name in data for name in SECTIONS):
        results.write(whole, pages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="a section; may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to see that it runs; needs --json and --pages"
    )
    parser.add_argument("--json", type=Path, default=results.DATA)
    parser.add_argument("--pages", type=Path, default=results.ROOT / "benchmarks", help="folder of the pages")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    if arguments.quick and arguments.json == results.DATA:
        parser.error("--quick would overwrite what was measured: give --json and --pages")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    failed = run(arguments.only or list(SECTIONS), arguments.quick, arguments.json, arguments.pages)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
