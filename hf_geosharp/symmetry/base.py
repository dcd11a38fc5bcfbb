"""What every continuous symmetry of a model can do: give a random element, apply it, undo it, and break on purpose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]

Move = dict[str, Tensor]
"""A group element of one symmetry, by the names of its parts."""


class Symmetry(ABC):
    """One continuous symmetry: a pair, a direction that folds away, or a scale that is nothing."""

    name: str
    kind: str
    module: str

    @property
    @abstractmethod
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters it moves."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Real dimension of its group, over all copies."""

    @abstractmethod
    def random(self, weights: Weights, generator: torch.Generator, condition: float) -> Move:
        """A random element, far from the identity and well conditioned."""

    @abstractmethod
    def inverse(self, move: Move) -> Move:
        """The inverse element."""

    @abstractmethod
    def apply(self, weights: Weights, move: Move) -> None:
        """Moves ``weights`` in place; the function stays."""

    @abstractmethod
    def break_(self, weights: Weights, move: Move) -> None:
        """The negative control: only one side moves, so the function must not stay."""
