"""Our scores in the ``model-index`` of a card's front matter: put in, found, taken out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from hf_geosharp.cards import blockyaml, entry
from hf_geosharp.cards.blockyaml import Path
from hf_geosharp.errors import CardError

INDEX = "model-index"

NOTE = "added by hf-geosharp"
"""The comment on a model of the index that was put there with the score, and goes when the score goes."""


def merge(text: str, item: Mapping[str, Any], model: str, eol: str) -> str:
    """The front matter with a score in it: in place of one with the same settings, else after the other results.

    Args:
        text: The lines between the fences.
        item: What :func:`hf_geosharp.cards.entry.entry` made.
        model: The model's name. With several models in the index, the score belongs to the one of this name; to a new
            one if none has it. A single model is taken whatever its name.
        eol: The line ending for new lines.

    Raises:
        CardError: The front matter is not valid, or not written in a way that can be edited safely.
    """
    check(text)
    index = blockyaml.find(blockyaml.read(text), (INDEX,))
    whole = {"name": model, "results": [dict(item)]}
    if index is None:
        return blockyaml.add_key(text, INDEX, whole, eol, NOTE)
    at = _position(index.node, model)
    if at is None:
        return blockyaml.append(text, (INDEX,), whole, eol, NOTE)
    held = blockyaml.items(index.node)[at]
    results = blockyaml.child(held, "results")
    if results is None:
        return blockyaml.add_list(text, (INDEX, at), "results", dict(item), eol)
    return _merge_result(text, (INDEX, at, "results"), results, item, eol)


def remove(text: str) -> str:
    """The front matter without our scores, and without what held nothing else and was put there for them.

    Raises:
        CardError: As for :func:`merge`.
    """
    check(text)
    while found := next(_ours(text), None):
        text = blockyaml.delete(text, _outermost(text, found[0]))
    return text


def scores(text: str) -> list[dict[str, Any]]:
    """Our scores in the index, each ``{task, dataset, metrics: [one]}``, in the order of the card."""
    return [item for _, item in _ours(text)]


def check(text: str) -> None:
    """Whether the index can be edited.

    Raises:
        CardError: It cannot, and why.
    """
    root = blockyaml.read(text)
    index = blockyaml.find(root, (INDEX,))
    if index is None:
        return
    if blockyaml.has_reference(text, (INDEX,)):
        raise CardError(f"{INDEX} has anchors, aliases or merge keys (&, *, <<): write them out first")
    if blockyaml.is_empty(index.node):
        return
    if not isinstance(index.node, yaml.SequenceNode):
        raise CardError(f"{INDEX} is not a list of models")
    _refuse_flow(index.node)
    for model in blockyaml.items(index.node):
        if not isinstance(model, yaml.MappingNode):
            raise CardError(f"{INDEX} holds something that is not a model with a name and results")
        results = blockyaml.child(model, "results")
        _refuse_flow(model)
        if results is not None and not blockyaml.is_empty(results):
            if not isinstance(results, yaml.SequenceNode):
                raise CardError(f"{INDEX}: the results of a model are not a list")
            _refuse_flow(results)


def _merge_result(text: str, path: Path, results: yaml.Node, item: Mapping[str, Any], eol: str) -> str:
    (metric,) = item["metrics"]
    wanted = entry.key(item, metric)
    for (*_, i, _, k), found in _ours(text, path):
        if entry.key(found, found["metrics"][0]) != wanted:
            continue
        metrics = blockyaml.child(blockyaml.items(results)[i], "metrics")
        if len(blockyaml.items(metrics)) == 1:
            return blockyaml.replace(text, (*path, i), dict(item), eol)
        # Another tool has put the metrics of one data set together.
        return blockyaml.replace(text, (*path, i, "metrics", k), metric, eol)
    return blockyaml.append(text, path, dict(item), eol)


def _position(index: yaml.Node, model: str) -> int | None:
    models = blockyaml.items(index)
    names = [str(blockyaml.value(blockyaml.child(held, "name"))).lower() for held in models]
    if model.lower() in names:
        return names.index(model.lower())
    return 0 if len(models) == 1 else None


def _ours(text: str, below: Path = ()) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Paths of our metrics, each with its result reduced to that metric."""
    index = blockyaml.find(blockyaml.read(text), (INDEX,))
    for m, model in enumerate(blockyaml.items(index.node if index else None)):
        for i, result in enumerate(blockyaml.items(blockyaml.child(model, "results"))):
            for k, metric in enumerate(blockyaml.items(blockyaml.child(result, "metrics"))):
                path = (INDEX, m, "results", i, "metrics", k)
                plain = blockyaml.value(metric)
                if entry.is_ours(plain) and path[: len(below)] == below:
                    parts = {part: blockyaml.value(blockyaml.child(result, part)) for part in ("task", "dataset")}
                    yield path, {**parts, "metrics": [plain]}


def _outermost(text: str, path: Path) -> Path:
    """The largest part of the index that holds nothing but the metric at ``path`` and was put there with it."""
    root = blockyaml.read(text)

    def alone(depth: int) -> bool:
        owner = blockyaml.find(root, path[:depth])
        return owner is not None and len(blockyaml.items(owner.node)) == 1

    if not alone(5):
        return path
    if not (alone(3) and _is_noted(text, root, path[:2])):
        return path[:4]
    return path[:1] if alone(1) else path[:2]


def _is_noted(text: str, root: yaml.Node | None, model: Path) -> bool:
    name = blockyaml.find(root, (*model, "name"))
    if name is None:
        return False
    rest = text[name.node.end_mark.index :].splitlines()[:1]
    return bool(rest) and rest[0].strip().lstrip("#").strip() == NOTE


def _refuse_flow(node: yaml.Node) -> None:
    if isinstance(node, yaml.CollectionNode) and node.flow_style:
        raise CardError(f"{INDEX} is in flow style ([...] or {{...}}): write one item or key a line")
