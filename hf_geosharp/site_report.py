"""What an inspection says of one symmetry: its group, the parts of the parameters that it moves, what was proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_geosharp.symmetry.fold import Fold
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.verify import Verified
from hf_geosharp.symmetry.views import Axis

if TYPE_CHECKING:
    from hf_geosharp.symmetry.base import Symmetry
    from hf_geosharp.symmetry.map import SymmetryMap
    from hf_geosharp.symmetry.views import View

STATUSES = ("holds", "dead", "failed", "unverified")
"""What is known of a site: proved on this model; nothing to prove, for the control does not move the outputs either;
refuted on this model; not tried."""

_POSITIVE = Group(1, positive=True)

_FOLD_GROUPS = {
    "key_bias": "shift",
    "value_bias": "shift",
    "qk_mean": "shift",
    "norm_gain": "scale",
    "layer_scale": "scale",
    "read_mean": "shift",
    "written_mean": "shift",
    "stream_bias": "shift",
}


@dataclass(frozen=True)
class Slice:
    """Which part of a parameter a site uses.

    ``factor`` is "g" or "h" for the factor of a pair that it belongs to, "fixed" for what a fold sets to a constant,
    "centred" for weights whose mean over heads, or over what they read, is nothing.
    ``index`` says in words what is taken of each dimension, "" if all of it. Exactly: it begins at ``start``, and an
    index in each of the ``axes`` moves by its step along its dimension; ``layout`` names the axes of each dimension,
    outermost first.
    """

    parameter: str
    factor: str
    index: str
    layout: str
    start: list[int]
    axes: list[Axis]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Slice:
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**data, "axes": [Axis(**axis) for axis in data["axes"]]})


@dataclass(frozen=True)
class SiteReport:
    """One symmetry of one module.

    Attributes:
        kind: "qk", "vo", "mlp", "lora", "key_bias", "value_bias", "norm_gain", "layer_scale", ...
        module, name: where, and its name in messages.
        group: of each copy, such as "GL(64)" or "GL(1,C)"; of a fold "shift(64)", "scale(768)" or "affine(768)".
        copies: how many copies: heads, rotary frequencies of all heads, units.
        dim: the size of the block that the group acts on: the head dimension, 1 for a rotary frequency or a unit.
        total_dim: real dimension of the group over all copies.
        parameters, slices: what it moves, and which parts of it.
        deviation, control: relative change of the model's outputs along the orbit, and when it is broken on purpose.
        status: one of :data:`STATUSES`.
    """

    kind: str
    module: str
    name: str
    group: str
    copies: int
    dim: int
    total_dim: int
    parameters: list[str]
    slices: list[Slice]
    deviation: float | None
    control: float | None
    status: str

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteReport:
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**data, "slices": [Slice.from_dict(part) for part in data["slices"]]})


@dataclass(frozen=True)
class Totals:
    """Over the whole model: what failed or is dead does not count.

    ``effective_parameters`` are the parameters less the dimensions of the symmetry group; ``by_kind`` gives these
    dimensions by kind of site.
    """

    parameters: int
    symmetry_dim: int
    effective_parameters: int
    by_kind: dict[str, int]


def site_report(symmetry: Symmetry, shapes: Mapping[str, Sequence[int]], verified: Verified) -> SiteReport:
    """The report on one symmetry of a model whose parameters have these shapes, with what was found on it."""
    group, copies, dim, slices = _describe(symmetry, shapes)
    deviation, control, status = _evidence(symmetry, verified)
    return SiteReport(
        kind=symmetry.kind,
        module=symmetry.module or symmetry.name.rpartition(".")[0],
        name=symmetry.name,
        group=group,
        copies=copies,
        dim=dim,
        total_dim=symmetry.dimension,
        parameters=list(symmetry.parameters),
        slices=slices,
        deviation=deviation,
        control=control,
        status=status,
    )


def totals_of(parameters: int, symmetries: SymmetryMap) -> Totals:
    """Of a model with so many parameters and these symmetries."""
    by_kind: dict[str, int] = {}
    for symmetry in symmetries.symmetries:
        by_kind[symmetry.kind] = by_kind.get(symmetry.kind, 0) + symmetry.dimension
    return Totals(parameters, symmetries.dimension, parameters - symmetries.dimension, by_kind)


def _evidence(symmetry: Symmetry, verified: Verified) -> tuple[float | None, float | None, str]:
    """Deviation, control and status of one symmetry."""
    claim = next((c for c in verified.claims if c.name == symmetry.name), None)
    return (None, None, "unverified") if claim is None else (claim.deviation, claim.control, claim.status)


def _describe(symmetry: Symmetry, shapes: Mapping[str, Sequence[int]]) -> tuple[str, int, int, list[Slice]]:
    """Group, copies, the size of the block it acts on, and the slices."""
    if isinstance(symmetry, (Pair, Scale)):
        slices = [
            _slice(v, factor, shapes[v.parameter])
            for factor, views in (("g", symmetry.g), ("h", symmetry.h))
            for v in views
        ]
        group = _POSITIVE if isinstance(symmetry, Scale) else symmetry.group
        return group.name, symmetry.copies, group.dim, slices
    if isinstance(symmetry, Fold):
        first, word = symmetry.moved[0], _FOLD_GROUPS.get(symmetry.kind, symmetry.kind)
        factor, dim = "fixed" if symmetry.fixed else "centred", symmetry.dimension // first.count
        if symmetry.fixed:
            dim = min(dim, first.width * first.height)
        if symmetry.dimension > first.count * dim:  # a norm whose bias folds with its gain
            word = "affine"
        return f"{word}({dim})", first.count, dim, [_slice(v, factor, shapes[v.parameter]) for v in symmetry.moved]
    return symmetry.kind, 1, symmetry.dimension, []


def _slice(view: View, factor: str, shape: Sequence[int]) -> Slice:
    return Slice(view.parameter, factor, _index(view, shape), view.layout, list(view.start), list(view.axes))


def _index(view: View, shape: Sequence[int]) -> str:
    """``[:, 0:32]``: what a view takes of each dimension of a parameter of this shape; "" if all."""
    parts = []
    for dimension, (begin, size) in enumerate(zip(view.start, shape, strict=True)):
        runs = [(step, count) for d, step, count in view.region[2] if d == dimension]
        step, count = runs[0] if runs else (1, 1)
        text = f"{begin}:{begin + (count - 1) * step + 1}" + (f":{step}" if step > 1 else "")
        text += "".join(f" {count} times {step} apart" for step, count in runs[1:])
        parts.append(":" if text == f"0:{size}" else text)
    return "" if set(parts) <= {":"} else f"[{', '.join(parts)}]"
