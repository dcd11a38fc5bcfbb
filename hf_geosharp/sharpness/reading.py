"""A score from a JSON file: what ``--json`` wrote, checked before anything is made of it."""

from __future__ import annotations

import json
import math
import os
import unicodedata
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from hf_geosharp.errors import DataError
from hf_geosharp.sharpness.result import SharpnessResult

_TOLERANCE = 1e-6
_SHOWN = 60
_MAKE_ONE = "Make one with 'hf-geosharp score --json FILE'"


def read_result(path: str | os.PathLike[str]) -> SharpnessResult:
    """The score in a JSON file.

    Raises:
        DataError: There is no such file, it is no result of this schema, or its numbers contradict one another.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {name}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise DataError(f"{name} is not JSON: it is not UTF-8") from None
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not the JSON of a result: {error}") from None
    if not isinstance(data, dict):
        raise DataError(f"{name} is not a result: it holds no JSON object. {_MAKE_ONE}")
    odd = next(_no_text(data), None)
    if odd is not None:
        raise DataError(
            f"{name} holds a character that is not allowed in texts: {odd}. It could confuse a terminal or a page"
        )
    other = data.get("kind", "inspection" if "sites" in data else None)
    if other is not None:
        raise DataError(f"{name} is not a result: it holds something else ({str(other)[:_SHOWN]}). {_MAKE_ONE}")
    try:
        result = SharpnessResult.from_dict(data)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None
    except (TypeError, KeyError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{name} is not a result: {type(error).__name__}: {error}") from None
    _check(result, name)
    return result


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that a result can hold")


def _no_text(value: Any) -> Iterator[str]:
    """Texts with control characters, or with halves of characters, as Python writes them."""
    if isinstance(value, str):
        if any(unicodedata.category(c) in ("Cc", "Cs") and c not in "\t\n\r" for c in value):
            yield ascii(value)[:_SHOWN]
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_no_text, chain(value, value.values())))
    elif isinstance(value, list):
        yield from chain.from_iterable(map(_no_text, value))


def _check(result: SharpnessResult, name: str) -> None:
    """Types and the relations that every score has; an edited number breaks one of them."""
    wrong = next((what for what, right in _facts(result) if not right), None)
    if wrong is not None:
        raise DataError(f"{name} is not what a score wrote: {wrong}. Compute the score again")


def _facts(result: SharpnessResult) -> list[tuple[str, bool]]:
    """What must hold, each as a sentence and whether it does; later ones are only looked at if types are right."""
    facts = _types(result)
    if not all(right for _, right in facts):
        return facts
    at_rho = [point for point in result.curve if point.rho == result.rho]
    mean = math.fsum(batch.value for batch in result.per_batch) / max(len(result.per_batch), 1)
    facts += [
        ("its rho is not above 0", result.rho > 0),
        ("it has no samples or no batches", result.samples > 0 and result.batch_size > 0 and bool(result.per_batch)),
        ("its curve does not have its rho", bool(at_rho)),
    ]
    for point in at_rho:
        facts += [
            ("its score is not that of its curve", _near(point.geodesic_sharpness, result.geodesic_sharpness)),
            ("its interval is not that of its curve", point.interval95 == result.interval95),
            ("its standard error is not that of its curve", point.stderr == result.stderr),
        ]
    tops = [(batch.value, max(batch.rises, default=batch.value)) for batch in result.per_batch]
    facts.append(("a batch's value is not the largest of its starts", all(_near(*top) for top in tops)))
    facts.append(("its score is not the mean of its batches", _near(mean, result.geodesic_sharpness)))
    if result.interval95 is not None:
        low, high = result.interval95
        facts.append(("its score is not inside its interval", low <= result.geodesic_sharpness <= high))
    return facts


def _types(result: SharpnessResult) -> list[tuple[str, bool]]:
    texts = {name: getattr(result, name) for name in ("metric", "geodesic", "symmetries", "mode")}
    counts = {name: getattr(result, name) for name in ("steps", "starts", "seed", "samples", "batch_size")}
    numbers = {name: getattr(result, name) for name in ("geodesic_sharpness", "base_loss", "rho", "seconds")}
    numbers |= {f"baselines.{name}": value for name, value in result.baselines.items()}
    facts = [(f"{name} is no text", isinstance(value, str)) for name, value in texts.items()]
    facts += [(f"{name} is no whole number", type(value) is int) for name, value in counts.items()]
    facts += [(f"{name} is no finite number", _is_number(value)) for name, value in numbers.items()]
    facts += [("stderr is no finite number", result.stderr is None or _is_number(result.stderr))]
    for point in result.curve:
        held = (point.rho, point.geodesic_sharpness, *(() if point.stderr is None else (point.stderr,)))
        facts.append(("its curve holds something that is not a number", all(_is_number(value) for value in held)))
    for part in result.per:
        numbers_of_part = (part.value, *(() if part.stderr is None else (part.stderr,)))
        facts.append(
            ("a part holds something that is not a number", all(_is_number(value) for value in numbers_of_part))
        )
    if (way := result.profile) is not None:
        numbers_of_way = (*way.t, *way.geodesic, *way.straight, way.radius)
        facts.append(("its profile holds something that is not a number", all(map(_is_number, numbers_of_way))))
        facts.append(("its profile has gaps", len(way.t) == len(way.geodesic) == len(way.straight)))
    for batch in result.per_batch:
        facts.append(
            ("a batch holds something that is not a number", all(map(_is_number, (batch.value, *batch.rises))))
        )
    facts += [
        ("pairs has no whole numbers", type(result.pairs.count) is int and type(result.pairs.symmetry_dim) is int),
        ("model, data or versions is no object", all(isinstance(x, dict) for x in _objects(result))),
    ]
    return facts


def _objects(result: SharpnessResult) -> tuple[Any, ...]:
    return (result.model, result.data, result.versions)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-12)
