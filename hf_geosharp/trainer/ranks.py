"""Processes that train together come to one value, the first one's, or all to an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hf_geosharp.errors import WorldError

T = TypeVar("T")


def alone() -> bool:
    """Whether this process trains by itself."""
    from accelerate import PartialState

    return bool(PartialState().num_processes == 1)


def first_of_all() -> bool:
    """Whether this process is the one that speaks for all."""
    from accelerate import PartialState

    return bool(PartialState().is_main_process)


def of_the_first(value: T) -> T:
    """The value that the first process has; all processes must call."""
    from accelerate.utils import broadcast_object_list

    shared: list[T] = [value]
    if not alone():
        broadcast_object_list(shared, from_process=0)
    return shared[0]


def all_agree(value: bool) -> bool:
    """Whether it is true on all processes; all must call."""
    from accelerate.utils import gather_object

    return value if alone() else all(gather_object([value]))


def together(run: Callable[[], T]) -> T:
    """Runs on every process; if that fails on any of them, it fails on all.

    Raises:
        Exception: this process's own, or WorldError naming the process that failed.
    """
    from accelerate.utils import gather_object

    if alone():
        return run()
    result: list[T] = []
    own: Exception | None = None
    try:
        result.append(run())
    except Exception as error:
        own = error
    told: list[str | None] = gather_object([None if own is None else f"{type(own).__name__}: {own}"])
    if own is not None:
        raise own
    failed = [f"process {rank}: {text}" for rank, text in enumerate(told) if text is not None]
    if failed:
        raise WorldError(failed[0])
    return result[0]
