"""Batches in, per-batch values, mean, error and reproducibility out."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.errors import DataError, GeosharpWarning, ModelError, UsageError
from hf_geosharp.geometry.metrics import METRICS, ORDERS, Order
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.ascent import auto_pgd, average
from hf_geosharp.sharpness.borrow import Borrowed, borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Batch, Loss, Objective, Reach, Weight, rows, samples
from hf_geosharp.sharpness.result import (
    BatchScore,
    CurvePoint,
    PairSummary,
    Passes,
    Reproducible,
    SharpnessResult,
    mean_with_error,
)
from hf_geosharp.symmetry.find import PRESETS, find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.verify import Verified, verify

DEFAULT_RHO = {"inv": 0.1, "mix": 0.01, "adaptive": 0.1, "euclidean": 0.1}
"""Radius by metric; how it was chosen is measured in benchmarks/radius.py and explained in the README."""

AGREEMENT = 0.01
"""Relative difference that a re-run from slightly moved weights may show."""

NUDGE = {torch.float32: 1e-6, torch.float64: 1e-9}
"""Relative size of that move."""

COPY_LIMIT = 2 << 30
"""Symmetries are verified on a float64 copy where it takes at most this many bytes, else on the model itself."""


@dataclass(frozen=True)
class Progress:
    """How far a score has come; ``done`` of ``total`` count forward passes over everything."""

    stage: str
    batch: int
    batches: int
    step: int
    steps: int
    rho: float
    value: float
    done: int
    total: int


@dataclass(frozen=True)
class Settings:
    """How a score is taken; see :func:`hf_geosharp.score` for the meaning of each.

    Raises:
        UsageError: a value that is none of the choices, or out of range.
    """

    metric: str = "inv"
    geodesic: Order | None = None
    symmetries: str = "full"
    rho: tuple[float, ...] = ()
    steps: int = 20
    seed: int = 0
    average: bool = False
    baselines: tuple[str, ...] = ()
    damping: float = 0.0
    micro_batch: int | None = None
    reproducibility: bool = True
    verify: bool = True
    stationary: bool = False
    """The loss has a minimum at the model's own weights by construction."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("metric", self.metric, tuple(METRICS)),
            ("geodesic", self.geodesic, (None, *ORDERS)),
            ("symmetries", self.symmetries, tuple(PRESETS)),
            *(("baseline", b, ("adaptive", "euclidean")) for b in self.baselines),
        ):
            if value not in known:
                raise UsageError(f"{name} is {value!r}; it is one of {', '.join(str(k) for k in known if k)}")
        if any(not (r > 0 and math.isfinite(r)) for r in self.rho):
            raise UsageError(f"rho is {self.rho}; a radius is positive and finite")
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; at least 1 is needed")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise UsageError(f"micro_batch is {self.micro_batch}; at least 1 is needed")
        if not (self.damping >= 0 and math.isfinite(self.damping)):
            raise UsageError(f"damping is {self.damping}; it is not negative")

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii asked for, or the metric's default."""
        return self.rho or (DEFAULT_RHO[self.metric],)

    @property
    def order(self) -> Order:
        """The geodesic asked for; by default second order on pairs, and straight lines elsewhere."""
        return self.geodesic or ("second" if self.metric in ("inv", "mix") else "first")

    @property
    def geometry(self) -> Geometry:
        """Metric and geodesic."""
        return Geometry(self.metric, self.order, self.damping)


@dataclass
class _Track:
    """Counts passes and tells who asked."""

    tell: Callable[[Progress], None] | None
    batches: int
    steps: int
    total: int
    done: int = 0
    passes: Passes = field(default_factory=lambda: Passes(0, 0))

    def report(self, stage: str, batch: int, rho: float) -> Callable[[int, float], None]:
        def step(k: int, value: float) -> None:
            self.done += 1
            self.say(stage, batch, k, rho, value)

        return step

    def say(self, stage: str, batch: int = 0, step: int = 0, rho: float = 0.0, value: float = 0.0) -> None:
        if self.tell is not None:
            self.tell(
                Progress(
                    stage, batch, self.batches, step, self.steps, rho, value, min(self.done, self.total), self.total
                )
            )


