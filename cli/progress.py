"""Progress with the time left, on stderr, and only where somebody watches."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status

from hf_geosharp.cli import libraries
from hf_geosharp.cli.errors import say

if TYPE_CHECKING:
    from hf_geosharp.sharpness.progress import Progress as State

T = TypeVar("T")
Update = Callable[["State"], None]

_TRUE = {"1", "ON", "YES", "TRUE"}
_STAGES = {
    "find": "finding symmetries",
    "verify": "checking symmetries",
    "health": "measuring heads",
    "score": "scoring",
    "part": "scoring parts",
    "reproducibility": "checking reproducibility",
    "baseline": "baseline",
}


def wanted(quiet: bool) -> bool:
    """Whether to draw progress: stderr is a terminal and neither ``--quiet`` nor the environment says no."""
    disabled = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in _TRUE
    return not quiet and not disabled and sys.stderr.isatty()


@contextmanager
def computing(drawn: Callable[[bool], AbstractContextManager[T]], *, quiet: bool, debug: bool) -> Iterator[T]:
    """What commands compute in: only their results go to stdout, and the package's warnings are lines on stderr.

    Heavy libraries are imported inside: they read when they are imported how much they may say.

    Args:
        drawn: :func:`shown` or :func:`stages`; its callback is handed on.
        quiet, debug: the options of the command.
    """
    bars = wanted(quiet)
    libraries.hush(debug=debug, bars=bars)
    # What libraries (or code from a model's repository) print must not get among the results.
    with redirect_stdout(sys.stderr), libraries.warnings_as(say, debug=debug), drawn(bars) as update:
        yield update


@contextmanager
def shown(wanted: bool) -> Iterator[Update | None]:
    """A callback for the score, or None. The bar is gone afterwards, also after an exception."""
    if not wanted:
        yield None
        return
    bar = _Bar()
    try:
        yield bar.update
    finally:
        bar.close()


@contextmanager
def stages(wanted: bool) -> Iterator[Callable[[str], None] | None]:
    """A callback for work that only has stages, or None: a spinner with the name of the present one."""
    if not wanted:
        yield None
        return
    status = Console(stderr=True).status("")
    try:
        yield lambda stage: _spin(status, stage)
    finally:
        status.stop()


def _spin(status: Status, stage: str) -> None:
    # Loading draws bars of its own.
    if stage in _STAGES:
        status.update(_STAGES[stage])
        status.start()


class _Bar:
    """Starts at the first report, so that download bars of the libraries have the terminal until then."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("passes, left"),
            # A long window: stages differ in speed, and the estimate should not jump.
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            speed_estimate_period=120.0,
        )
        self._task: TaskID | None = None

    def update(self, state: State) -> None:
        if self._task is None:
            # A run that continues starts further on; that was not done now, and says nothing about speed.
            self._task = self._progress.add_task(_describe(state), total=state.total, completed=state.done)
            self._progress.start()
        self._progress.update(self._task, description=_describe(state), completed=state.done, total=state.total)

    def close(self) -> None:
        if self._task is not None:
            self._progress.stop()


def _describe(state: State) -> str:
    stage = _STAGES.get(state.stage, state.stage)
    together = f" ({state.ranks} processes)" if state.ranks > 1 else ""
    if state.stage != "score":
        return stage + together
    return (
        f"{stage} batch {state.batch}/{state.batches} step {state.step}/{state.steps} rho {state.rho:.3g}: "
        f"{state.value:.4g}{together}"
    )
