"""Models side by side on the same batches: a ranking, paired differences, and which of them cannot be told apart."""

from __future__ import annotations

import csv
import dataclasses
import gc
import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hf_geosharp.arguments import check, check_kind
from hf_geosharp.checkpoints import History
from hf_geosharp.comparable import (
    BASE_LOSS,
    SHARPNESS,
    Figure,
    Named,
    check_comparable,
    conditions,
    figure,
    named,
    named_results,
    notes_on,
    read_results,
    same_batches,
)
from hf_geosharp.demos import PREFIX
from hf_geosharp.errors import DataError, ModelError, UsageError, warn
from hf_geosharp.members import Member, check_members, find_members, folder_names, holds_results, one_task, rows_of
from hf_geosharp.paths import names_of, path_of
from hf_geosharp.record import Record
from hf_geosharp.sharpness.journal import differences
from hf_geosharp.sharpness.statistics import mean_with_error

if TYPE_CHECKING:
    from hf_geosharp.sharpness.progress import Progress
    from hf_geosharp.sharpness.result import SharpnessResult


RESOLUTION = 0.01
"""Relative difference below which two sharpnesses count as one: to that the ascent settles, and a re-run may differ."""

_ROUNDING = 1e-5
"""The same for a loss at the model's own weights, which nothing is searched for."""

# Options of loading; a model that is loaded already is scored without them.
_LOADING = ("task", "device", "dtype", "revision", "trust_remote_code", "allow_missing")


@dataclass(frozen=True)
class Difference:
    """How much higher one model is than another, batch by batch.

    ``apart`` says whether they can be told apart: Student's 95 % interval of the per-batch differences leaves out 0,
    and the mean difference is beyond what the search itself resolves. None where that is not known: there is one batch,
    or the figure has no values by batch, or the batches are not the same.
    """

    lower: str
    higher: str
    mean: float
    stderr: float | None
    interval95: tuple[float, float] | None
    batches: int
    apart: bool | None


