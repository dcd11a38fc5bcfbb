"""Batches in, per-batch values, mean, error and reproducibility out; on one process or many."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_geosharp.carried import emptied
from hf_geosharp.errors import DataError, ModelError, UsageError, first_line
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.borrow import Borrowed, borrow
from hf_geosharp.sharpness.identity import agree, identity, layouts_recorded
from hf_geosharp.sharpness.jobs import Ledger
from hf_geosharp.sharpness.journal import Journal, write_result
from hf_geosharp.sharpness.memory import checkpointed
from hf_geosharp.sharpness.notes import Notes
from hf_geosharp.sharpness.objective import Loss, few_outputs
from hf_geosharp.sharpness.parts import Batch, Weight, samples
from hf_geosharp.sharpness.precision import full_float32, name_of_dtype
from hf_geosharp.sharpness.progress import Progress, Track
from hf_geosharp.sharpness.proof import Proof
from hf_geosharp.sharpness.result import CurvePoint, PairSummary, PartScore, Passes, Reproducible, SharpnessResult
from hf_geosharp.sharpness.runner import Runner, Runs
from hf_geosharp.sharpness.selection import movable
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.sharpness.shards import Shards
from hf_geosharp.sharpness.statistics import mean_with_error
from hf_geosharp.symmetry.verify import Verified


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
    notes = Notes()
    each = settings.evaluations
    total = each * len(settings.radii) * (len(batches) + settings.reruns)
    total += each * len(batches) * len(settings.baselines)
    world = world or World()
    with _borrowed(model, dtype, batches, settings, notes) as borrowed:
        shards = borrowed.shards
        if shards is not None:
            _check_sharded(shards, world, settings)
        # Of a sharded model all ranks run every pass together.
        whole = settings.shard == "samples" or shards is not None
        track = Track(progress, len(batches), total, world, whole)
        if whole and world.size > 1 and len({leaf.tensor.device for leaf in borrowed.leaves.values()}) > 1:
            raise UsageError("shard is 'samples', but the model lies on several devices: use shard='batches'")
        header: dict[str, Any] = {}
        if world.size > 1 or output is not None:
            header = identity(borrowed, batches, settings, loss, data_digest, versions or {})
            agree(world, header)
        with _ledger(world, output, header, whole) as ledger:
            measured = _measure(borrowed, batches, settings, loss, weight, track, notes, ledger)
    model_record = {
        "dtype": name_of_dtype(borrowed.dtype),
        **(model_identity or {"class": type(model).__name__}),
        "stored_dtypes": list(borrowed.stored_dtypes),
        **({"compiled": True} if settings.compile else {}),
        **(layouts_recorded(settings) if measured.settings.geometry.paired else {}),
    }
    skipped = measured.runs.skipped
    data_record = {**(data_identity or {}), **({"skipped_batches": skipped} if skipped else {})}
    seconds = time.perf_counter() - started + ledger.seconds
    result = _result(measured, batches, seconds, model_record, data_record, dict(versions or {}), notes)
    if output is not None and world.leads:
        write_result(output, result.to_json() + "\n")
    return result


def check_function(
    model: nn.Module,
    batches: Sequence[Batch],
    settings: Settings,
    *,
    loss: Loss | None = None,
    weight: Weight | None = None,
    world: World | None = None,
) -> None:
    """Refuses without a climb what :func:`estimate` refuses at the base point of the first batch.

    That is a loss that changes where the model's symmetries are divided out, as one with a penalty on the weights does.
    Of a sharded model all processes of its ``world`` have to call.

    Raises:
        GeosharpError: as for :func:`estimate`.
    """
    notes, world = Notes(), world or World()
    with _borrowed(model, None, batches, settings, notes) as borrowed:
        whole = borrowed.shards is not None
        track = Track(None, 1, 0, world, whole)
        verified, settings = Proof(borrowed, batches[:1], settings, track, notes).symmetries()
        ledger = Ledger(world, None, whole=whole)
        Runner(borrowed, batches[:1], verified.map, settings, loss, weight, track, notes, ledger).check_function()


@contextmanager
def _borrowed(
    model: nn.Module, dtype: torch.dtype | None, batches: Sequence[Batch], settings: Settings, notes: Notes
) -> Iterator[Borrowed]:
    """The model to be measured, without what its passes have cached."""
    with full_float32(), borrow(model, dtype, movable(model, settings.params)) as borrowed, ExitStack() as stack:
        if borrowed.shards is None:
            # What the user's own passes have cached would hide the parameters that it was computed from.
            for odd in stack.enter_context(emptied(model, partial(few_outputs, model, batches[0]))):
                notes.warn(
                    f"{odd} holds tensors that a forward pass would compute anew, but with other outputs: they are "
                    "left as they are, and what they were computed from is not perturbed through them"
                )
        try:
            yield borrowed
        except RuntimeError as error:
            if not _of_precision(error, borrowed):
                raise
            raise ModelError(
                f"the model is stored in {', '.join(borrowed.stored_dtypes)} and scored in "
                f"{name_of_dtype(borrowed.dtype)}, in which its code does not run ({first_line(error)}): it may cast "
                "to a precision of its own where it should take that of its weights. Change that, or score in the "
                "precision that it is stored in"
            ) from error


def _of_precision(error: RuntimeError, borrowed: Borrowed) -> bool:
    """Whether a model's code has failed at tensors of different precision, and has its weights in another one."""
    told = any(words in str(error) for words in ("dtype", "scalar type", "bias type", "weight type"))
    return told and any(stored != name_of_dtype(borrowed.dtype) for stored in borrowed.stored_dtypes)


