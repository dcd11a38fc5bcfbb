"""Unit costs of Llama-shaped models: what an extrapolation to large ones starts from.

    python -m benchmarks.units [--quick]

Heads of 128 entries, as in large models; widths are small. For each shape: seconds of a forward and backward pass, and
of the rest of a step, per parameter; the floating point operations of a pass, counted; and what this machine does in
large products and in copies, so that seconds can be told in units that other machines have too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import subjects
from benchmarks.alone import alone
from benchmarks.clock import seconds
from benchmarks.geometry_cost import Run, timed

SHAPES = {
    "as 7B, hidden 512": (512, 1376, 4, 4),
    "as 7B, hidden 1024": (1024, 2752, 8, 8),
    "as 70B, hidden 1024": (1024, 3584, 8, 1),
}
"""Hidden size, inner size, heads and key heads: inner to hidden, and key heads to heads, as in Llama 2."""

QUICK = {"tiny": (16, 24, 2, 1)}
HEAD, LAYERS, VOCABULARY = 128, 2, 500
ROWS, TOKENS, STEPS = 2, 64, 4

Row = dict[str, Any]


def shape(hidden: int, inner: int, heads: int, key_heads: int, quick: bool) -> Row:
    """Unit costs of one shape, for both ascents."""
    model, batch = subjects.llama(
        ROWS, TOKENS, hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8 if quick else HEAD, num_hidden_layers=LAYERS, vocab_size=VOCABULARY,
    )  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    model.zero_grad()
    size, positions = subjects.parameters(model), subjects.tokens(batch)
    runs = [Run("inv", "second", ascent, 1 if quick else 3) for ascent in ("secant", "apgd")]
    found = timed(model, batch, runs, STEPS)
    one_pass = min(t.one_pass for _, times in found for t in times)
    return {
        "parameters": size,
        "tokens": positions,
        "flops_per_parameter_and_token": counter.get_total_flops() / size / positions,
        "pass_seconds": one_pass,
        "step_seconds": {run.ascent: min(t.rest for t in times) for run, times in found},
    }


def machine() -> dict[str, float]:
    """Products and copies of this machine: float32 operations, and bytes read and written, a second."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    x, y = torch.randn(1 << 24), torch.empty(1 << 24)
    return {"flops": 2 * 1024**3 / _least(lambda: a @ b), "bytes": 2 * 4 * len(x) / _least(lambda: y.copy_(x))}


def _least(run: Callable[[], Any], repeats: int = 10) -> float:
    return min(seconds(run)[0] for _ in range(repeats))


def sweeps(row: Row, ascent: str, bandwidth: float) -> float:
    """The rest of a step as bytes moved at the machine's bandwidth, over the bytes of the float32 parameters."""
    return float(row["step_seconds"][ascent] * bandwidth / (4 * row["parameters"]))


def measure(quick: bool = False) -> dict[str, Any]:
    rows = []
    for name, sizes in (QUICK if quick else SHAPES).items():
        before = machine()
        row = {"shape": name, **shape(*sizes, quick)}
        after = machine()
        row["machine"] = {key: statistics.fmean((before[key], after[key])) for key in before}
        rows.append(row)
        done = row["flops_per_parameter_and_token"] * row["parameters"] * row["tokens"] / row["pass_seconds"]
        moved = {ascent: sweeps(row, ascent, row["machine"]["bytes"]) for ascent in row["step_seconds"]}
        print(
            f"  {name}: {row['parameters'] / 1e6:.1f} M, {row['flops_per_parameter_and_token']:.2f} operations per "
            f"parameter and token, {done / row['machine']['flops']:.0%} of the machine's; rest of a step "
            + ", ".join(f"{ascent} {n:.0f} times the parameters" for ascent, n in moved.items()), flush=True,
        )  # fmt: skip
    return {"head_dimension": HEAD, "rows": rows}


if __name__ == "__main__":
    alone(measure, __doc__, "a tiny shape, to see that it runs")
