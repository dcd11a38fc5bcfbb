"""A score from a JSON file: what ``--json`` wrote, checked before anything is made of it."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

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
    except (TypeError, KeyError, ValueError, IndexError, AttributeError, OverflowError) as error:
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
    wrong = next(_mistyped(result, SharpnessResult), None)
    wrong = wrong or next((what for what, right in _facts(result) if not right), None)
    if wrong is not None:
        raise DataError(f"{name} is not what a score wrote: {wrong}. Compute the score again")


def _facts(result: SharpnessResult) -> list[tuple[str, bool]]:
    """What must hold where all types are right, each as a sentence and whether it does."""
    at_rho = [point for point in result.curve if point.rho == result.rho]
    mean = math.fsum(batch.value for batch in result.per_batch) / max(len(result.per_batch), 1)
    facts = [
        ("its rho is not above 0", result.rho > 0),
        ("it has no samples or no batches", result.samples > 0 and result.batch_size > 0 and bool(result.per_batch)),
        ("its curve does not have its rho", bool(at_rho)),
        ("it has a batch twice", len({batch.index for batch in result.per_batch}) == len(result.per_batch)),
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
    if (way := result.profile) is not None:
        facts.append(("its profile has gaps", 0 < len(way.t) == len(way.geodesic) == len(way.straight)))
    if result.interval95 is not None:
        low, high = result.interval95
        facts.append(("its score is not inside its interval", low <= result.geodesic_sharpness <= high))
    return facts


_KINDS: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "text"),
    bool: (lambda value: isinstance(value, bool), "truth value"),
    int: (lambda value: type(value) is int, "whole number"),
    float: (lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max, "finite number"),
    list: (lambda value: isinstance(value, list), "list"),
    tuple: (lambda value: isinstance(value, tuple), "list"),
    dict: (lambda value: isinstance(value, dict), "object"),
}
"""What a field can be declared as, with how a value is told to be that, and the word for it."""


def _mistyped(value: Any, kind: Any, name: str = "") -> Iterator[str]:
    """What is not of the type that its field is declared with, in words."""
    parts = get_args(kind)
    if dataclasses.is_dataclass(kind):
        for own, inner in get_type_hints(kind).items():
            yield from _mistyped(getattr(value, own), inner, f"{name}.{own}".lstrip("."))
    elif type(None) in parts:
        if value is not None:
            yield from _mistyped(value, parts[0], name)
    elif kind is not Any:
        is_right, word = _KINDS[get_origin(kind) or kind]
        if not is_right(value):
            yield f"{name} is no {word}"
        elif isinstance(value, dict):
            for key, held in value.items():
                yield from _mistyped(held, parts[1], f"{name}.{key}")
        elif isinstance(value, (list, tuple)):
            for place, held in enumerate(value):
                yield from _mistyped(held, parts[0], f"{name}[{place}]")


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-12)
