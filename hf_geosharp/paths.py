"""Names of files and folders, as users write them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hf_geosharp.errors import UsageError


def path_of(name: str | os.PathLike[str]) -> Path:
    """The path that a name means, with the home of a user in the place of ``~``.

    Raises:
        UsageError: no file can be called so: the user has no home here, or the name is too long.
    """
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
