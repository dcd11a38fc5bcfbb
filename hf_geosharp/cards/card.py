"""A model card with a score in it: bytes in, bytes out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hf_geosharp import arguments
from hf_geosharp.cards import blockyaml, entry, index, section
from hf_geosharp.cards.document import Document, split
from hf_geosharp.errors import CardError

if TYPE_CHECKING:
    from hf_geosharp.sharpness.result import SharpnessResult


def merge(content: bytes, result: SharpnessResult, model: str, picture: str | None = None) -> bytes:
    """A card with the score in its metadata and in a section of its body; everything else byte for byte as it was.

    Merging the same score again changes nothing. A score with the same settings is replaced, one with others is added
    to the metadata, and the section tells the latest.

    Args:
        content: The card.
        result: The score.
        model: The model the card is of: an id of the Hub, or the name of a folder.
        picture: The file name of the picture of the curve, beside the card.

    Raises:
        CardError: The card cannot be changed safely: then ``block`` of the error is what to paste into it. Or the score
            has a number that is missing, NaN or infinite.
    """
    arguments.check(content=content, model=model, picture=picture)
    result = entry.plain(result)
    try:
        return _merge(split(content), result, model, picture).encode()
    except CardError as error:
        raise CardError(str(error), error.block or block(result, model, picture)) from error


def remove(content: bytes) -> bytes:
    """A card without the scores and the section that :func:`merge` put there.

    What was put there for them goes too, so that merging and removing give back the card. Three things are not told
    apart, and the first is what comes back: no front matter from an empty one (``---`` twice), no ``model-index``
    from an empty one, and ``results: []`` from ``results`` left out or without a value.

    Raises:
        CardError: The card cannot be changed safely.
    """
    arguments.check(content=content)
    card = split(content)
    yaml, rest = index.remove(card.yaml), section.take(card.rest)
    if card.yaml and not yaml and card.opening.startswith("---"):
        return Document(card.mark, "", "", dataclasses.replace(card, rest=rest).body).encode()
    return _checked(dataclasses.replace(card, yaml=yaml, rest=rest)).encode()


def check(content: bytes) -> None:
    """Whether a score can be merged into a card, to be asked before one is taken.

    Raises:
        CardError: It cannot, and why.
    """
    arguments.check(content=content)
    card = split(content)
    index.check(card.yaml)
    section.find(card.rest)


def new(model: str) -> bytes:
    """A card for a model that has none."""
    name = section.plain(_name(model))
    return section.template("card").substitute(name=name).encode("utf-8")


def block(result: SharpnessResult, model: str, picture: str | None = None) -> str:
    """What :func:`merge` would write, for pasting by hand."""
    result = entry.plain(result)
    item = {index.INDEX: [{"name": _name(model), "results": [entry.entry(result)]}]}
    text = section.render(result, model, (), picture)
    return f"Into the front matter:\n\n{blockyaml.dump(item)}\nInto the body:\n\n{text}\n"


def _merge(card: Document, result: SharpnessResult, model: str, picture: str | None) -> Document:
    eol, item = card.eol, entry.entry(result)
    yaml = index.merge(card.yaml, item, _name(model), eol)
    own = entry.key(item, item["metrics"][0])
    found = index.scores(yaml)
    if not any(entry.key(score, score["metrics"][0]) == own for score in found):
        raise CardError("the score cannot be found again in the front matter")
    others = [score for score in found if entry.key(score, score["metrics"][0]) != own]
    rest = section.put(card.rest, section.render(result, model, others, picture), eol)
    if not card.opening:
        fence = f"---{eol}"
        return _checked(Document(card.mark, fence, yaml, fence + rest))
    return _checked(dataclasses.replace(card, yaml=yaml, rest=rest))


def _checked(card: Document) -> Document:
    """``card``, if it is read as it was written."""
    if split(card.encode()) != card:
        raise CardError("the card cannot be changed safely: its front matter would end elsewhere")
    return card


def _name(model: str) -> str:
    """An id without its owner: what a model is called in an index."""
    return " ".join(model.rstrip("/").rsplit("/", 1)[-1].removeprefix("demo:").split())
