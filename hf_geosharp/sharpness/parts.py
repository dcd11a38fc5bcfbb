"""Parts of a batch: which samples they have, and how the losses of parts make the loss of the whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_geosharp.errors import UsageError

Batch = Mapping[str, Any]

Weight = Callable[[Batch], float | Sequence[float]]
"""Number of loss terms in a batch: what its mean loss has to be multiplied by to give the sum. Where it is not known
what a loss is a mean over, the numbers by each reading, the likeliest first; the same readings for every batch."""

SETTLED = {torch.float32: 1e-5, torch.float64: 1e-5}
"""Relative difference between the loss of two samples and what their own losses make, by what the model computes in."""

ROUNDED = 1e-3
"""The same up to which it may be rounding after all, where that is as large: losses near 0 of large logits."""

NARROW = 0.03
"""The same where weights are in half precision, or quantised."""

FLOOR = 0.01
"""Loss below which differences are relative to this: a loss without labels starts from 0."""

_COUNTED = ("labels", "input_ids")
"""What has a row for each sample in any batch. Images need not: they may be the patches of all samples, one a row."""


def samples(batch: Batch) -> int:
    """Number of samples: the first dimension of its labels or tokens, else of the first of its tensors."""
    tensors = (batch.get(k) for k in (*_COUNTED, *batch))
    return next(int(v.shape[0]) for v in tensors if isinstance(v, Tensor) and v.ndim)


def uncut(batch: Batch) -> str | None:
    """Why a batch has no parts: an input of the model that is not by samples, as images in patches. None if it has."""
    n = samples(batch)
    for key, v in batch.items():
        if isinstance(v, Tensor) and v.ndim and v.shape[0] not in (1, n) and not key.startswith("_"):
            return f"{key!r} has {v.shape[0]} rows for {n} samples"
    return None


def structure(batch: Batch) -> object | None:
    """The same for batches that differ in fractions and labels of samples alone; None for one that nothing is like.

    Tokens and masks may decide what a model does, which positions it reads among others; and so may the size of
    fractions, where a model clips them: those of one structure differ in it by less than a factor of two.
    """
    if any(_decides(key, v) for key, v in batch.items()):
        return None
    return tuple(
        (k, tuple(v.shape), str(v.dtype), _size(v)) if isinstance(v, Tensor) else (k, repr(v))
        for k, v in sorted(batch.items())
    )


def _size(v: Tensor) -> int:
    """Of the largest of fractions, as a power of two; 0 of other tensors."""
    largest = float(v.abs().max()) if v.is_floating_point() and v.numel() else 0.0
    return math.frexp(largest)[1] if math.isfinite(largest) else 0


def _decides(key: str, v: object) -> bool:
    if not isinstance(v, Tensor) or (key == "labels" and v.ndim == 1):
        return False
    # A mask may be written in fractions.
    return not v.is_floating_point() or bool(((v == 0) | (v == 1)).all())


def padded(batch: Batch, column: int) -> list[int]:
    """The samples whose mask (a matrix of zeros and ones, one row for each) leaves out this column."""
    found: set[int] = set()
    for key, v in batch.items():
        if "mask" in key and isinstance(v, Tensor) and v.ndim == 2 and v.numel():
            found.update((v[:, column] == 0).nonzero().flatten().tolist())
    return sorted(found)


def rows(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """The samples start..stop of a batch that has parts."""
    return _by_samples(batch, slice(start, stop))


def picked(batch: Batch, which: list[int]) -> dict[str, Any]:
    """These samples of a batch that has parts."""
    return _by_samples(batch, which)


def excerpt(batch: Batch, start: int, stop: int) -> dict[str, Any]:
    """The samples start..stop of a batch, or all of one that has no parts."""
    return dict(batch) if uncut(batch) else rows(batch, start, stop)


def _by_samples(batch: Batch, which: slice | list[int]) -> dict[str, Any]:
    n = samples(batch)
    return {k: v[which] if isinstance(v, Tensor) and v.ndim and v.shape[0] == n else v for k, v in batch.items()}


def on_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """A batch with its tensors on a device."""
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}


def by_each_reading(weight: Weight, batch: Batch) -> tuple[float, ...]:
    """What a weight says of a batch, as a tuple."""
    found = weight(batch)
    return tuple(map(float, found)) if isinstance(found, Sequence) else (float(found),)


def proved_reading(batch: Batch, weight: Weight, loss: Callable[[Batch], float], dtype: torch.dtype) -> tuple[int, ...]:
    """Which readings of a loss are right: by them the losses of two samples make the loss of both.

    More than one where they do not differ on these; the likeliest comes first. None where nothing could be seen.

    Args:
        batch: at least two samples, of which those are taken that the readings differ in most.
        weight: its readings.
        loss: of a part of the batch; run three times, or five where rounding is in question, and twice more where
            readings differ in a sample that some of them leave out.
        dtype: the narrowest that the model computes in.

    Raises:
        UsageError: by none, as of contrastive losses, or of means that are weighted by class.
    """
    single = [by_each_reading(weight, rows(batch, i, i + 1)) for i in range(samples(batch))]
    scored = [i for i, found in enumerate(single) if all(found)]
    if len(scored) < 2:
        return ()
    pair = _most_unlike(batch, single, scored)
    both = _by_samples(batch, pair)
    whole, parts = loss(both), [loss(rows(batch, i, i + 1)) for i in pair]
    if not all(map(math.isfinite, (whole, *parts))):
        return ()
    deviations = []
    for reading, total in enumerate(by_each_reading(weight, both)):
        made = sum(single[i][reading] * part for i, part in zip(pair, parts, strict=True)) / total
        deviations.append(abs(whole - made) / max(map(abs, (whole, *parts, FLOOR))))
    best = min(deviations)
    settled = SETTLED.get(dtype, NARROW)
    if settled < best <= ROUNDED:
        # A sample twice has the loss that it has once, but for how the model rounds with two of them.
        twice = [abs(loss(_by_samples(batch, [i, i])) - part) for i, part in zip(pair, parts, strict=True)]
        settled = max(settled, 2 * max(twice) / max(map(abs, (whole, *parts, FLOOR))))
    if best > settled:
        raise UsageError(
            f"the loss of two samples ({whole:.6g}) is not made of the losses of each ({parts[0]:.6g} and "
            f"{parts[1]:.6g}), as a contrastive one or one weighted by class is not; so the batch has to go through "
            "the model at once, on one process: a micro_batch as large as the batch, or none, and no shard 'samples'"
        )
    # Rounding must not decide between readings that agree.
    fitting = [i for i, found in enumerate(deviations) if found <= 2 * best + SETTLED[torch.float64] / 10]
    left_out = next((i for i, found in enumerate(single) if len({bool(found[k]) for k in fitting}) > 1), None)
    if left_out is None:
        return tuple(fitting)
    # By some of them a sample is no term of the loss, by others it is one, of whatever loss it has.
    three, alone = loss(_by_samples(batch, [*pair, left_out])), loss(rows(batch, left_out, left_out + 1))
    held = [*zip(pair, parts, strict=True), (left_out, alone)]

    def off(reading: int) -> float:
        terms = [(single[i][reading], part) for i, part in held if single[i][reading]]
        made = sum(w * part for w, part in terms) / sum(w for w, _ in terms)
        return abs(three - made) if math.isfinite(made) else math.inf

    distances = {reading: off(reading) for reading in fitting}
    least = min(distances.values()) + settled * max(map(abs, (whole, *parts, FLOOR)))
    return tuple(reading for reading in fitting if distances[reading] <= 2 * least)


def agree(batch: Batch, weight: Weight, readings: Sequence[int]) -> bool:
    """Whether these readings say the same of every sample of a batch, and of all together."""
    each = [batch, *(rows(batch, i, i + 1) for i in range(samples(batch)))]
    return all(len({by_each_reading(weight, part)[reading] for reading in readings}) == 1 for part in each)


def other_cut(count: int, size: int) -> list[list[int]]:
    """The samples of a batch in parts of a size, cut elsewhere than from the first on; single ones in pairs."""
    order = [(i + size // 2) % count for i in range(count)]
    return [order[start : start + max(size, 2)] for start in range(0, count, max(size, 2))]


def same_by_another_cut(value: float, other: float, dtype: torch.dtype, rounding: Callable[[], float]) -> None:
    """Makes sure that the loss of a batch does not depend on how it is cut into parts.

    Args:
        value: the loss, from the parts; other: from others.
        dtype: the narrowest that the model computes in.
        rounding: what it makes of the loss where parts have other sizes; asked for only where it is in question.

    Raises:
        UsageError: it does: a mean that is weighted by class or leaves labels out, or a loss of samples together.
    """
    if not (math.isfinite(value) and math.isfinite(other)):
        return
    size = max(abs(value), abs(other), FLOOR)
    deviation, settled = abs(value - other) / size, SETTLED.get(dtype, NARROW)
    if settled < deviation <= ROUNDED:
        settled = max(settled, 2 * rounding() / size)
    if deviation > settled:
        raise UsageError(
            f"the loss of the batch is {value:.6g} from its parts, and {other:.6g} from other parts of the same batch, "
            "as where it is weighted by class or leaves out labels: it is not made of the losses of samples, so the "
            "batch has to go through the model at once, on one process: a micro_batch as large as the batch, or none, "
            "and no shard 'samples'"
        )


def _most_unlike(batch: Batch, single: Sequence[Sequence[float]], scored: Sequence[int]) -> list[int]:
    """The two samples whose numbers of terms are furthest apart by the first reading that tells any apart.

    By none of them: two of different labels, which a mean that is weighted by class tells apart.
    """
    for reading in range(len(single[0])):
        ordered = sorted(scored, key=lambda i: single[i][reading])
        if single[ordered[0]][reading] < single[ordered[-1]][reading]:
            return sorted((ordered[0], ordered[-1]))
    labels = batch.get("labels")
    other = next(
        (i for i in scored if isinstance(labels, Tensor) and bool((labels[i] != labels[scored[0]]).any())), None
    )
    return [scored[0], scored[1] if other is None else other]
