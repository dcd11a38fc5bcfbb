"""Pictures as part of a page: SVG that takes its colours and its font from the page around it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from hf_geosharp.figures import COLOUR, MISSING, QUIET, SECOND, WARNING, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THEME = {
    "#000000": "currentColor",
    "#ffffff": "none",
    COLOUR: "var(--picture)",
    SECOND: "var(--second)",
    WARNING: "var(--bad)",
    QUIET: "var(--quiet)",
    MISSING: "var(--missing)",
    "#b0b0b0": "var(--quiet)",
}
"""From the colours of the pictures to those of the page; what is not here (the scales of maps) stays."""

_COLOUR = re.compile(r"#[0-9a-f]{6}\b")
_FAMILY = re.compile(r"font-family: [^;]*;? *")
_FONT = re.compile(r"font: [^;]*?([\d.]+px)[^;]*")
"""As other versions of matplotlib write it, size and family in one."""

_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def inline(figure: Figure, key: str, label: str) -> str:
    """The figure as an ``<svg>`` element.

    Args:
        figure: what to draw.
        key: begins every id in it, so that several pictures may stand on one page.
        label: what it shows, for those who do not see it.
    """
    file = io.StringIO()
    with style():
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    _clean(root)
    used = set(_references(root))
    for element in root.iter():
        _adapt(element, key, used)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")


def _clean(parent: ElementTree.Element) -> None:
    """Without name spaces, which HTML does not need, and without what would reach beyond the picture."""
    parent.tag = parent.tag.rpartition("}")[2]
    for child in list(parent):
        if child.tag.rpartition("}")[2] in ("metadata", "style"):
            parent.remove(child)
        else:
            _clean(child)
    for name in [name for name in parent.attrib if "}" in name]:
        parent.set(name.rpartition("}")[2], parent.attrib.pop(name))


def _references(root: ElementTree.Element) -> Iterator[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == "href" and value.startswith("#"):
                yield value[1:]
            yield from _REFERENCE.findall(value)


def _adapt(element: ElementTree.Element, key: str, used: set[str]) -> None:
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{key}-{own}")
    for name, value in element.attrib.items():
        if name == "href" and value.startswith("#"):
            element.set(name, f"#{key}-{value[1:]}")
        elif name in ("style", "fill", "stroke", "clip-path"):
            value = _REFERENCE.sub(rf"url(#{key}-\1)", value)
            value = _FONT.sub(r"font-size: \1", _FAMILY.sub("", value))
            element.set(name, _COLOUR.sub(lambda found: _THEME.get(found[0], found[0]), value))
