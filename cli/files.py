"""A file that an option names: looked at before the work, written whole or not at all after it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from hf_geosharp import atomic
from hf_geosharp.errors import GeosharpError, UsageError
from hf_geosharp.paths import path_of
from hf_geosharp.sharpness.journal import RESULT

_Name = str | os.PathLike[str]


def check_apart(*given: tuple[str, _Name | None]) -> None:
    """Makes sure that no two options, each with its value, write the same file.

    Raises:
        UsageError: they do, and the later would replace what the earlier wrote.
    """
    seen: dict[Path, str] = {}
    for option, name in given:
        if name is None or Path(name) == Path("-") or atomic.is_special(path_of(name)):
            continue
        other = seen.setdefault(atomic.destination(path_of(name)), option)
        if other != option:
            raise UsageError(f"{other} and {option} would both write {name}; choose another file for one of them")


class Target:
    """The value of an option such as ``--csv``: nothing, '-' for stdout, or a file."""

    def __init__(self, option: str, path: Path | None) -> None:
        self._option = option
        self.is_wanted, self.is_stdout = path is not None, path == Path("-")
        self._path = None if path is None or self.is_stdout else atomic.destination(path_of(path))

    def check(self, inputs: Iterable[_Name | None] = (), results: Iterable[_Name] = ()) -> None:
        """Fail now rather than after the work.

        Raises:
            GeosharpError: nothing can be written there.
            UsageError: it is one of the ``inputs``, or of the ``results``, which may also be in folders of these names.
        """
        if self._path is None:
            return
        held = [path for name in results for path in (name, Path(name) / RESULT, *Path(name).glob(f"*/{RESULT}"))]
        if any(name is not None and self._path == atomic.destination(name) for name in (*inputs, *held)):
            raise UsageError(f"{self._option}: {self._path} is an input, which would be lost; choose another file")
        if not self._path.parent.is_dir():
            raise GeosharpError(f"{self._option}: there is no folder {self._path.parent}; create it first")
        if self._path.is_dir():
            raise GeosharpError(f"{self._option}: {self._path} is a folder; give the name of a file")
        if not os.access(self._path if atomic.is_special(self._path) else self._path.parent, os.W_OK):
            raise GeosharpError(f"{self._option}: no permission to write {self._path}")

    def write(self, text: str) -> None:
        """Writes ``text``, if it is wanted at all.

        Raises:
            GeosharpError: the file system refused.
        """
        if self.is_stdout:
            # As bytes: it is UTF-8 whatever the terminal's encoding.
            click.echo(text.encode(), nl=False)
        if self._path is None:
            return
        try:
            atomic.put(self._path, text.encode())
        except OSError as error:
            raise GeosharpError(f"{self._option}: cannot write {self._path}: {error.strerror or error}") from error
