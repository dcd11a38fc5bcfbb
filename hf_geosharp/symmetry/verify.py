"""Proof on the model itself: moved along its claimed orbits, its outputs stay; broken on purpose, they do not."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.carried import Carried, emptied
from hf_geosharp.evaluating import evaluating
from hf_geosharp.randomness import the_same_drawn
from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.inputs import LARGE, Recipe, call, output_tensors, recipe
from hf_geosharp.symmetry.map import Element, SymmetryMap, connected
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import Copies, Saved, widened
from hf_geosharp.symmetry.trials.probe import OF_CONTROL, Widened, deviation, double_by_default

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
    apart: bool = True,
    enough: float | None = None,
    spread: Spread | None = None,
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
        apart: with ``each``, move each kind by itself too. If not, and on large models, what all of them did together
            is the deviation of each kind whose own controls it passes, and those are measured on the shortest batch.
        enough: all together moving the outputs by no more than this is proof without a control.
        spread: runs measurements that do not depend on each other, where several processes share them.
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
        with _trial(model, symmetries, batches, element, spread or _one_by_one) as trial:
            return _verified(trial, symmetries, each, enough, apart and not trial.large)


def example_batches(model: nn.Module, symmetries: SymmetryMap, known: Recipe | None = None) -> list[Mapping[str, Any]]:
    """Two made-up batches that differ in content and length, long enough to tell the largest group's directions.

    ``known`` is how inputs of the model are made, where that has been found.
    """
    known = recipe(model) if known is None else known
    width = max((p.group.dim for p in symmetries.pairs if p.kind in ("qk", "vo")), default=4)
    long = min(2 * width + 3, MAX_TOKENS)
    # A pass of a large model takes as long as it has tokens.
    rows = 1 if _parameters(model) > LARGE else 2
    return [known.batch_for(model, rows=1, tokens=long, seed=1), known.batch_for(model, rows=rows, tokens=11, seed=2)]


MAX_TOKENS = 160


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _verified(
    trial: _Trial, symmetries: SymmetryMap, each: bool, enough: float | None, apart: bool
) -> Verified:  # fmt: skip
    names = [s.name for s in symmetries.symmetries]
    # Controls of all at once are not always wanted.
    acts = [_APPLY] if enough is not None or (each and trial.large) else [_APPLY, _BREAK]
    together, *controls = trial.spread([partial(trial.moved, names, act) for act in acts])
    if enough is not None and together <= enough:
        return Verified(symmetries, together, None)
    if each and trial.large and together < trial.tolerance:
        # Every kind has controls of its own.
        claims = {c.name: c for c in trial.by_kind(symmetries, together, apart)}
        control = min((c.control for c in claims.values() if c.status == "holds" and c.control), default=None)
        return Verified(symmetries.without(_refuted(claims)), together, control, tuple(claims[n] for n in names))
    passed = trial.search(names, together, *controls)
    claims = {n: Claim(n, *measured, _failure(*measured)) for n, measured in trial.single.items()}
    remaining = symmetries.without(_refuted(claims))
    moved: float | None = None
    control = None
    if remaining.symmetries:
        left = [s.name for s in remaining.symmetries]
        moved, control = passed or trial.measure(left)
        # Claims that pass by halves must pass together too.
        if not trial.passes(moved, control):
            reason = f"deviation {moved:.1e} together with the others, control {control:.1e}"
            claims |= {n: Claim(n, moved, control, "failed") for n in left}
            return Verified(
                remaining.without(dict.fromkeys(left, reason)), moved, control, tuple(claims.values())
            )  # fmt: skip
        claims |= {n: Claim(n, moved, control, "holds") for n in left}
    if each:
        measured = {c.name: c for c in trial.by_kind(remaining, moved, apart)}
        claims |= measured
        remaining = remaining.without(_refuted(measured))
    return Verified(remaining, moved, control, tuple(claims[n] for n in names))


def _refuted(claims: Mapping[str, Claim]) -> dict[str, str]:
    """Those that do not hold, the dead ones first, with the reason."""
    dead = {n: "dead: nothing that it does reaches the outputs" for n, c in claims.items() if c.status == "dead"}
    worse = {
        n: f"outputs move by {c.deviation:.1e}, by {c.control:.1e} when broken on purpose"
        for n, c in claims.items()
        if c.status == "failed"
    }
    return {**dead, **worse}


def _failure(moved: float, control: float) -> str:
    return "dead" if moved < DEAD and control < DEAD else "failed"


Spread = Callable[[Sequence[Callable[[], float]]], list[float]]
"""Measurements -> what each gives, in their order."""


def _one_by_one(measurements: Sequence[Callable[[], float]]) -> list[float]:
    return [measure() for measure in measurements]


_Act = Callable[[Any], Callable[..., None]]
"""Symmetry -> what is done with it."""

_APPLY: _Act = operator.attrgetter("apply")
_BREAK: _Act = operator.attrgetter("break_")


class _Trial:
    """A model that is moved and put back, over and over."""

    def __init__(
        self, model: nn.Module, symmetries: SymmetryMap, batches: Sequence[Mapping[str, Any]], element: Element,
        spread: Spread,
    ) -> None:  # fmt: skip
        self.model, self.batches, self.element, self.spread = model, batches, element, spread
        self.by_name: dict[str, Symmetry] = {s.name: s for s in symmetries.symmetries}
        self.hold()
        self.tolerance = TOLERANCE.get(next(model.parameters()).dtype, 2e-3)
        self.large = _parameters(model) > LARGE
        self.single: dict[str, tuple[float, float]] = {}
        """Deviation and control of those that fail by themselves."""
        self.double = all(p.dtype == torch.float64 for p in self.named.values() if p.is_floating_point())
        self.wide = next(model.parameters()).dtype == torch.float64
        self.base: list[list[Tensor]] = []
        self._carried = Carried(model)

    def hold(self) -> None:
        """Takes hold of the parameters' memory, once more where a pass has put other memory in its place."""
        self.named = {n: p.detach() for n, p in self.model.named_parameters(remove_duplicate=False)}
        self.saved = Saved(self.named)

    def outputs(self, batches: Sequence[Mapping[str, Any]]) -> list[list[Tensor]]:
        """What the model answers to each batch."""
        # Some models draw numbers in evaluation mode too: the same ones each time.
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(the_same_drawn())
            if self.wide:
                # What a model in double precision casts to single inside would hide small differences, or make them.
                stack.enter_context(Widened())
                stack.enter_context(double_by_default())
            return [self._answer(b) for b in batches]

    def _answer(self, batch: Mapping[str, Any]) -> list[Tensor]:
        # What the last pass has left in plain attributes was computed from other weights.
        self._carried.put_back()
        return [t.detach().clone() for t in output_tensors(call(self.model, batch))]

    def moved(self, names: Sequence[str], act: _Act, *, short: bool = False) -> float:
        """Relative change of the outputs when each of these is acted on; ``short``: on the shortest batch alone."""
        chosen = [self.by_name[n] for n in names]
        try:
            for members in connected(chosen):
                self._move(members, act)
            which = [self.shortest] if short else range(len(self.batches))
            answers = self.outputs([self.batches[i] for i in which])
            return max(deviation(answer, self.base[i]) for i, answer in zip(which, answers, strict=True))
        finally:
            self.saved.put_back()

    def _move(self, members: Sequence[Symmetry], act: _Act) -> None:
        """Acts with symmetries in double precision, and rounds once; in place on a large model, or a double one."""
        in_place = self.large or self.double
        weights = _InPlace(self.saved) if in_place else Copies(self.named)
        for symmetry in members:
            act(symmetry)(weights, self.element.moves[symmetry.name])
        for name, value in weights.items() if not in_place else ():
            self.saved.open(name).copy_(value)

    @property
    def shortest(self) -> int:
        """The batch with the fewest numbers."""
        sizes = [sum(v.numel() for v in b.values() if isinstance(v, Tensor)) for b in self.batches]
        return sizes.index(min(sizes))

    def passes(self, moved: float, control: float) -> bool:
        return moved < self.tolerance and moved < OF_CONTROL * control

    def measure(
        self, names: Sequence[str], moved: float | None = None, control: float | None = None
    ) -> tuple[float, float]:
        """(deviation, control) with these symmetries moved, as far as they are not known."""
        return (
            self.moved(names, _APPLY) if moved is None else moved,
            self.moved(names, _BREAK) if control is None else control,
        )

    def search(
        self, names: Sequence[str], moved: float | None = None, control: float | None = None
    ) -> tuple[float, float] | None:
        """Deviation and control of all where they pass together; else those that fail are found by halves."""
        moved, control = self.measure(names, moved, control)
        if self.passes(moved, control):
            return moved, control
        if len(names) == 1:
            self.single[names[0]] = moved, control
            return None
        middle = len(names) // 2
        self.search(names[:middle])
        self.search(names[middle:])
        return None

    def by_kind(self, symmetries: SymmetryMap, together: float | None, apart: bool) -> Iterator[Claim]:
        """The claims of each kind, against every control they have.

        Each by itself; or, not ``apart``, what all of them did ``together`` is each one's deviation too, unless it is
        too much for this kind's control.
        """
        kinds: dict[object, list[Symmetry]] = {}
        for s in symmetries.symmetries:
            kinds.setdefault((s.kind, s.group if isinstance(s, Pair) else None), []).append(s)
        claims = list(kinds.values())
        least = self._least(claims, short=not apart)
        shared = not apart and together is not None

        def enough(control: float) -> bool:
            return shared and together is not None and control >= DEAD and self.passes(together, control)

        if not self.large and shared:
            # What does not show on the shortest batch may do so on another.
            open_ = [i for i, control in enumerate(least) if not enough(control)]
            for i, control in zip(open_, self._least([claims[i] for i in open_]), strict=True):
                least[i] = control
        alone = [members for members, control in zip(claims, least, strict=True) if not enough(control)]
        moves = iter(self.spread([partial(self.moved, [s.name for s in members], _APPLY) for members in alone]))
        for members, control in zip(claims, least, strict=True):
            moved = together if enough(control) and together is not None else next(moves)
            for s in members:
                if control < DEAD and moved < DEAD:
                    yield Claim(s.name, moved, control, "dead")
                else:
                    yield Claim(s.name, moved, control, "holds" if self.passes(moved, control) else "failed")

    def _least(self, kinds: Sequence[Sequence[Symmetry]], *, short: bool = False) -> list[float]:
        """The least that a control of each kind moves the outputs by, on all batches or the shortest."""
        broken = [self._controls(members, short) for members in kinds]
        measured = iter(self.spread([measure for controls in broken for measure in controls]))
        return [min(next(measured) for _ in controls) for controls in broken]

    def _controls(self, members: Sequence[Symmetry], short: bool) -> list[Callable[[], float]]:
        """The measurements that break symmetries of one kind, each in its way."""
        found = [partial(self.moved, [s.name for s in members], _BREAK, short=short)]
        for way in ("wrong_pairing", "untied"):
            able = [s.name for s in members if isinstance(s, Pair) and getattr(s, f"has_{way}")]
            if able:
                found.append(partial(self.moved, able, operator.attrgetter(way), short=short))
        return [*found]


class _InPlace(dict[str, Tensor]):
    """The parameters themselves, each opened when it is first asked for."""

    def __init__(self, saved: Saved) -> None:
        super().__init__()
        self._saved = saved

    def __missing__(self, name: str) -> Tensor:
        """A parameter that was not asked for before."""
        self[name] = self._saved.open(name)
        return self[name]


@contextmanager
def _trial(
    model: nn.Module, symmetries: SymmetryMap, batches: Sequence[Mapping[str, Any]], element: Element, spread: Spread
) -> Iterator[_Trial]:
    """A trial on a model in evaluation mode, which is put back whatever happens."""

    def run() -> list[Tensor]:
        with torch.no_grad(), the_same_drawn():
            return output_tensors(call(model, batches[0]))

    with evaluating(model), emptied(model, run):
        trial = _Trial(model, symmetries, batches, element, spread)
        try:
            try:
                trial.base = trial.outputs(batches)
            except (RuntimeError, ValueError, TypeError):
                # Some models have operations that know single precision only.
                if not trial.wide:
                    raise
                trial.wide = False
                trial.base = trial.outputs(batches)
            trial.hold()  # some code casts parts of itself on the way (the router of Switch Transformers)
            yield trial
        finally:
            trial.saved.put_back()
