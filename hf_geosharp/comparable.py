"""Results side by side: where they are read from, what they are called, and whether their numbers may be compared."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_geosharp.arguments import check, check_kind
from hf_geosharp.errors import DataError, UsageError
from hf_geosharp.paths import names_of
from hf_geosharp.sharpness.journal import RESULT, differences
from hf_geosharp.sharpness.reading import read_result
from hf_geosharp.sharpness.result import SharpnessResult, unit_of
from hf_geosharp.sharpness.statistics import mean_with_error

SHARPNESS, BASE_LOSS = "sharpness", "base_loss"

# What two scores must share to be numbers about the same thing. Versions are not among them: they are told as a note.
_SETTINGS = (
    "metric", "geodesic", "symmetries", "params", "damping", "mode", "ascent", "rho", "steps", "starts", "seed",
    "samples", "batch_size",
)  # fmt: skip
# Of the data what does not follow from the model: how a text is cut is its tokenizer's business, and noted.
_NOT_DATA = ("chosen", "max_length", "max_length_chosen", "labels")
_LAYOUTS = ("layouts", "layouts_digest")
_SHOWN = 6


@dataclass(frozen=True)
class Named:
    """A result with the name it has among others.

    ``source`` is what was scored or read; ``aliases`` are other names it can be found by. A checkpoint of a Trainer
    has the folder of its ``run`` and its ``step``.
    """

    name: str
    result: SharpnessResult
    source: str = ""
    run: str = ""
    step: int | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(name=self.name)
        check_kind("result", self.result, SharpnessResult, "a SharpnessResult, which score returns")


@dataclass(frozen=True)
class Figure:
    """One number of a result; ``per_batch`` (batch -> value) where it is a mean over batches that is known in full."""

    value: float
    stderr: float | None = None
    interval95: tuple[float, float] | None = None
    per_batch: Mapping[int, float] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------------------- reading


def find_result_files(place: str | os.PathLike[str]) -> list[Path]:
    """The JSON files that a file or a folder stands for: itself, its ``result.json``, or those one folder below.

    Raises:
        DataError: there is none.
    """
    path = Path(place)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file or folder {path}")
    own = path / RESULT
    found = [own] if own.is_file() else sorted(path.glob(f"*/{RESULT}"))
    if not found:
        raise DataError(
            f"{path} holds no result: neither {RESULT} nor */{RESULT}, which 'hf-geosharp score' and 'compare' "
            "write with --output"
        )
    return found


def read_results(places: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Named]:
    """The results in JSON files, and in folders that ``--output`` wrote, each with a name of its own.

    Raises:
        DataError: no such file, no result in it, numbers that contradict one another; one file given twice.
    """
    names = names_of(places, "a place", "give files and folders of results")
    files = [file for place in names for file in find_result_files(place)]
    counts = Counter(os.path.realpath(file) for file in files)
    twice = [file for file in files if counts[os.path.realpath(file)] > 1]
    if twice:
        raise DataError(f"{twice[0]} is given {counts[os.path.realpath(twice[0])]} times; give each result once")
    return named([Named(_id(result), result, str(file)) for file, result in ((f, read_result(f)) for f in files)])


def _id(result: SharpnessResult) -> str:
    return str(result.model.get("id") or result.model.get("class") or "model")


def named(items: Sequence[Named]) -> list[Named]:
    """The same with names that tell them apart.

    A model's id where it is the only one of that id, with the commit where that tells them apart, else with the file
    that it came from. Where all are folders, what their paths begin with alike is left out.
    """
    names = [item.name for item in items]
    for more in (_commit, _file):
        counts = Counter(names)
        names = [
            f"{name} ({more(item)})" if counts[name] > 1 and more(item) else name
            for name, item in zip(names, items, strict=True)
        ]
    return [
        replace(item, name=short, aliases=_aliases(item, name))
        for item, name, short in zip(items, names, _short(names) if _are_folders(items) else names, strict=True)
    ]


def _are_folders(items: Sequence[Named]) -> bool:
    """Whether no model is from the Hub, where an owner is a part of the name even if all have the same."""
    ids = [_id(item.result) for item in items]
    return all("/" in name for name in ids) and not any(item.result.model.get("revision") for item in items)


def _commit(item: Named) -> str:
    return str(item.result.model.get("revision") or "")[:12]


def _file(item: Named) -> str:
    path = Path(item.source)
    return path.parent.name if path.name == RESULT else path.name


def _aliases(item: Named, name: str) -> tuple[str, ...]:
    """The full name, the id, its last part, and the file's name."""
    identity = _id(item.result)
    found = (name, item.name, identity, Path(identity).name, item.source, Path(_file(item)).stem)
    return tuple(dict.fromkeys(alias for alias in found if alias))


