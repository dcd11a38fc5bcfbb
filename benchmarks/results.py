"""The page of the costs, ``benchmarks/RESULTS.md``, from what ``benchmarks/bench.py`` measured.

    python -m benchmarks.results

Renders ``benchmarks/RESULTS.md`` and ``benchmarks/EXTRAPOLATION.md`` again from ``benchmarks/data/``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import extrapolate, scaling
from benchmarks.tables import GENERATED, markdown, paragraph, ranged

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "benchmarks" / "data" / "bench.json"
ASCENTS = ROOT / "benchmarks" / "data" / "ascent.json"

Data = dict[str, Any]


def page(data: Data) -> str:
    parts = [
        "# What a score costs",
        GENERATED.format(sources="`benchmarks/data/bench.json`"),
        _setting(data),
        "## Beside other measures",
        *_peers(data["peers"]),
        "## Geometry of a step",
        *_geometry(data["geometry"]),
        "## Memory",
        *_memory(data["memory"]),
        "## Growth",
        *_sweeps(data["sweeps"]),
        "## Two processes",
        *_scaling(data["scaling"]),
        "## Large models",
        "What follows for models of 7 and 70 billion parameters: [EXTRAPOLATION.md](EXTRAPOLATION.md).",
    ]
    return "\n\n".join(parts) + "\n"


def _setting(data: Data) -> str:
    runs = data["environment"].values()
    names = {f"torch {r['torch']}, transformers {r['transformers']}, threads: {r['threads']}" for r in runs}
    return paragraph(
        f"CPU, float32; {'; '.join(sorted(names))}. Times depend on the machine and on what else it "
        "does, ratios less: what is compared ran in one process, in turn. A value is the median of its repeats, and in "
        "brackets the least and the most."
    )


# ------------------------------------------------------------------------------------------------------------ peers


def _peers(data: Data) -> list[str]:
    how = data["settings"]
    intro = paragraph(
        f"One batch of {how['samples']} training samples of each demo, ρ = {how['rho']:g}, at most {how['steps']} "
        "steps. A *pass* is one plain forward and backward pass of the model on the batch, timed before and after each "
        "run (`benchmarks/peers.py`). *Over ours* is time over that of our score as it comes by default: found and "
        "proved symmetries, the ascent, and a second one for reproducibility. The others measure something else than "
        "that score; what they cost is what can be compared."
    )
    parts = [intro]
    for model in dict.fromkeys(row["model"] for row in data["rows"]):
        rows = []
        for row in data["rows"]:
            if row["model"] == model:
                passes = f"{row['forwards']} / {row['backwards']}" if "forwards" in row else ""
                rows.append(
                    [row["measure"], ranged(row["units"]), ranged(row["times_ours"]), passes, f"{row['value']:.4g}"]
                )
        head = [f"{model}: measure", "passes", "over ours", "forwards / backwards", "value"]
        parts.append(markdown(head, rows))
    if data["left_out"]:
        parts.append(f"Left out, not installed or not working here: {'; '.join(data['left_out'])}.")
    if data["versions"]:
        tools = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        parts.append(
            paragraph(
                f"Versions: {tools}. Eigenvalues are those largest in modulus: PyHessian and hessian-eigenthings by "
                "power iteration to their default tolerance, curvlinops through scipy's eigsh to a relative 1e-3; the "
                "trace is PyHessian's, to its default tolerance. Passes of a score are those of its one batch, without "
                "the second run."
            )
        )
    rows = [
        [f"{row['model']}: {row['measure'].removeprefix('hf-geosharp, ')}", ranged(row["speedup"]),
         f"{row['value_ratio']:.3f}"]
        for row in data["baseline"]
    ]  # fmt: skip
    return [
        *parts,
        paragraph(
            "The same thing as the published baseline (`benchmarks/baseline.py`: its steps, its projection, its 41 "
            "forward and 20 backward passes, written anew): adaptive sharpness, same ρ, same batch, without our "
            "evidence. Time of the baseline over ours, and our value over its:"
        ),
        markdown(["measure", "times as fast", "value over the baseline's"], rows),
    ]


# --------------------------------------------------------------------------------------------------------- geometry


def _geometry(data: Data) -> list[str]:
    passes = "; ".join(
        f"{row['ascent']} {row['forwards']} forward and {row['backwards']} backward passes" for row in data["passes"]
    )
    rows = [
        [f"{row['case']} ({row['parameters'] / 1e6:.3g} M)", f"{row['metric']}, {row['geodesic']}, {row['ascent']}",
         f"{row['pass_seconds']:.3g} s", f"{row['step_seconds']:.3g} s", _percent(row["ratio"])]
        for row in data["steps"]
    ]  # fmt: skip
    return [
        paragraph(
            "What an ascent does beside its forward and backward passes, its start included, for each pass: geodesic, "
            "pull-back, and the ascent's own vectors (`benchmarks/geometry_cost.py`; random weights). One batch at "
            f"{data['passes'][0]['steps']} steps at most takes: {passes}."
        ),
        markdown(["model, batch", "metric, geodesic, ascent", "pass", "rest of a step", "share of a pass"], rows, 2),
    ]


def _percent(spread: dict[str, float]) -> str:
    low, middle, high = (f"{100 * spread[key]:.3g}" for key in ("low", "median", "high"))
    return f"{middle} %" if low == high else f"{middle} % ({low} to {high})"


# ----------------------------------------------------------------------------------------------------------- memory


def _memory(data: Any) -> list[str]:
    if isinstance(data, dict):
        return [f"Not measured: {data['skipped']}."]
    ascents = list(dict.fromkeys(row["ascent"] for row in data))
    rows = []
    for model in dict.fromkeys(row["model"] for row in data):
        own = {row["ascent"]: row for row in data if row["model"] == model}
        size = own[ascents[0]]["parameters"]
        times = [f"{own[a]['times']:.2f} x ({own[a]['bytes_per_parameter']:.1f})" for a in ascents]
        rows.append([model, f"{size / 1e6:.1f} M", *times])
    return [
        paragraph(
            "Peak resident memory of a score, less what was there before the model was made, over the float32 "
            "parameters, and in brackets in bytes per parameter (`benchmarks/memory.py`: a process for each, 2 x 8 "
            "tokens, so that activations hardly count). The model itself is 1, and its gradients are 1."
        ),
        markdown(["model", "parameters", *ascents], rows),
    ]


# ----------------------------------------------------------------------------------------------------------- growth


def _sweeps(data: Data) -> list[str]:
    base = dict(data["base"])
    width, tokens = base.pop("width"), base.pop("tokens")
    others = ", ".join(f"{value} {name}" for name, value in base.items())
    rows = []
    for row in data["rows"]:
        # What a single pass or step takes has nothing to do with how many there are.
        shown = [_exponent(row["fit"][c]) if c == "ascent" or row["quantity"] != "steps" else "" for c in _COLUMNS]
        rows.append([row["quantity"], ", ".join(map(str, row["sizes"])), *shown])
    return [
        paragraph(
            "The exponent b of cost = a · size^b, fitted by least squares of the logarithms, with its standard error "
            f"(`benchmarks/sweeps.py`: a T5 of width {width}, {tokens} tokens, inv, second order, Auto-PGD; one "
            f"quantity at a time, the others at {others}). An exponent of less than 1 says that there is a part which "
            "does not grow."
        ),
        markdown(["quantity", "sizes", "of a pass", "of the rest of a step", "of the whole ascent"], rows, 2),
    ]


_COLUMNS = ("pass", "geometry", "ascent")


def _exponent(fit: dict[str, float]) -> str:
    return f"{fit['exponent']:.2f} ± {fit['stderr']:.2f}"


# -------------------------------------------------------------------------------------------------------- processes


def _scaling(data: Data) -> list[str]:
    count, start = data["processes"], data["start"]
    names = scaling.COLUMNS
    rows = [
        [row["what"], f"{row['seconds']['median']:.3g} s", *(ranged(row[name]) for name in names)]
        for row in data["rows"]
    ]
    return [
        paragraph(
            f"{count} processes with one thread each against one with one thread, on batches of {data['samples']} "
            f"samples of {data['model']} (`benchmarks/scaling.py`). *Machine*: time of one over the time in which "
            f"{count} do the same side by side, each for itself, times {count}: what the machine gives. *Strong*: "
            f"time of one over time of {count} for the same work, at best {count}. *Computing*: the same of processor "
            f"time, that of the process which needed most. *Weak*: time of one over time of {count} for "
            f"{count} times the work, at best 1. Batches, and the measurements that prove the symmetries, are spread "
            "over the processes; the second run for reproducibility is one batch more, which one process does. All are "
            "calls in processes that stand there: until it has model and data, one takes "
            f"{start['one']:.1f} s, and {count} with their launcher take {start['all']:.1f} s."
        ),
        markdown(["work", "one process", *names], rows),
    ]


# ------------------------------------------------------------------------------------------------------------ pages


def pages(data: Data, folder: Path = ROOT / "benchmarks") -> dict[Path, str]:
    """Path -> text of both pages."""
    ascents = json.loads(ASCENTS.read_text(encoding="utf-8"))
    return {
        folder / "RESULTS.md": page(data),
        folder / "EXTRAPOLATION.md": extrapolate.page(data, ascents),
    }


def write(data: Data, folder: Path = ROOT / "benchmarks") -> None:
    for path, text in pages(data, folder).items():
        path.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    write(json.loads(DATA.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
