"""Which part of a model may move: an adapter's parameters, or one layer, head or kind of a chart at a time.

A layer, a head or a kind is a set of coordinates that neither metric nor geodesic couples with others: whole copies of
pairs, and entries of loose parameters. Where all others are zero, what is left is the same ball in fewer dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.errors import UsageError
from hf_geosharp.geometry.space import Space, Tangent
from hf_geosharp.layers import layer_of
from hf_geosharp.sharpness.chart import Chart, Owned
from hf_geosharp.sharpness.shards import Shards, is_sharded, rows_of
from hf_geosharp.symmetry.health import by_head
from hf_geosharp.symmetry.pairs import Pair

EMBEDDINGS, MATRICES, VECTORS = "embeddings", "matrices", "vectors"
"""Kinds of the parameters that are in no pair."""

NO_HEADS = "per is 'head', but no attention heads were found in this model; per 'layer' and 'kind' do without"

_ATTENTION = ("qk", "vo")


# --------------------------------------------------------------------------------------------------- parts of a chart


@dataclass(frozen=True)
class Selection:
    """One part: its name among those of ``by``, what it belongs to as far as that is one thing, its coordinates."""

    part: str
    by: str
    layer: int | None = None
    head: int | None = None
    kind: str | None = None
    coordinates: tuple[Owned, ...] = ()

    def within(self, space: Space) -> Restricted:
        """The space of a chart, in or out of focus, in which only this part moves."""
        # A space may measure in a way of its own, over processes say.
        own = type(space)
        kind: Any = Restricted if own is Space else type(f"Restricted{own.__name__}", (Restricted, own), {})
        restricted: Restricted = kind(space, self.coordinates)
        return restricted


class Restricted(Space):
    """A space in which some coordinates stay zero."""

    def __init__(self, space: Space, coordinates: Sequence[Owned]) -> None:
        # Everything that the space is, but for the directions in it.
        self.__dict__.update(space.__dict__)
        self._still: dict[int, Tensor | None] = {}
        """Part -> which of its copies (or entries) do not move; None where all move. Of other parts nothing moves."""
        for owned in coordinates:
            if owned.part is None:
                continue
            if owned.entries is None:
                self._still[owned.part] = None
                continue
            part = self.parts[owned.part]
            paired = len(part.shapes[0]) == 3
            count = part.shapes[0][0] if paired else part.shapes[0][1]
            still = self._still.get(owned.part)
            if still is None:
                shape = (count, 1, 1) if paired else (1, count)
                still = self._still[owned.part] = torch.ones(shape, dtype=torch.bool, device=self.place(part))
            still.view(-1)[owned.entries] = False

    def project_(self, u: Tangent) -> Tangent:
        """Sets to zero what may not move, in place."""
        for i, (part, piece) in enumerate(self.slices(u)):
            if i not in self._still:
                piece.zero_()
            elif (still := self._still[i]) is not None:
                # Not by a product: what is left out may be infinite.
                for x in part.storage(piece):
                    x.masked_fill_(still, 0.0)
        return u

    def random(self, generator: torch.Generator) -> Tangent:
        """A standard Gaussian tangent vector of the part, horizontal."""
        return self.project_(super().random(generator))


def selections(chart: Chart, by: str) -> tuple[Selection, ...]:
    """The parts of a chart, in the order of the model's parameters; every coordinate is in one, but for heads.

    - "layer": all that lies in one numbered module (``encoder.layer.3``; of nested numbers the outermost counts), and
      what is in none by the modules beside the layers (``bert.embeddings``, ``classifier``). What spans several layers
      is by itself.
    - "head": the query/key and value/output pairs of one head; heads that share a key are one.
    - "kind": the kinds of pairs, and what is in no pair: embeddings, other matrices, vectors (biases, norms).

    Raises:
        UsageError: heads are asked for and there are none.
    """
    found = {"layer": _layers, "head": _heads, "kind": _kinds}[by](chart)
    if not found:
        raise UsageError(NO_HEADS)
    return found


def _layers(chart: Chart) -> tuple[Selection, ...]:
    names = list(chart.leaves)
    beside = _beside([path for path, _ in filter(None, map(layer_of, names))])

    def key(owned: Owned) -> tuple[str, int | None]:
        if owned.pair is None:
            return layer_of(owned.name) or (beside(owned.name), None)
        layers = {layer_of(name) for name in owned.pair.parameters}
        first = layers.pop()
        if layers:
            return owned.pair.name, None
        return first or (beside(owned.pair.module or owned.pair.parameters[0]), None)

    return _grouped(chart, lambda owned: [Selection(key(owned)[0], "layer", layer=key(owned)[1])])


def _heads(chart: Chart) -> tuple[Selection, ...]:
    attention = [owned for owned in chart.owned() if owned.pair is not None and owned.pair.kind in _ATTENTION]
    counts: dict[str, set[int]] = {}
    for owned in attention:
        assert owned.pair is not None
        counts.setdefault(owned.pair.module, set()).add(len(heads_of(owned.pair)))

    def parts(owned: Owned) -> list[Selection]:
        pair = owned.pair
        if pair is None or pair.kind not in _ATTENTION:
            return []
        # Where queries and values have different numbers of heads, they are no heads of one another.
        where = pair.module if len(counts[pair.module]) == 1 else f"{pair.module} {pair.kind}".strip()
        layer = layer_of(f"{pair.module}.")
        return [
            Selection(
                f"{where} head {head}".strip(), "head", layer=layer and layer[1], head=head,
                coordinates=(_some(owned, copies),),
            )
            for head, copies in enumerate(heads_of(pair))
        ]  # fmt: skip

    return _grouped(chart, parts)


def _some(owned: Owned, copies: Tensor) -> Owned:
    """Some copies of a pair."""
    return replace(owned, entries=owned.entries[copies]) if isinstance(owned.entries, Tensor) else owned


def _kinds(chart: Chart) -> tuple[Selection, ...]:
    tables = {id(m.weight) for m in chart.model.modules() if isinstance(m, nn.Embedding)}

    def kind(owned: Owned) -> str:
        if owned.pair is not None:
            return owned.pair.kind
        leaf = chart.leaves[owned.name]
        if any(id(p) in tables for p, _ in leaf.members):
            return EMBEDDINGS
        return MATRICES if leaf.members[0][0].ndim > 1 else VECTORS

    return _grouped(chart, lambda owned: [Selection(kind(owned), "kind", kind=kind(owned))])


def _grouped(chart: Chart, parts: Callable[[Owned], Sequence[Selection]]) -> tuple[Selection, ...]:
    """The parts that coordinates belong to, those of one name joined, in the order of the model's parameters."""
    order = {name: i for i, name in enumerate(chart.leaves)}
    found: dict[str, list[tuple[int, Selection]]] = {}
    for owned in chart.owned():
        names = [owned.name] if owned.pair is None else owned.pair.parameters
        at = min(order[name] for name in names)
        for part in parts(owned):
            own = part if part.coordinates else replace(part, coordinates=(owned,))
            found.setdefault(part.part, []).append((at, own))
    joined = [
        (min(at for at, _ in own), replace(own[0][1], coordinates=tuple(c for _, s in own for c in s.coordinates)))
        for own in found.values()
    ]
    # Heads of one module begin at the same parameter.
    return tuple(s for _, s in sorted(joined, key=lambda item: (item[0], -1 if item[1].head is None else item[1].head)))