@dataclass(frozen=True)
class _Measured:
    """What was measured, and by which symmetries and settings in the end."""

    verified: Verified
    settings: Settings
    runs: Runs
    per: tuple[PartScore, ...]
    reproducible: Mapping[float, Reproducible]
    baselines: dict[str, float]


def _measure(
    borrowed: Borrowed, batches: Sequence[Batch], settings: Settings, loss: Loss | None, weight: Weight | None,
    track: Track, notes: Notes, ledger: Ledger,
) -> _Measured:  # fmt: skip
    """Proves the symmetries of a borrowed model, then runs all that is asked for."""
    proof = Proof(borrowed, batches, settings, track, notes)
    if settings.params != "all":
        proof.say_what_rounds()
    track.say("verify")
    verified, settings = proof.symmetries()
    same = {"symmetries": verified.map.dimension, "dropped": verified.map.dropped, "per": settings.per}
    agree(ledger.world, same)
    with checkpointed(borrowed.model, settings.gradient_checkpointing):
        runner = Runner(borrowed, batches, verified.map, settings, loss, weight, track, notes, ledger)
        parts = runner.parts()
        runs = runner.run()
        per = runner.scores_of(parts, runs)
        return _Measured(verified, settings, runs, per, *runner.evidence(runs))


def _result(
    measured: _Measured, batches: Sequence[Batch], seconds: float, model: dict[str, Any], data: dict[str, Any],
    versions: dict[str, str], notes: Notes,
) -> SharpnessResult:  # fmt: skip
    """The record of a score."""
    settings, runs, reproducible = measured.settings, measured.runs, measured.reproducible
    curve = [_curve_point(r, runs.values(r), reproducible.get(r)) for r in sorted(settings.radii)]
    head = next(c for c in curve if c.rho == settings.radii[0])
    return SharpnessResult(
        geodesic_sharpness=head.geodesic_sharpness,
        stderr=head.stderr,
        interval95=head.interval95,
        base_loss=math.fsum(o.base for o in runs.outcomes) / len(runs.outcomes),
        **settings.recorded,
        per=measured.per,
        profile=runs.profile,
        samples=sum(samples(batches[o.job.batch]) for o in runs.outcomes),
        batch_size=samples(batches[0]),
        per_batch=[o.at(head.rho) for o in runs.outcomes],
        curve=curve,
        baselines=measured.baselines,
        pairs=_summary(measured.verified, runs.reduced),
        share=dict(sorted(runs.worst(head.rho).share.items(), key=lambda item: -item[1])),
        reproducible=reproducible.get(head.rho, Reproducible(None, None, "not checked")),
        passes=Passes(sum(o.passes.forwards for o in runs.outcomes), sum(o.passes.backwards for o in runs.outcomes)),
        seconds=seconds,
        model=model,
        data=data,
        versions=versions,
        warnings=[*dict.fromkeys(notes)],
    )


def _check_sharded(shards: Shards, world: World, settings: Settings) -> None:
    """What is not there for sharded models.

    Raises:
        UsageError: it was asked for.
    """
    shards.check_world(world)
    for asked, what in (
        (settings.micro_batch == "auto", "micro_batch 'auto' (give a number: the ranks run every pass together)"),
        (settings.compile, "compile"),
    ):
        if asked:
            raise UsageError(f"the model is sharded over processes, and such models do not support {what}")


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
