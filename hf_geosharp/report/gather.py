"""The results that a report is about: files, folders that ``--output`` wrote, and folders of files."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hf_geosharp.comparable import Named, find_result_files, read_results
from hf_geosharp.errors import DataError
from hf_geosharp.sharpness.journal import RESULT

_MARK = "geodesic_sharpness"
"""The field by which a result is told from the other JSON that this package writes."""


def gather(places: Sequence[str | os.PathLike[str]]) -> tuple[list[Named], list[str]]:
    """The results in files and folders, each with a name of its own, and the files that are no results.

    A folder stands for its ``result.json``; else for those one folder below and the results among its ``*.json``.
    Other JSON in a folder is left out, and named; where a file is given itself it has to be a result.

    Raises:
        DataError: there is no result; one of them is broken, or given twice.
    """
    files: list[Path] = []
    left_out: list[str] = []
    for place in places:
        path = Path(place)
        loose = sorted(path.glob("*.json")) if path.is_dir() and not (path / RESULT).is_file() else []
        held = [file for file in loose if _is_result(file)]
        left_out += [str(file) for file in loose if file not in held]
        if held:
            files += [*held, *sorted(path.glob(f"*/{RESULT}"))]
        else:
            files += find_result_files(path)
    return _told_apart(read_results(files)), left_out


def _is_result(file: Path) -> bool:
    """Whether a file means to be a result; one that cannot be read is not passed over."""
    try:
        data = json.loads(file.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}. Repair it, or give the results one by one") from None
    return isinstance(data, dict) and _MARK in data


def _told_apart(items: Sequence[Named]) -> list[Named]:
    counts = Counter(item.name for item in items)
    return [replace(item, name=f"{item.name} ({item.source})") if counts[item.name] > 1 else item for item in items]
