"""Proof on the model itself: moved along its claimed orbits, its outputs stay; broken on purpose, they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.inputs import call, output_tensors, synthetic
from hf_geosharp.symmetry.map import Element, SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import put, wide_copy, widened
from hf_geosharp.symmetry.probe import OF_CONTROL, Widened, deviation, double_by_default

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Largest relative change of the outputs that a true symmetry may show: rounding, by the dtype of the model.

Models in float64 cast to float32 inside (norms, softmax, rotary tables), hence more than float64's own rounding.
"""

DEAD = 1e-9
"""A pair whose control moves the outputs by less than this is dead: nothing that it does reaches them."""


@dataclass(frozen=True)
class Claim:
    """What was measured for one symmetry.

    Attributes:
        name: of the symmetry.
        deviation: relative change of the outputs when it moves, together with all of its kind.
        control: the least relative change when it is broken on purpose in one of several ways.
        status: "holds", "failed", "dead" (nothing it does reaches the outputs) or "unverified".
    """

    name: str
    deviation: float | None
    control: float | None
    status: str


@dataclass(frozen=True)
class Verified:
    """A map without the claims that failed, and the evidence: output changes of all moved together, and of each."""

    map: SymmetryMap
    deviation: float | None
    control: float | None
    claims: tuple[Claim, ...] = ()


def verify(
    model: nn.Module,
    symmetries: SymmetryMap,
    batches: Sequence[Mapping[str, Any]] | None = None,
    *,
    seed: int = 0,
    condition: float = 10.0,
    each: bool = False,
) -> Verified:
    """Checks the claims of a map on a model and its data; those that fail are dropped and named in the map.

    All claims are moved at once by one random element; where the outputs do not agree, halves are tried until
    the culprits are single. A claim holds when the relative deviation is below the tolerance of the dtype and
    below 1e-3 of the negative control's, in which only one side of each symmetry moves; a false claim of little
    effect can hide behind the controls of the others unless ``each`` kind is measured by itself. A model in half
    precision is checked in float32.

    The model comes back bit-identical.

    Args:
        model: the model.
        symmetries: what was found on it.
        batches: inputs to compare outputs on; two made-up ones of different length if None.
        seed, condition: of the random element.
        each: measure each kind of symmetry by itself too, with more controls (wrong pairing, groups that are not
            tied), and tell dead ones.
    """
    if not symmetries.symmetries:
        return Verified(symmetries, None, None)
    with widened(model):
        if batches is None:
            batches = example_batches(model, symmetries)
        wide = next(model.parameters()).dtype
        narrow = (torch.float16, torch.bfloat16, *((torch.float32,) if wide == torch.float64 else ()))
        batches = [
            {k: v.to(wide) if isinstance(v, Tensor) and v.dtype in narrow else v for k, v in b.items()} for b in batches
        ]
        element = symmetries.random_element(model, seed, condition)
        with _trial(model, symmetries, batches, element) as trial:
            return _verified(trial, symmetries, each)


def example_batches(model: nn.Module, symmetries: SymmetryMap) -> list[Mapping[str, Any]]:
    """Two made-up batches that differ in content and length, long enough to tell the largest group's directions."""
    width = max((p.group.dim for p in symmetries.pairs if p.kind in ("qk", "vo")), default=4)
    long = min(2 * width + 3, MAX_TOKENS)
    return [synthetic(model, rows=1, tokens=long, seed=1), synthetic(model, tokens=11, seed=2)]


MAX_TOKENS = 160


def _verified(trial: _Trial, symmetries: SymmetryMap, each: bool) -> Verified:
    failed: dict[str, str] = {}
    trial.search([s.name for s in symmetries.symmetries], failed)
    claims = {n: Claim(n, *trial.single[n], _failure(*trial.single[n])) for n in failed}
    remaining = symmetries.without(failed)
    moved: float | None = None
    control: float | None = None
    if remaining.symmetries:
        names = [s.name for s in remaining.symmetries]
        moved, control = trial.measure(names)
        # Claims that pass by halves must pass together too.
        if not trial.passes(moved, control):
            reason = f"deviation {moved:.1e} together with the others, control {control:.1e}"
            claims |= {n: Claim(n, moved, control, "failed") for n in names}
            return Verified(
                remaining.without(dict.fromkeys(names, reason)), moved, control, tuple(claims.values())
            )  # fmt: skip
        claims |= {n: Claim(n, moved, control, "holds") for n in names}
    if each:
        claims |= {c.name: c for c in trial.by_kind(remaining)}
        dead = {c.name: "dead: nothing that it does reaches the outputs" for c in claims.values() if c.status == "dead"}
        worse = {
            c.name: f"outputs move by {c.deviation:.1e}, by {c.control:.1e} when broken on purpose"
            for c in claims.values()
            if c.status == "failed" and c.name not in failed
        }
        remaining = remaining.without({**dead, **worse})
    order = [s.name for s in symmetries.symmetries]
    return Verified(remaining, moved, control, tuple(claims[n] for n in order))