@dataclass(frozen=True)
class Ranked:
    """One model in the ranking; rank 1 is the lowest value.

    ``best_rank`` and ``worst_rank`` bound the rank by the models that it can be told apart from. ``losses`` are those
    that its Trainer logged up to ``step``.
    """

    rank: int
    best_rank: int
    worst_rank: int
    name: str
    value: float
    stderr: float | None
    interval95: tuple[float, float] | None
    sharpness: float
    sharpness_interval95: tuple[float, float] | None
    base_loss: float
    batches: int
    converged: int
    reproducible: bool | None
    source: str
    run: str = ""
    step: int | None = None
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that could not be scored."""

    name: str
    reason: str


@dataclass(frozen=True)
class Run:
    """A folder of checkpoints: how many, those left out, and the logged losses, (step, value) by name."""

    folder: str
    checkpoints: int
    skipped: tuple[Skipped, ...] = ()
    losses: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison(Record):
    """A ranking with its evidence.

    ``settings`` are what the scores share (of the first, where they were forced together), ``next`` the differences
    between neighbours of the ranking, ``differences`` those of all pairs. ``forced`` lists what the results differ in;
    it is empty unless they were forced together.
    """

    KIND: ClassVar[str] = "comparison"
    SCHEMA: ClassVar[int] = 1

    rank_by: str
    settings: Mapping[str, Any]
    ranking: tuple[Ranked, ...]
    next: tuple[Difference, ...]
    differences: tuple[Difference, ...]
    runs: tuple[Run, ...] = ()
    forced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """The checkpoints of all runs that could not be scored."""
        return tuple(skipped for run in self.runs for skipped in run.skipped)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comparison:
        """The inverse of :meth:`to_dict`.

        Raises:
            DataError: it is something else.
        """
        values = cls.fields_of(data)
        try:
            values["ranking"] = tuple(Ranked(**_pairs(held)) for held in data["ranking"])
            for name in ("next", "differences"):
                values[name] = tuple(Difference(**_pairs(held)) for held in data[name])
            values["runs"] = tuple(_run(held) for held in data["runs"])
            values["forced"], values["notes"] = tuple(data["forced"]), tuple(data["notes"])
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"no comparison: {type(error).__name__}: {error}") from None

    def to_csv(self) -> str:
        """A line for each model, in the order of the ranking."""
        losses = list(dict.fromkeys(name for held in self.ranking for name in held.losses))
        names = [f.name for f in dataclasses.fields(Ranked) if f.name not in ("losses", *_INTERVALS)]
        columns = [*names, *(f"{name}_{end}" for name in _INTERVALS for end in ("low", "high"))]
        columns += ["next", "next_difference", "next_low", "next_high", "apart_from_next"]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*columns, *(f"logged_{name}" for name in losses), "rank_by", "forced"])
        for held, step in zip(self.ranking, (*self.next, None), strict=True):
            row = [getattr(held, name) for name in names]
            row += [bound for name in _INTERVALS for bound in getattr(held, name) or (None, None)]
            row += [None] * 5 if step is None else _step_cells(step)
            writer.writerow([*row, *(held.losses.get(name) for name in losses), self.rank_by, "; ".join(self.forced)])
        return text.getvalue()


def _step_cells(step: Difference) -> list[Any]:
    return [step.higher, step.mean, *(step.interval95 or (None, None)), step.apart]


_INTERVALS = ("interval95", "sharpness_interval95")


def _pairs(held: Mapping[str, Any]) -> dict[str, Any]:
    """With intervals as tuples, which JSON does not have."""
    return {k: tuple(v) if k in _INTERVALS and v is not None else v for k, v in held.items()}


def _run(held: Mapping[str, Any]) -> Run:
    losses = {name: tuple((int(step), float(value)) for step, value in v) for name, v in held["losses"].items()}
    return Run(**{**held, "skipped": tuple(Skipped(**s) for s in held["skipped"]), "losses": losses})


# ------------------------------------------------------------------------------------------------- results to ranking


def compare(
    results: Sequence[Named],
    *,
    rank_by: str = SHARPNESS,
    force: bool = False,
    runs: Sequence[Run] = (),
) -> Comparison:
    """Ranks results that were taken alike.

    Args:
        results: at least two, of :func:`hf_geosharp.comparable.read_results` or made from scores.
        rank_by: "sharpness", "base_loss", or a baseline that all of them carry.
        force: rank results of different settings or data, too; what they differ in is in the comparison.
        runs: folders of checkpoints that some of them are from.

    Raises:
        UsageError: fewer than two; two of one name; other settings or data, with what differs; no such figure.
        DataError: a result with NaN.
    """
    results = named_results(results)
    check(force=force)
    check_kind("runs", runs, (list, tuple), "a list of runs")
    for run in runs:
        check_kind("a run", run, Run, "a Run")
    twice = [name for name, count in Counter(item.name for item in results).items() if count > 1]
    if twice:
        raise UsageError(f"{twice[0]} is there twice; name each model once")
    if len(results) < 2:
        raise UsageError(f"a comparison needs at least two models, and there is {len(results) or 'none'}")
    forced = check_comparable(results, force=force)
    figures = {item.name: figure(item, rank_by) for item in results}
    ordered = sorted(results, key=lambda item: (figures[item.name].value, item.name))
    pairs = {(low.name, high.name): _difference(low, high, figures, rank_by) for low, high in combinations(ordered, 2)}
    names = [item.name for item in ordered]
    bounds = [_bounds(name, names, pairs) for name in names]
    return Comparison(
        rank_by=rank_by,
        settings=conditions(results[0].result),
        ranking=tuple(
            _ranked(rank, bound, item, figures[item.name], runs)
            for rank, (bound, item) in enumerate(zip(bounds, ordered, strict=True), start=1)
        ),
        next=tuple(pairs[pair] for pair in pairwise(names)),
        differences=tuple(pairs.values()),
        runs=tuple(runs),
        forced=tuple(forced),
        notes=tuple(notes_on(results)),
    )


def _difference(low: Named, high: Named, figures: Mapping[str, Figure], rank_by: str) -> Difference:
    a, b = figures[low.name], figures[high.name]
    common = sorted(set(a.per_batch) & set(b.per_batch)) if same_batches(low.result, high.result) else []
    if not common:
        return Difference(low.name, high.name, b.value - a.value, None, None, 0, None)
    mean, stderr, interval = mean_with_error([b.per_batch[i] - a.per_batch[i] for i in common])
    resolved = _resolution(low, high, rank_by) * max(abs(a.value), abs(b.value))
    apart = None if interval is None else not interval[0] <= 0 <= interval[1] and abs(mean) > resolved
    return Difference(low.name, high.name, mean, stderr, interval, len(common), apart)


def _resolution(low: Named, high: Named, rank_by: str) -> float:
    """What two values must differ by, relatively, whatever the batches say."""
    if rank_by != SHARPNESS:
        return _ROUNDING
    return max(RESOLUTION, *(item.result.reproducible.spread or 0.0 for item in (low, high)))


def _bounds(name: str, names: Sequence[str], pairs: Mapping[tuple[str, str], Difference]) -> tuple[int, int]:
    """The best and the worst rank, by those that are certainly below and certainly above."""
    at = names.index(name)
    below = sum(pairs[other, name].apart is True for other in names[:at])
    above = sum(pairs[name, other].apart is True for other in names[at + 1 :])
    return below + 1, len(names) - above


def _ranked(rank: int, bounds: tuple[int, int], item: Named, found: Figure, runs: Sequence[Run]) -> Ranked:
    result = item.result
    run = next((run for run in runs if item.run and run.folder == item.run), None)
    return Ranked(
        rank=rank,
        best_rank=bounds[0],
        worst_rank=bounds[1],
        name=item.name,
        value=found.value,
        stderr=found.stderr,
        interval95=found.interval95,
        sharpness=result.geodesic_sharpness,
        sharpness_interval95=result.interval95,
        base_loss=result.base_loss,
        batches=len(result.per_batch),
        converged=sum(batch.converged for batch in result.per_batch),
        reproducible=result.reproducible.ok,
        source=item.source,
        run=item.run,
        step=item.step,
        losses=History(run.losses).at(item.step) if run is not None and item.step is not None else {},
    )


# -------------------------------------------------------------------------------------------------- models to results


def compare_pretrained(
    models: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    rank_by: str = SHARPNESS,
    force: bool = False,
    output: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | None = None,
    told: Callable[[str], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Comparison:
    """Scores models on the same batches and ranks them.

    Args:
        models: ids of the Hub (``owner/name@revision`` for a branch, tag or commit), folders, shipped demos; folders
            of a Trainer's checkpoints, which stand for all of these; JSON files of results.
        rank_by: "sharpness", "base_loss", or a baseline that all of them carry.
        force: compare results of other settings or data, too; what they differ in is in the comparison.
        output: a folder that gets a folder for each model, with its journal and its result; the same call continues.
        revision: of all models of the Hub that are given without one.
        token: as for :func:`hf_geosharp.score_pretrained`.
        told: told of each model before it is scored.
        progress: told after every step.
        options: of :func:`hf_geosharp.score_pretrained`, the same for all models. Without ``data`` each model's own are
            taken, which must turn out to be the same.

    Raises:
        UsageError: fewer than two models, models of different tasks, results that do not compare, results of other
            settings in ``output``.
        GeosharpError: as for :func:`hf_geosharp.score_pretrained`. A checkpoint of a run that cannot be scored is left
            out with a warning; any other model ends the comparison.
    """
    from hf_geosharp.scoring import score_pretrained
    from hf_geosharp.sharpness.settings import several

    check(force=force, output=output, revision=revision, token=token, told=told, progress=progress)
    names = names_of(models, "a model", "results in memory are ranked by hf_geosharp.comparison.compare")
    known = [*(score_pretrained.__kwdefaults__ or {}), "revision", "token"]
    if unknown := [name for name in options if name not in known]:
        raise UsageError(f"there is no option {unknown[0]}; the options are {', '.join(sorted(known))}")
    files = [name for name in names if holds_results(name)]
    found = find_members([name for name in names if name not in files], revision)
    members, notes = found.members, list(found.notes)
    results = read_results(files)
    total = len(members) + len(results)
    if total < 2:
        raise UsageError(
            f"a comparison needs at least two models, and there {'is one' if total else 'is none'}; a folder of "
            "checkpoints (checkpoint-100, ...) counts as many"
        )
    _check_figure(rank_by, members, results, several(options.get("baselines", ())))
    check_comparable(results, force=force)
    kinds = {name: options[name] for name in ("task", "params") if name in options}
    broken = check_members(members, results, token=token, **kinds)
    if results and members and not force:
        _check_settings(results[0], options, token)
    given = {**(score_pretrained.__kwdefaults__ or {}), **options}
    rows = rows_of([member for member in members if member.source not in broken], given, token)
    if not force:
        _check_rows(rows, results[:1], by_name=given["data"] is not None)
    skipped: dict[str, list[Skipped]] = {}
    taken: list[Named] = []
    for number, (member, folder) in enumerate(zip(members, folder_names(members), strict=True)):
        if told is not None:
            told(f"{number + 1} of {len(members)}: {member.source}")
        try:
            if member.source in broken:
                raise broken[member.source]
            place = None if output is None else path_of(output) / folder
            update = _overall(progress, number, len(members))
            taken.append(_score(member, place, token, update, [*results, *taken], force, options))
        except ModelError as error:
            if not member.run:
                raise
            skipped.setdefault(member.run, []).append(Skipped(member.source, str(error)))
            warn(f"skipped: {error}")
    if len(results) + len(taken) < 2:
        reasons = "".join(f"\n  {s.name}: {s.reason}" for group in skipped.values() for s in group)
        raise ModelError(f"fewer than two of {total} models could be scored, too few to compare:{reasons}")
    runs = [
        Run(folder, count, tuple(skipped.get(folder, ())), history.losses)
        for folder, (count, history) in found.runs.items()
    ]
    notes += [note for _, history in found.runs.values() for note in history.notes]
    notes += [
        f"{run.folder}: {len(run.skipped)} of {run.checkpoints} checkpoints skipped" for run in runs if run.skipped
    ]
    done = compare(named([*results, *taken]), rank_by=rank_by, force=force, runs=runs)
    return dataclasses.replace(done, notes=(*notes, *done.notes))


def _check_figure(rank_by: str, members: Sequence[Member], results: Sequence[Named], baselines: Sequence[str]) -> None:
    """A figure that the scores will not have, or the results have not, is told before any score is taken."""
    known = (SHARPNESS, BASE_LOSS, *baselines)
    if members and rank_by not in known:
        raise UsageError(f"rank_by is {rank_by!r}; it is one of {', '.join(known)}, or a requested baseline")
    for item in results:
        figure(item, rank_by)


def _check_settings(item: Named, options: Mapping[str, Any], token: str | None) -> None:
    """What scores will be taken with, and on, is held against a result beforehand, as far as it is known."""
    from hf_geosharp.scoring import score_pretrained

    given = {**(score_pretrained.__kwdefaults__ or {}), **options}
    result, who = item.result, (f"in {item.name}", "here")
    known: dict[str, Any] = {"dtype": given["dtype"]} if "dtype" in result.model else {}
    if given["max_length"] is None or not result.data.get("max_length_chosen"):
        known["max_length"] = given["max_length"]
    known["labels"] = "model" if given["labels"] == "model" else "data"
    theirs = conditions(result)
    theirs["max_length"] = theirs["data"].get("max_length")
    theirs["labels"] = "model" if theirs["labels"] == "model" else "data"
    by_name = isinstance(given["data"], (str, os.PathLike))
    if given["data"] is None or by_name:
        known["batch_size"] = given["batch_size"]
    ways = [{**own, **known} for own in _records(given)]
    # Which of the ways it will be is decided by the model.
    found = min((differences({name: theirs[name] for name in own}, own, who) for own in ways), key=len)
    if not found and by_name and not _in_memory(result):
        found = _differing_data(result, given, token, who)
    if found:
        raise UsageError(
            f"the scores would not be comparable with the results: {'; '.join(found)}. Pass the settings of the "
            "results, or force (--force)"
        )


def _check_rows(rows: Mapping[str, Mapping[str, Any]], results: Sequence[Named], *, by_name: bool) -> None:
    """What models will be scored on, as far as it is known, is held against the first of them, and against a result."""
    # Data that are named have been held against those of a result, but for what is read of them.
    each: dict[str, Mapping[str, Any]] = {
        f"in {item.name}": {"columns": item.result.data.get("columns")} if by_name else item.result.data
        for item in results
        if not _in_memory(item.result)
    }
    each |= {f"of {name}": own for name, own in rows.items()}
    if not rows or len(each) < 2:
        return
    (first, theirs), *rest = each.items()
    for who, own in rest:
        # A path can be written in many ways, and a result need not say everything.
        same = theirs.get("fingerprint") == own["fingerprint"] is not None
        names = [name for name in own if theirs.get(name) is not None and not (same and name == "id")]
        before, here = ({"data": {name: data[name] for name in names}} for data in (theirs, own))
        if found := differences(before, here, (first, who)):
            raise UsageError(
                f"the scores would not be comparable, for they would be of different data: {'; '.join(found)}. Pass "
                "the same data and columns for all (--data, --text-column and the like), or force (--force)"
            )


def _records(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a result may say of how it was taken: as was asked for, as without symmetries, as where the base rounds."""
    from hf_geosharp.sharpness.settings import Settings, radii_of

    names = ("metric", "geodesic", "symmetries", "ascent", "steps", "starts", "seed", "average", "params")
    asked = Settings(rho=radii_of(given["rho"]), **{name: given[name] for name in names})
    ways = [asked, asked.unpaired] if asked.geometry.paired else [asked]
    if asked.params != "all" and asked.ascent == "auto" and not asked.average:
        ways += [dataclasses.replace(way, ascent="secant") for way in ways]
    return [way.recorded for way in ways]


