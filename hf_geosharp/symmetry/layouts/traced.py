"""What a layout describes, held against what a trace has seen of the same projections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

from hf_geosharp.symmetry.attention.couplings import Couplings
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.tracing.features import Families, Node
from hf_geosharp.symmetry.views import View

SIDES = "gh"

Feature = tuple[str, int, int]
"""A parameter, one of its dimensions, and an index in that."""


def disagreement(pair: Pair, forms: Mapping[str, Sequence[Couplings]], families: Families) -> str | None:
    """What a trace has seen otherwise than a described pair says, as text; "" where they agree, None if it saw nothing.

    Which features meet in which head is compared, not what may act on them: rotary embeddings and norms leave a smaller
    group than that of a plain pair, or none, and the description is right all the same.

    Args:
        pair: one that a layout describes: each view has the axes n (the head) and h, some have g.
        forms: what was traced, by kind.
        families: of the features of those.
    """
    described = {side: dict(_heads(views)) for side, views in zip(SIDES, (pair.g, pair.h), strict=True)}
    shared = [s for s, views in zip(SIDES, (pair.g, pair.h), strict=True) if views[0].sizes.get("g", 1) == 1]
    seen: dict[str, set[str]] = {side: set() for side in SIDES}
    for kind, own in forms.items():
        nodes = set[Node]().union(*(form.nodes for form in own))
        for side in SIDES:
            if _among(nodes, described[side], families):
                seen[side].add(kind)
    if not any(seen.values()):
        return None
    for side, views in zip(SIDES, (pair.g, pair.h), strict=True):
        if seen[side] and pair.kind not in seen[side]:
            return f"{views[0].parameter} is seen in the {' and '.join(sorted(seen[side]))} of attention instead"
    own = forms[pair.kind]
    if not any(all(_among(nodes, described[side], families) for side in SIDES) for f in own for nodes in f.members):
        return f"{pair.g[0].parameter} and {pair.h[0].parameter} do not meet in any head"
    return next((text for form in own if (text := _of_heads(form, described, shared, families))), "")


def _of_heads(
    form: Couplings, described: Mapping[str, Mapping[Feature, int]], shared: Sequence[str], families: Families
) -> str:
    """The same of heads, as far as they can be told apart: where norms make features one, by those of some heads only.

    A norm over all heads makes these one.
    """
    of_head: dict[int, list[dict[str, set[Feature]]]] = {}
    nodes: list[set[Node]] = [{n for pair in edges for n in pair} for edges in form.heads if edges]
    if not nodes and form.members:
        nodes = [set(own - frozenset.intersection(*form.members)) for own in form.members]
    for members in nodes:
        own = {side: _among(members, described[side], families) for side in SIDES}
        heads = {described[side][f] for side in SIDES for f in own[side]}
        if len(heads) > 1:
            return f"what is one head is described as {len(heads)}"
        for head in heads:
            of_head.setdefault(head, []).append(own)
    for one, other in (two for own in of_head.values() for two in combinations(own, 2)):
        if any(one[side] and other[side] and not one[side] & other[side] for side in shared):
            return "what are several heads is described as one"
    return ""


def _among(nodes: Iterable[Node], described: Mapping[Feature, int], families: Families) -> set[Feature]:
    """Those of some nodes that are described."""
    return {f for node in nodes if (f := _feature(node, families)) is not None and f in described}


def _heads(views: Sequence[View]) -> Iterator[tuple[Feature, int]]:
    """Of each feature of a factor the head that it is described to be of."""
    for view in views:
        dimension = next(a.dimension for a in view.axes if a.name == "h")
        axes = [a for a in view.axes if a.dimension == dimension]
        for at in product(*(range(a.size) for a in axes)):
            index = view.start[dimension] + sum(i * a.step for i, a in zip(at, axes, strict=True))
            yield (view.parameter, dimension, index), next(i for i, a in zip(at, axes, strict=True) if a.name == "n")


def _feature(node: Node, families: Families) -> Feature | None:
    """The parameter, dimension and index of a feature; None for those of several dimensions together."""
    family = families.members[node[0]]
    return (family.parameter, family.dimensions[0], node[1]) if len(family.dimensions) == 1 else None
