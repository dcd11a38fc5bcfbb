"""Several climbs in one ball: the loss may have more than one peak there, and a climb ends on the one it comes to.

The first climb starts at the base point. If it does not settle, the ball is *rough*, and another ascent that is better
at finding its way there climbs from the base point. With several starts, the second one is opposite the peak that was
found: as far away as the ball allows, and as high as that as far as the loss is quadratic and has no slope. If the loss
there is below that of the base point, it is a slope that nothing opposite makes up for, and nobody climbs. All others
start at random points of the sphere. What is found from each start is kept: it tells how far to trust the highest.
Measured in ``benchmarks/ascent.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from hf_geosharp.geometry.space import Space, Tangent
from hf_geosharp.sharpness.ascent import Climb, Evaluate, inside
from hf_geosharp.sharpness.result import BatchScore

ALIKE = 0.01
"""Relative difference below which two peaks are as high as each other: to that an ascent settles."""


@dataclass(frozen=True)
class Peaks:
    """What the climbs in one ball found: the highest of them, and all.

    ``rises`` are the highest from each start, 0 where nobody climbed; ``evaluations`` how often the loss was asked for.
    """

    highest: Climb
    rises: tuple[float, ...]
    evaluations: int
    rough: bool = False


@dataclass(frozen=True)
class Ways:
    """How to climb: from the first start, from all others, and from the base point of a ball that is rough.

    Each climbs from the point that it takes out of a list of ends, with the loss and the gradient that it takes out of
    another list, whose memory it uses; from where it is used to if there is nothing in them.
    """

    first: Callable[[], Climb]
    further: Callable[[], Climb]
    rough: Callable[[], Climb] | None = None


def peaks(
    ways: Ways,
    ends: list[Tangent],
    given: list[tuple[float, Tangent]],
    evaluate: Evaluate,
    space: Space,
    rho: float,
    starts: int,
    generator: torch.Generator,
) -> Peaks:
    """Climbs from so many starts.

    Args:
        ways: how to climb.
        ends, given: the lists that these take from. No other name may hold on to what is in them.
        evaluate: the objective.
        space: the space of the ball.
        rho: its radius.
        starts: how many, the ascent's own one among them.
        generator: of the random ones.

    Raises:
        NotFiniteError: the loss at the ascent's own start is not finite.
    """
    highest = ways.first()
    evaluations, finite = highest.steps + 1, highest.finite
    rough = ways.rough is not None and highest.stopped != "converged"
    if rough:
        assert ways.rough is not None
        found = ways.rough()
        evaluations, finite = evaluations + found.steps + 1, finite and found.finite
        if found.rise > highest.rise:
            highest = found
        del found
    rises = [highest.rise]
    for number in range(1, starts):
        opposite = number == 1 and space.norm(highest.u) > 0
        ends.append(highest.u.clone().mul_(-1.0) if opposite else _on_sphere(space, rho, generator))
        least = highest.base if opposite else -math.inf
        loss, g = evaluate(ends[0], lambda loss, least=least: least < loss < math.inf)  # type: ignore[misc]
        evaluations, finite = evaluations + 1, finite and math.isfinite(loss)
        if g is None:
            ends.clear()
            rises.append(0.0)
            continue
        given.append((loss, g))
        del g
        found = ways.further()
        rises.append(found.rise)
        evaluations, finite = evaluations + found.steps, finite and found.finite
        if found.rise > highest.rise:
            highest = found
        del found
    return Peaks(replace(highest, finite=finite), tuple(rises), evaluations, rough)


def _on_sphere(space: Space, rho: float, generator: torch.Generator) -> Tangent:
    point = space.random(generator)
    return point.mul_(inside(space, rho) / space.norm(point))


def higher(rises: tuple[float, ...]) -> float:
    """How much higher, relatively, the highest peak is than that of the first start; 0 where they are alike."""
    if not rises or max(rises) <= (1 + ALIKE) * rises[0]:
        return 0.0
    return max(rises) / rises[0] - 1 if rises[0] > 0 else math.inf


def told(scores: Mapping[float, Sequence[BatchScore]]) -> list[str]:
    """What is to know of the peaks; ``scores`` are those of all batches by radius.

    Where another start found more than the first, and where a ball holds less than a smaller one, which lies inside.
    """
    notes = []
    for rho, batches in sorted(scores.items()):
        found = [higher(batch.rises) for batch in batches]
        missed = [share for share in found if share]
        if missed:
            notes.append(
                f"rho {rho:g}: in {len(missed)} of {len(found)} batches another start found more than the first, by "
                f"{_by(max(missed))}: the loss has several peaks in the ball, and there may be higher ones"
            )
    for (small, before), (rho, batches) in pairwise(sorted(scores.items())):
        pairs = [(a.value, b.value) for a, b in zip(before, batches, strict=True) if b.stopped != "lost"]
        missed = [share for a, b in pairs if (share := higher((b, a)))]
        if missed:
            notes.append(
                f"rho {rho:g}: in {len(missed)} of {len(batches)} batches rho {small:g} found more, by "
                f"{_by(max(missed))}, though that ball lies inside this one: the loss has several peaks, of which more "
                "starts find more"
            )
    return notes


def _by(share: float) -> str:
    return f"up to {share:.0%}" if share < 10 else "more than ten times"
