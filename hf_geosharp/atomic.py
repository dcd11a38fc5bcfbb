"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def destination(path: str | os.PathLike[str]) -> Path:
    """Where a name leads: through links, so that a link to a file stays one; a device or a pipe as it is called."""
    return Path(path) if is_special(path) else Path(os.path.realpath(path))


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether it is a device or a pipe: those are written to, and a file in their place would be none of them."""
    place = Path(path)
    return place.exists() and not place.is_file() and not place.is_dir()


def put(path: Path, content: bytes) -> None:
    """Writes a file beside ``path``, through to the disk, and puts it there; into a device or a pipe it writes.

    What was there before is replaced at once, and its permissions stay.

    Raises:
        OSError: the file system refused; what was there before still is.
    """
    if is_special(path):
        path.write_bytes(content)
        return
    # Created with what the umask leaves; the name says nothing, for that of the file may be as long as one can be.
    temporary = path.with_name(f".hf-geosharp.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
