"""Arguments of public calls: one of another kind than is wanted is told by its name, with what to give instead."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hf_geosharp.errors import UsageError

Test = Callable[[Any], bool]


def _is_flag(value: Any) -> bool:
    # NumPy's are called so, too.
    return type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_length(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= math.inf


def _or_none(test: Test) -> Test:
    return lambda value: value is None or test(value)


KINDS: Mapping[str, tuple[Test, str]] = {
    **dict.fromkeys(
        (
            "allow_missing", "average", "back", "cached", "compile", "force", "gradient_checkpointing", "health",
            "profile", "prove", "random_init", "reproducibility", "trust_remote_code", "verify",
        ),
        (_is_flag, "True or False"),
    ),
    **dict.fromkeys(("model", "name", "target_name"), (_is_text, "a text")),
    **dict.fromkeys(
        ("config_name", "data_config", "picture", "revision", "split"), (_or_none(_is_text), "a text, or None")
    ),
    **dict.fromkeys(("progress", "told"), (_or_none(callable), "a function, or None")),
    "alive": (callable, "a function"),
    "content": (lambda value: isinstance(value, bytes), "the bytes of a card, of which every one can stay then"),
    "inputs": (_or_none(_is_mapping), "a batch (a mapping from names to tensors), or None"),
    "label_map": (_or_none(_is_mapping), "a mapping from labels to classes, or None"),
    "output": (_or_none(_is_path), "the name or path of a folder, or None"),
    "path": (_is_path, "the name or path of a file"),
    "processor": (_or_none(callable), "what transformers.AutoTokenizer or AutoImageProcessor loads, or None"),
    "timeout": (_is_length, "a positive number of seconds"),
    "token": (_or_none(lambda value: isinstance(value, (str, bool))), "a text, or None"),
}  # fmt: skip
"""What arguments of these names are, wherever they are taken: a test, and words for a message."""


def check(**given: Any) -> None:
    """Makes sure that arguments are what :data:`KINDS` says under their names.

    Raises:
        UsageError: one is something else.
    """
    for name, value in given.items():
        test, words = KINDS[name]
        if not test(value):
            raise UsageError(f"{name} is {value!r:.60}; it is {words}")


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], words: str) -> None:
    """Makes sure that an argument is of a type; ``words`` say what to give.

    Raises:
        UsageError: it is of another.
    """
    if not isinstance(value, kind):
        raise UsageError(f"{name} is {value!r:.60}; it is {words}")


def fraction(name: str, value: Any) -> float:
    """A number of any kind as Python's own.

    Raises:
        UsageError: it is none.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{name} is {value!r:.60}; it is a number") from None


def whole(name: str, value: Any) -> int:
    """A whole number of any kind, such as NumPy's, as Python's own.

    Raises:
        UsageError: it is none.
    """
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise UsageError(f"{name} is {value!r:.60}; it is a whole number")


def check_choice(name: str, value: Any, known: Iterable[str | None]) -> None:
    """Makes sure that a value is one of those that are known; any kind can be asked for.

    Raises:
        UsageError: it is not.
    """
    known = tuple(known)
    if value not in known:
        raise UsageError(f"{name} is {value!r:.60}; it is one of {', '.join(str(k) for k in known if k)}")
