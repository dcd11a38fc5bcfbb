"""How the score depends on the radius, on the shipped demos: what the default radii were chosen from.

    python benchmarks/radius.py [--samples 256] [--json benchmarks/data/radius.json]

For each metric and radius: the score over the base loss, how much it grows with the radius (2 where the loss is
quadratic in the ball, 1 where it is linear), how many batches converged in 20 steps, and the spread of a re-run from
weights moved by a relative 1e-6. Radii are scored on their own, by Auto-PGD.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from hf_geosharp import score_pretrained

RADII = {
    "inv": (0.01, 0.03, 0.1, 0.3, 1.0),
    "mix": (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1),
    "adaptive": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}
DEMOS = ("demo:digits-vit", "demo:vader-bert")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':16} {'metric':9} {'rho':>7} {'score':>11} {'/ base':>9} {'growth':>7} {'converged':>10}    spread")
    for demo in DEMOS:
        for metric, radii in RADII.items():
            last = None
            for rho in radii:
                r = score_pretrained(demo, metric=metric, rho=rho, samples=arguments.samples, ascent="apgd")
                value = r.geodesic_sharpness
                growth = math.log(value / last[1]) / math.log(rho / last[0]) if last and value > 0 else None
                converged = sum(b.converged for b in r.per_batch)
                spread = r.reproducible.spread
                rows.append(
                    {"model": demo, "metric": metric, "rho": rho, "score": value, "base_loss": r.base_loss,
                     "growth": growth, "converged": converged, "batches": len(r.per_batch), "spread": spread}
                )  # fmt: skip
                print(
                    f"{demo.removeprefix('demo:'):16} {metric:9} {rho:7g} {value:11.6f} {value / r.base_loss:9.3f} "
                    f"{'' if growth is None else f'{growth:.2f}':>7} {converged:>5} of {len(r.per_batch)}"
                    f" {spread:9.1e}",
                    flush=True,
                )
                last = (rho, value)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
