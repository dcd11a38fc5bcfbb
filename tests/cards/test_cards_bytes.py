"""What merging a score leaves alone, card by card: every byte that is not ours."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
import yaml

from hf_geosharp.cards import card, index, section
from hf_geosharp.cards.document import split
from tests.cards.results import MODEL, make_result

BOM = codecs.BOM_UTF8
RESULT = make_result()
OTHERS = """\
model-index:
- name: small-bert
  results:
  - task:
      name: Text Classification
      type: text-classification
    dataset:
      name: glue
      type: glue
      args: sst2
    metrics:
    - name: Accuracy
      type: accuracy
      value: 0.9
"""

CARDS: dict[str, bytes] = {
    "empty file": b"",
    "one line break": b"\n",
    "blank lines only": b"\n\n\n",
    "body only": b"# Title\n\ntext\n",
    "body without final newline": b"# Title",
    "body with trailing blank lines": b"# Title\n\n\n",
    "body in CRLF": b"# Title\r\n\r\ntext\r\n",
    "body in CRLF without final newline": b"# Title\r\n\r\ntext",
    "body in CR": b"# Title\rtext\r",
    "body with BOM": BOM + b"# Title\n",
    "BOM only": BOM,
    "rule further down": b"# Title\n\n---\n\nmore\n\n---\n",
    "front matter": b"---\nlicense: mit\n---\n\n# Title\n",
    "front matter without body": b"---\nlicense: mit\n---\n",
    "front matter without final newline": b"---\nlicense: mit\n---",
    "front matter, body without final newline": b"---\nlicense: mit\n---\ntext",
    "front matter in CRLF": b"---\r\nlicense: mit\r\n---\r\n\r\n# Title\r\n",
    "front matter in CRLF, body in LF": b"---\r\nlicense: mit\r\n---\r\n# Title\n\na\n\nb\n",
    "front matter in LF, body in CRLF": b"---\nlicense: mit\n---\r\n# Title\r\n\r\na\r\n",
    "mixed line endings inside": b"---\r\nlicense: mit\ntags:\r\n- a\n---\n# Title\r\n",
    "line before the fence ends with CR": b"---\nlicense: mit\r---\n# Title\n",
    "BOM and front matter": BOM + b"---\nlicense: mit\n---\n# Title\n",
    "BOM, CRLF, no final newline": BOM + b"---\r\nlicense: mit\r\n---\r\n# Title",
    "leading blank lines": b"\n\n---\nlicense: mit\n---\n# Title\n",
    "leading blanks before the fence": b"  ---\nlicense: mit\n---\n",
    "blanks after the closing fence": b"---\nlicense: mit\n---  \n# Title\n",
    "rule in the body": b"---\nlicense: mit\n---\n# Title\n\n---\n\nmore\n",
    "comments": b"---\n# first\nlicense: mit # why\n\n# last\n---\n# Title\n",
    "comments only": b"---\n# nothing yet\n---\n# Title\n",
    "blank line only": b"---\n\n---\n# Title\n",
    "key order": b"---\nz: 1\na: 2\nm: 3\n---\n",
    "quoting": b"---\na: 'x'\nb: \"y\"\nc: z\nd: 'it''s'\n---\n",
    "numbers that a dump would change": b"---\nn: 1.10\nm: 0x1F\no: 1_000\np: 1e3\n---\n",
    "no and yes": b"---\nlanguage: no\nflag: yes\nlist: [on, off]\n---\n",
    "null keys": b"---\nlicense:\ntags: null\nextra: ~\n---\n",
    "unknown keys": b"---\nsome_tool: {deep: [1, {x: y}]}\nother: !custom value\n---\n",
    "duplicate tags": b"---\ntags:\n- a\n- a\n---\n",
    "dates": b"---\ndate: 2024-02-30\nwhen: 2024-01-01T00:00:00Z\n---\n",
    "wide indentation": b"---\ntags:\n        - a\n        - b\n---\n",
    "indented front matter": b"---\n  license: mit\n  tags:\n  - a\n---\n# Title\n",
    "folded and literal text": b"---\na: >\n  folded\n  text\n\n\nb: |+\n  kept\n\n\n---\n# Title\n",
    "literal text last": b"---\na: |\n  one\n   two\n---\n# Title\n",
    "plain text over lines": b"---\na: one\n  two\n  three\nb: 'four\n\n  five'\n---\n",
    "anchors outside the index": b"---\nbase: &b\n  x: 1\nmore:\n  <<: *b\n  y: *b\n---\n# Title\n",
    "value that holds itself": b"---\na: &a\n- *a\n---\n# Title\n",
    "complex keys": b"---\n? [a, b]\n: c\n? d\n: e\n---\n",
    "emoji and other alphabets": "---\nemoji: \U0001f917\nname: Ünïcödé 中文\n---\n# \U0001f680 Título\n".encode(),
    "line separators in text": "---\na: x\n---\n# a\u2028b\x0bc\x85d\n".encode(),
    "colours and colons": b"---\ncolorFrom: red\na: 'b: c'\nurl: https://x.y/z#w\n---\n",
    "marker in the front matter": f"---\na: '{section.START}'\n---\n# Title\n".encode(),
    "other results": f"---\nlicense: mit\n{OTHERS}---\n# Title\n".encode(),
    "other results in CRLF": f"---\nlicense: mit\n{OTHERS}---\n# Title\n".replace("\n", "\r\n").encode(),
    "keys after the index": f"---\n{OTHERS}license: mit # after\n---\n# Title\n".encode(),
    "comments around results": (
        f"---\n{OTHERS}  # the end of the results\n\n# the end of the index\ntags:\n- a\n---\n# Title\n".encode()
    ),
    "index indented": (
        b"---\nmodel-index:\n  - name: small-bert\n    results:\n      - task: {type: a}\n        x: 1\n---\n"
    ),
    "wide dashes": b"---\nmodel-index:\n-   name: x\n    results:\n    -   task:\n            type: t\n---\n",
    "dash on a line of its own": b"---\nmodel-index:\n-\n  name: x\n  results:\n  -\n    task:\n      type: t\n---\n",
    "name after results": b"---\nmodel-index:\n- results:\n  - task:\n      type: t\n  name: x\n---\n",
    "no results yet": b"---\nmodel-index:\n- name: x\n  results: []\nlicense: mit\n---\n# Title\n",
    "no results yet, with a comment": b"---\nmodel-index:\n- name: x\n  results: [] # none\n  more: 1\n---\n",
    "no results yet, quoted key": b"---\n'model-index':\n- 'name': x\n  \"results\": []\n---\n",
    "results that end in literal text": (
        b"---\nmodel-index:\n- name: x\n  results:\n  - task:\n      type: |+\n        t\n\n\nlicense: mit\n---\n"
    ),
    "results in flow style inside": (
        b"---\nmodel-index:\n- name: x\n  results:\n  - {task: {type: t}, metrics: [{type: a, value: 1}]}\n---\n"
    ),
    "several models": (
        f"---\n{OTHERS}- name: second\n  results:\n  - task:\n      type: t\nlicense: mit\n---\n# Title\n".encode()
    ),
    "several models, none ours": (
        b"---\nmodel-index:\n- name: a\n  results:\n  - x: 1\n- name: b\n  results: []\n# end\ntags: []\n---\n"
    ),
    "verified results": (
        b"---\nmodel-index:\n- name: x\n  results:\n  - task:\n      type: t\n    metrics:\n    - type: accuracy\n"
        b"      value: 0.91\n      verified: true\n      verifyToken: eyJ.x-_y\n---\n"
    ),
    "numpy scalars of another tool": (
        b"---\nmodel-index:\n- name: x\n  results:\n  - task:\n      type: t\n    metrics:\n    - type: f1\n"
        b"      value: !!python/object/apply:numpy.core.multiarray.scalar\n      - 1\n---\n"
    ),
}


def others(content: bytes) -> Any:
    """The metadata without our scores, read by another way than that of the code: as data, not as text."""
    text = split(content).yaml
    data = yaml.load(text, Loader=_Loader) or {}
    for model in data.get("model-index") or []:
        for result in model.get("results") or []:
            metrics = result.get("metrics") or []
            kept = [m for m in metrics if not (isinstance(m, dict) and m.get("type") == "geodesic_sharpness")]
            if metrics and not kept:
                result["ours"] = True
        model["results"] = [r for r in model.get("results") or [] if "ours" not in r]
    return data


class _Loader(yaml.SafeLoader):
    """Reads what other tools leave in cards, too."""


_Loader.add_multi_constructor("", lambda loader, suffix, node: (suffix, str(node.value)))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda loader, node: node.value)


def is_subsequence(part: bytes, whole: bytes) -> bool:
    rest = iter(whole.splitlines(keepends=True))
    return all(line in rest for line in part.splitlines(keepends=True))


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_every_other_byte_stays(content: bytes) -> None:
    merged = card.merge(content, RESULT, MODEL)
    assert merged != content
    # Our score is there once, as the entry says.
    (score,) = index.scores(split(merged).yaml)
    assert score["metrics"][0]["value"] == 0.0125
    assert score["dataset"]["type"] == "nyu-mll/glue"
    # And the section, once.
    assert split(merged).body.count("0.0125000") == 2
    # All else is as it was: front matter as data, the body to the byte.
    assert merged.startswith(BOM) == content.startswith(BOM)
    before, after = split(content), split(merged)
    start, end = section.find(after.rest) or (0, 0)
    assert after.body.startswith(before.body) or not before.body
    assert start < end


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_the_lines_of_the_front_matter_stay_in_order(content: bytes) -> None:
    before, after = split(content).yaml, split(card.merge(content, RESULT, MODEL)).yaml
    # The one line that changes is that of an empty list, which becomes a list.
    for empty in (" [] # none\n", " []\n"):
        if f"results:{empty}" in before or f'"results":{empty}' in before:
            before = before.replace(f"results:{empty}", "results:" + empty.replace(" []", ""), 1)
            before = before.replace(f'"results":{empty}', '"results":' + empty.replace(" []", ""), 1)
    if "none ours" in _name(content):
        # A new model is put after the others, so theirs stay empty.
        before = split(content).yaml
    assert is_subsequence(before.encode(), after.encode())


# Plain dicts cannot hold the others; the code compares nodes.
AS_DATA = {name: content for name, content in CARDS.items() if name not in ("value that holds itself", "complex keys")}


@pytest.mark.parametrize("content", AS_DATA.values(), ids=AS_DATA.keys())
def test_the_other_metadata_mean_the_same(content: bytes) -> None:
    before, after = others(content), others(card.merge(content, RESULT, MODEL))
    if [m.get("name") for m in after["model-index"]] != [m.get("name") for m in before.get("model-index") or []]:
        assert after["model-index"].pop() == {"name": "small-bert", "results": []}
    if not after["model-index"]:
        del after["model-index"]
    assert after == before


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_twice_is_once(content: bytes) -> None:
    merged = card.merge(content, RESULT, MODEL)
    assert card.merge(merged, RESULT, MODEL) == merged


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_removing_gives_back_the_card(content: bytes) -> None:
    assert card.remove(card.merge(content, RESULT, MODEL)) == content


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_removing_from_a_card_without_a_score_changes_nothing(content: bytes) -> None:
    assert card.remove(content) == content


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_a_second_score_comes_and_goes_alone(content: bytes) -> None:
    first = card.merge(content, RESULT, MODEL)
    both = card.merge(first, make_result(metric="mix", rho=0.01), MODEL)
    assert len(index.scores(split(both).yaml)) == 2
    assert card.remove(both) == content


@pytest.mark.parametrize("content", CARDS.values(), ids=CARDS.keys())
def test_new_lines_have_the_line_ending_of_the_card(content: bytes) -> None:
    merged = card.merge(content, RESULT, MODEL)
    new_crlf = merged.count(b"\r\n") - content.count(b"\r\n")
    new_lf = merged.count(b"\n") - content.count(b"\n") - new_crlf
    if content.count(b"\r\n") > content.count(b"\n") - content.count(b"\r\n"):
        assert (new_lf, new_crlf > 50) == (0, True)
    elif content.endswith(b"\r"):
        # The first line feed joins the carriage return that stands there.
        assert (new_lf > 50, new_crlf) == (True, 1)
    else:
        assert (new_lf > 50, new_crlf) == (True, 0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        # Two lines --- are an empty front matter; it is gone with what was put into it.
        (b"---\n---\n# Title\n", b"# Title\n"),
        (b"---\r\n---\r\n# Title\r\n", b"# Title\r\n"),
        (b"---\n---", b""),
        (b"---\n---\n# Title\n\n---\n\nmore\n", b"# Title\n\n---\n\nmore\n"),
        (b"---\nmodel-index: []\nlicense: mit\n---\n", b"---\nlicense: mit\n---\n"),
        (b"---\nmodel-index:\nlicense: mit\n---\n", b"---\nlicense: mit\n---\n"),
        (b"---\nmodel-index:\n- name: x\n  results:\n---\n", b"---\nmodel-index:\n- name: x\n  results: []\n---\n"),
        (b"---\nmodel-index:\n- name: x\n---\n", b"---\nmodel-index:\n- name: x\n  results: []\n---\n"),
    ],
)
def test_the_documented_exceptions_of_removing(content: bytes, expected: bytes) -> None:
    merged = card.merge(content, RESULT, MODEL)
    assert len(index.scores(split(merged).yaml)) == 1
    assert card.merge(merged, RESULT, MODEL) == merged
    assert card.remove(merged) == expected


def test_there_are_at_least_forty_cases() -> None:
    assert len(CARDS) >= 40
    assert len(set(CARDS.values())) == len(CARDS)


def test_the_whole_card_as_it_is_written() -> None:
    merged = card.merge(b"---\nlicense: mit # yes\n---\n\n# Title\n", RESULT, MODEL).decode()
    head, body = merged.split("---\n\n# Title\n")
    assert head == (
        "---\nlicense: mit # yes\nmodel-index:\n- name: small-bert # added by hf-geosharp\n  results:\n  - task:\n"
        "      type: text-classification\n    dataset:\n      name: nyu-mll/glue\n      type: nyu-mll/glue\n"
        f'      config: sst2\n      split: train\n      revision: "{RESULT.data["revision"]}"\n'
        "    metrics:\n    - type: geodesic_sharpness\n      value: 0.0125\n"
        "      name: Geodesic sharpness (inv, rho 0.1)\n      args:\n        metric: inv\n        rho: 0.1\n"
        "        geodesic: second\n        symmetries: full\n        params: all\n        case: worst\n"
        "        ascent: apgd\n        steps: 20\n"
        "        samples: 256\n        batch_size: 128\n        seed: 0\n    source:\n      name: hf-geosharp\n"
        "      url: https://arxiv.org/abs/2505.05409\n"
    )
    assert body.startswith(f"\n{section.START}\n## Geodesic sharpness\n")
    assert body.endswith(f"{section.END}\n")


def _name(content: bytes) -> str:
    return next(name for name, held in CARDS.items() if held == content)
