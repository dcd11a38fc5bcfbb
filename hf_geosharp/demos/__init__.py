"""What ships with the package, each a folder with its data and a ``demo.json`` that describes it.

Most are small trained models with the data they were trained and tested on; data alone say so (no ``parameters``).

A *twin* of a demo, ``NAME-twin``, is the same function at other weights; it is derived when it is scored, so no
folder holds it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from hf_geosharp.errors import GeosharpError, UsageError

PREFIX = "demo:"
TWIN = "-twin"
_DESCRIPTION = "demo.json"


def shipped() -> list[str]:
    """Every folder that ships, sorted: the models, and the text that language models are scored on."""
    return sorted(file.parent.name for file in _root().glob(f"*/{_DESCRIPTION}"))


def names() -> list[str]:
    """The models that ship, sorted."""
    return [name for name in shipped() if is_model(name)]


def is_model(name: str) -> bool:
    """Whether what ships under this name is a model with its data rather than data alone.

    Raises:
        UsageError: nothing of this name ships.
    """
    return info(name)["parameters"] is not None


def base_name(name: str) -> tuple[str, bool]:
    """The model that ``name`` (with or without the prefix ``demo:``) stands for, and whether its twin is meant.

    Raises:
        UsageError: there is no such model.
    """
    known = names()
    plain = name.removeprefix(PREFIX)
    if plain in known:
        return plain, False
    base = plain.removesuffix(TWIN)
    if base not in known:
        raise UsageError(f"there is no demo {plain!r}; there are: {', '.join(known)}, and each with {TWIN} appended")
    return base, True


def path(name: str) -> Path:
    """The folder that ships under a name; that of a twin is the folder of the model it is derived from.

    Raises:
        UsageError: nothing of this name ships.
    """
    plain = name.removeprefix(PREFIX)
    return _root() / (plain if plain in shipped() else base_name(name)[0])


def info(name: str) -> dict[str, Any]:
    """What ``demo.json`` says: task, licence, source, accuracy, size.

    Raises:
        UsageError: nothing of this name ships.
    """
    description: dict[str, Any] = json.loads((path(name) / _DESCRIPTION).read_text(encoding="utf-8"))
    return description


def copy(name: str, target: str | os.PathLike[str]) -> Path:
    """Copy a folder to ``target``, whole or not at all.

    Raises:
        UsageError: nothing of this name ships, or it is a twin.
        GeosharpError: ``target`` is something other than an empty folder, or cannot be written.
    """
    source = path(name)
    if name.removeprefix(PREFIX) != source.name:
        raise UsageError(f"{name} has no files: it is derived from {source.name} when it is scored")
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise GeosharpError(f"{target} exists and is not an empty folder; nothing was copied")
    try:
        _copy_whole(source, target)
    except OSError as error:
        raise GeosharpError(f"cannot copy to {target}: {error.strerror or error}") from error
    return target


def _copy_whole(source: Path, target: Path) -> None:
    """Copy to a folder of its own first, so that a failure half-way leaves nothing that looks complete."""
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as beside:
        staged = Path(beside) / "demo"
        shutil.copytree(source, staged, ignore=shutil.ignore_patterns("__pycache__"))
        if not target.exists():
            staged.rename(target)
            return
        # An empty folder stays the same folder: somebody may be standing in it.
        for entry in staged.iterdir():
            entry.rename(target / entry.name)


def _root() -> Path:
    return Path(str(resources.files(__name__)))
