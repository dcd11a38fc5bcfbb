"""Whether a score repeats: the batch with the largest value, run again from weights that are moved a little."""

from __future__ import annotations

import torch

from hf_geosharp.errors import ModelError
from hf_geosharp.sharpness.jobs import Outcome
from hf_geosharp.sharpness.result import Reproducible

AGREEMENT = 0.01
"""Relative difference that a re-run from slightly moved weights may show."""

NUDGE = {torch.float32: 1e-6, torch.float64: 1e-9}
"""Relative size of that move."""


def compared(before: Outcome, after: Outcome, dtype: torch.dtype) -> dict[float, Reproducible]:
    """The batch with the largest value, and the same run again from weights moved a little, at every radius."""
    index, nudge = before.job.batch, NUDGE[dtype]
    if after.skipped is not None:
        raise ModelError(f"reproducibility: {after.skipped}")
    how = f"batch {index} run again from weights moved by a relative {nudge:g}; values may differ by {AGREEMENT:.0%}"
    out = {}
    for rho, score in after.scores:
        value, first = score.value, before.at(rho).value
        # Below the rounding of the loss itself there is nothing to compare.
        floor = 100 * torch.finfo(dtype).eps * max(abs(before.base), 1e-3)
        spread = abs(value - first) / max(abs(first), abs(value), floor)
        out[rho] = Reproducible(spread <= AGREEMENT, spread, how)
    return out
