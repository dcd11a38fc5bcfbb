"""What there is to choose from in a score, by name, and what each metric is called and described as.

Only the standard library is imported here: the command line shows the choices before it loads anything. What a metric
computes is in :mod:`hf_geosharp.geometry.metrics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_QUOTIENT = (
    "on the quotient by the symmetries that were found on the model: weights that differ only by these have the same "
    "score"
)
_NO_QUOTIENT = "without the model's symmetries: the same function with other weights can have another score"


@dataclass(frozen=True)
class Metric:
    """One way to measure the length of a perturbation, as users meet it.

    ``paired`` says whether it knows pairs, so that symmetries are divided out; ``geodesic`` and ``rho`` are the default
    ones (``benchmarks/radius.py``); ``type`` the name of its score in the metadata of cards, ``title`` in texts;
    ``length`` completes "length is measured".
    """

    name: str
    paired: bool
    geodesic: Literal["first", "second", "exact"]
    rho: float
    type: str
    title: str
    length: str


METRICS = {
    metric.name: metric
    for metric in (
        Metric(
            "inv", True, "second", 0.1, "geodesic_sharpness", "Geodesic sharpness",
            f"as the relative change of each factor, {_QUOTIENT}",
        ),
        Metric(
            "mix", True, "exact", 0.01, "geodesic_sharpness", "Geodesic sharpness",
            f"as the absolute change of the products of the factors, {_QUOTIENT}",
        ),
        Metric(
            "adaptive", False, "first", 0.1, "adaptive_sharpness", "Adaptive sharpness",
            f"relative to each weight, {_NO_QUOTIENT}",
        ),
        Metric(
            "euclidean", False, "first", 0.1, "euclidean_sharpness", "Euclidean sharpness",
            f"as it is, {_NO_QUOTIENT}",
        ),
    )
}  # fmt: skip
"""By name."""


def title_of(metric: str) -> str:
    """What a score by this metric is called; one that is not known here may be a later version's."""
    return METRICS[metric].title if metric in METRICS else "Sharpness"


BASELINES = tuple(metric.name for metric in METRICS.values() if not metric.paired)
GEODESICS = ("first", "second", "exact")
SYMMETRIES = ("full", "attention", "paper")
ASCENTS = ("auto", "secant", "apgd")
"""How the maximum is searched: by the secant ascent and, in rough balls, Auto-PGD; or by one of them alone."""
PATIENCE = 13
"""Steps in which the secant ascent has to settle, which it is asked before the last one; else the ball is rough."""

MORE = 3
"""How many times as many steps Auto-PGD takes in a rough ball as were asked for."""


def search(ascent: str, steps: int, starts: int = 1) -> str:
    """The search for the maximum in words: what climbs, and how far."""
    auto_pgd = f"{steps} {'step' if steps == 1 else 'steps'} of Auto-PGD"
    if ascent == "auto":
        text = search("secant", min(steps, PATIENCE))
        if steps > PATIENCE:
            text += f", and {MORE * steps} of Auto-PGD in rough balls"
    elif ascent == "secant":
        text = f"at most {steps} {'step' if steps == 1 else 'steps'} of the secant ascent"
    else:
        text = auto_pgd if ascent == "apgd" else f"{ascent}, {steps} steps"
    return text if starts == 1 else f"{text}, from each of {starts} starts"


PARAMS = ("all", "lora")
PER = ("layer", "head", "kind")
SHARDS = ("batches", "samples")
ON_NAN = ("stop", "skip")
DTYPES = ("float32", "float64")
LABELS = ("data", "model")
