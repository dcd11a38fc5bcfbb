"""Proof on the model itself: moved along its claimed orbits, its outputs stay; broken on purpose, they do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.inputs import call, output_tensors
from hf_geosharp.symmetry.map import Element, SymmetryMap
from hf_geosharp.symmetry.parameters import put, wide_copy
from hf_geosharp.symmetry.probe import OF_CONTROL, deviation

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Largest relative change of the outputs that a true symmetry may show: rounding, by the dtype of the model.

Models in float64 cast to float32 inside (norms, softmax, rotary tables), hence more than float64's own rounding.
"""


@dataclass(frozen=True)
class Verified:
    """A map without the claims that failed, and the evidence for the rest: output changes of all moved together."""

    map: SymmetryMap
    deviation: float | None
    control: float | None


def verify(
    model: nn.Module,
    symmetries: SymmetryMap,
    batches: Sequence[Mapping[str, Any]],
    *,
    seed: int = 0,
    condition: float = 10.0,
) -> Verified:
    """Checks the claims of a map on a model and its data; those that fail are dropped and named in the map.

    All claims are moved at once by one random element; where the outputs do not agree, halves are tried until
    the culprits are single. A claim holds when the relative deviation is below the tolerance of the dtype and
    below 1e-3 of the negative control's, in which only one side of each symmetry moves.

    The model comes back bit-identical.
    """
    if not symmetries.symmetries:
        return Verified(symmetries, None, None)
    trial = _Trial(model, symmetries, batches, symmetries.random_element(model, seed, condition))
    failed: dict[str, str] = {}
    try:
        trial.search([s.name for s in symmetries.symmetries], failed)
        remaining = symmetries.without(failed)
        if not remaining.symmetries:
            return Verified(remaining, None, None)
        names = [s.name for s in remaining.symmetries]
        moved, control = trial.measure(names)
        # Claims that pass by halves must pass together too.
        if not trial.passes(moved, control):
            reason = f"deviation {moved:.1e} together with the others, control {control:.1e}"
            return Verified(remaining.without(dict.fromkeys(names, reason)), moved, control)
        return Verified(remaining, moved, control)
    finally:
        trial.restore()


class _Trial:
    """A model that is moved and put back, over and over."""

    def __init__(
        self, model: nn.Module, symmetries: SymmetryMap, batches: Sequence[Mapping[str, Any]], element: Element
    ) -> None:
        self.model, self.batches, self.element = model, batches, element
        self.by_name: dict[str, Symmetry] = {s.name: s for s in symmetries.symmetries}
        named = dict(model.named_parameters(remove_duplicate=False))
        self.stored = {n: named[n].detach().clone() for n in symmetries.parameters}
        self.tolerance = TOLERANCE.get(next(model.parameters()).dtype, 2e-3)
        self.training = {m: m.training for m in model.modules()}
        model.eval()
        try:
            self.base = self.outputs()
        except BaseException:
            self.restore()
            raise

    def outputs(self) -> list[Tensor]:
        with torch.no_grad():
            return [t.detach().clone() for b in self.batches for t in output_tensors(call(self.model, b))]

    def measure(self, names: Sequence[str]) -> tuple[float, float]:
        """(deviation, control) with these symmetries moved."""
        results = []
        touched = tuple(dict.fromkeys(p for n in names for p in self.by_name[n].parameters))
        for broken in (False, True):
            weights = wide_copy(self.model, touched)
            for name in names:
                symmetry, move = self.by_name[name], self.element.moves[name]
                (symmetry.break_ if broken else symmetry.apply)(weights, move)
            put(self.model, weights)
            results.append(deviation(self.outputs(), self.base))
            put(self.model, {n: self.stored[n] for n in touched})
        return results[0], results[1]

    def passes(self, moved: float, control: float) -> bool:
        return moved < self.tolerance and moved < OF_CONTROL * control

    def search(self, names: Sequence[str], failed: dict[str, str]) -> None:
        """Finds the symmetries that fail, by halves."""
        moved, control = self.measure(names)
        if self.passes(moved, control):
            return
        if len(names) == 1:
            failed[names[0]] = f"outputs move by {moved:.1e}, by {control:.1e} when broken on purpose"
            return
        middle = len(names) // 2
        self.search(names[:middle], failed)
        self.search(names[middle:], failed)

    def restore(self) -> None:
        put(self.model, self.stored)
        for module, mode in self.training.items():
            module.training = mode
