"""The checkpoints of a Trainer's run on disk, and the losses that it logged beside them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_geosharp.paths import path_of

STATE = "trainer_state.json"

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# A mean over the whole training, which Trainer adds to the last record.
_NOT_LOSSES = ("train_loss",)


@dataclass(frozen=True)
class Checkpoint:
    """One saved state of a run."""

    folder: Path
    step: int


@dataclass(frozen=True)
class History:
    """What a Trainer logged.

    ``losses`` by name ("loss" is the training loss), each as (step, value) in order of steps; ``notes`` say what is
    amiss with the files.
    """

    losses: Mapping[str, tuple[tuple[int, float], ...]]
    notes: tuple[str, ...] = ()

    def at(self, step: int) -> dict[str, float]:
        """The last value of each loss that was logged up to a step.

        The training loss that Trainer logs is a mean since the record before.
        """
        return {
            name: earlier[-1][1]
            for name, points in self.losses.items()
            if (earlier := [point for point in points if point[0] <= step])
        }


def find_checkpoints(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """The folders ``checkpoint-<step>`` in a folder, by step; empty if it has none."""
    path = path_of(folder)
    if not path.is_dir():
        return []
    found = [
        Checkpoint(entry, int(match[1]))
        for entry in path.iterdir()
        if (match := _CHECKPOINT.fullmatch(entry.name)) and entry.is_dir()
    ]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def read_history(folder: str | os.PathLike[str], checkpoints: Sequence[Checkpoint]) -> History:
    """The losses that the Trainer logged, from the ``trainer_state.json`` that reaches furthest.

    A run may have been continued, so that a folder holds several; a file that cannot be read is noted and passed over.
    """
    notes: list[str] = []
    files = [path_of(folder) / STATE, *(checkpoint.folder / STATE for checkpoint in reversed(checkpoints))]
    best: list[Mapping[str, Any]] = []
    for file in files:
        records = _records(file, notes) if file.is_file() else []
        if _reach(records) > _reach(best):
            best = records
    losses: dict[str, dict[int, float]] = {}
    dropped = 0
    for name, step, value in _losses(best):
        if math.isfinite(value):
            losses.setdefault(name, {})[step] = value
        else:
            dropped += 1
    if dropped:
        notes.append(f"{dropped} losses in {STATE} are NaN or infinite and were left out")
    if not best:
        notes.append(f"no losses: there is no {STATE} with records")
    return History({name: tuple(sorted(points.items())) for name, points in losses.items()}, tuple(notes))


def _records(file: Path, notes: list[str]) -> list[Mapping[str, Any]]:
    try:
        log = json.loads(file.read_bytes())["log_history"]
        return [record for record in log if isinstance(record, Mapping) and type(record.get("step")) is int]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        notes.append(f"{file} cannot be read ({type(error).__name__}) and was passed over")
        return []


def _reach(records: Sequence[Mapping[str, Any]]) -> int:
    return max((record["step"] for record in records), default=-1)


def _losses(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, float]]:
    for record in records:
        for name, value in record.items():
            is_loss = name == "loss" or (name.endswith("_loss") and name not in _NOT_LOSSES)
            if is_loss and isinstance(value, (int, float)) and not isinstance(value, bool):
                yield name, record["step"], float(value)
