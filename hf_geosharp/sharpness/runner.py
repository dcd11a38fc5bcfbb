"""The jobs of a score on one borrowed model: all batches, each part by itself, the re-run and the baselines."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_geosharp.errors import GeosharpWarning, ModelError, UsageError, WorldError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.geometry.space import Space, Tangent, Vector
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.ascent import average
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.jobs import BASELINE, PART, REPRODUCIBILITY, SCORE, Ahead, Job, Ledger, Outcome
from hf_geosharp.sharpness.memory import MicroBatch
from hf_geosharp.sharpness.notes import Notes
from hf_geosharp.sharpness.objective import Loss, Objective, Reach
from hf_geosharp.sharpness.parts import Batch, Weight
from hf_geosharp.sharpness.progress import Track
from hf_geosharp.sharpness.reproducibility import NUDGE, compared
from hf_geosharp.sharpness.result import BatchScore, PartScore, Passes, Profile, Reproducible, mean_with_error
from hf_geosharp.sharpness.selection import Selection, selections
from hf_geosharp.sharpness.settings import ASCENTS, Settings
from hf_geosharp.sharpness.sharded import ShardedChart
from hf_geosharp.symmetry.map import SymmetryMap

FORESIGHT = 0.75
"""Share of the batches that have to be done for a rank without work to run the worst of them a second time."""

PROFILE_POINTS = 11
"""How many points of the way to the worst perturbation a profile has, both ends included."""


@dataclass(frozen=True)
class Runs:
    """What the batches gave, in their order: those that have a score, and the numbers of those that were skipped."""

    outcomes: list[Outcome]
    skipped: list[int]
    reduced: list[str]

    def values(self, rho: float) -> list[float]:
        """The value of each batch at a radius."""
        return [o.at(rho).value for o in self.outcomes]

    @property
    def profile(self) -> Profile | None:
        """Of the first batch, where it was asked for."""
        return next((o.profile for o in self.outcomes if o.profile is not None), None)

    def worst(self, rho: float) -> Outcome:
        """The batch that rose most; of equals the last."""
        return max(self.outcomes, key=lambda o: (o.at(rho).value, o.job.batch))


class Runner:
    """One borrowed model with its batches: runs charts on it."""

    def __init__(
        self,
        borrowed: Borrowed,
        batches: Sequence[Batch],
        settings: Settings,
        loss: Loss | None,
        weight: Weight | None,
        track: Track,
        notes: Notes,
        ledger: Ledger,
    ) -> None:
        self.borrowed, self.batches, self.settings = borrowed, batches, settings
        self.loss, self.weight, self.track, self.notes = loss, weight, track, notes
        self.ledger = ledger
        # Where a batch is split over ranks, they take every step together.
        self.split = track.world if track.shared else World()
        self.sharing = World() if borrowed.shards is None else borrowed.shards.sharing(self.split)
        self._batch_notes: list[str] = []
        self.micro = MicroBatch(settings.micro_batch, self._less_memory)
        self._highest = -math.inf
        self._chart: tuple[str, Chart] | None = None
        self._parts: dict[str, Selection] = {}

    def _less_memory(self, text: str) -> None:
        self._batch_notes.append(text)
        warnings.warn(text, GeosharpWarning, stacklevel=2)

    # ------------------------------------------------------------------------------------------------------ scores

    def run(self, symmetries: SymmetryMap, settings: Settings) -> Runs:
        """All batches at all radii."""
        jobs = [Job(SCORE, index) for index in range(len(self.batches))]
        if settings.on_nan == "stop":
            self.ledger.forget_skipped()
        known = self._resumed(jobs)
        self._highest = max((o.at(settings.radii[0]).value for o in known if o.scores), default=-math.inf)
        reduced = self._chart_of(jobs[0], symmetries, settings).reduced
        ahead = None
        if settings.reruns and settings.per is None:
            ahead = Ahead(REPRODUCIBILITY, settings.radii[0], FORESIGHT)
        outcomes = self.ledger.run(jobs, lambda job: self._do(job, symmetries, settings), self.track.refresh, ahead)
        self.notes += [note for o in outcomes for note in o.notes]
        scored = [o for o in outcomes if o.skipped is None]
        skipped = [o.job.batch for o in outcomes if o.skipped is not None]
        if not scored:
            raise ModelError(f"no batch has a score: {outcomes[0].skipped}")
        if skipped:
            self.notes.warn(
                f"{len(skipped)} of {len(outcomes)} batches were skipped, for their loss is not finite: "
                f"{', '.join(map(str, skipped))}"
            )
        return Runs(scored, skipped, reduced)

    def parts(self, symmetries: SymmetryMap, settings: Settings) -> tuple[Selection, ...]:
        """What the model is cut into, if that was asked for; told before anything is run."""
        if settings.per is None:
            return ()
        found = selections(self._chart_of(Job(SCORE, 0), symmetries, settings), settings.per)
        self._parts = {_key(part): part for part in found}
        self.track.total += (settings.steps + 1) * len(found) * len(self.batches)
        return found

    def scores_of(
        self, parts: Sequence[Selection], symmetries: SymmetryMap, settings: Settings, runs: Runs
    ) -> tuple[PartScore, ...]:
        """The score at the first radius where only one part may move, for each part."""
        first = settings.radii[0]
        jobs = [Job(PART, o.job.batch, part=_key(part)) for o in runs.outcomes for part in parts]
        self._resumed(jobs)
        outcomes = self.ledger.run(jobs, lambda job: self._do(job, symmetries, settings), self.track.refresh)
        self.notes += [note for o in outcomes for note in o.notes]
        values: dict[str, list[float]] = {}
        for outcome in outcomes:
            if outcome.skipped is not None:
                raise ModelError(f"{outcome.job.part}: {outcome.skipped}")
            values.setdefault(outcome.job.part, []).append(outcome.at(first).value)
        return tuple(
            PartScore(part.part, part.by, part.layer, part.head, part.kind, *mean_with_error(values[_key(part)])[:2])
            for part in parts
        )

    def evidence(
        self, symmetries: SymmetryMap, settings: Settings, runs: Runs
    ) -> tuple[dict[float, Reproducible], dict[str, float]]:
        """What is told beside the score: whether the worst batch repeats, and the baselines."""
        first = settings.radii[0]
        again = [runs.worst(first)] if settings.reruns else []
        jobs = [Job(REPRODUCIBILITY, o.job.batch) for o in again]
        jobs += [Job(BASELINE, o.job.batch, metric) for metric in settings.baselines for o in runs.outcomes]
        self._resumed(jobs)
        outcomes = self.ledger.run(jobs, lambda job: self._do(job, symmetries, settings), self.track.refresh)
        self.notes += [note for o in outcomes for note in o.notes]
        checks = [compared(before, o, self.borrowed.dtype) for before, o in zip(again, outcomes, strict=False)]
        values: dict[str, list[float]] = {}
        for outcome in outcomes[len(again) :]:
            if outcome.skipped is not None:
                raise ModelError(f"baseline {outcome.job.metric}: {outcome.skipped}")
            values.setdefault(outcome.job.metric, []).append(outcome.at(first).value)
        return checks[0] if checks else {}, {metric: mean_with_error(v)[0] for metric, v in values.items()}

    def _resumed(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What is done of these; one rank counts it."""
        known = self.ledger.known(jobs)
        if self.track.shared or self.track.world.leads:
            self.track.done += (self.settings.steps + 1) * sum(len(o.scores) for o in known)
        return known

    def _do(self, job: Job, symmetries: SymmetryMap, settings: Settings) -> Outcome:
        """A batch under the geometry that its job is about."""
        chart = self._chart_of(job, symmetries, settings)
        if job.stage == BASELINE:
            settings = _plain(settings, job.metric)
        if job.stage == PART:
            settings = replace(settings, rho=settings.radii[:1])
        started = time.perf_counter()
        self._batch_notes.clear()
        outcome = self._batch(chart, job, settings)
        outcome = replace(outcome, notes=tuple(self._batch_notes), seconds=time.perf_counter() - started)
        if outcome.skipped is not None:
            self.track.done += (settings.steps + 1) * len(settings.radii)
        return outcome

    def _chart_of(self, job: Job, symmetries: SymmetryMap, settings: Settings) -> Chart:
        """The chart that a job needs; there is one at a time."""
        # A part moves in the chart of all.
        key = f"{SCORE if job.stage == PART else job.stage} {job.metric}"
        if self._chart is None or self._chart[0] != key:
            self._chart = None
            self.restore()
            if job.stage == BASELINE:
                # On the weights as they are stored.
                chart = self._chart_with(SymmetryMap(), _plain(settings, job.metric).geometry)
            else:
                nudge = NUDGE[self.borrowed.dtype] if job.stage == REPRODUCIBILITY else 0.0
                seed = settings.seed + 1 if nudge else 0
                chart = self._chart_with(symmetries, settings.geometry, nudge, seed)
            self._chart = key, chart
        return self._chart[1]

    def _chart_with(self, symmetries: SymmetryMap, geometry: Geometry, nudge: float = 0.0, seed: int = 0) -> Chart:
        if self.borrowed.shards is not None:
            return ShardedChart(self.borrowed, symmetries, geometry, self.sharing, nudge=nudge, seed=seed)
        return Chart(self.borrowed, symmetries, geometry, nudge=nudge, seed=seed)

    def _batch(self, chart: Chart, job: Job, settings: Settings) -> Outcome:
        """One ball at each radius, ascending, each started from the best point of the one before."""
        index = job.batch
        objective = self._objective(index)

        def evaluate(u: Vector, gradient: bool) -> tuple[float, Tangent | None]:
            try:
                chart.write(u)
            except ArithmeticError as error:
                raise UsageError(f"batch {index}, radii {settings.radii}: {error}") from None
            value = objective.evaluate(gradient)
            return value, pull() if gradient else None

        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + index)
        base = self._base_point(chart, objective, not settings.average)
        if not math.isfinite(base):
            text = (
                f"batch {index}: the loss before any step is {base} (NaN or overflow in the model's own forward pass)"
            )
            if settings.on_nan == "stop":
                raise ModelError(f"{text}; on_nan 'skip' leaves such batches out, and says so")
            self._batch_notes.append(f"{text}: skipped")
            return Outcome(job, skipped=text)
        scores: list[tuple[float, BatchScore]] = []
        share: dict[str, float] = {}
        profile: Profile | None = None
        space, pull = self._ball(chart, job)
        # An ascent takes the memory of what it is given, so no name may hold on to it here.
        given = [] if settings.average else [(base, pull())]
        if given and job.stage == PART and _still(space, given[0][1]):
            self.track.done += 1 + settings.steps
            score = BatchScore(index, base, 0.0, 0, True, 1, "converged")
            return Outcome(job, base, ((settings.radii[0], score),), Passes(objective.forwards, objective.backwards))
        ends: list[Tangent] = []
        for rho in sorted(set(settings.radii)):
            report = self.track.report(job.stage, index + 1, rho)
            if settings.average:
                generator.manual_seed(settings.seed * 1_000_003 + index)
                rise, end = average(space, evaluate, rho, settings.steps, generator, base=base, report=report)
                if not math.isfinite(rise):
                    raise ModelError(
                        f"batch {index}: the loss is not finite at a random perturbation of rho {rho:g}; "
                        "use a smaller radius"
                    )
                score = BatchScore(index, base, rise, settings.steps, True, settings.steps)
            else:
                climb = ASCENTS[settings.ascent](
                    space, evaluate, rho, settings.steps, start=ends.pop() if ends else None, base=base,
                    given=given.pop() if given else None,
                    stationary=settings.stationary, generator=generator, report=report,
                )  # fmt: skip
                end = climb.u
                score = BatchScore(
                    index, base, climb.rise, climb.steps, climb.converged, climb.steps + 1, climb.stopped
                )
                if not climb.finite:
                    where = f"{job.part}, rho {rho:g}" if job.part else f"rho {rho:g}"
                    self._batch_notes.append(
                        f"batch {index}: the loss is not finite at some points of the ball, {where}"
                    )
                del climb
            # The pass at the start, and the steps that were not needed.
            self.track.done += 1 + settings.steps - score.steps
            scores.append((rho, score))
            if job.stage == SCORE and rho == settings.radii[0] and score.value >= self._highest:
                # Where the worst perturbation lies is told of the batch that rose most.
                self._highest, share = score.value, chart.share(end)
            if settings.profile and job == Job(SCORE, 0) and rho == settings.radii[0]:
                profile = self._profile(chart, end, rho, base)
            ends = [end]
            del end
        self._in_step(scores, ends[0])
        passes = Passes(objective.forwards, objective.backwards)
        return Outcome(job, base, tuple(scores), passes, share, profile=profile)

    def _objective(self, index: int) -> Objective:
        return Objective(
            self.borrowed.model, self.batches[index], self.loss, self.weight, self.micro, self.split,
            self.borrowed.shards,
        )  # fmt: skip

    def _ball(self, chart: Chart, job: Job) -> tuple[Space, Callable[[], Tangent]]:
        """Where a job climbs, and the gradient there of the loss whose gradients the parameters hold."""
        if job.stage != PART:
            return chart.space, chart.pull
        space = self._parts[job.part].within(chart.space)
        return space, lambda: space.project_(chart.pull())

    def _profile(self, chart: Chart, u: Tangent, rho: float, base: float) -> Profile | None:
        """The rise of the loss of the first batch on the way to u; its passes are not those of the score."""
        objective = self._objective(0)
        t = tuple(i / (PROFILE_POINTS - 1) for i in range(PROFILE_POINTS))
        point = chart.space.empty()

        def along(order: Order | None) -> tuple[float, ...]:
            rises = [0.0]
            for fraction in t[1:]:
                chart.write(chart.space.combine(point, (u, fraction)), order)
                rises.append(objective.evaluate(False) - base)
            return tuple(rises)

        found = Profile(t, along(None), along("first"), rho)
        if all(map(math.isfinite, (*found.geodesic, *found.straight))):
            return found
        self._batch_notes.append(f"batch 0: no profile, for the loss is not finite at some points of it, rho {rho:g}")
        return None

    def _in_step(self, scores: Sequence[tuple[float, BatchScore]], u: Tangent) -> None:
        """Ranks that share a ball must have gone the same way, to the last bit.

        Raises:
            WorldError: they have not.
        """
        # Of a sharded model each rank has coordinates of its own.
        sums = [float(p.double().sum()) for p in u.pieces] if self.borrowed.shards is None else []
        marks = self.split.gather((list(scores), sums))
        if any(mark != marks[0] for mark in marks):
            raise WorldError(
                "the ranks drifted apart: they compute the same steps with different rounding. Use equal machines and "
                "equally many threads, or shard='batches'"
            )

    def _base_point(self, chart: Chart, objective: Objective, gradient: bool) -> float:
        """The loss at the model's own weights; with ``gradient`` the parameters hold its gradient afterwards.

        The chart then sees what the batch can reach.
        """
        chart.widen()
        with Reach(self.borrowed.model) as reach:
            value = objective.evaluate(gradient)
        if not gradient or not math.isfinite(value):
            return value
        seen = reach.rows
        owners = {n: id(leaf.members[0][0]) for n, leaf in self.borrowed.leaves.items()}
        chart.focus(self._union({n: seen[key] for n, key in owners.items() if key in seen}))
        return value

    def _union(self, seen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows that any rank looks up for its part of the batch."""
        if self.split.size == 1:
            return seen
        every = self.split.gather({name: ids.cpu() for name, ids in seen.items()})
        names = sorted({name for ranks in every for name in ranks})
        devices = {n: leaf.tensor.device for n, leaf in self.borrowed.leaves.items()}
        return {n: torch.unique(torch.cat([ranks[n] for ranks in every if n in ranks])).to(devices[n]) for n in names}

    def restore(self) -> None:
        """The model's own weights, as they were borrowed."""
        with torch.no_grad():
            for name, leaf in self.borrowed.leaves.items():
                leaf.tensor.copy_(self.borrowed.originals[name])


def _key(part: Selection) -> str:
    """What a part is called among those of all ways to cut a model."""
    return f"{part.by} {part.part}"


def _still(space: Space, g: Tangent) -> bool:
    """Whether nothing in a space can move, for all weights in it are zero."""
    return space.norm(g) == 0 and space.norm(space.random(torch.Generator().manual_seed(0))) == 0


def _plain(settings: Settings, metric: str) -> Settings:
    """The same ascent under another metric, at the first radius."""
    return replace(settings, metric=metric, geodesic="first", rho=settings.radii[:1], baselines=(), profile=False)
