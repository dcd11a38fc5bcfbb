"""How a score is taken."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from hf_geosharp.arguments import check, check_choice, fraction, whole
from hf_geosharp.errors import UsageError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.sharpness.ascent import auto_pgd
from hf_geosharp.sharpness.chart import Geometry
from hf_geosharp.sharpness.choices import (
    ASCENTS,
    BASELINES,
    GEODESICS,
    METRICS,
    MORE,
    ON_NAN,
    PARAMS,
    PATIENCE,
    PER,
    SHARDS,
    SYMMETRIES,
)
from hf_geosharp.sharpness.secant import secant
from hf_geosharp.symmetry.layouts import Layout, layouts_of

WITHIN = 1e-18, 1e18
"""Radii whose squares single precision can hold."""

CLIMBS = {"secant": secant, "apgd": auto_pgd}
"""The ascents, of which "auto" is made; measured against each other and against that in benchmarks/ascent.py."""


def radii_of(rho: Any) -> tuple[float, ...]:
    """A radius or several, in whatever holds them (sequences, arrays, tensors); nothing for None.

    Raises:
        UsageError: it holds no numbers, or nothing.
    """
    if rho is None:
        return ()
    try:
        if isinstance(rho, (str, bytes)):
            # Of its characters each may be a number.
            raise TypeError
        # Arrays and tensors without a dimension look like sequences, and are numbers.
        several = isinstance(rho, Iterable) and getattr(rho, "ndim", None) != 0
        radii = tuple(float(r) for r in rho) if several else (float(rho),)
    except (TypeError, ValueError):
        raise UsageError(f"rho is {rho!r}; it is a number or a sequence of numbers") from None
    if not radii:
        raise UsageError(f"rho is {rho!r}: no radius; leave it out for the metric's default")
    return radii


def several(value: Any) -> tuple[Any, ...]:
    """What is in a sequence, or a single thing by itself."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


_FLAGS = ("average", "gradient_checkpointing", "compile", "reproducibility", "verify", "profile")


