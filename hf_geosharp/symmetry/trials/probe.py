"""Local twins: one module copied in float64, its parameters randomised, run again on what it was called with.

On a twin a claimed symmetry can be told from an approximate or an accidental one: rotations look exact where norm
weights are still all ones, everything looks exact where attention is saturated. What a twin decides is proved once
more on the real weights (:mod:`hf_geosharp.symmetry.verify`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hf_geosharp.carried import Carried
from hf_geosharp.errors import first_line
from hf_geosharp.randomness import the_same_drawn
from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.grouped import GROUPED, written_out
from hf_geosharp.symmetry.inputs import output_tensors
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import Copies
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.recorded import Call, mapped
from hf_geosharp.symmetry.trials import narrow
from hf_geosharp.symmetry.trials.fewer_heads import FewerHeads, fewer_heads
from hf_geosharp.symmetry.trials.narrow import Cut, Cuts, Plan
from hf_geosharp.symmetry.trials.together import Together, least_control

HOLDS = 1e-7
"""A claim holds on a twin when its relative deviation is below this ..."""

OF_CONTROL = 1e-3
"""... and below this share of the negative control's."""

LARGEST = 1 << 28
"""Parameters of the largest module that is copied in double precision."""

CONDITION = 10.0
"""Condition of the elements by which a claim is tried."""

NOTHING = 1e-13
"""Relative change of the outputs that is none."""

LARGER = 100.0
"""Where a claim holds it is tried once more on inputs so many times as large: it may end there, at a clamp say."""

DIFFERENTIATED = 1 << 26
"""Parameters of the largest module of which derivatives are taken."""

RETRIES = 2
"""On how many modules that are alike a claim is tried before it is given up for all of them."""

_WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
"""The dtype that takes the place of each narrow one."""

_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})


class Widened(TorchFunctionMode):
    """Runs code that casts to single precision inside (norms, softmax, rotary tables) in float64 throughout."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replaces narrow dtypes among the arguments."""
        # Every call of a pass comes by here.
        if func in _CASTS:
            func = Tensor.double
        if torch.dtype in map(type, args):
            args = tuple(_WIDE.get(a, a) if type(a) is torch.dtype else a for a in args)
        if kwargs and torch.dtype in map(type, kwargs.values()):
            kwargs = {k: _WIDE.get(v, v) if type(v) is torch.dtype else v for k, v in kwargs.items()}
        product = written_out(func, args, kwargs or {}) if func in GROUPED else None
        return func(*args, **(kwargs or {})) if product is None else product


