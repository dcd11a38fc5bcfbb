"""Front matters and bodies made at random: what is not ours survives, merging twice is once, removing undoes it."""

from __future__ import annotations

import codecs
import os

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_geosharp.cards import blockyaml, card, index, section
from hf_geosharp.cards.document import split
from hf_geosharp.errors import CardError
from tests.cards.results import MODEL, make_result

RESULT = make_result()
SECOND = make_result(metric="mix", rho=0.01)

# Blocks of a front matter, each whole lines, in the ways people and tools write them.
BLOCKS = (
    "license: mit\n",
    "language: no\n",
    "language:\n- en\n- no\n",
    "language:\n    - en\n",
    "tags: [a, 'b', \"c\"]\n",
    "tags:\n- a # one\n# between\n- b\n",
    "version: 1.10\n",
    "empty:\n",
    "nothing: null\n",
    "text: |\n  one\n\n  two\n",
    "text: |+\n  one\n\n\n",
    "text: >-\n    folded\n    over lines\n",
    "text: plain\n  over\n  lines\n",
    "text: 'quoted\n\n  over lines'\n",
    'text: "a \\\n  b"\n',
    "deep:\n  a:\n    b:\n    - c: 1\n      d: {e: [f, g]}\n    -\n      - h\n",
    "base: &base\n  x: 1\n",
    "widget:\n- text: \"I love \U0001f917 #hub: really\"\n  example_title: 'it''s'\n",
    "? complex\n: value\n",
    '"quoted key" : 1\n',
    "co2_eq_emissions:\n  emissions: 1e-5\n  source: code\n",
    "when: 2024-01-01\n",
)
FILLERS = ("", "", "", "\n", "# comment\n", "  # indented comment\n", "\n# a\n\n")
RESULTS = (
    "task:\n  type: text-classification\ndataset:\n  name: x\n  type: x\nmetrics:\n- type: accuracy\n  value: 0.5\n",
    "task: {type: t}\ndataset: {name: n, type: n}\nmetrics: [{type: f1, value: 1}]\n",
    "metrics:\n- value: 0.9 # good\n  type: accuracy\n  verified: true\ntask:\n  type: t\n",
    "task:\n  type: |\n    t\n",
    "name: only\n",
)


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line if line.strip() else line for line in text.splitlines(keepends=True))


def item(text: str, column: int, width: int) -> str:
    """A mapping as an item of a list: its dash at ``column``, its keys ``width`` further on."""
    return " " * column + "-" + indented(text, column + width)[column + 1 :]


@st.composite
def indexes(draw: st.DrawFn) -> str:
    """A model-index in block style, or none."""
    if draw(st.booleans()):
        return ""
    inner, width = draw(st.sampled_from([0, 2, 4])), draw(st.sampled_from([2, 3, 4]))
    text = ""
    for name in draw(st.lists(st.sampled_from(["small-bert", "other", "'no'"]), min_size=1, max_size=3, unique=True)):
        held = draw(st.lists(st.sampled_from(RESULTS), max_size=3))
        results = "results:\n" if held else draw(st.sampled_from(["results: []\n", "results: [] # none\n"]))
        for result in held:
            results += item(result, inner, width) + draw(st.sampled_from(["", "", indented("# c\n", inner), "\n"]))
        parts = [f"name: {name}\n", results]
        model = "".join(draw(st.permutations(parts)))
        text += item(model, inner, width) + draw(st.sampled_from(["", "", "# after the model\n"]))
    return f"model-index:{draw(st.sampled_from(['', ' ', ' # results']))}\n{text}"


def top_level_key(block: str) -> str:
    return block.lstrip("? ").split(":")[0].split("\n")[0]


@st.composite
def front_matters(draw: st.DrawFn) -> str:
    blocks = draw(st.lists(st.sampled_from(BLOCKS), max_size=6, unique_by=top_level_key))
    blocks.insert(draw(st.integers(0, len(blocks))), draw(indexes()))
    text = "".join(block + (draw(st.sampled_from(FILLERS)) if block else "") for block in blocks)
    if any("&base" in block for block in blocks):
        text += "uses:\n  <<: *base\n  z: *base\n"
    return text


def bodies() -> st.SearchStrategy[str]:
    words = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    pieces = st.one_of(
        words, st.sampled_from(["\n", "\r\n", "\r", "# Title\n", "---\n", "```\n", "<!-- c -->", "\x85", "\u2028"])
    )
    return st.lists(pieces, max_size=8).map("".join).filter(lambda text: section.START not in text)


