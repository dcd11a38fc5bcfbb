"""How far a score has come: what is counted, who is told, and the sign of life for the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_geosharp.parallel import World


@dataclass(frozen=True)
class Progress:
    """How far a score has come; ``done`` of ``total`` count forward passes over everything, on all ``ranks``.

    Batch, step and value are this process's; ``batch`` counts from 1.
    """

    stage: str
    batch: int
    batches: int
    step: int
    steps: int
    rho: float
    value: float
    done: int
    total: int
    ranks: int = 1


@dataclass
class Track:
    """Counts passes, tells who asked, and keeps in touch with the other ranks."""

    tell: Callable[[Progress], None] | None
    batches: int
    total: int
    world: World = field(default_factory=World)
    shared: bool = False
    """Every rank does everything, so that its own count is that of all."""
    done: int = 0
    last: Progress | None = None
    _where: dict[str, Any] = field(default_factory=dict)

    @property
    def together(self) -> World:
        """The ranks that take every step of a batch together, each with a part of its samples; this one otherwise."""
        return self.world if self.shared else World()

    def report(self, stage: str, batch: int, rho: float, steps: int) -> Callable[[int, float], None]:
        """What an ascent of so many steps at most calls after each of them."""

        def step(k: int, value: float) -> None:
            self.done += 1
            self.say(stage, batch, k, rho, value, steps)

        return step

    def stay(self, stage: str, batch: int = 0, step: int = 0) -> None:
        """Leaves a sign of life for the other ranks, and hears whether one has failed."""
        self._where = {"stage": stage, "batch": batch, "step": step}
        self.world.tell({"done": self.done, **self._where})
        self.world.poll()

    def say(
        self, stage: str, batch: int = 0, step: int = 0, rho: float = 0.0, value: float = 0.0, steps: int = 0
    ) -> None:
        """Tells where this rank is."""
        self.stay(stage, batch, step)
        self.last = Progress(
            stage, batch, self.batches, step, steps, rho, value, 0, self.total, self.world.size
        )  # fmt: skip
        self.refresh()

    def refresh(self) -> None:
        """Tells again what was told last, with what this rank and the others have done since."""
        self.world.tell({"done": self.done, **self._where})
        if self.tell is not None and self.last is not None:
            self.tell(replace(self.last, done=min(self._of_all(), self.total)))

    def _of_all(self) -> int:
        if self.shared or self.world.size == 1:
            return self.done
        others = (state["done"] for r, state in enumerate(self.world.heard()) if state and r != self.world.rank)
        return self.done + sum(others)
