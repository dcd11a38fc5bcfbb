"""Names of files and folders, as users write them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from hf_geosharp.errors import UsageError


def name_of(value: object, what: str, instead: str) -> str:
    """A name as text; ``instead`` is what to do with what is none.

    Raises:
        UsageError: it is none, but a model in memory, say.
    """
    if isinstance(value, (str, os.PathLike)):
        name = os.fspath(value)
        if not name:
            raise UsageError(f"{what} is an empty name")
        return name
    raise UsageError(f"{what} is of type {type(value).__name__}, not a name or a path; {instead}")


def names_of(values: object, what: str, instead: str) -> list[str]:
    """Several names, or a single one.

    Raises:
        UsageError: as for :func:`name_of`.
    """
    several = values if isinstance(values, Iterable) and not isinstance(values, (str, os.PathLike)) else [values]
    return [name_of(value, what, instead) for value in several]


def path_of(name: str | os.PathLike[str]) -> Path:
    """The path that a name means, with the home of a user in the place of ``~``.

    Raises:
        UsageError: no file can be called so: it is empty, the user has no home here, or the name is too long.
    """
    if not os.fspath(name):
        # To Python it is the folder that one is in, but mostly it was to come from a variable that is not set.
        raise UsageError("the name of a file, a folder or a model is empty; for the folder that you are in write .")
    path = Path(name)
    try:
        path = path.expanduser()
        path.exists()
    except RuntimeError:
        raise UsageError(f"{path}: there is no home of that user here; write the whole path") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UsageError(f"{str(path)[:60]}... is too long to be the name of a file or of a model") from None
        # What else keeps it from being looked at is told where it is opened.
    return path
