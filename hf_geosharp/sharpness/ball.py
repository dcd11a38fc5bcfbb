"""One batch's ball: the loss at the points of a chart, climbed or averaged at one radius after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hf_geosharp.errors import ModelError
from hf_geosharp.geometry.integration import EndlessError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.geometry.space import Tangent, Vector
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.ascent import Climb, Report, Wanted, average, is_wanted
from hf_geosharp.sharpness.chart import Chart
from hf_geosharp.sharpness.objective import Objective, Reach
from hf_geosharp.sharpness.result import Profile
from hf_geosharp.sharpness.selection import Selection
from hf_geosharp.sharpness.settings import CLIMBS, Settings
from hf_geosharp.sharpness.starts import Peaks, Ways, peaks

PROFILE_POINTS = 11
"""How many points of the way to the worst perturbation a profile has, both ends included."""

CLOSE = 0.1
"""Relative difference of two rises of the loss that are told to be the same, along two geodesics."""

ROUNDING = 1e-5
"""And the difference, relative to the loss itself, that rounding may make of them."""


def loss_at(chart: Chart, objective: Objective, u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
    """The loss at γ_u(1), and its horizontal gradient in u if that is wanted.

    Raises:
        EndlessError: a geodesic that is integrated does not get there.
    """
    chart.write(u)
    wanted = False

    def asked(loss: float) -> bool:
        nonlocal wanted
        wanted = is_wanted(gradient, loss)
        return wanted

    value = objective.evaluate(asked if gradient else False)
    return value, chart.pull() if wanted else None


class Ball:
    """The ball of one batch around a chart's base point, of all coordinates or of one part of them.

    ``base`` is the loss at the base point; where it is not finite there is nothing to climb.
    """

    def __init__(
        self, chart: Chart, objective: Objective, settings: Settings, *, number: int, split: World,
        part: Selection | None = None,
    ) -> None:  # fmt: skip
        """Of the batch with this ``number``. ``split`` are the ranks among which its samples are spread."""
        self.chart, self.objective, self.settings = chart, objective, settings
        self.number, self.split = number, split
        self._generator = torch.Generator().manual_seed(self._seed)
        self.endless = ""
        """Of a geodesic that had no end, at the last radius."""
        self.unfelt: list[str] = []
        """Parameters that the loss has no gradient in."""
        self.base = self._base_point(gradient=not settings.average)
        self._part = None if part is None else part.within(chart.space)
        self.space = self._part or chart.space
        # An ascent takes the memory of what it is given, so no other name may hold on to it.
        self._given: list[tuple[float, Tangent]] = []
        self._end: Tangent | None = None
        if not settings.average and math.isfinite(self.base):
            self._given.append((self.base, self._pull()))

    @property
    def _seed(self) -> int:
        return self.settings.seed * 1_000_003 + self.number

    @property
    def still(self) -> bool:
        """Whether nothing in it can move, for all weights concerned are zero. To be asked before the first climb."""
        norm, random = self.space.norm, self.space.random
        return norm(self._given[0][1]) == 0 and norm(random(torch.Generator().manual_seed(0))) == 0

    @property
    def end(self) -> Tangent:
        """The best point at the last radius, or the last of the random ones."""
        assert self._end is not None
        return self._end

    # ------------------------------------------------------------------------------------------------- the objective

    def _evaluate(self, u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
        try:
            value, g = loss_at(self.chart, self.objective, u, gradient)
        except EndlessError as error:
            # The map from velocities to end points ends there: the search stays where there is one.
            self.endless = str(error)
            return math.nan, None
        return value, g if g is None or self._part is None else self._part.project_(g)

    def _pull(self) -> Tangent:
        """The gradient of the loss whose gradients the parameters hold."""
        g = self.chart.pull()
        return g if self._part is None else self._part.project_(g)

    def _base_point(self, *, gradient: bool) -> float:
        """The loss at the model's own weights; with ``gradient`` the parameters hold its gradient afterwards.

        The chart then sees what the batch can reach.
        """
        self.chart.widen()
        compiled = self.objective.compiled
        with Reach(self.chart.model) as reach:
            if not compiled:
                value = self.objective.evaluate(gradient)
            elif gradient:
                self.objective.look()
        if compiled:
            value = self.objective.evaluate(gradient)
        if not gradient or not math.isfinite(value):
            return value
        without = self.objective.without
        unfelt = [n for n, leaf in self.chart.leaves.items() if all(id(p) in without for p, _ in leaf.members)]
        every = self.split.gather(unfelt)
        self.unfelt = [name for name in unfelt if all(name in other for other in every)]
        seen = reach.rows
        owners = {n: id(leaf.members[0][0]) for n, leaf in self.chart.leaves.items()}
        self.chart.focus(self._union({n: seen[key] for n, key in owners.items() if key in seen}))
        return value

    def _union(self, seen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows that any rank looks up for its part of the batch."""
        if self.split.size == 1:
            return seen
        every = self.split.gather({name: ids.cpu() for name, ids in seen.items()})
        names = sorted({name for ranks in every for name in ranks})
        devices = {n: leaf.tensor.device for n, leaf in self.chart.leaves.items()}
        return {n: torch.unique(torch.cat([ranks[n] for ranks in every if n in ranks])).to(devices[n]) for n in names}

    # ---------------------------------------------------------------------------------------------------- sharpness

    def worst(self, rho: float, report: Callable[[int], Report]) -> Peaks:
        """The climbs to the largest loss in the ball of this radius, in which no other radius has a part.

        ``report`` makes what is called after each step of a climb of so many.
        """
        self._generator.manual_seed(self._seed)
        self.endless = ""
        self._end = None  # its memory is not needed any more
        ends: list[Tangent] = []

        def climb(ascent: str, steps: int) -> Climb:
            return CLIMBS[ascent](
                self.space, self._evaluate, rho, steps,
                start=ends.pop() if ends else None, base=self.base,
                given=self._given.pop() if self._given else None,
                stationary=self.settings.stationary, generator=self._generator, report=report(steps),
            )  # fmt: skip

        rough = self.settings.rough
        ways = Ways(
            partial(climb, *self.settings.first), partial(climb, *self.settings.further),
            None if rough is None else partial(climb, *rough),
        )  # fmt: skip
        found = peaks(ways, ends, self._given, self._evaluate, self.space, rho, self.settings.starts, self._generator)
        self._end = found.highest.u
        return found

    def average(self, rho: float, report: Report) -> float:
        """The mean rise under random perturbations of this radius, the same directions at all radii.

        Raises:
            ModelError: the loss is not finite at one of them.
        """
        self._generator.manual_seed(self._seed)
        self.endless = ""
        rise, end = average(
            self.space, self._evaluate, rho, self.settings.steps, self._generator, base=self.base, report=report
        )
        if not math.isfinite(rise):
            why = self.endless or "the loss is not finite"
            raise ModelError(
                f"batch {self.number}: {why} at a random perturbation of rho {rho:g}; use a smaller radius"
            )
        self._end = end
        return rise

    def exact(self, rise: float, objective: Objective) -> float | None:
        """The rise at the end of the exact geodesic with the velocity :attr:`end`, where it is another than ``rise``.

        None where the two agree to :data:`CLOSE`. ``objective`` is one whose passes are not those of the score. Where
        the loss is the same at the ends of first and second order, it is taken to be so at that of the exact geodesic,
        which takes longer to be computed.

        Raises:
            EndlessError: the exact geodesic does not get there.
        """
        orders: list[Order] = ["first" if self.settings.geometry.geodesic == "second" else "second", "exact"]
        found = rise
        for order in orders:
            self.chart.write(self.end, order)
            found = objective.evaluate(False) - self.base
            if abs(found - rise) <= CLOSE * max(abs(found), abs(rise)) + ROUNDING * abs(self.base):
                return None
        return found

    def profile(self, rho: float, objective: Objective) -> Profile | None:
        """The rise of the loss on the way to :attr:`end`, by an objective whose passes are not those of the score.

        None where the loss is not finite somewhere on the way.
        """
        t = tuple(i / (PROFILE_POINTS - 1) for i in range(PROFILE_POINTS))
        point = self.chart.space.empty()

        def along(order: Order | None) -> tuple[float, ...]:
            rises = [0.0]
            for fraction in t[1:]:
                try:
                    self.chart.write(self.chart.space.combine(point, (self.end, fraction)), order)
                except EndlessError:
                    rises.append(math.nan)
                    continue
                rises.append(objective.evaluate(False) - self.base)
            return tuple(rises)

        found = Profile(t, along(None), along("first"), rho)
        return found if all(map(math.isfinite, (*found.geodesic, *found.straight))) else None
