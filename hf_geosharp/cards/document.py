"""A model card taken apart: byte order mark, opening fence, YAML, closing fence and body, each as it was written."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from hf_geosharp.errors import CardError

# What the Hub itself takes for front matter; after it, so that everything downstream agrees with what the Hub shows.
_FRONT_MATTER = re.compile(r"^(\s*---(?:\r\n|\r|\n))([\S\s]*?)((?:\r\n|\r|\n)---[ \t]*(?:\r\n|\n|$))")
_OPENING = re.compile(r"^\s*---(?:\r\n|\r|\n)")
_OPENING_WITH_BLANKS = re.compile(r"^\s*---[ \t]+(?:\r\n|\r|\n)")
_CLOSING = re.compile(r"---[ \t]*(?:\r\n|\n|$)")


@dataclass(frozen=True)
class Document:
    """The parts of a card; joined they are its text.

    Attributes:
        mark: Whether it begins with a byte order mark.
        opening: The opening fence, with what white space stands before it; empty where there is no front matter.
        yaml: The lines between the fences.
        rest: The closing fence, if there is one, and the body.
    """

    mark: bool
    opening: str
    yaml: str
    rest: str

    @property
    def body(self) -> str:
        """What follows the front matter."""
        fence = _CLOSING.match(self.rest) if self.opening else None
        return self.rest[fence.end() :] if fence else self.rest

    @property
    def eol(self) -> str:
        """The line ending that most lines have; a line feed where there are none."""
        text = self.opening + self.yaml + self.rest
        crlf = text.count("\r\n")
        return "\r\n" if crlf > text.count("\n") - crlf else "\n"

    def encode(self) -> bytes:
        """The bytes of the card."""
        text = self.opening + self.yaml + self.rest
        return (codecs.BOM_UTF8 if self.mark else b"") + text.encode("utf-8")


def split(content: bytes) -> Document:
    """Takes a card apart.

    Raises:
        CardError: It is not UTF-8, or its front matter is opened and not closed.
    """
    mark = content.startswith(codecs.BOM_UTF8)
    try:
        text = content[len(codecs.BOM_UTF8) if mark else 0 :].decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise CardError(f"the card is not UTF-8 (line {line}): save it as UTF-8 first") from None
    if _OPENING_WITH_BLANKS.match(text):
        raise CardError("the opening --- is followed by spaces, so the Hub sees no front matter: delete them first")
    opening = _OPENING.match(text)
    if opening is None:
        return Document(mark, "", "", text)
    empty = _CLOSING.match(text, opening.end())
    if empty is not None and not _continues(text):
        return Document(mark, opening[0], "", text[opening.end() :])
    found = _FRONT_MATTER.match(text)
    if found is None:
        raise CardError(
            "the card begins with --- but no line --- closes it: close the front matter, or let the card begin with "
            "something else"
        )
    if empty is not None:
        raise CardError("the card begins with two lines ---, and what follows reads as front matter: delete one first")
    # The line break before the closing fence belongs to the last line of the YAML.
    fence = found.start(3) + (2 if found[3].startswith("\r\n") else 1)
    return Document(mark, found[1], text[found.end(1) : fence], text[fence:])


def _continues(text: str) -> bool:
    """Whether the Hub, which does not see that a fence right after a fence closes it, finds keys further down."""
    import yaml

    found = _FRONT_MATTER.match(text)
    if found is None:
        return False
    try:
        return isinstance(yaml.compose(found[2], Loader=yaml.SafeLoader), yaml.MappingNode)
    except yaml.YAMLError:
        return False
