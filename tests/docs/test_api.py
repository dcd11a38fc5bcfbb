"""The page about the Python API: complete, its snippet runs, and every argument of a function is in its docstring."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import hf_geosharp
from tests.docs.page import run_snippets

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
FUNCTIONS = ("score", "score_pretrained", "load_pretrained", "compare_pretrained", "correlate", "find_symmetries",
             "inspect", "inspect_pretrained", "GeodesicSharpnessCallback")  # fmt: skip
SAME_AS = {
    "score_pretrained": ("score",),
    "load_pretrained": ("score_pretrained",),
    "inspect_pretrained": ("inspect", "score_pretrained"),
}
"""Whose arguments are documented with those of others."""


def test_every_name_is_on_the_page_and_can_be_imported() -> None:
    for name in hf_geosharp.__all__:
        assert getattr(hf_geosharp, name).__doc__
        assert re.search(rf"`{name}\b", PAGE), name


def test_every_name_on_the_page_is_one_that_can_be_imported() -> None:
    listed = re.findall(r"^\| `(\w+)", PAGE, flags=re.MULTILINE) + re.findall(r", `(\w+)\(", PAGE)
    assert set(listed) == set(hf_geosharp.__all__)


def test_every_member_on_the_page_is_one_of_its_class() -> None:
    rows = re.findall(r"^\| `([A-Z]\w+)` \| [^|:]*: (`[^|]*) \|$", PAGE, flags=re.MULTILINE)
    assert {name for name, _ in rows} >= {"SharpnessResult", "SymmetryMap", "Inspection"}
    for name, text in rows:
        for member in re.findall(r"`(\w+)`", text):
            own: Any = getattr(hf_geosharp, name)
            assert member in {*dir(own), *inspect.signature(own).parameters}, f"{name}: {member}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_in_a_docstring(name: str) -> None:
    function: Any = getattr(hf_geosharp, name)
    texts = " ".join(getattr(hf_geosharp, n).__doc__ for n in (name, *SAME_AS.get(name, ())))
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b", texts), f"{name}: {argument}"


def test_the_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run_snippets("docs/api.md", 1)
    assert len(capsys.readouterr().out.splitlines()) == 2
