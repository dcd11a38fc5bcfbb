"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def destination(path: str | os.PathLike[str]) -> Path:
    """Where a name leads: through links, so that a link to a file stays one; a device or a pipe as it is called."""
    return Path(path) if is_special(path) else Path(os.path.realpath(path))


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is a device or a pipe: those are written to, and a file in their place would be none of them."""
    place = Path(path)
    return place.exists() and not place.is_file() and not place.is_dir()


def put(path: Path, content: bytes) -> None:
    """Writes a file beside ``path`` and puts it there; into a device or a pipe it writes.

    Raises:
        OSError: the file system refused.
    """
    if is_special(path):
        path.write_bytes(content)
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