def _in_memory(result: SharpnessResult) -> bool:
    """Whether nothing is known of where the data of a result are from, or they ship with a demo."""
    name = str(result.data.get("id") or "")
    return not name or name.startswith(PREFIX)


def _differing_data(
    result: SharpnessResult, given: Mapping[str, Any], token: str | None, who: tuple[str, str]
) -> list[str]:
    """In what the rows that will be scored are not those of a result."""
    from hf_geosharp.tasks.data import load_data
    from hf_geosharp.tasks.kinds import TASKS

    # The task decides what is taken where none are named.
    _, rows = load_data(
        given["data"], config=given["data_config"], split=given["split"], token=token, task=TASKS[0]
    )  # fmt: skip
    names = ("id", "config", "split", "revision", "fingerprint", "rows", "samples")
    size = given["batch_size"]
    drawn = min(given["samples"], rows["rows"]) // size * size
    theirs, ours = ({name: held.get(name) for name in names} for held in (result.data, {**rows, "samples": drawn}))
    if theirs["fingerprint"] == ours["fingerprint"]:
        # A path can be written in many ways.
        ours["id"] = theirs["id"]
    if theirs["samples"] is None or (result.data.get("skipped") and theirs["samples"] < drawn):
        # Of rows in which there is nothing to score none is drawn.
        ours["samples"] = theirs["samples"]
    return differences({"data": theirs}, {"data": ours}, who)


