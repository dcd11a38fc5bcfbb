"""Batches in, per-batch values, mean, error and reproducibility out; on one process or many."""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hf_geosharp.errors import DataError, GeosharpWarning, ModelError, UsageError, WorldError
from hf_geosharp.geometry.metrics import METRICS, ORDERS, PAIR_METRICS, Order
from hf_geosharp.geometry.space import Space, Tangent
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.ascent import auto_pgd, average
from hf_geosharp.sharpness.borrow import Borrowed, borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.jobs import BASELINE, PART, REPRODUCIBILITY, SCORE, Ahead, Job, Ledger, Outcome
from hf_geosharp.sharpness.journal import Journal, differences, digest, digest_batches, write_result
from hf_geosharp.sharpness.memory import MicroBatch, checkpointed
from hf_geosharp.sharpness.objective import Batch, Loss, Objective, Reach, Weight, rows, samples
from hf_geosharp.sharpness.precision import full_float32
from hf_geosharp.sharpness.result import (
    BatchScore,
    CurvePoint,
    PairSummary,
    PartScore,
    Passes,
    Profile,
    Reproducible,
    SharpnessResult,
    mean_with_error,
)
from hf_geosharp.sharpness.secant import secant
from hf_geosharp.sharpness.selection import BY, NO_HEADS, PARAMS, Selection, movable, selections
from hf_geosharp.sharpness.sharded import ShardedChart
from hf_geosharp.sharpness.shards import Shards, whole_of
from hf_geosharp.symmetry.find import PRESETS, find_symmetries
from hf_geosharp.symmetry.fingerprint import of_adapters, of_config
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.verify import Verified, verify

DEFAULT_RHO = {"inv": 0.1, "mix": 0.01, "adaptive": 0.1, "euclidean": 0.1}
"""Radius by metric; how it was chosen is measured in benchmarks/radius.py and explained in the README."""

AGREEMENT = 0.01
"""Relative difference that a re-run from slightly moved weights may show."""

NUDGE = {torch.float32: 1e-6, torch.float64: 1e-9}
"""Relative size of that move."""

ASCENTS = {"secant": secant, "apgd": auto_pgd}
"""How the maximum is searched; measured against each other in benchmarks/ascent.py."""

SHARDS = ("batches", "samples")
ON_NAN = ("stop", "skip")

_HOW = ("micro_batch", "gradient_checkpointing", "on_nan", "per")
"""Settings that do not decide a score: a journal may go on with others."""

FORESIGHT = 0.75
"""Share of the batches that have to be done for a rank without work to run the worst of them a second time."""

PROFILE_POINTS = 11
"""How many points of the way to the worst perturbation a profile has, both ends included."""

COPY_LIMIT = 2 << 30
"""Symmetries are verified on a float64 copy where it takes at most this many bytes, else on the model itself."""


