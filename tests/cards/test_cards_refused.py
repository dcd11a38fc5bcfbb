"""Cards that are left as they are: each with its reason, exit code 5, and what to paste."""

from __future__ import annotations

import pytest

from hf_geosharp.cards import card, section
from hf_geosharp.errors import CardError
from tests.cards.results import MODEL, make_result

RESULT = make_result()
START, END = section.START, section.END

REFUSED: dict[str, tuple[bytes, str]] = {
    "latin-1": ("# Modèle\n".encode("latin-1"), "not UTF-8"),
    "UTF-16": ("---\nlicense: mit\n---\n".encode("utf-16"), "not UTF-8"),
    "unclosed fence": (b"---\nlicense: mit\n", "closes it"),
    "rule as the first line": (b"---\n# Title\n\ntext\n", "closes it"),
    "only a fence": (b"---\n", "closes it"),
    "fences in CR": (b"---\rlicense: mit\r---\rtext", "closes it"),
    "blanks after the opening fence": (b"--- \nlicense: mit\n---\n", "followed by spaces"),
    "two opening fences": (b"---\n---\nlicense: mit\n---\n", "two lines ---"),
    "broken YAML": (b"---\nlicense: [mit\n---\n", "not valid YAML"),
    "tabs": (b"---\ntags:\n\t- a\n---\n", "not valid YAML"),
    "control characters": (b"---\na: \x01\n---\n", "not valid YAML"),
    "undefined alias": (b"---\na: *b\n---\n", "not valid YAML"),
    "two documents": (b"---\na: 1\n...\nb: 2\n---\n", "not valid YAML"),
    "end of a document": (b"---\na: 1\n...\n---\n", "edited safely"),
    "key twice": (b"---\nlicense: mit\ntags: []\nlicense: apache-2.0\n---\n", "'license' twice"),
    "key twice below": (b"---\na:\n  b: 1\n  b: 2\n---\n", "'b' twice"),
    "list": (b"---\n- license\n- mit\n---\n", "not a mapping"),
    "text": (b"---\njust text\n---\n", "not a mapping"),
    "null": (b"---\n~\n---\n", "not a mapping"),
    "flow style": (b"---\n{license: mit}\n---\n", "flow style"),
    "flow style index": (b"---\nmodel-index: [{name: x, results: []}]\n---\n", "flow style"),
    "flow style model": (b"---\nmodel-index:\n- {name: x, results: []}\n---\n", "flow style"),
    "flow style results": (b"---\nmodel-index:\n- name: x\n  results: [{a: 1}]\n---\n", "flow style"),
    "JSON": (b'---\n{"license": "mit", "model-index": []}\n---\n', "flow style"),
    "empty list over lines": (b"---\nmodel-index:\n- name: x\n  results: [\n  ]\n---\n", "over several lines"),
    "index is text": (b"---\nmodel-index: later\n---\n", "not a list of models"),
    "index is a mapping": (b"---\nmodel-index:\n  name: x\n---\n", "not a list of models"),
    "models are text": (b"---\nmodel-index:\n- x\n---\n", "not a model"),
    "results are a mapping": (b"---\nmodel-index:\n- name: x\n  results:\n    a: 1\n---\n", "are not a list"),
    "anchor in the index": (b"---\nmodel-index:\n- name: &n x\n  results: []\nbase: *n\n---\n", "anchors"),
    "alias in the index": (b"---\nbase: &b [1]\nmodel-index:\n- name: x\n  results: *b\n---\n", "anchors"),
    "index is an alias": (b"---\nbase: &b\n- name: x\nmodel-index: *b\n---\n", "anchors"),
    "merge key in the index": (b"---\nb: &b\n  c: 1\nmodel-index:\n- <<: *b\n  name: x\n---\n", "merge keys"),
    "start marker only": (f"# T\n{START}\n".encode(), "markers"),
    "end marker only": (f"# T\n{END}\n".encode(), "markers"),
    "markers the wrong way round": (f"# T\n{END}\n{START}\n".encode(), "markers"),
    "two start markers": (f"{START}\n{START}\n{END}\n".encode(), "markers"),
    "two sections": (f"{START}\n{END}\n{START}\n{END}\n".encode(), "markers"),
}

# The others are only known from the edit itself.
AT_ONCE = {name: case for name, case in REFUSED.items() if case[1] not in ("over several lines", "edited safely")}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_the_reason_and_what_to_paste(content: bytes, reason: str) -> None:
    with pytest.raises(CardError, match=reason) as caught:
        card.merge(content, RESULT, MODEL)
    assert caught.value.exit_code == 5
    assert "model-index:\n- name: small-bert\n" in caught.value.block
    assert START in caught.value.block
    assert "0.0125" in caught.value.block


@pytest.mark.parametrize(("content", "reason"), AT_ONCE.values(), ids=AT_ONCE.keys())
def test_known_before_a_score_is_taken(content: bytes, reason: str) -> None:
    with pytest.raises(CardError, match=reason):
        card.check(content)


@pytest.mark.parametrize(("content", "reason"), AT_ONCE.values(), ids=AT_ONCE.keys())
def test_removing_is_refused_too(content: bytes, reason: str) -> None:
    with pytest.raises(CardError, match=reason):
        card.remove(content)


def test_the_line_of_the_first_byte_that_is_not_utf8_is_named() -> None:
    with pytest.raises(CardError, match="line 3"):
        card.check(b"# Title\n\n\xff\n")


def test_a_name_that_holds_a_marker_is_refused() -> None:
    # Names are escaped in the text, but a command is quoted as it is.
    result = make_result(data={**RESULT.data, "columns": {"text": START}})
    with pytest.raises(CardError, match="its own marker"):
        card.merge(b"# T\n", result, MODEL)
