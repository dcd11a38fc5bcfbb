"""A file that an option names: looked at before the work, written whole or not at all after it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import click

from hf_geosharp import atomic
from hf_geosharp.errors import GeosharpError, UsageError
from hf_geosharp.paths import path_of
from hf_geosharp.sharpness.journal import RESULT

_Name = str | os.PathLike[str]

_OF_A_MODEL = (
    "*config*.json", "*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", "tokenizer*", "vocab*", "merges.txt",
    "*_tokens*.json", "*.model", "*.py", "chat_template*", "trainer_state.json",
)  # fmt: skip
"""What is saved into a model's folder, by transformers, PEFT and tokenizers."""


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


def _is_of_model(name: str) -> bool:
    return any(fnmatch(name.lower(), pattern) for pattern in _OF_A_MODEL)


class Target:
    """The value of an option such as ``--csv``: nothing, '-' for stdout, or a file."""

    def __init__(self, option: str, path: Path | None) -> None:
        self._option = option
        self.is_wanted, self.is_stdout = path is not None, path == Path("-")
        self._path = None if path is None or self.is_stdout else atomic.destination(path_of(path))

    def check(
        self, inputs: Iterable[_Name | None] = (), results: Iterable[_Name] = (), models: Iterable[_Name | None] = ()
    ) -> None:
        """Fail now rather than after the work.

        Raises:
            GeosharpError: nothing can be written there.
            UsageError: it is one of the ``inputs``, or of the ``results``, which may also be in folders of these names,
                or a file that one of the ``models`` consists of.
        """
        if self._path is None:
            return
        folders = [atomic.destination(path_of(name)) for name in models if name is not None]
        if self._path.is_file() and self._path.parent in folders and _is_of_model(self._path.name):
            raise UsageError(
                f"{self._option}: {self._path} is a part of the model, which would be lost; choose another"
            )
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
