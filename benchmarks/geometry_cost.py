"""Cost of the geometry: passes a step, time on top of a forward and backward pass, and peak memory.

    python benchmarks/geometry_cost.py [--threads 2] [--repeats 3] [--steps 20] [--case base|tiny|all]

A real ascent is timed: its model passes, and all the rest of it, in turn in one process; ratios are medians over
repeats (one for exact geodesics).
Peak memory runs in a process of its own, on a sequence so short that activations do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging

from hf_geosharp.geometry.metrics import Order
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.ascent import auto_pgd
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.estimate import ASCENTS, Settings, estimate
from hf_geosharp.sharpness.objective import Objective, Reach
from hf_geosharp.symmetry.find import find_symmetries


@dataclass(frozen=True)
class Case:
    """A model with random weights and the shape of its batch."""

    title: str
    config: BertConfig
    rows: int
    tokens: int
    orders: tuple[Order, ...]
    steps: int
    repeats: int


CASES = {
    "base": Case("BERT-base, 32 x 128 tokens", BertConfig(), 32, 128, ("second",), 4, 1),
    "tiny": Case(
        "BERT 4 layers, hidden 128, 32 x 64 tokens",
        BertConfig(hidden_size=128, num_hidden_layers=4, num_attention_heads=2, intermediate_size=512),
        32,
        64,
        ("second", "exact"),
        20,
        3,
    ),
}


def build(case: Case) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = BertForSequenceClassification(case.config).eval()
    batch = {
        "input_ids": torch.randint(5, case.config.vocab_size, (case.rows, case.tokens)),
        "attention_mask": torch.ones(case.rows, case.tokens, dtype=torch.long),
        "labels": torch.randint(0, 2, (case.rows,)),
    }
    return model, batch


class Stopwatch:
    """An objective that keeps the seconds of each forward and backward pass."""

    def __init__(self, objective: Objective) -> None:
        self.objective, self.seconds = objective, list[float]()

    def evaluate(self, gradient: bool) -> float:
        start = time.perf_counter()
        value = self.objective.evaluate(gradient)
        self.seconds.append(time.perf_counter() - start)
        return value


def step_cost(case: Case, steps: int, repeats: int) -> None:
    """Seconds of one forward + backward pass, and of everything else that a step of the ascent does."""
    model, batch = build(case)
    symmetries = find_symmetries(model)
    print(f"\n{case.title}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    for metric in ("inv", "mix"):
        for geodesic in case.orders:
            with borrow(model) as borrowed:
                chart = Chart(borrowed, symmetries, Geometry(metric, geodesic))
                passes, rest = [], []
                for _ in range(repeats if geodesic == "second" else 1):
                    watch = Stopwatch(Objective(model, batch))
                    total = ascent_seconds(chart, watch, model, steps)
                    # The last evaluation of an ascent has no backward pass.
                    passes.append(statistics.median(watch.seconds[1:-1]))
                    rest.append((total - sum(watch.seconds)) / steps)
                ratio = [r / p for r, p in zip(rest, passes, strict=True)]
                print(
                    f"  {metric:4} {geodesic:7} forward+backward {statistics.median(passes):7.3f} s   "
                    f"everything else {statistics.median(rest):7.3f} s a step   "
                    f"ratio {statistics.median(ratio):6.1%} ({min(ratio):.1%} to {max(ratio):.1%})"
                )


def ascent_seconds(chart: Chart, watch: Stopwatch, model: torch.nn.Module, steps: int) -> float:
    """One ascent as a score takes it."""

    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        chart.write(u)
        value = watch.evaluate(gradient)
        return value, chart.pull() if gradient else None

    names = {id(p): n for n, p in model.named_parameters()}
    start = time.perf_counter()
    chart.widen()
    with Reach(model) as reach:
        base = watch.evaluate(True)
    chart.focus({names[key]: rows for key, rows in reach.rows.items()})
    auto_pgd(chart.space, evaluate, 0.01, steps, given=(base, chart.pull()))
    return time.perf_counter() - start


def passes_per_step(case: Case) -> None:
    model, batch = build(case)
    for ascent in ASCENTS:
        result = estimate(model, [batch], Settings(ascent=ascent, reproducibility=False))
        print(
            f"\npasses of one batch, {ascent}, at most {result.steps} steps: {result.passes.forwards} forwards, "
            f"{result.passes.backwards} backwards"
        )


def peak_memory(case: Case) -> None:
    """Peak resident memory of a score less that before the model was made, in units of the float32 parameters."""
    code = f"from benchmarks.geometry_cost import measure_peak; measure_peak({case.title!r})"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    figures = json.loads(out.strip().splitlines()[-1])
    print(
        f"\npeak memory of a score, {case.title.split(',')[0]}, 2 x 8 tokens: {figures['ratio']:.2f} times the float32"
        f" parameters ({figures['peak_mb']:.0f} MB for {figures['parameter_mb']:.0f} MB)"
    )


def peak_resident() -> int:
    """Peak resident bytes of this process (Linux): what getrusage says of a child includes its parent's peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise OSError("no VmHWM in /proc/self/status")


def measure_peak(title: str) -> None:
    case = next(c for c in CASES.values() if c.title == title)
    build(CASES["tiny"])[0](input_ids=torch.ones(1, 4, dtype=torch.long))  # load what a forward pass loads
    before = peak_resident()
    model, _ = build(case)
    batch = {"input_ids": torch.randint(5, 1000, (2, 8)), "labels": torch.tensor([0, 1])}
    size = 4 * sum(p.numel() for p in model.parameters())
    estimate(model, [batch], Settings(steps=6))
    peak = peak_resident() - before
    print(json.dumps({"ratio": peak / size, "peak_mb": peak / 1e6, "parameter_mb": size / 1e6}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, help="ascents of each kind; by default 3 for tiny, 1 for base")
    parser.add_argument("--steps", type=int, help="steps of an ascent; by default 20 for tiny, 4 for base")
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads")
    passes_per_step(CASES["tiny"])
    for name, case in CASES.items():
        if arguments.case in (name, "all"):
            step_cost(case, arguments.steps or case.steps, arguments.repeats or case.repeats)
    if arguments.case in ("base", "all"):
        peak_memory(CASES["base"])


if __name__ == "__main__":
    main()
