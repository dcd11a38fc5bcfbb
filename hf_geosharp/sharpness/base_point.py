"""What the loss of a batch at the base point is held against, before anything climbs from there.

Moving pairs to where they are balanced, and folding, must leave every batch's loss as it is at the stored weights, and
no weight that the loss depends on may be without a gradient.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hf_geosharp.errors import ModelError, UsageError
from hf_geosharp.randomness import same_random_numbers
from hf_geosharp.sharpness.ball import Ball
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.objective import Loss
from hf_geosharp.sharpness.parts import Batch
from hf_geosharp.sharpness.reproducibility import rounding_in
from hf_geosharp.symmetry.inputs import call
from hf_geosharp.symmetry.map import SymmetryMap, connected, parameters_of

SAME_LOSS = {torch.float32: 1e-5, torch.float64: 1e-6}
"""Relative difference between the loss of a batch at the stored weights and at the base point that is rounding."""

LEAST_LOSS = 0.01
"""Loss below which that is relative to this."""

ROUNDINGS, MOVED, CONDITION = 3, 1e-6, 2.0
"""How often the stored weights are moved to see what rounding makes where that is larger, by how little (relative), and
the condition of the element that moves the pairs along their orbits."""

FAR = 100.0
"""The condition of that element where the outputs stay as they were computed, so that no rounding grows with it."""

POINTS, SPACING = 7, 1e-7
"""At how many weights the loss is looked at to see what rounds inside a model in double precision, and how far from one
another (relative): as far as single precision tells apart, and so near that a loss is smooth."""

MOST_UNFELT = 1 << 24
"""Entries of parameters without a gradient that are tried."""


class Tape:
    """What a model, or a part of it, returns when it is called from outside: the first time kept, later given again."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = set(model.modules())
        self._kept: list[Any] = []

    @contextmanager
    def playing(self) -> Iterator[None]:
        """From the beginning; calls beyond the end are kept."""
        depth = played = 0

        def enter(module: nn.Module, _: Any) -> None:
            nonlocal depth
            depth += module in self._modules

        def leave(module: nn.Module, _: Any, outputs: Any) -> Any:
            nonlocal depth, played
            if module not in self._modules:
                return None
            depth -= 1
            if depth:
                return None
            if played == len(self._kept):
                self._kept.append(_copied(outputs))
            played += 1
            return _copied(self._kept[played - 1])

        with ExitStack() as stack:
            for handle in (register_module_forward_pre_hook(enter), register_module_forward_hook(leave)):
                stack.callback(handle.remove)
            yield


def _copied(outputs: Any) -> Any:
    """What a loss may change, or take something out of, as it may in a training."""
    try:
        return copy.deepcopy(outputs)
    except (RuntimeError, TypeError):
        # Tensors of a graph, and what else cannot be copied.
        return copy.copy(outputs)


