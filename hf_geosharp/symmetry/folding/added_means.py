"""Means that nothing sees of parameters which are added as they are: embeddings, position tables, tokens, biases.

Also of convolutions that write to a stream. Of each coordinate of a stream that only layer norms read, the same number
can be taken off; of the biases that a head adds to its logits by distance, one for all distances. As for what linear
maps write, the derivatives in what is added sum to zero then.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from torch import nn

from hf_geosharp.symmetry.fold import Mean, whole
from hf_geosharp.symmetry.folding.readers import owned
from hf_geosharp.symmetry.folding.unseen import Written, unseen
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.views import View


def added_means(
    model: nn.Module, names: Mapping[int, str], trace: Trace, taken: Container[str]
) -> Iterator[Mean]:  # fmt: skip
    """The folds, without names, of the means of what is added; one for each module with such parameters.

    ``names`` are those of the model's parameters, by identity; those that are ``taken`` are left out.
    """
    cut = {p for x in trace.linears for p in (x.weight.parameter, x.bias.parameter if x.bias else "")}
    multiplied = {name for _, name, _ in trace.before_norm.values()}
    asked: list[tuple[View, Written]] = []
    for name in owned(model, names) - cut - multiplied:
        parameter = model.get_parameter(name)
        if name in taken or not parameter.is_floating_point():
            continue
        if name not in trace.looked_up:
            asked += [(_means(name, parameter.shape, axis), Written([(parameter, axis)])) for axis in _axes(parameter)]
        elif name in trace.lookups and parameter.ndim == 2:
            rows = [(x, -1) for x, _ in trace.lookups[name]]
            for axis, over in ((1, False), (0, True)):
                asked.append((_means(name, parameter.shape, axis), Written(rows, over_places=over)))
    # In the order of the model, and of one parameter along its last axis first.
    order = {name: i for i, name in enumerate(names.values())}
    asked.sort(key=lambda item: order[item[0].parameter])
    found: dict[str, View] = {}
    for i in unseen(trace, [written for _, written in asked]):
        found.setdefault(asked[i][0].parameter, asked[i][0])
    modules: dict[str, list[View]] = {}
    for name, view in found.items():
        modules.setdefault(name.rpartition(".")[0], []).append(view)
    for module, views in modules.items():
        yield Mean("", module, tuple(views), "written_mean")


def _axes(parameter: nn.Parameter) -> Iterator[int]:
    """The axes along which there is more than one number, the last one first."""
    yield from (axis for axis in reversed(range(parameter.ndim)) if parameter.shape[axis] > 1)


def _means(parameter: str, shape: tuple[int, ...], axis: int) -> View:
    """A parameter as (coordinates, everything else)."""
    view = whole(parameter, *shape)
    own = view.names[axis]
    return View(view.parameter, view.axes, view.start, (), (own,), tuple(n for n in view.names if n != own))
