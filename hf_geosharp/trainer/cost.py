"""What the measurements cost, as a share of the training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hf_geosharp.arguments import fraction
from hf_geosharp.errors import UsageError


class Cost:
    """A clock of the training and of the measurements in it."""

    def __init__(self, limit: float | None = None) -> None:
        if limit is not None and not 0 < fraction("max_fraction", limit) <= 1:
            raise UsageError(f"max_fraction is {limit}; it lies between 0 and 1")
        self.limit = limit
        self.begin()

    def begin(self) -> None:
        """A training begins."""
        self._began = time.perf_counter()
        self.seconds = 0.0
        self._last: float | None = None

    @property
    def share(self) -> float:
        """The share of the time since the training began that went into measurements."""
        return self.seconds / max(time.perf_counter() - self._began, 1e-9)

    @contextmanager
    def spent(self, *, measured: bool = True) -> Iterator[None]:
        """Counts what happens inside; ``measured`` says that a measurement takes as long."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds += took
            if measured:
                self._last = took

    @property
    def last(self) -> float:
        """Seconds of the last measurement."""
        return self._last or 0.0

    def expected(self) -> float:
        """The share there would be after another measurement as long as the last."""
        elapsed = time.perf_counter() - self._began
        return (self.seconds + self.last) / max(elapsed + self.last, 1e-9)

    def affords(self) -> bool:
        """Whether one more measurement stays within the limit. How long one takes is known after the first."""
        return self.limit is None or self._last is None or self.expected() <= self.limit
