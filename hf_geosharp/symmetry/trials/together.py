"""Many symmetries of one module at once: hidden units of experts, each of which would take runs of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.symmetry.base import Move, Symmetry, Weights
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.scales import Scale


@dataclass(frozen=True)
class Together(Symmetry):
    """Pairs and scales that move together, each by an element of its own.

    If the function stays, it stays for each of them: what two of them do does not cancel, but by chance.
    """

    name: str
    kind: str
    module: str
    members: tuple[Pair | Scale, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Those of all, each name once."""
        return tuple(dict.fromkeys(name for member in self.members for name in member.parameters))

    @property
    def dimension(self) -> int:
        """That of all."""
        return sum(member.dimension for member in self.members)

    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """One after the other."""
        moves = (member.random(weights, generator, condition) for member in self.members)
        return {f"{number} {part}": x for number, move in enumerate(moves) for part, x in move.items()}

    def _each(self, move: Move) -> Iterator[tuple[Pair | Scale, Move]]:
        own: list[Move] = [{} for _ in self.members]
        for name, x in move.items():
            number, _, part = name.partition(" ")
            own[int(number)][part] = x
        yield from zip(self.members, own, strict=True)

    def inverse(self, move: Move) -> Move:
        """Of each."""
        inverses = (member.inverse(own) for member, own in self._each(move))
        return {f"{number} {part}": x for number, inverse in enumerate(inverses) for part, x in inverse.items()}

    def apply(self, weights: Weights, move: Move) -> None:
        """All move."""
        for member, own in self._each(move):
            member.apply(weights, own)

    def break_(self, weights: Weights, move: Move) -> None:
        """All are broken."""
        for member, own in self._each(move):
            member.break_(weights, own)

    def shares(self, entries: Weights) -> list[float]:
        """The sum of the entries that each member moves where it is broken."""
        return [sum(float(v.of(entries[v.parameter]).sum()) for v in member.g) for member in self.members]


def least_control(together: Together, outputs: list[Tensor], weights: Weights, change: Weights) -> float:
    """The least that a member, broken by itself, would change of the outputs, relative and to first order.

    By the derivatives of one random sum of the outputs: of that, what a member changes is as likely larger as smaller.

    Args:
        together: the members.
        outputs: made of ``weights``, with their graph.
        weights: the parameters that are moved, leaves of the graph.
        change: what breaking all of them adds to these.
    """
    generator = torch.Generator().manual_seed(2)
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        if y.requires_grad:
            noise = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device)
            size = float((y.detach() - y.detach().mean()).norm())
            total = total + ((y * noise).sum() / size).cpu() if size > 0 else total
    if not total.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(total, list(weights.values()), allow_unused=True)
    felt = {
        name: torch.zeros_like(change[name]) if gradient is None else gradient * change[name]
        for name, gradient in zip(weights, gradients, strict=True)
    }
    return min(abs(share) for share in together.shares(felt))