@dataclass(frozen=True)
class Settings:
    """How a score is taken; see :func:`hf_geosharp.score` for the meaning of each.

    Raises:
        UsageError: a value that is none of the choices, or out of range.
    """

    metric: str = "inv"
    geodesic: Order | None = None
    symmetries: str = "full"
    layouts: tuple[Layout, ...] = ()
    """Descriptions of attention modules that cannot be traced."""
    rho: tuple[float, ...] = ()
    ascent: str = "auto"
    steps: int = 20
    starts: int = 1
    """Climbs in each ball, from points far apart."""
    seed: int = 0
    average: bool = False
    baselines: tuple[str, ...] = ()
    damping: float = 0.0
    micro_batch: int | Literal["auto"] | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    """Whether the model's passes are compiled."""
    shard: str = "batches"
    on_nan: str = "stop"
    reproducibility: bool = True
    verify: bool = True
    params: str = "all"
    per: str | None = None
    profile: bool = False
    stationary: bool = False
    """The loss has a minimum at the model's own weights by construction."""

    def __post_init__(self) -> None:
        check(**{name: getattr(self, name) for name in _FLAGS})
        for name in ("steps", "starts", "seed", "micro_batch"):
            number = getattr(self, name)
            if name != "micro_batch" or not (number is None or isinstance(number, str)):
                object.__setattr__(self, name, whole(name, number))
        object.__setattr__(self, "damping", fraction("damping", self.damping))
        for name, value, known in (
            ("metric", self.metric, tuple(METRICS)),
            ("geodesic", self.geodesic, (None, *GEODESICS)),
            ("symmetries", self.symmetries, SYMMETRIES),
            ("ascent", self.ascent, ASCENTS),
            ("shard", self.shard, SHARDS),
            ("on_nan", self.on_nan, ON_NAN),
            ("params", self.params, PARAMS),
            ("per", self.per, (None, *PER)),
            *(("baseline", b, BASELINES) for b in self.baselines),
        ):
            check_choice(name, value, known)
        layouts_of(self.layouts)
        if any(not (r > 0 and math.isfinite(r)) for r in self.rho):
            raise UsageError(f"rho is {self.rho}; a radius is positive and finite")
        if any(not WITHIN[0] <= r <= WITHIN[1] for r in self.rho):
            raise UsageError(f"rho is {self.rho}; a radius lies between {WITHIN[0]:g} and {WITHIN[1]:g}")
        for name in ("steps", "starts"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed is {self.seed}; it lies between 0 and {2**32 - 1}")
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise UsageError(f"micro_batch is {self.micro_batch!r}; it is a number or 'auto'")
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise UsageError(f"micro_batch is {self.micro_batch}; at least 1 is needed")
        if not (self.damping >= 0 and math.isfinite(self.damping)):
            raise UsageError(f"damping is {self.damping}; it is not negative")
        if self.average and self.steps % 2:
            raise UsageError(
                f"steps is {self.steps}: the average case draws in pairs of opposite sign, which cancel the slope of "
                "the loss; an even number is needed"
            )
        if self.average and (self.per or self.profile or self.starts > 1 or self.ascent != "auto"):
            raise UsageError("per, profile, starts and ascent are available only for the worst case: leave out average")
        paired = " or ".join(metric.name for metric in METRICS.values() if metric.paired)
        for asked, text in (
            (self.per == "head", f"per is 'head', but the metric {self.metric} does not distinguish heads"),
            (
                self.geodesic not in (None, "first"),
                f"geodesic is {self.geodesic!r}, but the geodesics of the metric {self.metric} are straight lines",
            ),
            (self.damping > 0, f"damping is {self.damping:g}, but the metric {self.metric} has no directions to damp"),
        ):
            if asked and not METRICS[self.metric].paired:
                raise UsageError(f"{text}: use {paired}")

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii asked for, each once, or the metric's default."""
        return tuple(dict.fromkeys(self.rho)) or (METRICS[self.metric].rho,)

    @property
    def first(self) -> tuple[str, int]:
        """The ascent from the first start, and its steps."""
        return ("secant", min(PATIENCE, self.steps)) if self.ascent == "auto" else (self.ascent, self.steps)

    @property
    def rough(self) -> tuple[str, int] | None:
        """The ascent from the base point where the first one does not settle, and its steps.

        None where so few steps were asked for that it may have had too few.
        """
        asked = self.ascent == "auto" and not self.average and self.steps > PATIENCE
        return ("apgd", MORE * self.steps) if asked else None

    @property
    def further(self) -> tuple[str, int]:
        """The ascent from all other starts, and its steps."""
        return ("secant" if self.ascent == "auto" else self.ascent), self.steps

    @property
    def evaluations(self) -> int:
        """How often the loss of a batch is asked for at one radius, at most."""
        if self.average:
            return self.steps + 1
        climbs = [self.first, *([self.rough] if self.rough else []), *[self.further] * (self.starts - 1)]
        return sum(steps + 1 for _, steps in climbs)

    @property
    def reruns(self) -> bool:
        """Whether one batch is run a second time."""
        return self.reproducibility and not self.average

    @property
    def order(self) -> Order:
        """The geodesic of pairs asked for, or else the metric's default; other weights go along straight lines."""
        return self.geodesic or METRICS[self.metric].geodesic

    @property
    def approximate(self) -> bool:
        """Whether pairs move along something else than their geodesics."""
        return METRICS[self.metric].paired and self.order != "exact"

    @property
    def unpaired(self) -> Settings:
        """The settings of a model in which no symmetry is found."""
        return replace(self, metric="adaptive", geodesic="first", damping=0.0)

    @property
    def recorded(self) -> dict[str, Any]:
        """What a result says of them."""
        paired = METRICS[self.metric].paired
        return {
            "metric": self.metric,
            "geodesic": self.order,
            "symmetries": self.symmetries if paired else "none",
            "rho": self.radii[0],
            "mode": "average" if self.average else "worst",
            "ascent": "none" if self.average else self.ascent,
            "steps": self.steps,
            "starts": self.starts,
            "seed": self.seed,
            "params": self.params,
            "damping": self.damping if paired else 0.0,
        }

    @property
    def geometry(self) -> Geometry:
        """Metric and geodesic."""
        return Geometry(self.metric, self.order, self.damping)
