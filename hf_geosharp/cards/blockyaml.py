"""Edits of YAML in block style that leave every other character as it is.

PyYAML says where in the text a value stands; what is edited is the text, by whole lines. After each edit the text is
read again and must mean exactly what the same edit of the data gives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import yaml

from hf_geosharp.errors import CardError

Path = tuple[str | int, ...]
"""Keys and positions that lead to a value."""

_REST_OF_LINE = re.compile(r"([^\r\n]*)(?:\r\n|\r|\n|$)")
_COLON = re.compile(r"[ \t]*:")
_INDENT = re.compile(r"[ ]*")
_MERGE = "tag:yaml.org,2002:merge"
_NULL = "tag:yaml.org,2002:null"

# Strings that no reader of YAML takes for anything else; the others are quoted, since readers differ about them. (The
# dumper itself sees to words such as no and null.)
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z_0-9.,:/()-]*(?: [A-Za-z_0-9.,:/()-]+)*")


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    pass


def _represent_string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_string)


@dataclass(frozen=True)
class Place:
    """A value in the text: its node, and the key's if it belongs to a mapping."""

    node: yaml.Node
    key: yaml.ScalarNode | None = None


def dump(value: Any) -> str:
    """``value`` in block style, each scalar on one line."""
    return yaml.dump(
        value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"), default_flow_style=False
    )


