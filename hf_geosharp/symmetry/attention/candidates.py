"""What attention may have: pairs of its blocks, the largest group first, and folds of its biases.

Nothing here is tried: what holds is decided on a twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hf_geosharp.symmetry.attention.blocks import Block, in_order
from hf_geosharp.symmetry.attention.couplings import Couplings
from hf_geosharp.symmetry.attention.feature_views import views_of
from hf_geosharp.symmetry.attention.sites import Attention
from hf_geosharp.symmetry.fold import Fold, KeyBias, ValueBias, whole
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Between, Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.tracing.features import Families
from hf_geosharp.symmetry.views import View


def isometries(kind: str, scope: str, forms: Sequence[Couplings], families: Families) -> Iterator[Pair]:
    """Pairs of which a norm without weights leaves rotations: of a whole head, those that keep the mean, or phases."""
    for pairing in ("", "half", "interleaved") if kind == "qk" else ("",):
        blocks = in_order(forms, families, pairing)
        g, h = (views_of(families.members, blocks, side) if blocks else None for side in "gh")
        if g is not None and h is not None:
            group = Group(1, complex=True) if pairing else Group(g[0].width)
            # The whole group where something is done to the product alone, a cap on logits say.
            yield Pair("", kind, scope, group, g, h)
            yield from (Pair("", kind, scope, smaller, g, h) for smaller in _rotations(group))


def _rotations(group: Group) -> list[Group]:
    """What keeps lengths, and of that what keeps the mean as well, where that is more than nothing."""
    isometric = replace(group, isometric=True)
    return [isometric, *([replace(isometric, centred=True)] if group.dim > 2 else [])]


def betweens_of(sites: Sequence[Attention], forms: Sequence[Couplings], traced: Trace) -> list[Between]:
    """What a norm that was left out may do to the columns of the output projection: by its weight, or 1 + weight."""
    gains_ = {f.gain for f in forms}
    outputs = {x.weight: x for s in sites for x in s.outputs}
    if gains_ == {""} or len(gains_) != 1 or len(outputs) != 1:
        return []
    gain, (weight, output) = next(iter(gains_)), next(iter(outputs.items()))
    bias = traced.biases.get(gain, "")
    out = output.bias.parameter if bias and output.bias is not None and output.bias.start == (0,) else ""
    plain = Between(gain, weight.parameter, weight.inner[0], bias=bias if out else "", out=out)
    return [plain, replace(plain, offset=1.0)]


def lengths(pairs: Sequence[Pair]) -> Iterator[Scale]:
    """The lengths of each side's heads: of what is normalised they may be nothing."""
    for pair in pairs:
        if pair.group.isometric and not pair.group.complex and pair.group.dim > 1:
            yield from (Scale("", pair.kind, pair.module, views, (), 0) for views in (pair.g, pair.h))


