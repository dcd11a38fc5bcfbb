"""The page about inspecting: its snippets run one after the other, its commands parse, it has every field."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from hf_geosharp.cli import main
from hf_geosharp.geometry.gauge import CUTOFF
from hf_geosharp.inspection import Inspection
from hf_geosharp.site_report import STATUSES, SiteReport, Slice, Totals
from hf_geosharp.symmetry.health import DEAD, HeadHealth
from hf_geosharp.symmetry.layouts import read_layouts
from tests.docs.page import fenced, run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "inspect.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return fenced(PAGE, language)


@pytest.mark.slow
def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets("docs/inspect.md", 6)
    assert {path.name for path in tmp_path.iterdir()} == {"batch.safetensors", "heads.svg"}


def test_every_command_parses() -> None:
    lines = [line[2:].split("#")[0].split(" | ")[0] for b in blocks("console") for line in b.splitlines()]
    assert len(lines) >= 8
    group = click.Context(main)
    command = main.get_command(group, "inspect")
    assert command is not None
    for line in lines:
        name, *arguments = shlex.split(line.replace("<model-id>", "owner/name"))[1:]
        assert name == "inspect"
        command.make_context(name, arguments, parent=group)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--help"} <= known


@pytest.mark.parametrize("record", [Inspection, SiteReport, Slice, Totals, HeadHealth])
def test_every_field_is_explained(record: Any) -> None:
    named = set(re.findall(r"`(\w+)`", PAGE)) | {"schema"}
    assert {field.name for field in fields(record)} <= named


def test_statuses_and_thresholds_are_those_of_the_code() -> None:
    assert all(f"| `{status}` |" in PAGE for status in STATUSES)
    assert f"at most {DEAD:.0e} of the median" in PAGE.replace("e-4", "e-04")
    assert f"above {CUTOFF:.0e} of the largest, as in a score" in PAGE.replace("1e-6", "1e-06")


def test_every_file_that_is_named_exists() -> None:
    for path in re.findall(r"`(tests/[\w./-]*)`", PAGE):
        assert (ROOT / path).exists()


def test_the_layout_that_is_shown_can_be_read(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks("json") if '"layouts"' in block)
    (tmp_path / "layout.json").write_text(shown, encoding="utf-8")
    (layout,) = read_layouts(tmp_path / "layout.json")
    assert (layout.name, layout.heads) == ("mine", (8, 2))
