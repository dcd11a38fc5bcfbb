"""Every failure that the package foresees, each with the exit code the command line gives it.

A message says what is wrong, where (parameter, layer, head, column), and what to do about it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator


class GeosharpError(Exception):
    """A known failure. ``exit_code`` is what ``hf-geosharp`` ends with when it reaches the user."""

    exit_code = 1


class UsageError(GeosharpError):
    """The call's arguments do not fit together."""

    exit_code = 2


class DataError(GeosharpError):
    """The data cannot be scored: empty, wrong columns, labels out of range, ..."""


class ModelError(GeosharpError):
    """The model cannot be scored as it is: missing weights, NaN in a parameter, no loss, ..."""


class InputsError(ModelError, ValueError):
    """No inputs of a model can be made up: it needs an example batch."""


class UnsupportedModelError(ModelError):
    """No score is possible for a model of this kind: quantised, offloaded, on the meta device, or without a task."""

    exit_code = 3


class HubError(GeosharpError):
    """The Hub or the network did not give what was asked for."""

    exit_code = 4


class CardError(GeosharpError):
    """A model card cannot be changed safely, so it was left as it is.

    ``block`` is what to paste into it by hand, if there is something.
    """

    exit_code = 5

    def __init__(self, message: str, block: str = ""):
        super().__init__(message)
        self.block = block


class WorldError(GeosharpError):
    """Another process of the run failed, died, does not answer, or is not there at all."""


class GeosharpWarning(UserWarning):
    """Something the user should know about a score that was nevertheless taken."""


class DataWarning(GeosharpWarning):
    """Something about the data alone: where several models are scored on them, it is said once."""


_INSIDE = frozenset({__name__.partition(".")[0], "transformers", "evaluate", "trl"})
"""This package, and those whose Trainers and metrics call it for the user."""


def warn(text: str, category: type[Warning] = GeosharpWarning) -> None:
    """Warns of something at the line from where the package was called: that one is the user's.

    Where a Trainer or ``evaluate`` calls it, at the line from where these were called.
    """
    frame = caller = sys._getframe(1)
    while frame.f_back is not None:
        inside = frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE
        frame = frame.f_back
        if inside:
            caller = frame
    known = caller.f_globals.setdefault("__warningregistry__", {})
    place = caller.f_code.co_filename, caller.f_lineno, caller.f_globals.get("__name__")
    warnings.warn_explicit(text, category, *place, known)


def first_line(error: BaseException) -> str:
    """What an error says first, for messages that tell of another library's; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what caused it, and so on; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