def alike_blocks(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """Blocks that may be copies of one pair, together."""
    groups: dict[object, list[Block]] = {}
    for b in blocks:
        shape = tuple((f, len(rows)) for side in (b.g, b.h) for f, rows in side)
        groups.setdefault((b.turned, b.size, shape), []).append(b)
    yield from groups.values()


def pairs_of_blocks(
    kind: str, scope: str, blocks: Sequence[Block], families: Families, betweens: Sequence[Between] = ()
) -> Iterator[Pair]:
    """Pairs that blocks may be, the largest group first; with a norm between the factors only rotations."""
    g, h = (views_of(families.members, blocks, side) for side in "gh")
    if g is None or h is None:
        return
    turned = blocks[0].turned
    group = Group(1, complex=True) if turned else Group(g[0].width)
    pair = Pair("", kind, scope, group, g, h)
    if betweens:
        for between in betweens if {v.parameter for v in h} == {betweens[0].parameter} else ():
            yield from (replace(pair, group=smaller, between=between) for smaller in _rotations(group))
        return
    yield pair
    if turned:
        return
    # Something may act on the one factor entry by entry, a gate say: then it is not part of the pair.
    sources = list(dict.fromkeys(v.parameter for v in g))
    owners = [tuple(v for v in g if v.parameter == s or _is_bias_of(v, s, g)) for s in sources]
    subsets = [views for views in dict.fromkeys(owners) if len(views) < len(g)]
    for views in subsets:
        yield replace(pair, g=views)
    for views in (g, *subsets):
        apart = replace(pair, g=_apart(views), h=_apart(h))
        # Something may let positive numbers through only: the largest of several queries, say.
        yield from (replace(apart, group=group) for group in (Group(1), Group(1, positive=True)))


def _is_bias_of(view: View, source: str, views: Sequence[View]) -> bool:
    """Whether a view directly follows that of a weight, as the view of its bias does."""
    at = views.index(view)
    return at > 0 and not any(n[0] == "i" for n in view.rows) and views[at - 1].parameter == source


def _apart(views: Sequence[View]) -> tuple[View, ...]:
    """The same views with each coordinate a copy of its own."""
    return tuple(replace(v, copies=(*v.copies, *v.dim), dim=()) for v in views)


def bias_folds(pair: Pair, sites: Sequence[Attention]) -> Iterator[KeyBias | ValueBias]:
    """Key and value biases that may fold: each by itself, then all of them at once, which those of streams do."""
    views = pair.h if pair.kind == "qk" else pair.g
    found = []
    for at, bias in enumerate(views):
        # That of a linear map follows its weight; one that was added in another way may come before.
        beside = (*views[max(0, at - 1) : at], *views[at + 1 : at + 2])
        weight = next((v for v in beside if _is_weight_of(v, bias)), None)
        if weight is not None:
            found.append((bias, weight))
    if not found:
        return
    # The others need no weight: one more key may be a parameter.
    first, weight = found[0]
    others = tuple(v for v in views if v != first and not _reads(v) and v.shape() == first.shape())
    if pair.kind == "qk":
        yield from (KeyBias("", pair.module, *both) for both in found)
        if others:
            yield KeyBias("", pair.module, first, weight, others=others)
        return
    outs = _outs(pair, sites)
    if not outs:
        return
    if len(outs) == 1:
        yield from (ValueBias("", pair.module, bias, pair.h[0], outs[0]) for bias, _ in found)
    if others or len(outs) > 1:
        yield ValueBias(
            "", pair.module, first, pair.h[0], outs[0], others=others, weights=pair.h[1:], outs=tuple(outs[1:])
        )


def _outs(pair: Pair, sites: Sequence[Attention]) -> list[View]:
    """The whole bias of each output projection that the second factor is made of; none unless each has its own."""
    biases: dict[str, View] = {}
    for x in (x for s in sites for x in s.outputs):
        if x.bias is not None and x.bias.start == (0,):
            biases[x.weight.parameter] = whole(x.bias.parameter, x.outputs)
    outs = [biases[v.parameter] for v in pair.h if v.parameter in biases]
    return outs if len({v.parameter for v in outs}) == len(pair.h) else []


def _is_weight_of(view: View, bias: View) -> bool:
    """Whether it has the rows of a bias, each with what it reads."""
    rows = {axis: size for axis, size in view.sizes.items() if axis[0] != "i"}
    return _reads(view) and rows == bias.sizes


def _reads(view: View) -> bool:
    """Whether it has what each feature reads, as weights have and biases do not."""
    return any(axis[0] == "i" for axis in view.rows)


def norm_bias_folds(pair: Pair, traced: Trace) -> Iterator[Fold]:
    """Biases of norms that may be key biases: those of keys, of entries that no rotary embedding turns."""
    for weight, bias in (both for views in (pair.g, pair.h) for both in pairwise(views)):
        if traced.biases.get(weight.parameter) == bias.parameter:
            yield KeyBias("", pair.module, bias, replace(weight, shift=0.0))


def of_another(pair: Pair, scope: str, names: Mapping[str, str]) -> Pair:
    """The pair in an attention that is alike."""
    between = pair.between.renamed(names) if pair.between is not None else None
    g, h = _renamed(pair.g, names), _renamed(pair.h, names)
    return replace(pair, name="", module=scope, g=g, h=h, between=between)


def _renamed(views: Sequence[View], names: Mapping[str, str]) -> tuple[View, ...]:
    return tuple(replace(v, parameter=names[v.parameter]) for v in views)
