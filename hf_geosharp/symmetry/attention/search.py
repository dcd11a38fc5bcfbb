"""Finds the heads of a model and the group of each: attention by attention, kind by kind, the largest that holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hf_geosharp.symmetry.attention.blocks import Analysis, analyse
from hf_geosharp.symmetry.attention.candidates import (
    alike_blocks,
    betweens_of,
    bias_folds,
    isometries,
    lengths,
    norm_bias_folds,
    of_another,
    pairs_of_blocks,
)
from hf_geosharp.symmetry.attention.couplings import Couplings
from hf_geosharp.symmetry.attention.exchange import exchanges, joins
from hf_geosharp.symmetry.attention.head_means import head_means
from hf_geosharp.symmetry.attention.sites import Attention, attentions, common
from hf_geosharp.symmetry.fold import Fold, KeyBias, ValueBias
from hf_geosharp.symmetry.names import Names
from hf_geosharp.symmetry.pairs import Between, Pair
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.tracing.features import Families
from hf_geosharp.symmetry.trials.probe import Trials

ROWS = "queries or keys are computed by matrices in a way that is not seen as a linear map: numbers are claimed alone"
"""Of matrices that pass for the weights of norms: each coordinate can be scaled, but there is more to it."""

MAX_PLACES = 4
"""Places that are named one by one."""

MODEL = "the model"
"""What the module is called that has no name."""


class Heads:
    """The heads of a model: pairs, their scales, the folds of biases and means, and what is not recognised."""

    def __init__(self, traced: Trace, families: Families, trials: Trials, names: Names) -> None:
        self.pairs: list[Pair] = []
        self.folds: list[Fold] = []
        self.scales: list[Scale] = []
        self.unrecognised: list[str] = []
        self.sites = list(attentions(traced, families))
        self.forms = {"qk": [s.qk for s in self.sites], "vo": [s.vo for s in self.sites]}
        self._traced, self._families, self._trials, self._names = traced, families, trials, names
        # By identity and kind the pairs of attentions that share no weights with others, and why they are not all.
        self._alone: dict[tuple[int, str], list[Pair]] = {}
        self._partly: dict[tuple[int, str], str] = {}

    def search(self, kinds: frozenset[str]) -> None:
        """Finds all pairs, and the folds of these kinds."""
        for kind, own in self.forms.items():
            groups = [([self.sites[i] for i in members], [own[i] for i in members]) for members in _sharing(own)]
            dead = [group for group in groups if not self._attend(kind, *group)]
            for group in dead:
                self._attend(kind, *group, last=True)
        folds = [f for f in self.folds if f.kind in kinds]
        for f in folds:
            self._trials.holds(f, f.module)  # of those where nothing shows, others that are alike say what they are
        self.folds = [
            replace(f, name=self._names(f.module, f.kind))  # type: ignore[type-var]
            for f in self._held(folds)
        ]

    def _attend(
        self, kind: str, sites: Sequence[Attention], forms: Sequence[Couplings], *, last: bool = False
    ) -> bool:  # fmt: skip
        """Pairs and folds of one side of attention, for sites that share it.

        False where nothing shows on this example, as in a first layer that mixes zeros: those that are alike, once they
        are known, say what it has. The ``last`` time it is told.
        """
        scope = common([s.softmax.scope for s in sites]) if len(sites) > 1 else sites[0].scope
        pairs, partly, reason = list(self._carried(kind, scope, sites)), "", ""
        if pairs:
            partly = self._partly.get((id(sites[0].like), kind), "")
        else:
            analysis = analyse(forms, self._families)
            pairs = list(self._pairs(kind, scope, analysis, betweens_of(sites, forms, self._traced)))
            # Of a head that is normalised in part, that part.
            reason, partly = analysis.reason, analysis.reason if pairs else ""
            if kind == "qk" and (partly or not pairs):
                exchanged = self._exchanged(scope, sites)
                pairs += exchanged
                if self._of_matrices(exchanged, sites):
                    partly = partly or reason or ROWS
            if not pairs:
                possible = isometries(kind, scope, forms, self._families)
                isometric = next((p for p in possible if self._trials.holds(p, scope)), None)
                pairs = [replace(isometric, name=self._names(scope, kind))] if isometric else []
        self.scales += [
            replace(s, name=self._names(scope, f"{kind}_scale")) for s in lengths(pairs) if self._trials.holds(s, scope)
        ]
        centred = []
        if kind == "qk" and (partly or all(p.group.isometric or p.kind != "qk" for p in pairs)):
            means = head_means(sites, scope, self._traced, self._families)
            centred = [m for m in means if self._trials.holds(m, scope)]
            self.folds += centred
        mixed = self._traced.mixing | self._traced.weighing
        if not pairs and kind == "vo" and all(not s.outputs and id(s.softmax) not in mixed for s in sites):
            return True  # shares that are handed out as they are
        if not pairs and not centred:
            if not last and not reason and not self._trials.shows(scope, kind):
                return False
            why = reason or self._trials.why_not(scope, kind)
            self.unrecognised.append(f"{_place(scope, sites)}.{kind}: {why}")
            return True
        if partly:
            self.unrecognised.append(f"{_place(scope, sites)}.{kind}: in part: {partly}")
        self.pairs += pairs
        if len(sites) == 1:
            self._alone[id(sites[0]), kind], self._partly[id(sites[0]), kind] = pairs, partly
        for pair in pairs:
            if pair.kind in ("qk", "vo") and not pair.group.complex:
                self.folds += bias_folds(pair, sites)
            elif pair.kind == "qk_norm":
                self.folds += norm_bias_folds(pair, self._traced)
        return True

    def _carried(self, kind: str, scope: str, sites: Sequence[Attention]) -> Iterator[Pair]:
        """What was found at an attention that is alike, under the names of this one; nothing where it does not hold."""
        if len(sites) > 1 or sites[0].like is None:
            return
        names = sites[0].renamed
        pairs = self._alone.get((id(sites[0].like), kind), [])
        if any(n not in names for p in pairs for n in p.parameters):
            return
        here = [of_another(p, scope, names) for p in pairs]
        if all(self._trials.holds(p, scope) for p in here):
            yield from (replace(p, name=self._names(scope, p.kind)) for p in here)

    def _pairs(self, kind: str, scope: str, analysis: Analysis, betweens: Sequence[Between] = ()) -> Iterator[Pair]:
        """For each kind of block the largest group that holds on the twin."""
        for blocks in alike_blocks(analysis.blocks):
            for pair in pairs_of_blocks(kind, scope, blocks, self._families, betweens):
                if self._trials.holds(pair, scope):
                    yield replace(pair, name=self._names(scope, kind))
                    break

    def _exchanged(self, scope: str, sites: Sequence[Attention]) -> list[Pair]:
        """What the weights of norms on queries and keys can exchange."""
        pairs: list[Pair] = []
        for candidates in exchanges(sites, scope, self._traced, self._families):
            held = next((p for p in candidates if self._trials.holds(p, scope)), None)
            if held is not None and joins(held, pairs, self._families):
                pairs.append(replace(held, name=self._names(scope, held.kind)))
        return pairs

    def _of_matrices(self, pairs: Sequence[Pair], sites: Sequence[Attention]) -> bool:
        """Whether what passes for the weights of norms are matrices that were not seen as linear maps.

        A norm has no more weights than a linear map before it has outputs.
        """
        sources = {id(s) for site in sites for s in self._traced.sources(site.softmax.logits)}
        outputs = max((x.outputs for x in self._traced.linears if id(x.leaf) in sources), default=0)
        sizes = {f.parameter: math.prod(f.shape) for f in self._families.members}
        return any(v.height > 1 and sizes[v.parameter] > outputs for p in pairs for v in (*p.g, *p.h))

    def _held(self, folds: Sequence[Fold]) -> Iterator[Fold]:
        """Those that hold; what folds by itself does not fold with others again."""
        taken: set[object] = set()
        for f in folds:
            own = {v.region for v in f.biases} if isinstance(f, (KeyBias, ValueBias)) else set()
            if not own & taken and self._trials.holds(f, f.module):
                taken |= own
                yield f


def _sharing(forms: Sequence[Couplings]) -> Iterator[list[int]]:
    """Forms that have features in common, together: shared modules, keys that several layers read."""
    owner: dict[tuple[int, int], int] = {}
    partition = Partition(range(len(forms)))
    for i, form in enumerate(forms):
        for node in form.nodes:
            j = owner.setdefault(node, i)
            partition.join(i, j)
    yield from partition.groups().values()


def _place(scope: str, sites: Sequence[Attention]) -> str:
    """Where to look for sites: the modules of their softmaxes, or that of it all where those are many."""
    inside = list(dict.fromkeys(s.softmax.scope[-1] for s in sites if s.softmax.scope))
    return ", ".join(n or MODEL for n in inside) if 0 < len(inside) <= MAX_PLACES else scope or MODEL
