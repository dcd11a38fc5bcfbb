"""What scales unevenly: behind a squared ReLU s on the way in is s⁻² on the way out, before a norm it is nothing.

The metrics of where they lie are invariant under them as they are, so that a score needs nothing of them: they are
counted, proved and can be moved, no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_geosharp.symmetry.base import Move, Symmetry, Weights
from hf_geosharp.symmetry.views import View, scale


@dataclass(frozen=True)
class Scale(Symmetry):
    """G -> G s, H -> H s^-power for each unit, s > 0; ``g`` and ``h`` are views of (units, 1, rows).

    Without ``h`` (power 0) the units are heads of (heads, d, rows) that are normalised, and their length is nothing.
    """

    name: str
    kind: str
    module: str
    g: tuple[View, ...]
    h: tuple[View, ...]
    power: int

    @property
    def copies(self) -> int:
        """Number of units."""
        return self.g[0].count

    @property
    def dimension(self) -> int:
        """One for each unit."""
        return self.copies

    @property
    def parameters(self) -> tuple[str, ...]:
        """Each name once, in order."""
        return tuple(dict.fromkeys(v.parameter for v in (*self.g, *self.h)))

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """Factors from condition^-½ to condition^½."""
        return {"s": condition ** (torch.rand(self.copies, generator=generator, dtype=torch.float64) - 0.5)}

    def inverse(self, move: Move) -> Move:
        """1 / s."""
        return {"s": 1 / move["s"]}

    def apply(self, weights: Weights, move: Move) -> None:
        """Both sides."""
        scale(self.g, weights, move["s"])
        scale(self.h, weights, move["s"] ** -self.power)

    def break_(self, weights: Weights, move: Move) -> None:
        """The way in alone; of heads that are normalised one coordinate alone."""
        scale(self.g if self.h else [v.pick(v.dim[0], 0) for v in self.g], weights, move["s"])
