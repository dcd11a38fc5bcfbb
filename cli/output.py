"""Where the JSON of a result goes."""

from __future__ import annotations

import os
from typing import Protocol

import click

from hf_geosharp import atomic
from hf_geosharp.errors import GeosharpError


class HasJson(Protocol):
    """What can be written: a result, an inspection."""

    def to_json(self) -> str:
        """The whole of it as JSON."""
        ...


class JsonTarget:
    """The value of ``--json``: nothing, '-' for stdout, or a file that is written whole or not at all."""

    def __init__(self, target: str | None):
        self.is_stdout = target == "-"
        self._path = None if target is None or self.is_stdout else atomic.destination(target)

    def check(self) -> None:
        """Fail now rather than after the score has been computed.

        Raises:
            GeosharpError: nothing can be written there.
        """
        if self._path is None:
            return
        folder = self._path.parent
        if not folder.is_dir():
            raise GeosharpError(f"--json: there is no folder {folder}; create it first")
        if self._path.is_dir():
            raise GeosharpError(f"--json: {self._path} is a folder; give the name of a file")
        if not os.access(self._path if atomic.is_special(self._path) else folder, os.W_OK):
            raise GeosharpError(f"--json: no permission to write {self._path}")

    def write(self, result: HasJson) -> None:
        """Write ``result``, if it is wanted as JSON at all.

        Raises:
            GeosharpError: the file system refused.
        """
        if self.is_stdout:
            # As bytes: JSON is UTF-8 whatever the terminal's encoding.
            click.echo(result.to_json().encode())
        elif self._path is not None:
            try:
                atomic.put(self._path, (result.to_json() + "\n").encode())
            except OSError as error:
                raise GeosharpError(f"--json: cannot write {self._path}: {error.strerror or error}") from error
