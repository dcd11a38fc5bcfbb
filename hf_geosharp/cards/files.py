"""Cards on disk: written whole or not at all, and never where the Hub's client keeps its downloads."""

from __future__ import annotations

import os
from pathlib import Path

from hf_geosharp import atomic
from hf_geosharp.errors import CardError, GeosharpError


def read(path: Path) -> bytes | None:
    """The bytes of a card; None if there is no file, or a device or a pipe.

    Raises:
        GeosharpError: It cannot be read.
        CardError: It is in the Hub's cache.
    """
    refuse_cache(path)
    if atomic.is_special(path):
        return None
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise GeosharpError(f"cannot read {path}: {error.strerror or error}") from error


def write(path: Path, content: bytes, before: bytes | None) -> None:
    """Puts ``content`` in the place of ``before``, with its permissions; a link stays a link to what is written.

    Raises:
        GeosharpError: It cannot be written, or the file is not ``before`` any more.
        CardError: It is in the Hub's cache.
    """
    if read(path) != before:
        raise GeosharpError(
            f"{path} was changed by somebody else in the meantime; nothing was written. Run the command again"
        )
    target = atomic.destination(path)
    try:
        atomic.put(target, content)
    except OSError as error:
        raise GeosharpError(f"cannot write {path}: {error.strerror or error}") from error


def refuse_cache(path: Path) -> None:
    """Keeps away from what the Hub's client downloaded, where a change would be taken for the repository's state.

    Raises:
        CardError: The path, or what it links to, is in the cache.
    """
    from huggingface_hub import constants

    cache = Path(os.path.realpath(constants.HF_HUB_CACHE))
    if any(cache in place.parents for place in (Path(os.path.abspath(path)), Path(os.path.realpath(path)))):
        raise CardError(
            f"{path} is in the Hub's cache, which only its client may change: use the id of the model, or copy the card"
        )