def _overall(
    progress: Callable[[Progress], None] | None, number: int, models: int
) -> Callable[[Progress], None] | None:
    """Counts over all models, as if each took as long."""
    if progress is None:
        return None
    return lambda state: progress(
        dataclasses.replace(state, done=number * state.total + state.done, total=models * state.total)
    )


def _score(
    member: Member,
    place: Path | None,
    token: str | None,
    progress: Callable[[Progress], None] | None,
    others: Sequence[Named],
    force: bool,
    options: Mapping[str, Any],
) -> Named:
    """One model, held against the first before the next is loaded."""
    from hf_geosharp.parallel import World
    from hf_geosharp.scoring import load_pretrained, score_pretrained

    # Which weights may move matters to loading and to the score.
    loading = {name: options[name] for name in (*_LOADING, "params") if name in options}
    rest = {name: value for name, value in options.items() if name not in _LOADING}
    loaded = load_pretrained(member.place, token=token, **{**loading, "revision": member.revision})
    if others:
        theirs = str(others[0].result.model.get("task"))
        one_task({theirs: [others[0].name], loaded.task.name: [member.source]})
    result = score_pretrained(loaded, token=token, output=place, world=World(), progress=progress, **rest)
    item = Named(member.source, result, member.source, member.run, member.step)
    # The model goes before the next one comes.
    del loaded
    gc.collect()
    if others and not force:
        check_comparable([others[0], item])
    return item