# PyYAML takes its time, and an edit asks for the same text several times. Nobody changes the nodes.
@lru_cache(maxsize=8)
def read(text: str) -> yaml.MappingNode | None:
    """The mapping that the text holds; None if it holds nothing.

    Raises:
        CardError: It is not valid YAML, has a key twice, or is no mapping in block style.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise CardError(f"the front matter is not valid YAML: {_one_line(error)}") from None
    except RecursionError:
        raise CardError("the front matter is nested too deeply to be read") from None
    if root is None:
        return None
    if not isinstance(root, yaml.MappingNode):
        raise CardError("the front matter is not a mapping of keys to values")
    if root.flow_style:
        raise CardError("the front matter is in flow style ({...}): write one key a line")
    _refuse_twice(root)
    return root


def find(root: yaml.Node | None, path: Path) -> Place | None:
    """The value at a path; None where there is none."""
    place = None if root is None else Place(root)
    for step in path:
        if place is None:
            return None
        place = _child(place.node, step)
    return place


def child(node: yaml.Node, key: str) -> yaml.Node | None:
    """The value of a key, if ``node`` is a mapping that has it."""
    place = _child(node, key)
    return None if place is None else place.node


def items(node: yaml.Node | None) -> list[yaml.Node]:
    """The items, if ``node`` is a sequence."""
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def value(node: yaml.Node | None) -> Any:
    """What a node stands for in Python; None also where a tag or a date cannot be read."""
    if node is None:
        return None
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError):
        return None


def is_empty(node: yaml.Node) -> bool:
    """Whether nothing stands there: no value, null, or []."""
    return node.tag == _NULL or (isinstance(node, yaml.SequenceNode) and not node.value)


def has_reference(text: str, path: Path) -> bool:
    """Whether anchors, aliases or merge keys occur in the value of a top-level key."""
    root = read(text)
    place = find(root, path)
    if root is None or place is None or place.key is None:
        return False
    start = place.key.end_mark.index
    later = [key.start_mark.index for key, _ in root.value if key.start_mark.index > start]
    end = min(later, default=len(text))
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if start <= event.start_mark.index < end and getattr(event, "anchor", None):
            return True
    return any(node.tag == _MERGE for node in _nodes(place.node))


def add_key(text: str, key: str, item: Any, eol: str, note: str = "") -> str:
    """Adds a top-level key, at the end, with a list of one item as its value.

    Raises:
        CardError: The text cannot be edited safely.
    """
    root = read(text)
    column = 0 if root is None else root.start_mark.column
    lines = _shift(f"{key}:\n" + _with_note(dump([item]), note), column, eol)
    pairs = [] if root is None else plain(root)
    return _checked(text + lines, [*pairs, (plain_key(key), plain_of([item]))])


def append(text: str, path: Path, item: Any, eol: str, note: str = "") -> str:
    """Adds an item at the end of the list at ``path``, which may be empty, null or []; the last step is a key.

    Raises:
        CardError: The text cannot be edited safely.
    """
    root, place = _must_find(text, path)
    expected = plain(root)
    _set(expected, path, [*(plain(place.node) if items(place.node) else []), plain_of(item)])
    if is_empty(place.node):
        return _checked(_begin_list(text, place, item, eol, note), expected)
    _refuse_flow(place.node, path)
    at = _next_line(text, _end(place.node))
    lines = _shift(_with_note(dump([item]), note), place.node.start_mark.column, eol)
    return _checked(text[:at] + lines + text[at:], expected)


def add_list(text: str, path: Path, key: str, item: Any, eol: str) -> str:
    """Adds a key to the mapping at ``path``, an item of a list, with a list of one item as its value.

    Raises:
        CardError: The text cannot be edited safely.
    """
    root, place = _must_find(text, path)
    _refuse_flow(place.node, path)
    expected = plain(root)
    _set(expected, path, [*plain(place.node), (plain_key(key), plain_of([item]))])
    at = _next_line(text, _end(place.node))
    lines = _shift(f"{key}:\n" + dump([item]), place.node.start_mark.column, eol)
    return _checked(text[:at] + lines + text[at:], expected)


def replace(text: str, path: Path, item: Any, eol: str) -> str:
    """Puts another item in the place of that at ``path``, whose last step is a position in a list.

    Raises:
        CardError: The text cannot be edited safely.
    """
    root, _ = _must_find(text, path)
    start, end, column = _item_lines(text, root, path)
    expected = plain(root)
    _set(expected, path, plain_of(item))
    return _checked(text[:start] + _shift(dump([item]), column, eol) + text[end:], expected)


def delete(text: str, path: Path) -> str:
    """Takes away the top-level key, or the item of a list, at ``path``; of a list's only item [] remains.

    Raises:
        CardError: The text cannot be edited safely.
    """
    root, place = _must_find(text, path)
    expected = plain(root)
    _delete(expected, path)
    if isinstance(path[-1], str):
        assert place.key is not None
        start, end = _line_start(text, place.key.start_mark.index), _next_line(text, _end(place.node))
        return _checked(text[:start] + text[end:], expected)
    start, end, _ = _item_lines(text, root, path)
    owner = find(root, path[:-1])
    assert owner is not None
    if len(items(owner.node)) > 1:
        return _checked(text[:start] + text[end:], expected)
    assert owner.key is not None
    colon = _colon(text, owner.key)
    return _checked(text[:colon] + " []" + text[colon:start] + text[end:], expected)


def plain(node: yaml.Node) -> Any:
    """What the text means, comparable: tags and texts of scalars, lists, and mappings as lists of pairs in order."""
    return _plain(node, set(), [])


def plain_of(item: Any) -> Any:
    """The same of data that are not in the text yet."""
    return plain(yaml.compose(dump(item), Loader=yaml.SafeLoader))


def plain_key(key: str) -> Any:
    """The same of a key."""
    return plain_of({key: None})[0][0]


def _plain(node: yaml.Node, seen: set[int], aliased: list[int]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return (node.tag, node.value)
    if id(node) in seen:
        # An alias. Only which of them, since a value may hold itself.
        if id(node) not in aliased:
            aliased.append(id(node))
        return ("alias", aliased.index(id(node)))
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        return [(_plain(key, seen, aliased), _plain(item, seen, aliased)) for key, item in node.value]
    return [_plain(item, seen, aliased) for item in node.value]


def _set(data: Any, path: Path, new: Any) -> None:
    owner, at = _owner(data, path)
    owner[at] = (owner[at][0], new) if isinstance(path[-1], str) else new


def _delete(data: Any, path: Path) -> None:
    owner, at = _owner(data, path)
    del owner[at]


def _owner(data: Any, path: Path) -> tuple[list[Any], int]:
    """The list that holds the value at a path, and where in it."""
    for step in path[:-1]:
        data = data[_position(data, step)]
        if isinstance(step, str):
            data = data[1]
    return data, _position(data, path[-1])


def _position(data: list[Any], step: str | int) -> int:
    if isinstance(step, int):
        return step
    return next(i for i, pair in enumerate(data) if pair[0] == plain_key(step))


def _checked(text: str, expected: Any) -> str:
    try:
        root = read(text)
    except CardError as error:
        raise CardError(f"the front matter cannot be edited safely: afterwards {error}") from None
    if (None if root is None else plain(root)) != (expected or None):
        raise CardError("the front matter cannot be edited safely: the change would alter more than it should")
    return text


def _must_find(text: str, path: Path) -> tuple[yaml.MappingNode, Place]:
    root = read(text)
    place = find(root, path)
    if root is None or place is None:
        raise CardError(f"the front matter has no {_name(path)}")
    return root, place


def _child(node: yaml.Node, step: str | int) -> Place | None:
    if isinstance(step, int):
        held = items(node)
        return Place(held[step]) if step < len(held) else None
    if isinstance(node, yaml.MappingNode):
        for key, item in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value == step:
                return Place(item, key)
    return None


def _begin_list(text: str, place: Place, item: Any, eol: str, note: str) -> str:
    """Where nothing or [] follows the key, the items go on lines of their own."""
    assert place.key is not None
    colon, end = _colon(text, place.key), place.node.end_mark.index
    if re.search(r"[\r\n#]", text[colon:end]):
        raise CardError(f"{place.key.value} is an empty list over several lines: write [] on the line of the key")
    at = _next_line(text, max(colon, end))
    lines = _shift(_with_note(dump([item]), note), place.key.start_mark.column, eol)
    return text[:colon] + text[max(colon, end) : at] + lines + text[at:]


def _item_lines(text: str, root: yaml.Node, path: Path) -> tuple[int, int, int]:
    """The lines of a list's item, from its dash on, and the column of the dash."""
    owner, place = find(root, path[:-1]), find(root, path)
    assert owner is not None
    assert place is not None
    _refuse_flow(owner.node, path[:-1])
    column = owner.node.start_mark.column
    start = place.node.start_mark.index
    dashes = [
        token.start_mark.index
        for token in yaml.scan(text, Loader=yaml.SafeLoader)
        if isinstance(token, yaml.BlockEntryToken) and token.start_mark.column == column
    ]
    dash = max(at for at in dashes if at <= start)
    return _line_start(text, dash), _next_line(text, _end(place.node)), column