class BasePoint:
    """Checks of the base point on one borrowed model.

    ``loss`` is that of a batch, by its number, at the weights that the model has at the moment; ``refuted`` names the
    symmetries that do not hold on a batch; ``put_back`` puts back the stored weights, after which there is no chart;
    ``say`` tells of the batch that is looked at.
    """

    def __init__(
        self,
        borrowed: Borrowed,
        symmetries: SymmetryMap,
        loss: Callable[[int], float],
        refuted: Callable[[int], Sequence[str]],
        put_back: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.borrowed, self.symmetries = borrowed, symmetries
        self._loss, self._refuted, self._put_back, self._say = loss, refuted, put_back, say
        self.stored: dict[int, float] = {}
        """Losses of batches at the weights as they are stored, before anything is folded."""
        self._felt = False
        """Whether parameters without a gradient have been looked at."""

    def expect(self, stored: Mapping[int, float]) -> None:
        """The losses of these batches are those at the stored weights."""
        self.stored = dict(stored)

    def check_felt(self, ball: Ball) -> None:
        """Parameters without a gradient are in no perturbation: told if the loss depends on them all the same, once.

        That is so where a forward pass detaches what it computed, or computes under ``torch.no_grad``.
        """
        if self._felt or not ball.unfelt or self.borrowed.shards is not None:
            return
        self._felt = True
        leaves, taken, entries = [self.borrowed.leaves[name] for name in ball.unfelt], [], 0
        for leaf in leaves:
            entries += leaf.tensor.numel()
            if entries > MOST_UNFELT:
                break
            taken.append((leaf.tensor, leaf.tensor.detach().clone()))
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for tensor, held in taken:
                    size = max(float(held.std(unbiased=False)), float(held.mean().abs()), 1e-3)
                    tensor.add_(0.1 * size * torch.randn(held.shape, generator=generator).to(held))
            moved = self._loss(ball.number)
        finally:
            with torch.no_grad():
                for tensor, held in taken:
                    tensor.copy_(held)
        noise = 100 * torch.finfo(self.borrowed.dtype).eps * max(abs(ball.base), LEAST_LOSS)
        if not abs(moved - ball.base) <= noise:
            shown = ", ".join(ball.unfelt[:3]) + ", ..." * (len(ball.unfelt) > 3)
            self._say(
                f"the loss depends on parameters in which it has no gradient, for the forward pass detaches them or "
                f"runs under torch.no_grad: they are not perturbed (without a gradient: {len(ball.unfelt)}, {shown})"
            )

    def is_stored_loss(self, index: int, base: float, noise: float = 0.0) -> bool:
        """Whether the loss of a batch is the expected one but for rounding, or one is not known or not finite."""
        stored = self.stored.get(index, base)
        if not math.isfinite(stored):
            return True
        return abs(base - stored) <= max(SAME_LOSS[self.borrowed.dtype] * max(abs(stored), LEAST_LOSS), noise)

    def check_function(self, index: int, base: float) -> None:
        """A base point of another loss than the stored weights is another function, unless rounding makes as much.

        What rounding makes is seen where the pairs move the weights along their symmetries: code that rounds inside, as
        half precision does, then rounds everything otherwise. That they are symmetries on this batch, too, has to be
        proved for that. On a sharded model it cannot be, and it is told.

        Raises:
            ModelError: it is another function.
        """
        self._put_back()
        stored = self.stored[index]
        kinds = ", ".join(sorted({symmetry.kind for symmetry in self.symmetries.symmetries}))
        told = f"batch {index}: its loss is {stored:.6g}, and {base:.6g} once symmetries are divided out ({kinds})"
        sharded = self.borrowed.shards is not None
        if refuted := () if sharded else self._refuted(index):
            raise ModelError(
                f"{told}. These hold on the samples that they were proved on, but not on this batch: "
                f"{'; '.join(refuted[:3])}{'; ...' if len(refuted) > 3 else ''}. The model may do something else with "
                "its inputs, such as clipping large values or leaving rows out that attend to nothing (left padding): "
                "use symmetries 'paper', which folds nothing, or score without this batch. Or its loss depends on the "
                "weights themselves, as a penalty on them does: leave that out"
            )
        if not self.is_stored_loss(index, base, 10 * self._rounding(index)):
            raise ModelError(
                f"{told}. They hold on the samples that they were proved on, but not on all of this batch: it may have "
                "rows that attend to nothing, such as those of left padding, or its loss may read hidden states or "
                "weights. Use symmetries 'paper', which folds nothing"
            )
        if sharded:
            self._say(f"{told}: rounding inside the model, or they do not hold on this batch")
        del self.stored[index]

    def check_loss(self, loss: Loss, batch: Batch) -> None:
        """Refuses a custom loss that reads the weights: along the symmetries the outputs stay, but it does not.

        The model has its stored weights, and has them afterwards. Where the loss runs the model itself, or a part of
        it, that gives what it gave the first time.

        Raises:
            UsageError: it is such a loss, or one that says something else of the same outputs when it is asked again.
        """
        tape = Tape(self.borrowed.model)

        def value(outputs: Any) -> float:
            same_random_numbers()
            found = loss(_copied(outputs), batch)
            # What is no tensor of such numbers is refused where it is scored.
            return float(found.mean()) if isinstance(found, Tensor) and found.is_floating_point() else math.nan

        def differ(first: float, second: float) -> bool:
            return abs(second - first) > SAME_LOSS[self.borrowed.dtype] * max(abs(first), LEAST_LOSS)

        with torch.no_grad():
            same_random_numbers()
            outputs = call(self.borrowed.model, batch)
            with tape.playing():
                before = value(outputs)
            with tape.playing():
                again = value(outputs)
            if differ(before, again):
                raise UsageError(
                    f"the loss is {before:.6g}, and {again:.6g} of the same outputs and batch when it is computed "
                    "again: it depends on what it was given before. Pass a function that keeps nothing from call to "
                    "call"
                )
            self._move(0, FAR)
            try:
                with tape.playing():
                    after = value(outputs)
            finally:
                self._put_back()
                self._settle()
        if differ(before, after):
            raise UsageError(
                f"the loss is {before:.6g}, and {after:.6g} of the same outputs where the weights are moved along the "
                "model's symmetries: it depends on the weights themselves, as a penalty on them does, and no symmetry "
                "leaves it as it is. Leave that out of the loss, or use metric 'adaptive' or 'euclidean'"
            )

    def noise(self, index: int) -> float:
        """What rounding makes of the loss of a batch, measured at weights around the stored ones, on one line."""
        losses = []
        for place in range(-(POINTS // 2), POINTS // 2 + 1):
            self._put_back()
            self._disturb(0, place * SPACING)
            losses.append(self._loss(index))
        self._put_back()
        return rounding_in(losses)

    def _rounding(self, index: int) -> float:
        """How much the loss of a batch changes where the same function is computed from other weights."""
        noise = 0.0
        for seed in range(ROUNDINGS):
            self._move(seed, CONDITION, MOVED)
            noise = max(noise, abs(self._loss(index) - self.stored[index]))
            self._put_back()
        return noise

    def _move(self, seed: int, condition: float, little: float = 0.0) -> None:
        """Moves the weights by that little (relative), and along the pairs' symmetries."""
        if little:
            self._disturb(seed, little)
        pairs = SymmetryMap(self.symmetries.separated()[0].pairs)
        leaves, shards = self.borrowed.leaves, self.borrowed.shards
        element = pairs.random_element({name: leaf.tensor for name, leaf in leaves.items()}, seed, condition)
        with torch.no_grad():
            for members in connected(pairs.symmetries):
                # What hangs together has to be whole, and nothing else at the same time.
                names = parameters_of(members)
                weights = {n: leaves[n].tensor if shards is None else shards.whole(n).clone() for n in names}
                for symmetry in members:
                    symmetry.apply(weights, element.moves[symmetry.name])
                if shards is not None:
                    for name, moved in weights.items():
                        leaves[name].tensor.copy_(leaves[name].here(moved))
        self._settle()

    def _settle(self) -> None:
        """The next pass sees the weights as they are now."""
        if self.borrowed.shards is not None:
            self.borrowed.shards.settle()

    def _disturb(self, seed: int, little: float) -> None:
        """Moves all weights by that little (relative), in a random direction."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for leaf in self.borrowed.leaves.values():
                way = torch.randn(leaf.shape, generator=generator)
                leaf.tensor.mul_(1 + little * leaf.here(way).to(leaf.tensor))
