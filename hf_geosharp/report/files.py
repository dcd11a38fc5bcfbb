"""The pictures of results as files, PNG and SVG."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hf_geosharp import figures
from hf_geosharp.errors import GeosharpError
from hf_geosharp.report.overview import overview
from hf_geosharp.report.page import public_name
from hf_geosharp.report.pictures import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hf_geosharp.comparable import Named

KINDS = (".png", ".svg")
RANKING = "ranking"
_LONGEST = 30


def make_folder(folder: Path) -> None:
    """Makes the folder for the pictures, and those that it is in.

    Raises:
        GeosharpError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GeosharpError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    if not os.access(folder, os.W_OK):
        raise GeosharpError(f"no permission to write to the folder {folder}")


def save_pictures(items: Sequence[Named], folder: Path) -> list[Path]:
    """Writes every picture there are data for; of several results each into a folder of its own. Returns the files.

    The same results give the same bytes.

    Raises:
        GeosharpError: matplotlib is not installed, or the file system refused.
    """
    figures.require()
    alone = len(items) == 1
    written: list[Path] = []
    for item, own in zip(items, _folders(items), strict=True):
        place = folder if alone else folder / own
        make_folder(place)
        name = figures.cut(public_name(item) if alone else item.name, _LONGEST)
        for picture in pictures(item.result).values():
            written += _save(picture.draw(f"{picture.title}, {name}"), place / picture.key)
    above = None if alone else overview(items)
    if above is not None and above.comparison is not None:
        from hf_geosharp.charts import comparison_figure

        written += _save(comparison_figure(above.comparison), folder / RANKING)
    return written


def _save(figure: Figure, path: Path) -> list[Path]:
    files = [path.with_name(path.name + kind) for kind in KINDS]
    for file in files:
        figures.save(figure, file)
    return files


def _folders(items: Sequence[Named]) -> list[str]:
    """A folder's name for each result, made of what it is called."""
    names = [re.sub(r"[^\w.@+-]+", "-", item.name).strip("-.") or "result" for item in items]
    # File systems may take upper and lower case for the same.
    lower = [name.lower() for name in names]
    return [name if lower.count(name.lower()) == 1 else f"{name}-{place}" for place, name in enumerate(names, start=1)]
