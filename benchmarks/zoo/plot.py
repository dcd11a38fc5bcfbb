"""Tau over the radius, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SHOWN = ("gap in error", "gap in loss", "error elsewhere")
_WORST, _AVERAGE = ("#c0504d", "^", "worst case"), ("#1f77b4", "o", "average")
LINES = {
    "": _WORST, "second": _WORST, "average": _AVERAGE, "second average": _AVERAGE,
    "second paper": ("#8064a2", "v", "worst case, the paper's symmetries"),
}  # fmt: skip
"""What follows the metric in a cell's name: colour, marker and label."""


def plot(result: Mapping[str, Any], path: Path) -> None:
    """A row for each target, a column for each metric."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "hf-geosharp", "font.size": 10})
    metrics = result["setting"]["radii"]
    figure, axes = plt.subplots(
        len(SHOWN), len(metrics), figsize=(9, 2.3 * len(SHOWN) + 0.9), layout="constrained", sharey=True, sharex="col"
    )
    loss = next(row for row in result["rows"] if row["name"] == "training loss")
    labels: dict[str, Any] = {}
    for target, line in zip(SHOWN, axes, strict=True):
        for metric, axis in zip(metrics, line, strict=True):
            for words, (colour, marker, label) in LINES.items():
                name = " ".join([metric, words]).strip()
                own = [row for row in result["rows"] if row["name"] == name]
                if not own:
                    continue
                radii, cells = [row["rho"] for row in own], [row[target] for row in own]
                if "average" not in words and "paper" not in words:
                    axis.fill_between(
                        radii, [c["low"] for c in cells], [c["high"] for c in cells], color=colour, alpha=0.12, lw=0
                    )  # fmt: skip
                (drawn,) = axis.plot(radii, [c["tau"] for c in cells], color=colour, marker=marker, markersize=4)
                labels.setdefault(label, drawn)
            drawn = axis.axhline(loss[target]["tau"], color="#888888", linestyle="--", linewidth=0.8)
            labels.setdefault("training loss", drawn)
            axis.axhline(0, color="#888888", linewidth=0.8, zorder=0)
            axis.set_xscale("log")
            axis.set_ylim(-1, 1)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel(f"τ, {target}")
    for metric, top, bottom in zip(metrics, axes[0], axes[-1], strict=True):
        top.set_title(metric, fontsize=10)
        bottom.set_xlabel("ρ")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.patch.set_facecolor("white")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
