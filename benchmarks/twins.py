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
    ("euclidean", None, "Euclidean (SAM-like)"),
    ("adaptive", None, "adaptive"),
    ("mix", "second", "geodesic, mix"),
    ("inv", "second", "geodesic, inv"),
)


def measure(samples: int) -> list[dict[str, Any]]:
    rows = []
    for demo in DEMOS:
        for metric, geodesic, title in MEASURES:
            pair = [
                score_pretrained(f"demo:{name}", metric=metric, geodesic=geodesic, samples=samples)
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

    plt.rcParams["svg.hashsalt"] = "hf-geosharp"
    figure, axes = plt.subplots(1, len(DEMOS), figsize=(9, 2.6), sharey=True, layout="constrained")
    for axis, demo in zip(axes, DEMOS, strict=True):
        own = [r for r in rows if r["demo"] == demo]
        colours = ["#b5b5b5" if not r["measure"].startswith("geodesic") else "#1f77b4" for r in own]
        axis.barh([r["measure"] for r in own], [r["ratio"] for r in own], left=0, color=colours)
        axis.set_xscale("log")
        axis.set_xlim(0.5, 3 * max(r["ratio"] for r in rows))
        axis.axvline(1, color="black", linewidth=0.8)
        for i, r in enumerate(own):
            axis.text(max(r["ratio"], 1) * 1.15, i, f"x {r['ratio']:.3g}" if abs(r["ratio"] - 1) > 1e-4 else "x 1.0000",
                      va="center", fontsize=9)  # fmt: skip
        axis.set_title(f"{demo}: twin / model", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
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