def _short(names: Sequence[str]) -> list[str]:
    """Paths without the folders that all of them are in."""
    if len(names) < 2:
        return list(names)
    split = [name.split("/") for name in names]
    same = next((i for i, parts in enumerate(zip(*split, strict=False)) if len(set(parts)) > 1), min(map(len, split)))
    return ["/".join(parts[min(same, len(parts) - 1) :]) for parts in split]


# --------------------------------------------------------------------------------------------------------- comparable


def conditions(result: SharpnessResult) -> dict[str, Any]:
    """What two scores must share for their difference to be one of the models."""
    data = {key: value for key, value in result.data.items() if key not in _NOT_DATA and value is not None}
    if result.data.get("max_length_chosen"):
        data["max_length"] = result.data.get("max_length")
    labels = result.data.get("labels")
    targets = labels if labels in ("model", "regression") else "data"
    kept = {name: getattr(result, name) for name in _SETTINGS}
    model = {"task": result.model.get("task"), "dtype": result.model.get("dtype")}
    return {**kept, **model, "labels": targets, "data": data}


def unit_of_scores(settings: Mapping[str, Any]) -> str:
    """In what the losses of scores with these :func:`conditions` are told."""
    model = {name: settings[name] for name in ("task",) if name in settings}
    return unit_of({"labels": settings.get("labels"), "loss": settings.get("data", {}).get("loss")}, model)


def named_results(given: Any) -> list[Named]:
    """Results with names, as they are handed to a call.

    Raises:
        UsageError: they are something else.
    """
    found = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)) else [given]
    for item in found:
        if not isinstance(item, Named):
            raise UsageError(
                f"the results have no names: read_results gives them some, or Named(name, result); here is {item!r:.60}"
            )
    return found


def check_comparable(items: Sequence[Named], *, force: bool = False) -> list[str]:
    """What the results differ in, which must be nothing unless ``force``.

    Each is held against what most of them have.

    Raises:
        UsageError: they differ; every difference is listed.
        DataError: a number of a result is NaN or infinite.
    """
    for item in items:
        _check_finite(item)
    if not items:
        return []
    each: list[Mapping[str, Any]] = [conditions(item.result) for item in items]
    common = _most_common(each)
    usual = items[each.index(common)].name
    found = [
        f"{item.name}: {text}"
        for item, own in zip(items, each, strict=True)
        for text in differences(*_same_data(own, common), ("here", f"in {usual}"))
    ]
    found += _other_layouts(items)
    if found and not force:
        listed = "".join(f"\n  {text}" for text in found)
        raise UsageError(
            f"these results are not comparable: they were computed with different settings or data:{listed}\nCompute "
            "them with the same settings on the same data, or pass force (--force), which marks every output"
        )
    return found


def _other_layouts(items: Sequence[Named]) -> Iterator[str]:
    """Where models of one class were scored by the symmetries of differing layouts; other classes need their own."""
    first: dict[Any, Named] = {}
    for item in items:
        usual = first.setdefault(item.result.model.get("class"), item)
        ours, theirs = ({name: held.result.model.get(name) for name in _LAYOUTS} for held in (item, usual))
        # A digest alone says little, but where the names are the same.
        found = differences(ours, theirs, ("here", f"in {usual.name}"))[:1]
        yield from (f"{item.name}: {text}" for text in found)


def same_batches(a: SharpnessResult, b: SharpnessResult) -> bool:
    """Whether batch i of one is batch i of the other; skipped ones aside, which are missing in one of them."""
    ours, theirs = (
        {name: own[name] for name in ("seed", "batch_size", "labels")}
        | {"data": {k: v for k, v in own["data"].items() if k not in ("skipped_batches", "id", "samples", "batches")}}
        for own in (conditions(a), conditions(b))
    )
    return ours == theirs