def _beside(layers: Sequence[str]) -> Callable[[str], str]:
    """Names of parameters outside all layers -> the outermost module of each that no layer lies in."""
    inside = {tuple(path.split(".")[:n]) for path in layers for n in range(path.count(".") + 1)}

    def name_of(name: str) -> str:
        path = tuple(name.split("."))
        end = next((n for n in range(1, len(path) + 1) if path[:n] not in inside), len(path))
        return ".".join(path[:end])

    return name_of


def heads_of(pair: Pair) -> Tensor:
    """(heads, copies of each): which copies of a pair make up a head; with rotary embeddings several frequencies do."""
    return by_head(pair, torch.arange(pair.copies))


# ------------------------------------------------------------------------------------------------------- an adapter's


def movable(model: nn.Module, params: str) -> frozenset[str] | None:
    """Names of the parameters that may move; None for all.

    For "lora" what PEFT would save of the active adapters: their matrices, and modules that are trained beside them.

    Raises:
        UsageError: the model has no adapter, or none that is active, or it is merged into the weights.
    """
    if params == "all":
        return None
    wrapper = next((m for m in model.modules() if getattr(m, "peft_config", None)), None)
    if wrapper is None:
        raise UsageError(
            f"params is 'lora', but this {type(model).__name__} has no adapter: load it with PEFT "
            "(PeftModel.from_pretrained, or get_peft_model), or score all parameters"
        )
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in wrapper.modules() if isinstance(m, BaseTunerLayer)]
    if any(layer.merged for layer in layers):
        raise UsageError("params is 'lora', but the adapter is merged into the weights: call unmerge_adapter() first")
    active = {name for layer in layers if not layer.disable_adapters for name in layer.active_adapters}
    held: set[int | None] = set()
    for name in sorted(active & set(_adapters(wrapper))):
        state = get_peft_model_state_dict(wrapper, adapter_name=name, save_embedding_layers=False)
        held |= {_place(tensor) for tensor in state.values()}
    named = [(n, _place(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    seen = [int(place is not None and place in held) for _, place in named]
    shards = Shards.of(model)
    # A process may have no row of a parameter.
    every = seen if shards is None else shards.total(seen)
    found = frozenset(n for (n, _), count in zip(named, every, strict=True) if count)
    if not found:
        listed = ", ".join(_adapters(wrapper))
        raise UsageError(f"params is 'lora', but no adapter of the model is active (it has: {listed})")
    return found


def _place(tensor: Tensor) -> int | None:
    """Where in memory a tensor is, or what of it lies here; None where nothing does."""
    rows = rows_of(tensor) if is_sharded(tensor) else tensor
    return rows.data_ptr() if rows.numel() else None


def _adapters(wrapper: Any) -> Mapping[str, Any]:
    adapters: Mapping[str, Any] = wrapper.peft_config
    return adapters
