"""How pictures are drawn and written: one style, whole files. Needs matplotlib, which is installed on request."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_geosharp import atomic
from hf_geosharp.errors import GeosharpError, UsageError
from hf_geosharp.paths import path_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR = "#2a6f97"
"""Of what a picture is about."""

SECOND = "#bc6c25"
"""Of what it is held against."""

WARNING = "#d62728"
QUIET = "#888888"
MISSING = "#dddddd"

PALE = 0.25
"""Opacity of intervals and grids."""

KINDS = {"qk": "query/key", "vo": "value/output", "mlp": "hidden units", "lora": "adapter"}
"""What readers call the kinds of pairs."""

ENDINGS: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None},
    ".pdf": {"CreationDate": None},
}
"""What a picture's file may end in, each with the metadata that make the same picture the same file."""

_STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.facecolor": "white",
    "figure.dpi": 144,
    "svg.hashsalt": "hf-geosharp",
    # Text stays text: it can be searched, and is drawn in the reader's font.
    "svg.fonttype": "none",
}


def require() -> None:
    """Fail now rather than after a score has been computed.

    Raises:
        GeosharpError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise GeosharpError("a picture needs matplotlib: pip install matplotlib") from None


def check(path: str | os.PathLike[str]) -> None:
    """Fail now rather than after the work, if no picture can be written there.

    Raises:
        UsageError: the file's ending is none of :data:`ENDINGS`.
        GeosharpError: no folder, no permission, or no matplotlib.
    """
    target = path_of(path)
    if target.suffix.lower() not in ENDINGS:
        raise UsageError(f"{target} ends in none of {', '.join(ENDINGS)}: its ending decides the kind of picture")
    if not target.parent.is_dir():
        raise GeosharpError(f"there is no folder {target.parent}; create it first")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise GeosharpError(f"{target} cannot be written: it is a folder, or there is no permission")
    require()


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Writes a picture, whole or not at all; the same figure gives the same bytes.

    Raises:
        UsageError, GeosharpError: as :func:`check`, or the file system refused.
    """
    check(path)
    target = path_of(path)
    ending = target.suffix.lower()
    picture = io.BytesIO()
    try:
        with style():
            figure.savefig(picture, format=ending[1:], metadata=ENDINGS[ending])
        atomic.put(atomic.destination(target), picture.getvalue())
    except OSError as error:
        raise GeosharpError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def style() -> Iterator[None]:
    """The package's style for as long as a picture is drawn or saved; the caller's own settings come back."""
    import matplotlib

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Names in scripts that the font lacks: the picture shows boxes, and nobody can do anything about it here.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def tidy(axes: Axes) -> None:
    """A faint grid, and no frame where there is no axis."""
    axes.grid(alpha=PALE)
    axes.spines[["top", "right"]].set_visible(False)


def cut(name: str, longest: int = 40) -> str:
    """The end of a name tells more than its beginning."""
    return name if len(name) <= longest else f"...{name[3 - longest :]}"