@contextmanager
def double_by_default() -> Iterator[None]:
    """Constants that code makes on its way are doubles too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _wide(x: Any, scale: float = 1.0) -> Any:
    return mapped(x, lambda v: v.double() * scale if isinstance(v, Tensor) and v.is_floating_point() else v)


class LocalTwin:
    """One module in float64 with random parameters, replayed on a recorded call.

    ``weights`` maps names of the model (through ``names``: id of a parameter -> its name) to the twin's parameters.
    With ``cuts`` it is a narrow one (:mod:`hf_geosharp.symmetry.trials.narrow`).
    """

    def __init__(self, module: nn.Module, recorded: Call, names: Mapping[int, str], cuts: Cut = narrow.WHOLE) -> None:
        own = list(module.named_parameters(remove_duplicate=False))
        self._locals = {local: names[id(p)] for local, p in own if id(p) in names}
        self.cuts = cuts
        self._shapes = {names[id(p)]: tuple(p.shape) for _, p in own if id(p) in names}
        self.replay(recorded)
        generator = torch.Generator().manual_seed(0)
        self.weights: dict[str, Tensor] = {}
        instead: dict[int, Any] = {}
        with torch.no_grad():
            for _, p in own:
                if id(p) in names:
                    name = names[id(p)]
                    if name not in self.weights:
                        self.weights[name] = _randomised(cuts.cut(name, p.detach()), generator).to(p.device)
                    # The copy is made with these in place of its own.
                    instead[id(p)] = nn.Parameter(self.weights[name], requires_grad=p.requires_grad)
            # A scripted module copies its parameters itself, as a computation.
            self._module = copy.deepcopy(module, instead).double()
        self._module.eval()  # on its own: what a model overrides need not return the module
        self.cuts.tell(module, self._module, names)
        self._carried = Carried(self._module)

    def replay(self, recorded: Call) -> None:
        """From now on it is run on this call."""
        self.recorded = recorded
        args, kwargs = self.cuts.shortened((recorded.args, dict(recorded.kwargs)), self._shapes)
        self._args, self._kwargs = _wide(args), _wide(kwargs)
        self._bases: dict[float, list[Tensor]] = {}

    def run(self, weights: Mapping[str, Tensor], scale: float = 1.0, graph: bool = False) -> list[Tensor]:
        """The module's floating-point outputs with these weights, on what it was called with times ``scale``.

        Those that somebody reads, if that is known of some; with their ``graph`` or without.
        """
        args, kwargs = (self._args, self._kwargs) if scale == 1.0 else _wide((self._args, dict(self._kwargs)), scale)
        substitutes = {local: weights[name] for local, name in self._locals.items()}
        # What the last run has left in plain attributes was computed from other weights.
        self._carried.put_back()
        with torch.set_grad_enabled(graph), Widened(), double_by_default(), the_same_drawn():
            outputs = torch.func.functional_call(self._module, substitutes, args, dict(kwargs))
        tensors = output_tensors(outputs)
        return [y for place, y in enumerate(tensors) if place in self.recorded.read] or tensors

    def test(self, symmetry: Symmetry, scale: float = 1.0) -> tuple[float, float]:
        """(deviation, control): relative change of the output along the symmetry, and when it is broken on purpose."""
        move = symmetry.random(self.weights, torch.Generator().manual_seed(1), CONDITION)
        if scale not in self._bases:
            self._bases[scale] = self.run(self.weights, scale)
        results = []
        for act in (symmetry.apply, symmetry.break_):
            moved = Copies(self.weights)
            act(moved, move)
            results.append(deviation(self.run({**self.weights, **moved}, scale), self._bases[scale]))
        if isinstance(symmetry, Together):
            results[1] = min(results[1], self._least_control(symmetry, moved, scale))
        return results[0], results[1]

    def _least_control(self, symmetry: Together, broken: Mapping[str, Tensor], scale: float) -> float:
        """What the control of each of several symmetries would be at least; 0 where that cannot be worked out."""
        if sum(x.numel() for x in broken.values()) > DIFFERENTIATED:
            return 0.0
        leaves = {name: self.weights[name].detach().requires_grad_() for name in broken}
        change = {name: broken[name] - self.weights[name] for name in broken}
        try:
            return least_control(symmetry, self.run({**self.weights, **leaves}, scale, graph=True), leaves, change)
        except Exception:  # its code may raise anything where it is differentiated
            return 0.0


def _randomised(p: Tensor, generator: torch.Generator) -> Tensor:
    """Weights that leave nothing degenerate: attention not flat, gains not one, biases not zero."""
    noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).double()
    if p.ndim >= 2:
        return noise / p.shape[-1] ** 0.5
    centre = 1.0 if float(p.float().mean()) > 0.5 else 0.0
    return centre + 0.3 * noise


def deviation(outputs: Sequence[Tensor], base: Sequence[Tensor]) -> float:
    """Largest relative change ‖y' - y‖ / ‖y‖ over the output tensors, each about its mean; NaN counts as infinite.

    So do outputs of another shape: how long a model speaks, say, may depend on its weights.
    """
    if [y.shape for y in outputs] != [y.shape for y in base]:
        return float("inf")
    worst = 0.0
    for y, reference in zip(outputs, base, strict=True):
        finite = torch.isfinite(reference)
        if not bool(finite.all()):
            y, reference = y[finite], reference[finite]
        if reference.numel() == 0:
            continue
        # Summed in double precision, without a wide copy of each: logits are large.
        difference = _length(y - reference)
        if not math.isfinite(difference):
            return float("inf")
        size = _length(reference - _mean(reference)) if reference.numel() > 1 else abs(float(reference))
        if size > 0:
            worst = max(worst, difference / size)
    return worst


def _length(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _mean(x: Tensor) -> float:
    return float(x.mean(dtype=torch.float64))


class Trials:
    """Tests claims on local twins; what has held once is not tested again for a module that is alike."""

    def __init__(
        self,
        model: nn.Module,
        calls: Mapping[str, Call],
        names: Mapping[int, str],
        alive: Callable[[], None] = lambda: None,
        plan: Plan = lambda scope, own: (),
        operations: Mapping[str, Iterable[object]] | None = None,
    ) -> None:
        """``calls`` has the arguments of a call of each module, by its name; ``alive`` is called before each trial.

        ``plan`` says how twins may be cut; ``operations`` what each module calls, by which those that are alike are
        known.
        """
        self._alive, self._plan = alive, plan
        self._operations = operations or {}
        self._likeness: dict[str, object] = {}
        self._modules = dict(model.named_modules())
        self._calls, self._names = calls, names
        self._held: dict[object, float] = {}
        """Claims that have held, and by how much outputs move on larger inputs where they do not hold there."""
        self._failed: dict[object, set[str]] = {}
        """In which modules a claim has failed."""
        self._limits: dict[tuple[str, str], float] = {}
        """By module and claim how much outputs move on larger inputs, where a claim does not hold there."""
        self._twins: dict[bool, tuple[str, LocalTwin]] = {}
        """The last whole twin and the last narrow one, by whether they are cut, each with its module."""
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._plans: dict[str, list[Cuts]] = {}
        """How a twin of a module may be cut, less what did not run."""
        self._fewer: dict[str, dict[int, FewerHeads | None]] = {}
        """The same for twins with fewer heads, by how many there are; of modules that are worth it, None if not run."""
        self.too_large: dict[str, int] = {}
        """Modules that are not copied, and how many parameters they have."""
        self._failures: dict[tuple[str, str], Exception | None] = {}
        """By module and kind why claims could not be tried; None where one could."""
        self._moved: dict[tuple[str, str], bool] = {}
        """By module and kind whether some claim that was tried did anything, kept or broken."""

    def called(self, scope: str) -> bool:
        """Whether the module has run, so that it can be replayed."""
        return scope in self._calls

    def holds(
        self, symmetry: Symmetry, scope: str, scales: Sequence[float] = (1.0,), instead: Call | None = None
    ) -> bool:
        """Whether a symmetry is exact on a randomised copy of the module ``scope``, in double precision.

        On what the module was called with (or ``instead`` of that) times each of the ``scales``.
        """
        key = self._claim(symmetry, scope, scales, instead)
        if key in self._held:
            self._note_limit(symmetry, scope, self._held[key])
            return True
        failed = self._failed.setdefault(key, set())
        if scope in failed or len(failed) >= RETRIES:
            return False
        self._alive()
        for scale in scales:
            measured = self.measure(symmetry, scope, scale, instead)
            if not self._exact(measured):
                # Where nothing shows, that says nothing about others; those that are alike say what there would be.
                if measured is None or max(measured) > NOTHING:
                    failed.add(scope)
                return False
        self._held[key] = self._beyond(symmetry, scope) if max(scales) < LARGER else 0.0
        self._note_limit(symmetry, scope, self._held[key])
        return True

    def at_once(
        self, symmetries: Sequence[Pair | Scale], scope: str, scales: Sequence[float], instead: Call | None = None
    ) -> None:
        """Tries symmetries of one module together: if they hold, and each of them shows, so they do one by one.

        What is not known after that :meth:`holds` tries by itself. It takes as long as one of them.
        """
        claims = {self._claim(s, scope, scales, instead): s for s in symmetries}
        unknown = {k: s for k, s in claims.items() if k not in self._held and scope not in self._failed.get(k, ())}
        if len(unknown) < 2 or max(scales) < LARGER:
            return
        self._alive()
        together = Together("", symmetries[0].kind, scope, tuple(unknown.values()))
        if all(self._exact(self.measure(together, scope, scale, instead)) for scale in scales):
            self._held |= dict.fromkeys(unknown, 0.0)

    def _claim(self, symmetry: Symmetry, scope: str, scales: Sequence[float], instead: Call | None) -> object:
        """A claim on a module as it would be on others that are alike."""
        prefix = f"{scope}." if scope else ""
        described = _described(symmetry).replace(f"'{prefix}", "'")
        # What is dead on the model is proved here or nowhere: not by another module of its class.
        apart = scope if instead is not None and self.called(scope) else None
        return self._alike(scope), described, tuple(scales), apart

    def _beyond(self, symmetry: Symmetry, scope: str) -> float:
        """By how much outputs move along a symmetry on larger inputs; 0 where it holds there too, or nothing shows.

        Attention to one token alone says little: what does not move when it is broken on purpose is no evidence.
        """
        measured = self.measure(symmetry, scope, LARGER)
        if measured is None or measured[1] <= NOTHING or measured[0] < max(HOLDS, OF_CONTROL * measured[1]):
            return 0.0
        return measured[0]

    def _note_limit(self, symmetry: Symmetry, scope: str, moved: float) -> None:
        if moved:
            self._limits[scope, _described(symmetry)] = moved

    def limit(self, symmetry: Symmetry) -> float:
        """By how much outputs move along a symmetry that has held, on inputs larger by ``LARGER``; 0 if it holds."""
        return self._limits.get((symmetry.module, _described(symmetry)), 0.0)

    def _alike(self, scope: str) -> object:
        """What modules have in common for which a claim holds or fails together.

        One class may do other things in other layers, by a setting or a hook: what is called decides, and functions
        that the modules hold, whose insides may not show. How the layers are numbered does not.
        """
        if scope not in self._likeness:
            inside = [(n, type(m), _functions(m)) for n, m in self._modules[scope].named_modules()]
            self._likeness[scope] = tuple(inside), frozenset(self._operations.get(scope, ()))
        return self._likeness[scope]

    def shows(self, scope: str, kind: str) -> bool:
        """Whether anything that was tried on a module has changed what it returns, moved or broken on purpose."""
        return self._moved.get((scope, kind), True)

    @property
    def conclusive(self) -> bool:
        """Whether something has shown of every module that was tried: not so where it mixes zeros on this example."""
        return all(self._moved.values())

    def why_not(self, scope: str, kind: str) -> str:
        """Why nothing of a kind that was tried on a module holds, as text."""
        if scope in self.too_large:
            return "too large to be tried"
        if (error := self._failures.get((scope, kind))) is not None:
            return f"it could not be tried by itself ({type(error).__name__}: {first_line(error)})"
        if not self.shows(scope, kind):
            return "nothing that it does shows in what the module returns on this example"
        return "no symmetry of the templates holds"

    @staticmethod
    def _exact(measured: tuple[float, float] | None) -> bool:
        return measured is not None and measured[0] < min(HOLDS, OF_CONTROL * measured[1])

    def measure(
        self, symmetry: Symmetry, scope: str, scale: float = 1.0, instead: Call | None = None
    ) -> tuple[float, float] | None:
        """(deviation, control) on the twin; None where the module cannot be replayed by itself."""
        start = scope
        while True:
            while instead is None and scope and (scope not in self._calls or self._calls[scope].has_modules):
                # Never called, or called with parts of others: what is around it can be replayed.
                scope = scope.rpartition(".")[0]
            call = instead or self._calls.get(scope)
            if call is None or call.has_modules:
                return None
            if not set(symmetry.parameters) <= self._own(scope).keys():
                # It moves parameters of more than this module.
                if not scope or instead is not None:
                    return None
                scope = scope.rpartition(".")[0]
                continue
            measured = self._measured_narrow(symmetry, scope, call, scale)
            if measured is not None:
                self._failures[start, symmetry.kind] = None
                return measured
            if (size := _size(self._modules[scope], self._names, narrow.WHOLE)) > LARGEST:
                self.too_large[scope] = size
                return None
            try:
                measured = self._tested(symmetry, scope, call, scale)
            except Exception as error:  # its code may raise anything where it is run by itself
                self._failures.setdefault((start, symmetry.kind), error)
                return None
            self._failures[start, symmetry.kind] = None
            return measured

    def _measured_narrow(self, symmetry: Symmetry, scope: str, call: Call, scale: float) -> tuple[float, float] | None:
        """The same on a narrow twin; None where there is none, or the symmetry acts along what is cut."""
        module = self._modules[scope]
        if scope not in self._plans:
            plan = self._plan(scope, self._own(scope))
            self._plans[scope] = [*plan, *(replace(cuts, told=False) for cuts in plan)]
            if plan:
                self._fewer[scope] = {}
        plans = self._plans[scope]
        while plans:
            cuts = plans[0]
            short = narrow.narrowed(symmetry, cuts)
            if short is None or _size(module, self._names, cuts) > LARGEST:
                break
            try:
                return self._tested(short, scope, call, scale, cuts)
            except Exception:
                # Its code, which may raise anything, wants more, or the width that it was made for.
                del plans[0]
        return self._measured_with_fewer_heads(symmetry, scope, call, scale)

    def _measured_with_fewer_heads(
        self, symmetry: Symmetry, scope: str, call: Call, scale: float
    ) -> tuple[float, float] | None:
        """The same on a twin with fewer heads; None where it does not hold there: a whole one decides that."""
        known = self._fewer.get(scope)
        cuts = None if known is None else fewer_heads(symmetry, self._own(scope))
        if cuts is None or known is None:
            return None
        cuts = known.setdefault(cuts.heads, cuts)
        short = None if cuts is None else narrow.narrowed(symmetry, cuts)
        if cuts is None or short is None or _size(self._modules[scope], self._names, cuts) > LARGEST:
            return None
        try:
            measured = self._tested(short, scope, call, scale, cuts)
        except Exception:  # as above
            known[cuts.heads] = None
            return None
        # On inputs that saturate it nothing may show on either.
        alike = self._exact(measured) or (scale != 1.0 and max(measured) <= NOTHING)
        return measured if alike else None

    def _own(self, scope: str) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the parameters of a module."""
        if scope not in self._shapes:
            parameters = self._modules[scope].parameters()
            self._shapes[scope] = {self._names[id(p)]: tuple(p.shape) for p in parameters if id(p) in self._names}
        return self._shapes[scope]

    def _tested(
        self, symmetry: Symmetry, scope: str, call: Call, scale: float, cuts: Cut = narrow.WHOLE
    ) -> tuple[float, float]:
        """(deviation, control) on the twin of this module that is cut so, which is made if it is not the last one."""
        key = bool(cuts)
        if key not in self._twins or self._twins[key][0] != scope or self._twins[key][1].cuts is not cuts:
            self._twins.pop(key, None)
            self._twins[key] = scope, LocalTwin(self._modules[scope], call, self._names, cuts)
        twin = self._twins[key][1]
        if twin.recorded is not call:
            twin.replay(call)
        measured = twin.test(symmetry, scale)
        where = scope, symmetry.kind
        self._moved[where] = self._moved.get(where, False) or max(measured) > NOTHING
        return measured


def _described(symmetry: Symmetry) -> str:
    """What a symmetry is, but for its name and place."""
    return repr(replace(symmetry, name="", module=""))  # type: ignore[type-var]


def _functions(module: nn.Module) -> tuple[int, ...]:
    """Identities of the functions that a module holds or that are hooked to it, of methods without whose they are."""
    held = (v for v in vars(module).values() if isinstance(v, (FunctionType, MethodType, torch.jit.ScriptFunction)))
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return tuple(id(getattr(f, "__func__", f)) for f in (*held, *hooks))


def _size(module: nn.Module, names: Mapping[int, str], cuts: Cut) -> int:
    """How many parameters a twin of a module has."""
    return sum(cuts.left(names.get(id(p), ""), p.shape) for p in module.parameters())
