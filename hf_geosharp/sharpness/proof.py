"""The symmetries of a model, found and proved on its own data before it is scored."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hf_geosharp.errors import UsageError, first_line
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.notes import Notes
from hf_geosharp.sharpness.parts import Batch, excerpt, on_device, padded, picked, samples, uncut
from hf_geosharp.sharpness.precision import name_of_dtype
from hf_geosharp.sharpness.progress import Track
from hf_geosharp.sharpness.selection import NO_HEADS
from hf_geosharp.sharpness.settings import Settings
from hf_geosharp.symmetry.find import NOT_APART, find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.verify import Verified, verify

COPY_LIMIT = 2 << 30
"""Symmetries are verified on a float64 copy where it takes at most this many bytes, else on the model itself."""


class Proof:
    """Of the symmetries of one borrowed model."""

    def __init__(
        self, borrowed: Borrowed, batches: Sequence[Batch], settings: Settings, track: Track, notes: Notes
    ) -> None:
        self.borrowed, self.batches, self.settings = borrowed, batches, settings
        self.track, self.notes = track, notes
        self.split = track.together

    def symmetries(self) -> tuple[Verified, Settings]:
        """Found on the model, proved on its own data; without any, the settings turn adaptive.

        Raises:
            UsageError: a score of each head, of a model in which no head was found.
        """
        nothing = Verified(SymmetryMap(), None, None)
        if not self.settings.geometry.paired:
            return nothing, self.settings
        if self.borrowed.shards is None:
            verified = self._proved_on_a_copy()
        else:
            # One rank finds them for all, on a copy that is whole.
            whole = self.borrowed.shards.plain(self.split.leads)
            if whole is not None and _fits_wide(whole):
                whole = whole.double()
            verified = self.split.broadcast(None if whole is None else self._proved(whole))
            del whole
        for reason in verified.map.dropped:
            self.notes.warn(f"symmetry dropped: {reason}")
        if not verified.map.pairs:
            if self.settings.per == "head":
                raise UsageError(NO_HEADS)
            if verified.map.folds:
                self._warn_of_folds_alone(verified.map)
                return verified, self.settings
            apart = [text for text in verified.map.unrecognised if NOT_APART in text]
            scope = "all parameters"
            if self.settings.params != "all":
                scope = "what may move; where the perturbation lives shows whether the adapter does"
            self.notes.warn(
                f"no attention symmetry was found in this model: scored with the adaptive metric on {scope}, which "
                f"can differ between weights that compute the same function{''.join(f' ({text})' for text in apart)}"
            )
            return Verified(replace(nothing.map, dropped=verified.map.dropped), None, None), self.settings.unpaired
        # The base of an adapter does not move: what it computes with does not matter.
        if (missed := verified.map.missed) and self.settings.params == "all":
            where = "1 place" if len(missed) == 1 else f"{len(missed)} places"
            self.notes.warn(
                f"attention, or what looks like it, was recognised only in part or not at all in {where} "
                f"({missed[0]}): there the score can differ between weights that compute the same function; "
                "hf-geosharp inspect names all of them"
            )
        if verified.map.limits:
            self.notes.warn(verified.map.limits)
        separated, lost = verified.map.separated()
        for name in lost:
            self.notes.warn(
                f"the score is not invariant under {name}: its entries belong to another symmetry's pairs too"
            )
        return replace(verified, map=separated), self.settings

    def _warn_of_folds_alone(self, found: SymmetryMap) -> None:
        """Of a model without pairs, in which something is folded all the same."""
        folded = ", ".join(f"{n} {kind}" for kind, n in Counter(f.kind for f in found.folds).items())
        first = f" ({found.missed[0]})" if found.missed else ""
        self.notes.warn(
            f"no attention symmetry was found in this model{first}: apart from what is folded ({folded}) the metric is "
            "the adaptive one, which can differ between weights that compute the same function"
        )

    def say_what_rounds(self) -> None:
        """A base that stays in half precision is told of: the loss is rounded to it, and searched accordingly."""
        narrow = {p.dtype for p in self.borrowed.model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
        if narrow:
            names = ", ".join(sorted(name_of_dtype(dtype) for dtype in narrow))
            text = f"the adapter's base stays in {names}, which rounds the loss more than its own weights do"
            if self.settings.ascent == "auto" and not self.settings.average:
                # Rounding makes every ball rough, and another search finds more of it.
                self.settings = replace(self.settings, ascent="secant")
                text += ": the secant ascent alone searches"
            self.notes.warn(text)

    def _proved_on_a_copy(self) -> Verified:
        """What is found and proved on a wide copy of the model, or on the model itself where that is impossible."""
        model = self._wide_copy()
        try:
            return self._proved(model)
        except (TypeError, RuntimeError) as error:
            # Some models do not compute in double precision: experts that add up in single, quantised bases.
            if model is self.borrowed.model:
                raise
            proved = self._proved(self.borrowed.model)
            self.notes.append(
                f"the symmetries were proved in the model's own precision, because a copy in double precision does not "
                f"run ({type(error).__name__}: {first_line(error)})"
            )
            return proved

    def _proved(self, model: nn.Module) -> Verified:
        """What is found on a model, and proved; of an adapter's score only what the adapter has by itself."""
        examples = self._examples(next(model.parameters()).device)
        # Of a sharded model only one rank is here.
        world = self.track.world if self.borrowed.shards is None else World()

        # On a large model this takes long: the others hear in between that this rank is at it.
        alive = partial(self.track.stay, "verify")

        def measured(task: Callable[[], float]) -> float:
            alive()
            return task()

        def spread(tasks: Sequence[Callable[[], float]]) -> list[float]:
            return world.spread([partial(measured, task) for task in tasks])

        how: dict[str, Any] = {"preset": self.settings.symmetries, "layouts": self.settings.layouts}
        (found,) = world.spread([lambda: find_symmetries(model, examples[0], **how, alive=alive)])
        if self.settings.params != "all":
            found = found.within(self.borrowed.leaves)
        if not self.settings.verify:
            return Verified(found, None, None)
        # In double precision every kind is measured by itself: no claim can hide behind another's control.
        wide = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
        return verify(model, found, examples, seed=self.settings.seed, each=wide, apart=False, spread=spread)

    def _examples(self, device: torch.device) -> list[dict[str, Any]]:
        """Inputs out of the data: the first samples and the last ones, or all of the first batch if it has no parts.

        And samples that are padded on the left or the right, where there are such and those are not.
        """
        n = samples(self.batches[0])
        size = max(1, min(4, n // 2))
        last = self.batches[-1]
        end = samples(last)
        if uncut(last) or uncut(self.batches[0]):
            last, end = self.batches[0], n
        chosen = [excerpt(self.batches[0], 0, size), excerpt(last, max(0, end - size), end)]
        for column in (0, -1):
            if any(padded(example, column) for example in chosen):
                continue
            batch, which = next(((b, p) for b in self.batches if (p := padded(b, column))), (None, []))
            if batch is not None and not uncut(batch):
                chosen.append(picked(batch, which[:size]))
        return [on_device(b, device) for b in chosen]

    def _wide_copy(self) -> nn.Module:
        """A float64 copy of the model to prove symmetries on, or the model itself where that is too large."""
        model = self.borrowed.model
        if any(len(leaf.members) > 1 for leaf in self.borrowed.leaves.values()):
            return model  # a copy would part the parameters that share memory
        if self.borrowed.dtype == torch.float64 or not _fits_wide(model):
            return model
        try:
            return copy.deepcopy(model).double()
        except (TypeError, RuntimeError, ValueError):  # hooks and compiled modules that cannot be copied
            return model


def _fits_wide(model: nn.Module) -> bool:
    """Whether a float64 copy of a model is made to prove symmetries on."""
    return 8 * sum(p.numel() for p in model.parameters()) <= COPY_LIMIT
