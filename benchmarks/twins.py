"""The same function, different weights: every measure on each demo and on its twin, as a table and a picture.

    python benchmarks/twins.py [--samples 1024] [--json benchmarks/data/twins.json] [--plot benchmarks/twins.svg]

A twin computes the same function at weights that were moved along the model's symmetries by a fixed random element.
A measure of the function has to give the same number for both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_geosharp import score_pretrained

DEMOS = ("digits-vit", "vader-bert")
MEASURES = (
    ("euclidean", None, "Euclidean"),
    ("adaptive", None, "adaptive"),
    ("mix", "exact", "geodesic, mix"),
    ("inv", "second", "geodesic, inv"),
)


def measure(samples: int) -> list[dict[str, Any]]:
    rows = []
    for demo in DEMOS:
        for metric, geodesic, title in MEASURES:
            pair = [
                score_pretrained(f"demo:{name}", metric=metric, geodesic=geodesic, samples=samples, ascent="apgd")
                for name in (demo, f"{demo}-twin")
            ]
            values = [r.geodesic_sharpness for r in pair]
            rows.append(
                {"demo": demo, "measure": title, "rho": pair[0].rho, "model": values[0], "twin": values[1],
                 "ratio": values[1] / values[0], "base_loss": [r.base_loss for r in pair]}
            )  # fmt: skip
            print(
                f"{demo:11} {title:22} rho {pair[0].rho:<6g} model {values[0]:11.6f}   twin {values[1]:11.6f}   "
                f"ratio {values[1] / values[0]:9.6g}",
                flush=True,
            )
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Ratio twin / model of each measure, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hf-geosharp", "font.size": 10})
    figure, axes = plt.subplots(1, len(DEMOS), figsize=(9, 2.4), sharey=True, layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    for axis, demo in zip(axes, DEMOS, strict=True):
        own = [r for r in rows if r["demo"] == demo]
        for height, row in enumerate(own):
            same = row["measure"].startswith("geodesic")
            colour = "#1f77b4" if same else "#c0504d"
            axis.plot([1, row["ratio"]], [height, height], color=colour, linewidth=6, solid_capstyle="butt")
            axis.plot(row["ratio"], height, "o", color=colour, markersize=9)
            axis.annotate(
                f"{row['ratio']:.5f}" if same else f"{row['ratio']:.3g} times",
                (max(row["ratio"], 1), height), xytext=(10, 0), textcoords="offset points", va="center", color=colour,
            )  # fmt: skip
        axis.axvline(1, color="#888888", linewidth=0.8, zorder=0)
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlim(0.6, 10 * max(r["ratio"] for r in rows))
        axis.set_yticks(range(len(own)), [r["measure"] for r in own])
        axis.set_ylim(len(own) - 0.5, -0.5)
        axis.set_title(demo, fontsize=10)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    figure.supxlabel("sharpness of the twin / sharpness of the model (same function, other weights)", fontsize=10)
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.samples)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
