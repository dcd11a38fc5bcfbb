"""Pairs that layouts describe, tried on the modules that they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from torch import nn

from hf_geosharp.errors import UsageError, warn
from hf_geosharp.symmetry.attention.search import Heads
from hf_geosharp.symmetry.layouts import Declared, Layout, declared, registered
from hf_geosharp.symmetry.names import Names
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.trials.probe import Trials


def described_pairs(
    model: nn.Module, names: Mapping[int, str], layouts: Sequence[Layout], heads: Heads, trials: Trials, named: Names,
    unlike: Callable[[Pair], str | None],
) -> Iterator[Pair]:  # fmt: skip
    """Pairs of modules that a layout describes and the trace did not see; ``unlike`` says what it saw otherwise.

    Raises:
        UsageError: a layout of the user's fits no module, or one where it does not hold. One that is registered for
            all models need not fit this one; that is warned of.
    """
    taken = {name for p in heads.pairs for name in p.parameters}
    given = [layout.name for layout in (*layouts, *registered())]
    used: set[str] = set()
    for site in declared(model, names, layouts):
        used.add(site.layout)
        for kind, candidates in site.candidates.items():
            known = any(name in taken for name in candidates[0].parameters)
            if known and site.layout not in given:
                continue
            if not trials.called(site.module):
                heads.unrecognised.append(f"{site.module}.{kind}: not called on the example batch")
                continue
            held = next((p for p in candidates if trials.holds(p, site.module)), None)
            if held is not None:
                if not known:
                    yield replace(held, name=named(site.module, kind))
            elif site.layout in given and (seen := unlike(candidates[0])) != "":
                _refuse(site, kind, trials.measure(candidates[0], site.module), seen)
    for name in (name for name in given if name not in used):
        text = (
            f"The layout {name!r} fits no module of this {type(model).__name__}: check its submodules and head counts."
        )
        if any(layout.name == name for layout in layouts):
            raise UsageError(text)
        warn(text)


def _refuse(site: Declared, kind: str, measured: tuple[float, float] | None, seen: str | None) -> NoReturn:
    """Says by how much a layout of the user's does not hold, and what was seen instead if anything was."""
    why = "the module cannot be run by itself"
    if measured is not None:
        why = f"the output moves by {measured[0]:.1e} (by {measured[1]:.1e} when broken on purpose)"
    raise UsageError(
        f"The layout {site.layout!r} does not hold for the {kind} of {site.module}: {f'{seen}, and ' if seen else ''}"
        f"{why}. Correct its projections, patterns or heads, or leave it out."
    )
