"""The jobs of a score on one borrowed model: all batches, each part by itself, the re-run and the baselines."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_geosharp.errors import ModelError, WorldError, warn
from hf_geosharp.geometry.integration import EndlessError
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.ball import Ball
from hf_geosharp.sharpness.base_point import BasePoint
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.compiled import compiled
from hf_geosharp.sharpness.jobs import BASELINE, PART, REPRODUCIBILITY, SCORE, Ahead, Job, Ledger, Outcome
from hf_geosharp.sharpness.memory import MicroBatch, is_out_of_memory
from hf_geosharp.sharpness.notes import Notes
from hf_geosharp.sharpness.objective import Loss, Objective
from hf_geosharp.sharpness.parts import Batch, Weight, excerpt, on_device, samples, structure
from hf_geosharp.sharpness.progress import Track
from hf_geosharp.sharpness.reproducibility import NUDGE, compared, measured, resolution, swallowed
from hf_geosharp.sharpness.result import BatchScore, PartScore, Passes, Profile, Reproducible
from hf_geosharp.sharpness.selection import Selection, selections
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.sharded import ShardedChart
from hf_geosharp.sharpness.starts import told
from hf_geosharp.sharpness.statistics import mean_with_error
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.verify import verify

FORESIGHT = 0.75
"""Share of the batches that have to be done for a rank without work to run the worst of them a second time."""


MOST_NAMED = 6
"""Parts that a warning names."""

CLEARLY = 0.1
"""A symmetry that moves the outputs by more than this share of its control is none; rounding moves them by less."""


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
        symmetries: SymmetryMap,
        settings: Settings,
        loss: Loss | None,
        weight: Weight | None,
        track: Track,
        notes: Notes,
        ledger: Ledger,
    ) -> None:
        """``symmetries`` are proved on the model, and ``settings`` are those that go with them."""
        self.borrowed, self.batches = borrowed, batches
        self.symmetries, self.settings = symmetries, settings
        self.loss, self.weight, self.track, self.notes = loss, weight, track, notes
        self.ledger = ledger
        self.split = track.together
        self.sharing = World() if borrowed.shards is None else borrowed.shards.sharing(self.split)
        self._batch_notes: list[str] = []
        self.micro = MicroBatch(settings.micro_batch, self._tell)
        self._highest = -math.inf
        self._chart: tuple[str, Chart] | None = None
        self._ranks: list[tuple[Tensor, ...]] = []
        """Of the pairs at the base point, of which every run makes a chart first."""
        self._noise: float | None = None
        self._run = compiled(borrowed.model) if settings.compile else None
        self._parts: dict[str, dict[str, Selection]] = {}
        """By stage: each has a chart of its own."""
        self.base_point = BasePoint(borrowed, symmetries, self._loss_of, self._refuted, self._put_back, self._tell)

    def _tell(self, text: str) -> None:
        """Warns of something at a batch, which its outcome carries."""
        self._batch_notes.append(text)
        warn(text)

    # ------------------------------------------------------------------------------------------------------ scores

    def run(self) -> Runs:
        """All batches at all radii."""
        settings = self.settings
        jobs = [Job(SCORE, index) for index in range(len(self.batches))]
        if settings.on_nan == "stop":
            self.ledger.forget_skipped()
        known = self._resumed(jobs)
        self.base_point.expect(self._stored_losses({o.job.batch for o in known}))
        self._highest = max((o.at(settings.radii[0]).value for o in known if o.scores), default=-math.inf)
        reduced = self._chart_of(jobs[0]).reduced
        ahead = None
        if settings.reruns and settings.per is None:
            ahead = Ahead(REPRODUCIBILITY, settings.radii[0], FORESIGHT)
        outcomes = self._outcomes(jobs, ahead)
        scored = [o for o in outcomes if o.skipped is None]
        if not settings.average:
            self.notes += told({rho: [o.at(rho) for o in scored] for rho in settings.radii})
        skipped = [o.job.batch for o in outcomes if o.skipped is not None]
        if not scored:
            raise ModelError(f"no batch has a score: {outcomes[0].skipped}")
        if skipped:
            self.notes.warn(
                f"{len(skipped)} of {len(outcomes)} batches were skipped, because their loss is not finite: "
                f"{', '.join(map(str, skipped))}"
            )
        return Runs(scored, skipped, reduced)

    def check_function(self) -> None:
        """Whether the first batch has the same loss where symmetries are divided out, without a climb.

        Raises:
            ModelError, UsageError: it has another one, or the loss reads the weights.
        """
        self.base_point.expect(self._stored_losses(()))
        if self.base_point.stored:
            chart = self._chart_of(Job(SCORE, 0))
            # Of a sharded model the ranks that own pairs have moved them, and the rows of all are to follow.
            chart.write(chart.space.zeros())
            base = self._loss_of(0)
            if math.isfinite(base) and not self.base_point.is_stored_loss(0, base):
                self.base_point.check_function(0, base)

    def parts(self) -> tuple[Selection, ...]:
        """What the model is cut into, if that was asked for; told before anything is run."""
        if self.settings.per is None:
            return ()
        found = selections(self._chart_of(Job(SCORE, 0)), self.settings.per)
        self.track.total += self.settings.evaluations * len(found) * (len(self.batches) + self.settings.reruns)
        return found

    def _part_of(self, job: Job, chart: Chart) -> Selection | None:
        """What may move, where that is not all; the coordinates are those of the job's chart."""
        if not job.part or self.settings.per is None:
            return None
        if job.stage not in self._parts:
            self._parts[job.stage] = {_key(part): part for part in selections(chart, self.settings.per)}
        return self._parts[job.stage][job.part]

    def scores_of(self, parts: Sequence[Selection], runs: Runs) -> tuple[PartScore, ...]:
        """The score at the first radius where only one part may move, for each part."""
        first = self.settings.radii[0]
        jobs = [Job(PART, o.job.batch, part=_key(part)) for o in runs.outcomes for part in parts]
        self._resumed(jobs)
        found: dict[str, list[Outcome]] = {}
        for outcome in self._outcomes(jobs):
            found.setdefault(outcome.job.part, []).append(outcome)
        values = {key: [_value(o, first, key) for o in own] for key, own in found.items()}
        checks = self._checks_of(found, runs) if self.settings.reruns else {}
        odd = [part.part for part in parts if _key(part) in checks and not checks[_key(part)].ok]
        if odd:
            self.notes.append(
                f"the scores of {len(odd)} of {len(parts)} parts are not reproducible: a re-run from weights moved by "
                f"a relative {NUDGE[self.borrowed.dtype]:g} differs, or they are no larger than what rounding makes of "
                f"the loss: {', '.join(odd[:MOST_NAMED])}{', ...' * (len(odd) > MOST_NAMED)}"
            )
        return tuple(
            PartScore(
                part.part, part.by, part.layer, part.head, part.kind, *mean_with_error(values[_key(part)])[:2],
                *((check.ok, check.spread) if (check := checks.get(_key(part))) else ()),
            )
            for part in parts
        )  # fmt: skip

    def _checks_of(self, found: Mapping[str, Sequence[Outcome]], runs: Runs) -> dict[str, Reproducible]:
        """Whether the worst batch of each part repeats; where nothing rose there is nothing to ask."""
        first = self.settings.radii[0]
        worst = {key: max(own, key=lambda o: (o.at(first).value, o.job.batch)) for key, own in found.items()}
        scores = {key: outcome.at(first) for key, outcome in worst.items()}
        asked = {key: worst[key] for key, score in scores.items() if score.value > 0 or score.stopped == "lost"}
        jobs = [Job(REPRODUCIBILITY, outcome.job.batch, part=key) for key, outcome in asked.items()]
        self._resumed(jobs)
        rounding = self._rounding(runs)
        return {
            outcome.job.part: compared(asked[outcome.job.part], outcome, self.borrowed.dtype, rounding)[first].check
            for outcome in self._outcomes(jobs)
        }

    def evidence(self, runs: Runs) -> tuple[dict[float, Reproducible], dict[str, float]]:
        """What is told beside the score: whether the worst batch repeats, and the baselines."""
        settings = self.settings
        first = settings.radii[0]
        again = [runs.worst(first)] if settings.reruns else []
        jobs = [Job(REPRODUCIBILITY, o.job.batch) for o in again]
        jobs += [Job(BASELINE, o.job.batch, metric) for metric in settings.baselines for o in runs.outcomes]
        self._resumed(jobs)
        outcomes = self._outcomes(jobs)
        rounding = self._rounding(runs) if again or settings.average else 0.0
        checks = [
            compared(before, o, self.borrowed.dtype, rounding) for before, o in zip(again, outcomes, strict=False)
        ]
        self.notes += [c.note for each in checks for _, c in sorted(each.items()) if c.note is not None]
        values: dict[str, list[float]] = {}
        for outcome in outcomes[len(again) :]:
            metric = outcome.job.metric
            values.setdefault(metric, []).append(_value(outcome, first, f"baseline {metric}"))
        found, lost = measured(
            {rho: c.check for each in checks for rho, c in each.items()},
            {rho: [o.at(rho) for o in runs.outcomes] for rho in settings.radii},
        )
        self.notes += lost
        if settings.average:
            self.notes += swallowed(runs.outcomes, settings.radii, rounding)
        return found, {metric: mean_with_error(v)[0] for metric, v in values.items()}

    def _rounding(self, runs: Runs) -> float:
        """A difference of losses that rounding alone makes, as far as it is known.

        A model in double precision may round inside, as norms in single precision do. That is measured.
        """
        known = resolution(runs.outcomes, self.borrowed.dtype, stationary=self.settings.stationary)
        if self.borrowed.dtype != torch.float64:
            return known
        if self._noise is None:
            task = partial(self.base_point.noise, runs.outcomes[0].job.batch)
            (self._noise,) = [task()] if self.track.shared else self.track.world.spread([task])
        return max(known, self._noise)

    def _resumed(self, jobs: Sequence[Job]) -> list[Outcome]:
        """What is done of these; one rank counts it."""
        known = self.ledger.known(jobs)
        if self.track.shared or self.track.world.leads:
            radii = (len(o.scores) or len(self._settings_of(o.job).radii) for o in known)
            self.track.done += self.settings.evaluations * sum(radii)
        return known

    def _outcomes(self, jobs: Sequence[Job], ahead: Ahead | None = None) -> list[Outcome]:
        """What jobs gave, on every rank; what is told of them is noted."""
        outcomes = self.ledger.run(jobs, self._do, self.track.refresh, ahead)
        self.notes += [note for o in outcomes for note in o.notes]
        return outcomes

    def _settings_of(self, job: Job) -> Settings:
        """A baseline is the same ascent under another metric, and both that and a part are at the first radius."""
        settings = self.settings
        if job.stage == BASELINE:
            settings = replace(
                settings, metric=job.metric, geodesic="first", damping=0.0, baselines=(), per=None, profile=False
            )
        return replace(settings, rho=self.settings.radii[:1]) if job.stage == BASELINE or job.part else settings

    def _do(self, job: Job) -> Outcome:
        """A batch under the geometry that its job is about."""
        settings = self._settings_of(job)
        started = time.perf_counter()
        self._batch_notes.clear()
        outcome = self._batch(job, settings)
        if isinstance(outcome, float):
            self.base_point.check_function(job.batch, outcome)
            outcome = self._batch(job, settings)
            assert isinstance(outcome, Outcome)
        outcome = replace(outcome, notes=tuple(self._batch_notes), seconds=time.perf_counter() - started)
        if outcome.skipped is not None:
            self.track.done += settings.evaluations * len(settings.radii)
        return outcome

    def _chart_of(self, job: Job) -> Chart:
        """The chart that a job needs; there is one at a time."""
        # A part moves in the chart of all.
        key = f"{SCORE if job.stage == PART else job.stage} {job.metric}"
        if self._chart is None or self._chart[0] != key:
            self._chart = None
            self.restore()
            # Baselines are on the weights as they are stored.
            symmetries = SymmetryMap() if job.stage == BASELINE else self.symmetries
            nudge = NUDGE[self.borrowed.dtype] if job.stage == REPRODUCIBILITY else 0.0
            seed = self.settings.seed + 1 if nudge else 0
            chart = self._chart_with(symmetries, self._settings_of(job).geometry, nudge, seed)
            self._chart = key, chart
            if job.stage in (SCORE, PART):
                self._ranks = chart.ranks
        return self._chart[1]

    def _chart_with(self, symmetries: SymmetryMap, geometry: Geometry, nudge: float, seed: int) -> Chart:
        moved: dict[str, Any] = {"nudge": nudge, "seed": seed, "ranks": self._ranks if nudge else ()}
        if self.borrowed.shards is not None:
            return ShardedChart(self.borrowed, symmetries, geometry, self.sharing, **moved)
        return Chart(self.borrowed, symmetries, geometry, **moved)

    def _batch(self, job: Job, settings: Settings) -> Outcome | float:
        """One ball at each radius, ascending.

        Where the loss at the base point is another than at the stored weights there is none, and that loss is returned.
        """
        chart, objective = self._chart_of(job), self._objective(job.batch)
        part = self._part_of(job, chart)
        ball = Ball(chart, objective, settings, number=job.batch, split=self.split, part=part)
        if not math.isfinite(ball.base):
            return self._not_finite(job, ball.base)
        if job.stage == SCORE:
            objective.check_parts(ball.base)
            self.base_point.check_felt(ball)
        if job.stage == SCORE and not self.base_point.is_stored_loss(job.batch, ball.base):
            return ball.base
        if not settings.average and ball.still:
            if part is None:
                raise ModelError(
                    "all weights that may be perturbed are zero, and the metric measures changes relative to their "
                    "size: there is nothing to score"
                )
            self.track.done += settings.evaluations
            score = BatchScore(job.batch, ball.base, 0.0, 0, True, 1, "converged")
            passes = Passes(objective.forwards, objective.backwards)
            return Outcome(job, ball.base, ((settings.radii[0], score),), passes, single=self._single(objective))
        scores: list[tuple[float, BatchScore]] = []
        share: dict[str, float] = {}
        profile: Profile | None = None
        for rho in sorted(settings.radii):
            done = self.track.done
            score = self._at(ball, job, rho)
            # The passes at the starts, and the steps that were not needed.
            self.track.done = done + settings.evaluations
            self.track.refresh()
            scores.append((rho, score))
            if job.stage == SCORE and rho == settings.radii[0] and score.value >= self._highest:
                # Where the worst perturbation lies is told of the batch that rose most.
                self._highest, share = score.value, chart.share(ball.end)
            if settings.profile and job == Job(SCORE, 0) and rho == settings.radii[0]:
                profile = self._profile(ball, rho)
            if job.stage == REPRODUCIBILITY and not job.part and settings.approximate and score.stopped != "lost":
                self._check_geodesic(ball, rho, score.value)
        self._in_step(scores, ball.end)
        passes = Passes(objective.forwards, objective.backwards)
        return Outcome(
            job, ball.base, tuple(scores), passes, share, profile=profile, single=self._single(objective)
        )  # fmt: skip

    def _single(self, objective: Objective) -> bool:
        """Whether the losses of a batch were numbers of single precision on all ranks that share it."""
        return all(self.split.gather(objective.single))

    def _piece(self) -> Batch:
        """As much of the first batch as goes through the model at once."""
        device = next(self.borrowed.model.parameters()).device
        return on_device(excerpt(self.batches[0], 0, self.micro.size(samples(self.batches[0]))), device)

    def _stored_losses(self, known: Container[int]) -> dict[int, float]:
        """Losses at the stored weights, by batch; of batches of one :func:`structure` one is enough.

        Symmetries are proved on a few samples, and what is not the same function on others would be scored as one.
        """
        if not self.symmetries.symmetries:
            return {}
        todo: dict[object, int] = {}
        for index, batch in enumerate(self.batches):
            if index not in known:
                todo.setdefault(structure(batch) or index, index)
        self._put_back()
        if self.loss is not None:
            try:
                self.base_point.check_loss(self.loss, self._piece())
            except (RuntimeError, MemoryError) as error:
                # Passes that count go on with smaller parts; of a sharded model all ranks take the same.
                if self.borrowed.shards is not None or not is_out_of_memory(error):
                    raise

        def loss(index: int) -> float:
            self.track.say("verify")
            return self._loss_of(index)

        tasks = [partial(loss, index) for index in todo.values()]
        together = self.track.shared or self.borrowed.shards is not None
        values = [task() for task in tasks] if together else self.track.world.spread(tasks)
        self.notes += self._batch_notes
        return dict(zip(todo.values(), values, strict=True))

    def _put_back(self) -> None:
        self._chart = None
        self.restore()

    def _loss_of(self, index: int) -> float:
        # Several of these take long on a large model, while others wait.
        self.track.stay("verify", index + 1)
        return self._objective(index).evaluate(False)

    def _refuted(self, index: int) -> list[str]:
        """Symmetries that do not hold on a batch, and why. The model has its stored weights.

        Those that are clearly broken: what rounds inside the model moves the outputs by more than a proof allows.
        """
        batch = on_device(self.batches[index], next(self.borrowed.model.parameters()).device)
        verified = verify(self.borrowed.model, self.symmetries, [batch], seed=self.settings.seed)
        return [
            f"{claim.name}: outputs move by {claim.deviation:.1e}, by {claim.control:.1e} when broken on purpose"
            for claim in verified.claims
            if claim.deviation is not None and claim.control is not None
            if claim.status == "failed" and not claim.deviation <= CLEARLY * claim.control
        ]

    def _objective(self, index: int) -> Objective:
        return Objective(
            self.borrowed.model, self.batches[index], self.loss, self.weight, self.micro, self.split,
            self.borrowed.shards, self._run,
        )  # fmt: skip

    def _not_finite(self, job: Job, base: float) -> Outcome:
        count = samples(self.batches[job.batch])
        why = "NaN or overflow in the model's own forward pass"
        if self.micro.size(count) < count:
            why += ", or a micro-batch without a label that counts: leave out micro_batch, or make it larger"
        text = f"batch {job.batch}: the loss before any step is {base} ({why})"
        if self.settings.on_nan == "stop":
            raise ModelError(f"{text}; on_nan 'skip' (--on-nan skip) leaves such batches out and records it")
        self._batch_notes.append(f"{text}: skipped")
        return Outcome(job, skipped=text)

    def _at(self, ball: Ball, job: Job, rho: float) -> BatchScore:
        """The score of a batch at one radius."""
        index, steps = job.batch, ball.settings.steps
        report = partial(self.track.report, job.stage, index + 1, rho)
        if ball.settings.average:
            return BatchScore(index, ball.base, ball.average(rho, report(steps)), steps, True, steps)
        found = ball.worst(rho, report)
        climb = found.highest
        if not climb.finite:
            where = f"{job.part}, rho {rho:g}" if job.part else f"rho {rho:g}"
            why = ball.endless or "the loss is not finite"
            text = f"batch {index}: {why} at some points of the ball, {where}"
            if climb.lost:
                text += ", and no higher loss was found elsewhere: 0 is not a measurement. Use a smaller radius"
                if ball.settings.metric == "mix":
                    text += ", or inv if pairs are almost zero: mix moves them as far as all others"
            self._batch_notes.append(text)
        return BatchScore(
            index, ball.base, climb.rise, climb.steps, climb.converged, found.evaluations,
            "lost" if climb.lost else climb.stopped, found.rises if ball.settings.starts > 1 else (),
            found.rough,
        )  # fmt: skip

    def _profile(self, ball: Ball, rho: float) -> Profile | None:
        found = ball.profile(rho, self._objective(ball.number))
        if found is None:
            self._batch_notes.append(
                f"batch {ball.number}: no profile, because the loss is not finite at some of its points, rho {rho:g}"
            )
        return found

    def _check_geodesic(self, ball: Ball, rho: float, rise: float) -> None:
        """Warns where the loss at the worst perturbation is another at the end of the exact geodesic."""
        order, where = f"{self.settings.geometry.geodesic}-order", f"rho {rho:g}"
        try:
            exact = ball.exact(rise, self._objective(ball.number))
            if exact is None:
                return
            told = f"by {exact:.2g} along the exact one"
        except EndlessError:
            told = "and the exact one has no end there"
        self._batch_notes.append(
            f"the {order} geodesic is not close to the exact one at {where}: at the worst perturbation of batch "
            f"{ball.number} the loss rises by {rise:.2g} along it, {told}. Use geodesic 'exact' (--geodesic exact) or "
            "a smaller radius"
        )

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
                "the ranks drifted apart: they compute the same steps with different rounding. Use identical machines "
                "and the same number of threads, or shard='batches'"
            )

    def restore(self) -> None:
        """The model's own weights, as they were borrowed."""
        with torch.no_grad():
            for name, leaf in self.borrowed.leaves.items():
                leaf.tensor.copy_(self.borrowed.originals[name])


def _value(outcome: Outcome, rho: float, what: str) -> float:
    """The value at a radius of a batch that has a score.

    Raises:
        ModelError: this job gave none.
    """
    if outcome.skipped is not None:
        raise ModelError(f"{what}: {outcome.skipped}")
    return outcome.at(rho).value


def _key(part: Selection) -> str:
    """What a part is called among those of all ways to cut a model."""
    return f"{part.by} {part.part}"