def notes_on(items: Sequence[Named]) -> list[str]:
    """What does not forbid a comparison and should be known: versions, cuts of texts, equal results, weak evidence."""
    notes = [text for name in ("hf-geosharp", "torch", "transformers") if (text := _versions(items, name))]
    lengths = {item.result.data.get("max_length") for item in items}
    if len(lengths) > 1:
        listed = ", ".join(f"{item.name} {item.result.data.get('max_length')}" for item in items[:_SHOWN])
        notes.append(f"the models' own tokenizers truncate texts at different lengths (max_length): {listed}")
    if any(not item.result.data.get("id") and not item.result.data.get("fingerprint") for item in items):
        notes.append("some results are of batches in memory: whether these are the same cannot be checked")
    notes += [
        f"{', '.join(group)} are equal in every batch: the same model, or copies of it" for group in _equal(items)
    ]
    lacking = [item.name for item in items if item.result.missing]
    if lacking:
        notes.append(f"weights are missing from the checkpoint, and random numbers instead: {_some(lacking)}")
    described = {item.name: item.result.model.get("layouts") for item in items}
    if any(described.values()) and len({str(names) for names in described.values()}) > 1:
        some = [f"{name} by {', '.join(map(str, names))}" for name, names in described.items() if names]
        notes.append(f"symmetries were found by layouts (--layout) in some of the models alone: {_some(some)}")
    unsure = [item.name for item in items if item.result.reproducible.ok is False]
    if unsure:
        notes.append(f"not reproducible, by their own check: {_some(unsure)}")
    open_ended = [item.name for item in items if not all(batch.converged for batch in item.result.per_batch)]
    if open_ended:
        notes.append(
            f"the search did not settle in every batch: {_some(open_ended)}; more steps (--steps) may raise them"
        )
    return notes


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _versions(items: Sequence[Named], name: str) -> str:
    found = Counter(str(item.result.versions.get(name, "unknown")) for item in items)
    return "" if len(found) < 2 else f"taken with different versions of {name}: {', '.join(sorted(found))}"


def _equal(items: Sequence[Named]) -> list[list[str]]:
    groups: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for item in items:
        batches = tuple((batch.base_loss, batch.value) for batch in item.result.per_batch)
        groups.setdefault(batches, []).append(item.name)
    return [names for names in groups.values() if len(names) > 1]


def _check_finite(item: Named) -> None:
    result = item.result
    numbers = [result.geodesic_sharpness, result.base_loss, result.rho, *result.baselines.values()]
    numbers += [number for batch in result.per_batch for number in (batch.value, batch.base_loss)]
    if not all(math.isfinite(number) for number in numbers):
        raise DataError(f"{item.name} holds a number that is NaN or infinite; compute its score again or leave it out")
    if result.lost:
        raise DataError(
            f"{item.name} is not a measurement: in {result.lost} of {len(result.per_batch)} batches no finite loss was "
            "found; compute its score at a smaller radius or leave it out"
        )
    if not result.per_batch:
        raise DataError(f"{item.name} has no batches; compute its score again or leave it out")


def _most_common(each: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    counts = Counter(json.dumps(own, sort_keys=True) for own in each)
    most = max(counts.values())
    return next(own for own in each if counts[json.dumps(own, sort_keys=True)] == most)


def _same_data(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Without the ids of data whose contents are known to be the same, for a path can be written in many ways."""
    prints = [own["data"].get("fingerprint") for own in (a, b)]
    if prints[0] is None or prints[0] != prints[1]:
        return a, b
    ours, theirs = ({**own, "data": {k: v for k, v in own["data"].items() if k != "id"}} for own in (a, b))
    return ours, theirs


# ------------------------------------------------------------------------------------------------------------ figures


def figure(item: Named, name: str) -> Figure:
    """A number that results carry: "sharpness", "base_loss", or a baseline by its name.

    Raises:
        UsageError: this result has none of that name; those it has are listed.
    """
    result = item.result
    if name == SHARPNESS:
        values = {batch.index: batch.value for batch in result.per_batch}
        return Figure(result.geodesic_sharpness, result.stderr, result.interval95, values)
    if name == BASE_LOSS:
        losses = {batch.index: batch.base_loss for batch in result.per_batch}
        _, stderr, interval = mean_with_error(list(losses.values()))
        return Figure(result.base_loss, stderr, interval, losses)
    if isinstance(name, str) and name in result.baselines:
        return Figure(result.baselines[name])
    known = ", ".join((SHARPNESS, BASE_LOSS, *result.baselines))
    more = "" if result.baselines else "; score with baselines (--baselines) to have more"
    raise UsageError(f"the result of {item.name} has no {name!r}; it has {known}{more}")