@dataclass(frozen=True)
class Progress:
    """How far a score has come; ``done`` of ``total`` count forward passes over everything, on all ``ranks``.

    Batch, step and value are this process's; ``batch`` counts from 1.
    """

    stage: str
    batch: int
    batches: int
    step: int
    steps: int
    rho: float
    value: float
    done: int
    total: int
    ranks: int = 1


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
    ascent: str = "secant"
    steps: int = 20
    seed: int = 0
    average: bool = False
    baselines: tuple[str, ...] = ()
    damping: float = 0.0
    micro_batch: int | Literal["auto"] | None = None
    gradient_checkpointing: bool = False
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
        for name, value, known in (
            ("metric", self.metric, tuple(METRICS)),
            ("geodesic", self.geodesic, (None, *ORDERS)),
            ("symmetries", self.symmetries, tuple(PRESETS)),
            ("ascent", self.ascent, tuple(ASCENTS)),
            ("shard", self.shard, SHARDS),
            ("on_nan", self.on_nan, ON_NAN),
            ("params", self.params, PARAMS),
            ("per", self.per, (None, *BY)),
            *(("baseline", b, ("adaptive", "euclidean")) for b in self.baselines),
        ):
            if value not in known:
                raise UsageError(f"{name} is {value!r}; it is one of {', '.join(str(k) for k in known if k)}")
        if any(not (r > 0 and math.isfinite(r)) for r in self.rho):
            raise UsageError(f"rho is {self.rho}; a radius is positive and finite")
        if self.steps < 1:
            raise UsageError(f"steps is {self.steps}; at least 1 is needed")
        if isinstance(self.micro_batch, str) and self.micro_batch != "auto":
            raise UsageError(f"micro_batch is {self.micro_batch!r}; it is a number or 'auto'")
        if isinstance(self.micro_batch, int) and self.micro_batch < 1:
            raise UsageError(f"micro_batch is {self.micro_batch}; at least 1 is needed")
        if not (self.damping >= 0 and math.isfinite(self.damping)):
            raise UsageError(f"damping is {self.damping}; it is not negative")
        if self.average and (self.per or self.profile):
            raise UsageError("per and profile are of the worst case: leave out average")
        if self.per == "head" and self.metric not in PAIR_METRICS:
            raise UsageError(
                f"per is 'head', and the metric {self.metric} knows no heads: use {' or '.join(PAIR_METRICS)}"
            )

    @property
    def radii(self) -> tuple[float, ...]:
        """The radii asked for, or the metric's default."""
        return self.rho or (DEFAULT_RHO[self.metric],)

    @property
    def reruns(self) -> bool:
        """Whether one batch is run a second time."""
        return self.reproducibility and not self.average

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
    """Counts passes, tells who asked, and keeps in touch with the other ranks."""

    tell: Callable[[Progress], None] | None
    batches: int
    steps: int
    total: int
    world: World = field(default_factory=World)
    shared: bool = False
    """Every rank does everything, so that its own count is that of all."""
    done: int = 0
    last: Progress | None = None

    def report(self, stage: str, batch: int, rho: float) -> Callable[[int, float], None]:
        def step(k: int, value: float) -> None:
            self.done += 1
            self.say(stage, batch, k, rho, value)

        return step

    def stay(self, stage: str, batch: int = 0, step: int = 0) -> None:
        """Leaves a sign of life for the other ranks, and hears whether one has failed."""
        self.world.tell({"done": self.done, "stage": stage, "batch": batch, "step": step})
        self.world.poll()

    def say(self, stage: str, batch: int = 0, step: int = 0, rho: float = 0.0, value: float = 0.0) -> None:
        self.stay(stage, batch, step)
        self.last = Progress(
            stage, batch, self.batches, step, self.steps, rho, value, 0, self.total, self.world.size
        )  # fmt: skip
        self.refresh()

    def refresh(self) -> None:
        """Tells again what was told last, with what the other ranks have done since."""
        if self.tell is not None and self.last is not None:
            self.tell(replace(self.last, done=min(self._of_all(), self.total)))

    def _of_all(self) -> int:
        if self.shared or self.world.size == 1:
            return self.done
        others = (state["done"] for r, state in enumerate(self.world.heard()) if state and r != self.world.rank)
        return self.done + sum(others)


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
    data_digest: str | None = None,
    output: str | os.PathLike[str] | None = None,
    world: World | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SharpnessResult:
    """The sharpness of a model on batches, one ball for each.

    The model comes back bit-identical whatever happens. In a world of several ranks all of them have to call this
    with the same arguments; the batches are spread over them, and all get the same result.

    Args:
        model: a module that takes a batch as keyword arguments.
        batches: dicts of tensors, samples first.
        settings: how.
        loss: (outputs, batch) -> losses of the samples or their mean; the model's own if None.
        weight: number of loss terms in a (micro-)batch; samples if None.
        dtype: computes in float64 if asked; else float32, or what the model has.
        model_identity, data_identity, versions: recorded as they are.
        data_digest: tells other data apart, for ranks and journals; by default made from all tensors of the batches.
        output: a folder for the journal, by which a killed run continues, and for the result.
        world: the processes that share the work; by default this one alone.
        progress: told after every step.

    Raises:
        DataError: no batches, or an empty one; a damaged journal.
        ModelError: NaN in a parameter, no loss, a loss that is not finite at the model's own weights; out of memory.
        UnsupportedModelError: quantised, offloaded or meta weights.
        UsageError: a journal of another run in ``output``; samples sharded over a model on several devices.
        WorldError: the ranks have other weights, data, settings or versions, or one of them does not answer.
        GeosharpError: the journal cannot be written.
    """
    started = time.perf_counter()
    if not batches:
        raise DataError("there is no batch to score: the data are empty")
    notes: list[str] = []
    per_pass = settings.steps + 1
    total = per_pass * len(settings.radii) * (len(batches) + settings.reruns)
    total += per_pass * len(batches) * len(settings.baselines)
    world = world or World()
    with full_float32(), borrow(model, dtype, movable(model, settings.params)) as borrowed:
        shards = borrowed.shards
        if shards is not None:
            _check_sharded(shards, world, settings)
        # Of a sharded model all ranks run every pass together.
        whole = settings.shard == "samples" or shards is not None
        track = _Track(progress, len(batches), settings.steps, total, world, whole)
        if whole and world.size > 1 and len({leaf.tensor.device for leaf in borrowed.leaves.values()}) > 1:
            raise UsageError("shard is 'samples', but the model lies on several devices: use shard='batches'")
        header: dict[str, Any] = {}
        if world.size > 1 or output is not None:
            header = _identity(borrowed, batches, settings, loss, data_digest, versions or {})
            _agree(world, header)
        with _ledger(world, output, header, whole) as ledger:
            scored = _Scored(borrowed, batches, settings, loss, weight, track, notes, ledger)
            if settings.params != "all":
                scored.say_what_rounds()
            track.say("verify")
            verified = scored.symmetries()
            effective = scored.settings
            same = {"symmetries": verified.map.dimension, "dropped": verified.map.dropped, "per": effective.per}
            _agree(world, same)
            with checkpointed(model, effective.gradient_checkpointing):
                parts = scored.parts(verified.map, effective)
                runs = scored.run(verified.map, effective)
                per = scored.scores_of(parts, verified.map, effective, runs)
                reproducible, baselines = scored.evidence(verified.map, effective, runs)
        stored = borrowed.stored_dtypes
    radii = effective.radii
    curve = [_curve_point(r, runs.values(r), reproducible.get(r)) for r in sorted(set(radii))]
    head = next(c for c in curve if c.rho == radii[0])
    check = reproducible.get(head.rho, Reproducible(None, None, "not checked"))
    for point in curve:
        if point.reproducible is False:
            notes.append(
                f"the score at rho {point.rho:g} is not reproducible: a re-run from weights moved by a relative "
                f"{NUDGE[borrowed.dtype]:g} differs by {reproducible[point.rho].spread:.1%}; use a smaller radius"
            )
    result = SharpnessResult(
        geodesic_sharpness=head.geodesic_sharpness,
        stderr=head.stderr,
        interval95=head.interval95,
        base_loss=math.fsum(o.base for o in runs.outcomes) / len(runs.outcomes),
        rho=head.rho,
        metric=effective.metric,
        geodesic=effective.order,
        symmetries=effective.symmetries if effective.geometry.paired else "none",
        mode="average" if effective.average else "worst",
        steps=effective.steps,
        ascent="none" if effective.average else effective.ascent,
        params=effective.params,
        damping=effective.damping if effective.geometry.paired else 0.0,
        per=per,
        profile=runs.profile,
        seed=effective.seed,
        samples=sum(samples(batches[o.job.batch]) for o in runs.outcomes),
        batch_size=samples(batches[0]),
        per_batch=[o.at(head.rho) for o in runs.outcomes],
        curve=curve,
        baselines=baselines,
        pairs=_summary(verified, runs.reduced),
        share=dict(sorted(runs.worst(head.rho).share.items(), key=lambda item: -item[1])),
        reproducible=check,
        passes=Passes(sum(o.passes.forwards for o in runs.outcomes), sum(o.passes.backwards for o in runs.outcomes)),
        seconds=time.perf_counter() - started + ledger.seconds,
        model={**(model_identity or {"class": type(model).__name__}), "stored_dtypes": list(stored)},
        data={**(data_identity or {}), **({"skipped_batches": runs.skipped} if runs.skipped else {})},
        versions=dict(versions or {}),
        warnings=[*dict.fromkeys(notes)],
    )
    if output is not None and world.leads:
        write_result(output, result.to_json() + "\n")
    return result


