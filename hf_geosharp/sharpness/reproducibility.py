"""Whether a score repeats: the batch with the largest value, run again from weights that are moved a little."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hf_geosharp.errors import ModelError
from hf_geosharp.sharpness.jobs import Outcome
from hf_geosharp.sharpness.result import BatchScore, Reproducible

AGREEMENT = 0.01
"""Relative difference that a re-run from slightly moved weights may show."""

NUDGE = {torch.float32: 1e-6, torch.float64: 1e-9}
"""Relative size of that move."""


LEAST = 1e-3
"""Loss below which rounding is taken to be as large as of this one."""


def resolution(runs: Sequence[Outcome], dtype: torch.dtype, *, stationary: bool) -> float:
    """A difference of losses that rounding alone makes, in the loss's units, of the largest loss of these runs.

    Losses that a model in double precision gives as single ones, to the last bit, were rounded inside. A divergence
    from the model's own output (``stationary``) starts from 0, and is a difference of logarithms that are not small.
    """
    scored = [run for run in runs if run.skipped is None]
    losses = [run.base for run in scored]
    single = dtype == torch.float64 and all(run.single for run in scored) and any(losses)
    size = max([1.0 if stationary else LEAST, *map(abs, losses)])
    return torch.finfo(torch.float32 if single else dtype).eps * size


def rounding_in(values: Sequence[float]) -> float:
    """What rounding makes of a smooth function, seen in its values at evenly spaced points close to one another.

    The function itself leaves nothing in fourth differences there, and errors of size ε leave √70 ε (Moré & Wild,
    "Estimating computational noise", SIAM J. Sci. Comput. 33, 2011).
    """
    rest = list(values)
    for _ in range(4):
        rest = [after - before for before, after in pairwise(rest)]
    return math.sqrt(math.fsum(difference**2 for difference in rest) / len(rest) / 70)


@dataclass(frozen=True)
class Compared:
    """A check at one radius, and what is told of it where it fails."""

    check: Reproducible
    note: str | None


def compared(before: Outcome, after: Outcome, dtype: torch.dtype, rounding: float) -> dict[float, Compared]:
    """The batch with the largest value, and the same run again from weights moved a little, at every radius.

    A value repeats if both agree, and if it is so much larger than the ``rounding`` of its loss that this could differ.
    Where they differ by what it makes in so many places, it is to blame, and not a loss that is rough.
    """
    index, nudge = before.job.batch, NUDGE[dtype]
    if after.skipped is not None:
        raise ModelError(f"reproducibility: {after.skipped}")
    how = f"batch {index} run again from weights moved by a relative {nudge:g}; values may differ by {AGREEMENT:.0%}"
    out = {}
    for rho, score in after.scores:
        value, first = score.value, before.at(rho).value
        least = rounding / AGREEMENT
        spread = abs(value - first) / max(abs(first), abs(value), least)
        note = None
        if before.at(rho).stopped == "lost":
            # Told of all such batches together.
            out[rho] = Compared(Reproducible(False, spread, how), None)
            continue
        if score.stopped == "lost":
            note = f"the score at rho {rho:g} is not a measurement: no finite loss above that at the weights was found"
        elif max(first, value) < least or (spread > AGREEMENT and abs(value - first) < least):
            note = (
                f"the score at rho {rho:g} is not reproducible: batch {index} rises by {first:.2g}, where rounding of "
                f"the loss makes {rounding:.1g}; use a larger radius, or float64 if the model computes in it"
            )
        elif spread > AGREEMENT:
            note = (
                f"the score at rho {rho:g} is not reproducible: a re-run from weights moved by a relative {nudge:g} "
                f"differs by {spread:.1%}; use a smaller radius"
            )
        out[rho] = Compared(Reproducible(note is None, spread, how), note)
    return out


def swallowed(runs: Sequence[Outcome], radii: Sequence[float], rounding: float) -> list[str]:
    """What is told of averages that are no larger than what ``rounding`` of the loss makes of them."""
    largest = {rho: max(abs(run.at(rho).value) for run in runs) for rho in sorted(set(radii))}
    return [
        f"the average at rho {rho:g} is not a measurement: the loss rises by {value:.1g}, where its rounding makes "
        f"{rounding:.1g}; use a larger radius, or float64 if the model computes in it"
        for rho, value in largest.items()
        if value < rounding / AGREEMENT
    ]


def measured(
    checks: Mapping[float, Reproducible], scores: Mapping[float, Sequence[BatchScore]]
) -> tuple[dict[float, Reproducible], list[str]]:
    """The checks by radius, and what is told, where batches at some radii are lost: a score with these is none."""
    found, notes = dict(checks), []
    for rho, batches in sorted(scores.items()):
        lost = sum(batch.stopped == "lost" for batch in batches)
        if lost:
            text = (
                f"in {lost} of {len(batches)} batches no finite loss above that at the weights was found, and they "
                "count as 0"
            )
            before = found.get(rho)
            found[rho] = Reproducible(False, None if before is None else before.spread, text)
            notes.append(f"the score at rho {rho:g} is not a measurement: {text}; use a smaller radius")
    return found, notes
