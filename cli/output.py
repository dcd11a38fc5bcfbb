"""Where the JSON of a result goes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from hf_geosharp.cli.files import Target


class HasJson(Protocol):
    """What can be written: a result, an inspection."""

    def to_json(self) -> str:
        """The whole of it as JSON."""
        ...


class JsonTarget(Target):
    """The value of ``--json``: nothing, '-' for stdout, or a file that is written whole or not at all."""

    def __init__(self, target: str | None) -> None:
        super().__init__("--json", None if target is None else Path(target))

    def write_json(self, result: HasJson) -> None:
        """Writes ``result``, if it is wanted as JSON at all.

        Raises:
            GeosharpError: the file system refused.
        """
        if self.is_wanted:
            self.write(result.to_json() + "\n")