def _check_sharded(shards: Shards, world: World, settings: Settings) -> None:
    """What is not there for sharded models.

    Raises:
        UsageError: it was asked for.
    """
    shards.check_world(world)
    for asked, what in (
        (settings.micro_batch == "auto", "micro_batch 'auto' (give a number: the ranks run every pass together)"),
    ):
        if asked:
            raise UsageError(f"the model is sharded over processes, and for such models there is no {what}")


def _identity(
    borrowed: Borrowed,
    batches: Sequence[Batch],
    settings: Settings,
    loss: Loss | None,
    data_digest: str | None,
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Of what a score is: what ranks have to agree in, and what a journal belongs to."""
    rest = [(f"buffer {n}", b) for n, b in borrowed.model.named_buffers() if not b.is_meta]
    return {
        "settings": {k: v for k, v in asdict(settings).items() if k not in _HOW},
        "loss": _name(loss),
        "dtype": str(borrowed.dtype).removeprefix("torch."),
        "device": next(iter(borrowed.originals.values())).device.type,
        "versions": dict(versions),
        "batches": len(batches),
        "data": data_digest or digest_batches(batches),
        "config": of_config(borrowed.model),
        "adapters": of_adapters(borrowed.model),
        "weights": digest(chain(_weights(borrowed), rest, _frozen(borrowed))),
    }


def _weights(borrowed: Borrowed) -> Iterator[tuple[str, Tensor]]:
    """All weights by name, in full: those of a sharded model are gathered one by one, on all ranks."""
    for name, held in sorted(borrowed.originals.items()):
        yield name, held if borrowed.shards is None else borrowed.shards.whole(name)


def _frozen(borrowed: Borrowed) -> Iterator[tuple[str, Tensor]]:
    """What an adapter sits on, which is a part of its score too."""
    for name, p in borrowed.model.named_parameters():
        if not p.requires_grad:
            yield f"frozen {name}", whole_of(p)


def _name(loss: Loss | None) -> str | None:
    """What tells a loss of the caller's from others, as far as code can be told apart."""
    if loss is None:
        return None
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', type(loss).__qualname__)}"
    try:
        return f"{name} {hashlib.sha256(inspect.getsource(loss).encode()).hexdigest()[:12]}"
    except (OSError, TypeError):
        return name


@contextmanager
def _ledger(
    world: World, output: str | os.PathLike[str] | None, header: Mapping[str, Any], whole: bool
) -> Iterator[Ledger]:
    journal = None if output is None else Journal(output, header, world.rank)
    try:
        yield Ledger(world, journal, whole=whole)
    finally:
        if journal is not None:
            journal.close()


def _agree(world: World, header: Mapping[str, Any]) -> None:
    """Ranks that differ would spread two scores over each other.

    Raises:
        WorldError: they do; with what in.
    """
    headers = world.gather(header)
    found = [
        f"rank {rank}: {', '.join(what)}"
        for rank, theirs in enumerate(headers)
        if (what := differences(theirs, headers[0], ("there", "on rank 0")))
    ]
    if found:
        raise WorldError(f"the processes are not about the same score. {'; '.join(found)}")


@dataclass(frozen=True)
class _Runs:
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

    # -------------------------------------------------------------------------------------------------- symmetries

    def symmetries(self) -> Verified:
        """Found on the model, proved on its own data; without any, the settings turn adaptive."""
        nothing = Verified(SymmetryMap(), None, None)
        if not self.settings.geometry.paired:
            return nothing
        model = self.borrowed.model
        if self.borrowed.shards is None:
            verified = self._proved_on_a_copy()
        else:
            # One rank finds them for all, on a copy that is whole.
            whole = self.borrowed.shards.plain(self.split.leads)
            if whole is not None and _fits_wide(whole):
                whole = whole.double()
            verified = self.split.broadcast(None if whole is None else self._proved(whole))
            del whole
        for reason in verified.map.dropped:
            self._warn(f"symmetry dropped: {reason}")
        if not verified.map.pairs:
            if self.settings.per == "head":
                raise UsageError(NO_HEADS)
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
        separated, lost = verified.map.separated(model)
        for name in lost:
            self._warn(f"the score is not invariant under {name}: its entries belong to another symmetry's pairs too")
        return replace(verified, map=separated)

    def say_what_rounds(self) -> None:
        """A base that stays in half precision is told of: the loss is rounded to it."""
        narrow = {p.dtype for p in self.borrowed.model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
        if narrow:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
            self._warn(f"the adapter's base stays in {names}, which rounds the loss more than its own weights do")

    def _proved_on_a_copy(self) -> Verified:
        """What is found and proved on a wide copy of the model, or on the model itself where that is impossible."""
        model = self._wide_copy()
        try:
            return self._proved(model)
        except (TypeError, RuntimeError):
            # Some models do not compute in double precision: experts that add up in single, quantised bases.
            if model is self.borrowed.model:
                raise
            return self._proved(self.borrowed.model)

    def _proved(self, model: nn.Module) -> Verified:
        """What is found on a model, and proved; of an adapter's score only what the adapter has by itself."""
        examples = self._examples(next(model.parameters()).device)
        # Of a sharded model only one rank is here.
        world = self.track.world if self.borrowed.shards is None else World()

        # On a large model this takes long: the others hear in between that this rank is at it.
        alive = partial(self.track.stay, "verify")

        def measured(task: Callable[[], float]) -> float:
            alive()
            return task()

        def spread(tasks: Sequence[Callable[[], float]]) -> list[float]:
            return world.spread([partial(measured, task) for task in tasks])

        preset = self.settings.symmetries
        (found,) = world.spread([lambda: find_symmetries(model, examples[0], preset=preset, alive=alive)])
        if self.settings.params != "all":
            found = found.within(self.borrowed.leaves)
        if not self.settings.verify:
            return Verified(found, None, None)
        # In double precision every kind is measured by itself: no claim can hide behind another's control.
        wide = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
        return verify(model, found, examples, seed=self.settings.seed, each=wide, spread=spread)

    def _examples(self, device: torch.device) -> list[dict[str, Any]]:
        """Two small inputs out of the data: the first and the last samples of the first batch."""
        batch = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.batches[0].items()}
        n = samples(batch)
        size = max(1, min(4, n // 2))
        return [rows(batch, 0, size), rows(batch, n - size, n)]

    def _wide_copy(self) -> nn.Module:
        """A float64 copy of the model to prove symmetries on, or the model itself where that is too large."""
        model = self.borrowed.model
        if any(len(leaf.members) > 1 for leaf in self.borrowed.leaves.values()):
            return model  # a copy would part the parameters that share memory
        if self.borrowed.dtype == torch.float64 or not _fits_wide(model):
            return model
        try:
            return copy.deepcopy(model).double()
        except (TypeError, RuntimeError, ValueError):  # hooks and compiled modules that cannot be copied
            return model

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        warnings.warn(text, GeosharpWarning, stacklevel=5)

    def _less_memory(self, text: str) -> None:
        self._batch_notes.append(text)
        warnings.warn(text, GeosharpWarning, stacklevel=2)

    # ------------------------------------------------------------------------------------------------------ scores

    def run(self, symmetries: SymmetryMap, settings: Settings) -> _Runs:
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
            self._warn(
                f"{len(skipped)} of {len(outcomes)} batches were skipped, for their loss is not finite: "
                f"{', '.join(map(str, skipped))}"
            )
        return _Runs(scored, skipped, reduced)

    def parts(self, symmetries: SymmetryMap, settings: Settings) -> tuple[Selection, ...]:
        """What the model is cut into, if that was asked for; told before anything is run."""
        if settings.per is None:
            return ()
        found = selections(self._chart_of(Job(SCORE, 0), symmetries, settings), settings.per)
        self._parts = {_key(part): part for part in found}
        self.track.total += (settings.steps + 1) * len(found) * len(self.batches)
        return found

    def scores_of(
        self, parts: Sequence[Selection], symmetries: SymmetryMap, settings: Settings, runs: _Runs
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
        self, symmetries: SymmetryMap, settings: Settings, runs: _Runs
    ) -> tuple[dict[float, Reproducible], dict[str, float]]:
        """What is told beside the score: whether the worst batch repeats, and the baselines."""
        first = settings.radii[0]
        again = [runs.worst(first)] if settings.reruns else []
        jobs = [Job(REPRODUCIBILITY, o.job.batch) for o in again]
        jobs += [Job(BASELINE, o.job.batch, metric) for metric in settings.baselines for o in runs.outcomes]
        self._resumed(jobs)
        outcomes = self.ledger.run(jobs, lambda job: self._do(job, symmetries, settings), self.track.refresh)
        self.notes += [note for o in outcomes for note in o.notes]
        checks = [self._compared(before, o) for before, o in zip(again, outcomes, strict=False)]
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

        def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
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

    # ----------------------------------------------------------------------------------------------------- evidence

    def _compared(self, before: Outcome, after: Outcome) -> dict[float, Reproducible]:
        """The batch with the largest value, and the same run again from weights moved a little, at every radius."""
        index, nudge = before.job.batch, NUDGE[self.borrowed.dtype]
        if after.skipped is not None:
            raise ModelError(f"reproducibility: {after.skipped}")
        how = (
            f"batch {index} run again from weights moved by a relative {nudge:g}; values may differ by {AGREEMENT:.0%}"
        )
        out = {}
        for rho, score in after.scores:
            value, first = score.value, before.at(rho).value
            # Below the rounding of the loss itself there is nothing to compare.
            floor = 100 * torch.finfo(self.borrowed.dtype).eps * max(abs(before.base), 1e-3)
            spread = abs(value - first) / max(abs(first), abs(value), floor)
            out[rho] = Reproducible(spread <= AGREEMENT, spread, how)
        return out

    def restore(self) -> None:
        """The model's own weights, as they were borrowed."""
        with torch.no_grad():
            for name, leaf in self.borrowed.leaves.items():
                leaf.tensor.copy_(self.borrowed.originals[name])


def _fits_wide(model: nn.Module) -> bool:
    """Whether a float64 copy of a model is made to prove symmetries on."""
    return 8 * sum(p.numel() for p in model.parameters()) <= COPY_LIMIT


def _key(part: Selection) -> str:
    """What a part is called among those of all ways to cut a model."""
    return f"{part.by} {part.part}"


def _still(space: Space, g: Tangent) -> bool:
    """Whether nothing in a space can move, for all weights in it are zero."""
    return space.norm(g) == 0 and space.norm(space.random(torch.Generator().manual_seed(0))) == 0


def _plain(settings: Settings, metric: str) -> Settings:
    """The same ascent under another metric, at the first radius."""
    return replace(settings, metric=metric, geodesic="first", rho=settings.radii[:1], baselines=(), profile=False)


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