def _end(node: yaml.Node) -> int:
    """Where a value's own text ends; PyYAML counts the comments and blank lines after a block collection to it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(node, yaml.MappingNode) else last)
    return int(node.end_mark.index)


def _next_line(text: str, at: int) -> int:
    """The start of the next line; only a comment may stand before it."""
    if at == 0 or text[at - 1] in "\r\n":
        return at
    found = _REST_OF_LINE.match(text, at)
    assert found is not None
    rest = found[1].strip(" \t")
    if rest and not rest.startswith("#"):
        raise CardError(f"the front matter cannot be edited safely near {rest[:40]!r}")
    return found.end()


def _line_start(text: str, at: int) -> int:
    """The start of the line of a key or dash that must be the first thing on it."""
    start = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
    if _INDENT.fullmatch(text, start, at) is None:
        raise CardError(f"the front matter cannot be edited safely near {text[start : at + 20]!r}")
    return start


def _colon(text: str, key: yaml.ScalarNode) -> int:
    found = _COLON.match(text, key.end_mark.index)
    if found is None:
        raise CardError(f"the front matter cannot be edited safely near {key.value!r}")
    return found.end()


def _shift(lines: str, column: int, eol: str) -> str:
    """Lines as :func:`dump` writes them, indented and with the line ending of the card."""
    return "".join(" " * column + line + eol for line in lines.rstrip("\n").split("\n"))


def _with_note(lines: str, note: str) -> str:
    """A comment at the end of the first line."""
    return lines.replace("\n", f" # {note}\n", 1) if note else lines


def _refuse_flow(node: yaml.Node, path: Path) -> None:
    if not isinstance(node, yaml.CollectionNode):
        raise CardError(f"{_name(path)} in the front matter is not what it should be (a list, or an item with keys)")
    if node.flow_style:
        raise CardError(f"{_name(path)} is in flow style ([...] or {{...}}): write one item or key a line")


def _refuse_twice(root: yaml.Node) -> None:
    for node in _nodes(root):
        if isinstance(node, yaml.MappingNode):
            seen: set[tuple[str, str]] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    if (key.tag, key.value) in seen:
                        line = key.start_mark.line + 1
                        raise CardError(f"the front matter has the key {key.value!r} twice (its line {line})")
                    seen.add((key.tag, key.value))


def _nodes(root: yaml.Node) -> Iterator[yaml.Node]:
    stack, seen = [root], set[int]()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if isinstance(node, yaml.MappingNode):
            stack.extend(part for pair in node.value for part in pair)
        elif isinstance(node, yaml.SequenceNode):
            stack.extend(node.value)


def _name(path: Path) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".") or "the front matter"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