def _failure(moved: float, control: float) -> str:
    return "dead" if moved < DEAD and control < DEAD else "failed"


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
        self.single: dict[str, tuple[float, float]] = {}
        self.wide = next(model.parameters()).dtype == torch.float64
        self.base: list[Tensor] = []

    def outputs(self) -> list[Tensor]:
        # Some models draw numbers in evaluation mode too: the same ones each time.
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.random.fork_rng())
            if self.wide:
                # What a model in double precision casts to single inside would hide small differences, or make them.
                stack.enter_context(Widened())
                stack.enter_context(double_by_default())
            torch.manual_seed(0)
            return [t.detach().clone() for b in self.batches for t in output_tensors(call(self.model, b))]

    def measure(self, names: Sequence[str]) -> tuple[float, float]:
        """(deviation, control) with these symmetries moved."""
        return self.moved(names, lambda s: s.apply), self.moved(names, lambda s: s.break_)

    def moved(self, names: Sequence[str], act: Callable[[Symmetry], Callable[..., None]]) -> float:
        """Relative change of the outputs when each of these is acted on."""
        touched = tuple(dict.fromkeys(p for n in names for p in self.by_name[n].parameters))
        weights = wide_copy(self.model, touched)
        for name in names:
            act(self.by_name[name])(weights, self.element.moves[name])
        try:
            put(self.model, weights)
            del weights
            return deviation(self.outputs(), self.base)
        finally:
            put(self.model, {n: self.stored[n] for n in touched})

    def passes(self, moved: float, control: float) -> bool:
        return moved < self.tolerance and moved < OF_CONTROL * control

    def search(self, names: Sequence[str], failed: dict[str, str]) -> None:
        """Finds the symmetries that fail, by halves."""
        moved, control = self.measure(names)
        if self.passes(moved, control):
            return
        if len(names) == 1:
            self.single[names[0]] = moved, control
            failed[names[0]] = f"outputs move by {moved:.1e}, by {control:.1e} when broken on purpose"
            return
        middle = len(names) // 2
        self.search(names[:middle], failed)
        self.search(names[middle:], failed)

    def by_kind(self, symmetries: SymmetryMap) -> Iterator[Claim]:
        """The claims of each kind by themselves, against every control they have."""
        kinds: dict[object, list[Symmetry]] = {}
        for s in symmetries.symmetries:
            kinds.setdefault((s.kind, s.group if isinstance(s, Pair) else None), []).append(s)
        for members in kinds.values():
            names = [s.name for s in members]
            moved = self.moved(names, lambda s: s.apply)
            controls = [self.moved(names, lambda s: s.break_)]
            for way in ("wrong_pairing", "untied"):
                able = [s.name for s in members if isinstance(s, Pair) and getattr(s, f"has_{way}")]
                if able:
                    controls.append(self.moved(able, lambda s, way=way: getattr(s, way)))  # type: ignore[misc]
            control = min(controls)
            for s in members:
                if control < DEAD and moved < DEAD:
                    yield Claim(s.name, moved, control, "dead")
                else:
                    yield Claim(s.name, moved, control, "holds" if self.passes(moved, control) else "failed")

    def restore(self) -> None:
        put(self.model, self.stored)


@contextmanager
def _trial(
    model: nn.Module, symmetries: SymmetryMap, batches: Sequence[Mapping[str, Any]], element: Element
) -> Iterator[_Trial]:
    """A trial on a model in evaluation mode, which is put back whatever happens."""
    training = {m: m.training for m in model.modules()}
    trial = _Trial(model, symmetries, batches, element)
    try:
        model.eval()
        try:
            trial.base = trial.outputs()
        except (RuntimeError, ValueError, TypeError):
            # Some models have operations that know single precision only.
            if not trial.wide:
                raise
            trial.wide = False
            trial.base = trial.outputs()
        yield trial
    finally:
        trial.restore()
        for module, mode in training.items():
            module.training = mode