def estimate(
    model: nn.Module,
    batches: Sequence[Batch],
    settings: Settings,
    *,
    loss: Loss | None = None,
    weight: Weight | None = None,
    dtype: torch.dtype | None = None,
    model_identity: Mapping[str, Any] | None = None,
    data_identity: Mapping[str, Any] | None = None,
    versions: Mapping[str, str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """The sharpness of a model on batches, one ball for each.

    The model comes back bit-identical whatever happens.

    Args:
        model: a module that takes a batch as keyword arguments.
        batches: dicts of tensors, samples first.
        settings: how.
        loss: (outputs, batch) -> losses of the samples or their mean; the model's own if None.
        weight: number of loss terms in a (micro-)batch; samples if None.
        dtype: computes in float64 if asked; else float32, or what the model has.
        model_identity, data_identity, versions: recorded as they are.
        progress: told after every step.

    Raises:
        DataError: no batches, or an empty one.
        ModelError: NaN in a parameter, no loss, a loss that is not finite at the model's own weights.
        UnsupportedModelError: quantised, offloaded or meta weights.
    """
    started = time.perf_counter()
    if not batches:
        raise DataError("there is no batch to score: the data are empty")
    notes: list[str] = []
    per_pass = settings.steps + 1
    checks = 1 if settings.reproducibility and not settings.average else 0
    total = per_pass * len(settings.radii) * (len(batches) + checks) + per_pass * len(batches) * len(settings.baselines)
    track = _Track(progress, len(batches), settings.steps, total)
    with borrow(model, dtype) as borrowed:
        scored = _Scored(borrowed, batches, settings, loss, weight, track, notes)
        track.say("verify")
        verified = scored.symmetries()
        effective = scored.settings
        runs = scored.run(verified.map, effective)
        reproducible = scored.reproducible(verified.map, effective, runs)
        baselines = {b: scored.baseline(b, effective) for b in effective.baselines}
        stored = borrowed.stored_dtypes
    radii = effective.radii
    curve = [_curve_point(r, runs.values[r], reproducible.get(r)) for r in sorted(set(radii))]
    head = next(c for c in curve if c.rho == radii[0])
    check = reproducible.get(head.rho, Reproducible(None, None, "not checked"))
    for point in curve:
        if point.reproducible is False:
            notes.append(
                f"the score at rho {point.rho:g} is not reproducible: a re-run from weights moved by a relative "
                f"{NUDGE[borrowed.dtype]:g} differs by {reproducible[point.rho].spread:.1%}; use a smaller radius"
            )
    return SharpnessResult(
        geodesic_sharpness=head.geodesic_sharpness,
        stderr=head.stderr,
        interval95=head.interval95,
        base_loss=math.fsum(runs.base) / len(runs.base),
        rho=head.rho,
        metric=effective.metric,
        geodesic=effective.order,
        symmetries=effective.symmetries if effective.geometry.paired else "none",
        mode="average" if effective.average else "worst",
        steps=effective.steps,
        seed=effective.seed,
        samples=sum(samples(b) for b in batches),
        batch_size=samples(batches[0]),
        per_batch=list(runs.scores[head.rho]),
        curve=curve,
        baselines=baselines,
        pairs=_summary(verified, runs.reduced),
        share=dict(sorted(runs.share.items(), key=lambda item: -item[1])),
        reproducible=check,
        passes=runs.passes,
        seconds=time.perf_counter() - started,
        model={**(model_identity or {"class": type(model).__name__}), "stored_dtypes": list(stored)},
        data=dict(data_identity or {}),
        versions=dict(versions or {}),
        warnings=[*dict.fromkeys(notes)],
    )


@dataclass
class _Runs:
    """What the batches gave: losses at the base point, and scores and values by radius."""

    base: list[float] = field(default_factory=list)
    scores: dict[float, list[BatchScore]] = field(default_factory=dict)
    values: dict[float, list[float]] = field(default_factory=dict)
    passes: Passes = field(default_factory=lambda: Passes(0, 0))
    share: dict[str, float] = field(default_factory=dict)
    reduced: list[str] = field(default_factory=list)


class _Scored:
    """One borrowed model with its batches: runs charts on it."""

    def __init__(
        self,
        borrowed: Borrowed,
        batches: Sequence[Batch],
        settings: Settings,
        loss: Loss | None,
        weight: Weight | None,
        track: _Track,
        notes: list[str],
    ) -> None:
        self.borrowed, self.batches, self.settings = borrowed, batches, settings
        self.loss, self.weight, self.track, self.notes = loss, weight, track, notes

    # -------------------------------------------------------------------------------------------------- symmetries

    def symmetries(self) -> Verified:
        """Found on the model, proved on its own data; without any, the settings turn adaptive."""
        nothing = Verified(SymmetryMap(), None, None)
        if not self.settings.geometry.paired:
            return nothing
        examples = self._examples()
        model = self._wide_copy()
        found = find_symmetries(model, examples[0], preset=self.settings.symmetries)
        verified = verify(model, found, examples, seed=self.settings.seed) if self.settings.verify else None
        verified = verified or Verified(found, None, None)
        for reason in verified.map.dropped:
            self._warn(f"symmetry dropped: {reason}")
        if not verified.map.pairs:
            self._warn(
                "no attention symmetry was found in this model: scored with the adaptive metric on all parameters"
            )
            self.settings = replace(
                self.settings,
                metric="adaptive",
                geodesic="first",
                rho=self.settings.rho or (DEFAULT_RHO["adaptive"],),
            )
            return Verified(replace(nothing.map, dropped=verified.map.dropped), None, None)
        return verified

    def _examples(self) -> list[dict[str, Any]]:
        """Two small inputs out of the data: the first and the last samples of the first batch."""
        device = next(self.borrowed.model.parameters()).device
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.batches[0].items()}
        n = samples(batch)
        size = max(1, min(4, n // 2))
        return [rows(batch, 0, size), rows(batch, n - size, n)]

    def _wide_copy(self) -> nn.Module:
        """A float64 copy of the model to prove symmetries on, or the model itself where that is too large."""
        model = self.borrowed.model
        if any(len(leaf.members) > 1 for leaf in self.borrowed.leaves.values()):
            return model  # a copy would part the parameters that share memory
        if self.borrowed.dtype == torch.float64 or 8 * sum(p.numel() for p in model.parameters()) > COPY_LIMIT:
            return model
        try:
            return copy.deepcopy(model).double()
        except (TypeError, RuntimeError, ValueError):  # hooks and compiled modules that cannot be copied
            return model

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(text, GeosharpWarning, stacklevel=5)

    # ------------------------------------------------------------------------------------------------------ scores

    def run(self, symmetries: SymmetryMap, settings: Settings) -> _Runs:
        """All batches at all radii."""
        chart = Chart(self.borrowed, symmetries, settings.geometry)
        runs = _Runs(reduced=chart.reduced)
        for index in range(len(self.batches)):
            self._batch(chart, index, settings, runs, "score")
        return runs

    def _batch(self, chart: Chart, index: int, settings: Settings, runs: _Runs, stage: str) -> None:
        """One ball at each radius, ascending, each started from the best point of the one before."""
        objective = Objective(self.borrowed.model, self.batches[index], self.loss, self.weight, settings.micro_batch)

        def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
            try:
                chart.write(u)
            except ArithmeticError as error:
                raise UsageError(f"batch {index}, radii {settings.radii}: {error}") from None
            value = objective.evaluate(gradient)
            return value, chart.pull() if gradient else None

        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + index)
        base, g = self._base_point(chart, objective, index, not settings.average)
        given = None if g is None else (base, g)
        del g
        start: Tangent | None = None
        for rho in sorted(set(settings.radii)):
            report = self.track.report(stage, index + 1, rho)
            if settings.average:
                generator.manual_seed(settings.seed * 1_000_003 + index)
                rise, start = average(chart.space, evaluate, rho, settings.steps, generator, base=base, report=report)
                if not math.isfinite(rise):
                    raise ModelError(
                        f"batch {index}: the loss is not finite at a random perturbation of rho {rho:g}; "
                        "use a smaller radius"
                    )
                score = BatchScore(index, base, rise, settings.steps, True)
            else:
                climb = auto_pgd(
                    chart.space, evaluate, rho, settings.steps, start=start, base=base, given=given,
                    stationary=settings.stationary, generator=generator, report=report,
                )  # fmt: skip
                start, given = climb.u, None
                score = BatchScore(index, base, climb.rise, climb.steps, climb.converged)
                if not climb.finite:
                    self.notes.append(f"batch {index}: the loss is not finite at some points of the ball, rho {rho:g}")
            self.track.done += 1
            runs.scores.setdefault(rho, []).append(score)
            runs.values.setdefault(rho, []).append(score.value)
            if rho == settings.radii[0] and score.value >= max(runs.values[rho]):
                # Where the worst perturbation lies is told of the batch that rose most.
                runs.share = chart.share(start)
        runs.base.append(base)
        runs.passes = Passes(runs.passes.forwards + objective.forwards, runs.passes.backwards + objective.backwards)

    def _base_point(
        self, chart: Chart, objective: Objective, index: int, gradient: bool
    ) -> tuple[float, Tangent | None]:
        """Loss (and gradient) at the model's own weights; the chart is focused on what the batch can reach."""
        chart.widen()
        with Reach(self.borrowed.model) as reach:
            value = objective.evaluate(gradient)
        if not math.isfinite(value):
            raise ModelError(
                f"batch {index}: the loss before any step is {value} (NaN or overflow in the model's own forward pass)"
            )
        if not gradient:
            return value, None
        rows = reach.rows
        owners = {n: id(leaf.members[0][0]) for n, leaf in self.borrowed.leaves.items()}
        chart.focus({n: rows[key] for n, key in owners.items() if key in rows})
        return value, chart.pull()

    # ----------------------------------------------------------------------------------------------------- evidence

    def reproducible(self, symmetries: SymmetryMap, settings: Settings, runs: _Runs) -> dict[float, Reproducible]:
        """The batch with the largest value, run again from weights moved a little, at every radius."""
        if not settings.reproducibility or settings.average:
            return {}
        values = runs.values[settings.radii[0]]
        index = max(range(len(values)), key=values.__getitem__)
        nudge = NUDGE[self.borrowed.dtype]
        self.restore()
        again = _Runs()
        self._batch(
            Chart(self.borrowed, symmetries, settings.geometry, nudge=nudge, seed=settings.seed + 1),
            index,
            settings,
            again,
            "reproducibility",
        )
        self.restore()
        how = (
            f"batch {index} run again from weights moved by a relative {nudge:g}; values may differ by {AGREEMENT:.0%}"
        )
        out = {}
        for rho, (value,) in again.values.items():
            first = runs.values[rho][index]
            # Below the rounding of the loss itself there is nothing to compare.
            floor = 100 * torch.finfo(self.borrowed.dtype).eps * max(abs(runs.base[index]), 1e-3)
            spread = abs(value - first) / max(abs(first), abs(value), floor)
            out[rho] = Reproducible(spread <= AGREEMENT, spread, how)
        return out

    def restore(self) -> None:
        """The model's own weights, as they were borrowed."""
        with torch.no_grad():
            for name, leaf in self.borrowed.leaves.items():
                leaf.tensor.copy_(self.borrowed.originals[name])

    def baseline(self, metric: str, settings: Settings) -> float:
        """The same ascent under another metric, at the first radius, on the weights as they are stored."""
        self.restore()
        plain = replace(settings, metric=metric, geodesic="first", rho=settings.radii[:1], baselines=())
        chart, runs = Chart(self.borrowed, SymmetryMap(), plain.geometry), _Runs()
        for index in range(len(self.batches)):
            self._batch(chart, index, plain, runs, "baseline")
        return mean_with_error(runs.values[plain.radii[0]])[0]


def _curve_point(rho: float, values: Sequence[float], check: Reproducible | None) -> CurvePoint:
    mean, stderr, interval = mean_with_error(values)
    return CurvePoint(rho, mean, stderr, interval, None if check is None else check.ok)


def _summary(verified: Verified, reduced: Sequence[str]) -> PairSummary:
    by_kind: dict[str, int] = {}
    folded: dict[str, int] = {}
    for pair in verified.map.pairs:
        key = f"{pair.kind} {pair.group.name}"
        by_kind[key] = by_kind.get(key, 0) + pair.copies
    for fold in verified.map.folds:
        folded[fold.kind] = folded.get(fold.kind, 0) + 1
    return PairSummary(
        sum(by_kind.values()), verified.map.dimension, by_kind, folded, list(reduced), list(verified.map.dropped),
        verified.deviation, verified.control,
    )  # fmt: skip
