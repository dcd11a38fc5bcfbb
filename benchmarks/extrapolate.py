"""What a score of a large model would take, from the unit costs of small ones: ``benchmarks/EXTRAPOLATION.md``.

Rendered from ``benchmarks/data/bench.json`` and ``benchmarks/data/ascent.json`` by ``benchmarks/bench.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks import units
from benchmarks.tables import GENERATED, markdown, paragraph

Data = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A Llama by its shape."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    key_heads: int
    head: int = 128
    vocabulary: int = 32000

    @property
    def parameters(self) -> int:
        """Attention, gated MLP and norms of each layer; embeddings, the last norm and the head."""
        attention = 2 * self.hidden * self.head * (self.heads + self.key_heads)
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + (2 * self.vocabulary + 1) * self.hidden


MODELS = (
    Model("Llama 2 7B", 32, 4096, 11008, 32, 32),
    Model("Llama 2 70B", 80, 8192, 28672, 64, 8),
)
GPUS = (8, 64)
SAMPLES, TOKENS, BATCHES = 128, 512, 8

FLOPS, BANDWIDTH, CAPACITY = 67e12, 3.35e12, 80e9
"""An H100 SXM by its data sheet: float32 operations a second without tensor cores, bytes a second, bytes of memory."""

LINK, NETWORK = 450e9, 50e9
"""Bytes a second into one GPU: NVLink inside a machine of 8, 400 Gb/s for each GPU between machines."""

SHARE = 0.5
"""Of FLOPS, BANDWIDTH and links that is reached: assumed, for passes, geometry and communication alike."""

RECOMPUTED = 4 / 3
"""Operations of a pass with gradient checkpointing, over those without."""

TRANSFERS = 4
"""Times that all parameters go through a GPU's link in a pass: gathered for the forward pass, for its recomputation
and for the backward pass, and their gradients scattered."""


@dataclass(frozen=True)
class Costs:
    """Unit costs: operations per parameter and token, parameters moved by the rest of a step, bytes per parameter."""

    operations: float
    moved: dict[str, float]
    held: dict[str, float] | None


def costs(data: Data) -> Costs:
    """The largest of the shapes measured."""
    rows = data["units"]["rows"]
    moved = {
        ascent: max(units.sweeps(row, ascent, row["machine"]["bytes"]) for row in rows) for ascent in ("secant", "apgd")
    }
    held = None
    if isinstance(data["memory"], list):
        llamas = [row for row in data["memory"] if row["model"].startswith("Llama")] or data["memory"]
        held = {a: max(r["bytes_per_parameter"] for r in llamas if r["ascent"] == a) for a in moved}
    return Costs(max(row["flops_per_parameter_and_token"] for row in rows), moved, held)


@dataclass(frozen=True)
class Step:
    """Seconds of the three things that a step does, one after another."""

    passes: float
    geometry: float
    communication: float

    @property
    def total(self) -> float:
        return self.passes + self.geometry + self.communication


def step(model: Model, gpus: int, ascent: str, unit: Costs) -> Step:
    """A step on one batch that all GPUs share."""
    size = model.parameters
    link = LINK if gpus <= 8 else NETWORK
    return Step(
        unit.operations * RECOMPUTED * size * SAMPLES * TOKENS / (gpus * SHARE * FLOPS),
        unit.moved[ascent] * 4 * size / (gpus * SHARE * BANDWIDTH),
        TRANSFERS * 4 * size * (1 - 1 / gpus) / (SHARE * link),
    )


def evaluations(ascents: Data) -> dict[str, tuple[str, int]]:
    """What to call a row -> (ascent, forward + backward passes a batch), as benchmarks/ascent.py counted them."""
    found = {row["ascent"]: row for row in ascents["summary"] if row["where"] == "all"}
    return {
        "default, median": ("secant", math.ceil(found["auto"]["median_passes"])),
        "default, 90th percentile": ("secant", math.ceil(found["auto"]["p90_passes"])),
        "Auto-PGD, 20 steps": ("apgd", math.ceil(found["apgd"]["median_passes"])),
    }


def page(data: Data, ascents: Data) -> str:
    unit = costs(data)
    parts = [
        "# What a score of a large model would take",
        GENERATED.format(sources="`benchmarks/data/bench.json` and `benchmarks/data/ascent.json`"),
        paragraph(
            "**No large model was scored for this page.** Unit costs are measured on small Llama-shaped models, on a "
            "CPU; the rest is arithmetic with data sheets and assumptions, all of which are below. It says which order "
            "of magnitude to expect and what dominates, not what a clock will show."
        ),
        "## Measured",
        _units(data),
        paragraph(
            "*Operations* are those of one forward and backward pass, counted by torch, per parameter and token. *Rest "
            "of a step* is all that a step of the ascent does beside its pass (geodesic, pull-back, the ascent's own "
            "vectors), timed, times the bandwidth that a copy reaches on the same machine, over the bytes of the "
            "float32 parameters: as if all of it were moving memory. The rows show how far it depends on the width; "
            f"heads have {data['units']['head_dimension']} entries here, as in the large models. Of the rows the "
            "largest is taken. Passes of an ascent are those of `benchmarks/ascent.py`, over tiny models."
        ),
        _held(unit),
        "## Formula",
        _formula(unit),
        "## Result",
        paragraph(
            f"A batch is {SAMPLES} samples of {TOKENS} tokens; a score has {BATCHES} batches and one of them a second "
            "time, for reproducibility. All GPUs work on one batch at once; where one machine holds the model, batches "
            "that are spread over machines need no network. Memory is parameters and all that a score holds beside "
            f"them, spread evenly, without activations; a GPU has {CAPACITY / 1e9:g} GB."
        ),
        _table(unit, ascents),
        "## Not measured",
        _not_measured(),
    ]
    return "\n\n".join(parts) + "\n"


def _units(data: Data) -> str:
    rows = []
    for row in data["units"]["rows"]:
        done = row["flops_per_parameter_and_token"] * row["parameters"] * row["tokens"] / row["pass_seconds"]
        moved = [f"{units.sweeps(row, a, row['machine']['bytes']):.0f} x" for a in ("secant", "apgd")]
        rows.append(
            [row["shape"], f"{row['parameters'] / 1e6:.1f} M", f"{row['flops_per_parameter_and_token']:.2f}",
             f"{done / row['machine']['flops']:.0%}", *moved]
        )  # fmt: skip
    head = ["shape", "parameters", "operations", "of the machine's", "rest of a step, secant", "apgd"]
    return markdown(head, rows)


def _held(unit: Costs) -> str:
    if unit.held is None:
        return "Memory was not measured."
    held = " and ".join(f"{value:.0f} bytes with {ascent}" for ascent, value in unit.held.items())
    return paragraph(
        f"Peak memory of a score is {held} per parameter (float32 parameters are 4 of them), activations aside: the "
        "most among the Llama shapes of [RESULTS.md](RESULTS.md)."
    )


def _formula(unit: Costs) -> str:
    moved = ", ".join(f"{value:.0f} ({ascent})" for ascent, value in unit.moved.items())
    lines = [
        "    seconds of a score = (batches + 1) · evaluations · (pass + rest + communication)",
        "    pass          = c · 4/3 · P · T / (n · u · F)",
        "    rest          = k · 4 P / (n · u · B)",
        f"    communication = {TRANSFERS} · 4 P · (1 - 1/n) / (u · W)",
    ]
    return (
        "\n".join(lines)
        + "\n\n"
        + paragraph(
            f"P parameters, T = {SAMPLES * TOKENS} tokens of a batch, n GPUs; measured: c = {unit.operations:.2f} "
            f"operations per parameter and token, k = {moved}. Assumed: gradient checkpointing (4/3); an H100 SXM by "
            f"its data sheet, F = {FLOPS / 1e12:g} TFLOP/s in float32 without tensor cores, for a score takes no "
            f"TF32, and B = {BANDWIDTH / 1e12:g} TB/s; W = {LINK / 1e9:g} GB/s among 8 GPUs and "
            f"{NETWORK / 1e9:g} GB/s beyond; u = {SHARE:g} of each is reached; nothing overlaps. The parameters go "
            f"through each GPU's link {TRANSFERS} times a pass: gathered three times, their gradients scattered once."
        )
    )


def _table(unit: Costs, ascents: Data) -> str:
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            for name, (ascent, count) in evaluations(ascents).items():
                one = step(model, gpus, ascent, unit)
                memory = None if unit.held is None else unit.held[ascent] * model.parameters / gpus
                cells = [f"{x:.2g} s" for x in (one.passes, one.geometry, one.communication)]
                total = (BATCHES + 1) * count * one.total
                rows.append([f"{model.name}, {gpus} GPUs", f"{name} ({count})", *cells, _long(total), _memory(memory)])
    head = ["model", "ascent (evaluations)", "pass", "rest of a step", "communication", "score", "memory a GPU"]
    return markdown(head, rows)


def _long(total: float) -> str:
    return f"{total / 60:.0f} min" if total < 7200 else f"{total / 3600:.1f} h"


def _memory(size: float | None) -> str:
    if size is None:
        return "not measured"
    return f"{size / 1e9:.0f} GB" + ("" if size < 0.9 * CAPACITY else ": does not fit")


def _not_measured() -> str:
    items = (
        "Any GPU: neither its passes nor its geometry. `benchmarks/gpu.py` measures both on one that you have.",
        "Several GPUs or machines: scaling is measured on the CPU with two processes ([RESULTS.md](RESULTS.md)); here "
        "everything is taken to spread evenly, parameters and all that a score holds beside them.",
        "The start: finding and proving the symmetries, and the canonical gauge in float64, once a score.",
        "Activations, which gradient checkpointing and micro-batches keep small.",
        "How many evaluations the ascent of a large model takes, and whether its loss is smooth enough inside the "
        "default ball for a reproducible score.",
    )
    return "\n".join(paragraph(item, first="- ", rest="  ") for item in items)