@st.composite
def cards(draw: st.DrawFn) -> bytes:
    yaml_lines, body = draw(front_matters()), draw(bodies())
    text = f"---\n{yaml_lines}---" + (f"{draw(st.sampled_from(['', ' ']))}\n{body}" if draw(st.booleans()) else "")
    if not yaml_lines or draw(st.integers(0, 5)) == 0:
        text = body
    text = draw(st.sampled_from(["", "", "\n", "\n\n"])) + text
    if draw(st.booleans()):
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    return draw(st.sampled_from([b"", codecs.BOM_UTF8])) + text.encode()


REASONS = ("closes it", "blanks follow", "two lines ---", "not valid YAML", "not a mapping of keys to values")


def merged(content: bytes) -> bytes | None:
    """None where the card is refused, which must be for a reason of its own."""
    try:
        return card.merge(content, RESULT, MODEL)
    except CardError as error:
        if any(reason in str(error) for reason in REASONS):
            return None
        raise


def given_back(content: bytes) -> bytes:
    """The card itself; of an empty front matter, what follows it."""
    document = split(content)
    if document.opening.startswith("---") and not document.yaml:
        return (codecs.BOM_UTF8 if document.mark else b"") + document.body.encode()
    return content


# More of them: CARD_EXAMPLES=2000 python -m pytest tests/cards/test_cards_properties.py
EXAMPLES = int(os.environ.get("CARD_EXAMPLES", "40"))
relaxed = settings(deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(cards())
@example(b"---\n0\n---")
@pytest.mark.slow
def test_what_is_not_ours_survives(content: bytes) -> None:
    new = merged(content)
    if new is None:
        return
    before, after = split(content), split(new)
    # To the byte: the body, and, line by line, the front matter.
    assert section.take(after.rest if before.opening else after.body) == before.rest
    old_lines = before.yaml.replace(" []", "").splitlines()
    rest = iter(after.yaml.replace(" []", "").splitlines())
    assert all(line in rest for line in old_lines)
    assert len(index.scores(after.yaml)) == 1
    assert card.merge(new, RESULT, MODEL) == new


@relaxed
@given(cards())
@pytest.mark.slow
def test_removing_undoes_merging(content: bytes) -> None:
    new = merged(content)
    if new is None:
        return
    assert card.remove(new) == given_back(content)
    assert card.remove(card.merge(new, SECOND, MODEL)) == given_back(content)
    both = card.merge(card.merge(new, SECOND, MODEL), RESULT, MODEL)
    assert len(index.scores(split(both).yaml)) == 2


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20), st.dates()
)
KEYS = st.text(st.characters(categories=["L", "N"], include_characters=" -_:#'\""), min_size=1, max_size=10)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@relaxed
@given(
    data=st.dictionaries(KEYS.filter(lambda key: key != index.INDEX), VALUES, min_size=1, max_size=5),
    style=st.sampled_from([None, "'", '"', "|", ">"]),
    indent=st.sampled_from([2, 4, 8]),
    width=st.sampled_from([20, 80]),
)
def test_any_metadata_that_a_tool_dumps_survives(
    data: dict[str, object], style: str | None, indent: int, width: int
) -> None:
    text = yaml.safe_dump(data, default_style=style, indent=indent, width=width, allow_unicode=True, sort_keys=False)
    content = f"---\n{text}---\n# Title\n".encode()
    if split(content).yaml != text:
        return  # a value has a line of its own that looks like a fence
    new = merged(content)
    if new is None:
        return
    after = split(new).yaml
    assert after.startswith(text)
    assert {k: v for k, v in yaml.safe_load(after).items() if k != index.INDEX} == yaml.safe_load(text)
    assert card.remove(new) == content


@relaxed
@given(st.binary(max_size=200))
def test_any_bytes_are_merged_or_refused(content: bytes) -> None:
    try:
        new = card.merge(content, RESULT, MODEL)
    except CardError as error:
        refused = error
    else:
        assert card.merge(new, RESULT, MODEL) == new
        return
    assert section.START in refused.block


@relaxed
@given(st.lists(st.one_of(st.text(max_size=12), st.integers(), st.none(), st.booleans()), max_size=4))
def test_what_is_dumped_reads_back(values: list[object]) -> None:
    assert yaml.safe_load(blockyaml.dump({"values": values})) == {"values": values}
