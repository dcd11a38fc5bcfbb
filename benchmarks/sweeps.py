"""How the cost of an ascent grows with samples, steps, heads and head dimension, with fitted exponents.

    python -m benchmarks.sweeps [--quick]

One quantity at a time on a T5, whose number and size of heads do not depend on its width. The least of two runs
counts, taken in turn over all sizes; the exponent b of cost = a size^b is that of least squares of the logarithms, and
its standard error says how well a power fits, not how it goes on beyond the sizes measured.
"""

from __future__ import annotations

from typing import Any

from benchmarks import subjects
from benchmarks.alone import alone
from benchmarks.clock import fit
from benchmarks.geometry_cost import Run, Timed, timed
from benchmarks.subjects import Subject

SIZES: dict[str, tuple[int, ...]] = {
    "samples": (8, 16, 32, 64),
    "steps": (5, 10, 20, 40),
    "heads": (4, 8, 16, 32),
    "head dimension": (8, 16, 32, 64, 128),
}
BASE = {"samples": 8, "steps": 4, "heads": 4, "head dimension": 32}
QUICK = {"samples": (2, 4, 8), "steps": (1, 2, 3), "heads": (1, 2, 4), "head dimension": (2, 4, 8)}
TOKENS = 16
REPEATS = 2
RUN = Run("inv", "second", "apgd", 1)

Row = dict[str, Any]


def build(values: dict[str, int], width: int) -> Subject:
    sizes = {"d_model": width, "d_ff": 2 * width, "num_layers": 2, "num_heads": values["heads"]}
    return subjects.t5(values["samples"], TOKENS, d_kv=values["head dimension"], **sizes)


def sweep(name: str, sizes: tuple[int, ...], repeats: int, width: int) -> Row:
    """Seconds at each size of one quantity, with exponents: of a pass, of the rest of a step, and of a whole ascent."""
    best: dict[int, Timed] = {}
    for _ in range(repeats):
        for size in sizes:
            values = {**BASE, name: size}
            model, batch = build(values, width)
            _, (found,) = timed(model, batch, (RUN,), values["steps"])[0]
            old = best.get(size, found)
            best[size] = Timed(
                min(old.one_pass, found.one_pass), min(old.rest, found.rest), min(old.total, found.total),
                found.steps, found.rise,
            )  # fmt: skip
    columns = {"pass": "one_pass", "geometry": "rest", "ascent": "total"}
    points = {column: {size: getattr(best[size], field) for size in sizes} for column, field in columns.items()}
    return {
        "quantity": name,
        "sizes": list(sizes),
        "seconds": {column: list(values.values()) for column, values in points.items()},
        "fit": {column: fit(values) for column, values in points.items()},
    }


def measure(quick: bool = False) -> dict[str, Any]:
    width, repeats = (16, 1) if quick else (256, REPEATS)
    rows = []
    for name, sizes in (QUICK if quick else SIZES).items():
        rows.append(sweep(name, sizes, repeats, width))
        fits = rows[-1]["fit"]
        shown = ", ".join(f"{k} {v['exponent']:.2f} ± {v['stderr']:.2f}" for k, v in fits.items())
        print(f"  {name} {sizes}: {shown}", flush=True)
    return {"base": {**BASE, "width": width, "tokens": TOKENS}, "rows": rows}


if __name__ == "__main__":
    alone(measure, __doc__, "tiny sizes, to see that it runs")
