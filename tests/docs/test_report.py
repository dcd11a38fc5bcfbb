"""The page about reports: its snippets run one after the other, its commands parse, what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from hf_geosharp.cli import main
from hf_geosharp.report.pictures import pictures
from hf_geosharp.sharpness.result import SharpnessResult
from tests.docs.page import fenced, run_snippets
from tests.report.results import full, heads

pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return fenced(PAGE, language)


@pytest.mark.slow
def test_the_snippets_run() -> None:
    names = run_snippets("docs/report.md", 2)
    assert {path.name for path in names["folder"].iterdir()} == {"result.json", "curve.svg", "report.html"}
    assert "<h1>demo:digits-" in (names["folder"] / "report.html").read_text(encoding="utf-8")


def test_the_commands_parse() -> None:
    lines = [line.removeprefix("$ ").split(" | ")[0] for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 7
    for line in lines:
        program, name, *arguments = shlex.split(line)
        command = main.get_command(click.Context(main), name)
        assert program == "hf-geosharp"
        assert command is not None
        command.make_context(name, arguments, parent=click.Context(main))


def test_what_is_named_exists() -> None:
    for path in re.findall(r"`((?:tests|hf_geosharp)/[\w./]*)`", PAGE) + re.findall(r"\]\((?!http)([\w./-]+)\)", PAGE):
        assert (ROOT / path).exists() or (ROOT / "docs" / path).exists(), path
    fields = set(SharpnessResult.__dataclass_fields__)
    table = "\n".join(line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| "))
    assert set(re.findall(r"`(\w+)`", table)) <= fields
    commands = [main.get_command(click.Context(main), name) for name in ("score", "report", "compare")]
    known = {option for c in commands if c for p in c.params for option in p.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= known


def test_every_picture_is_named() -> None:
    listed = re.search(r"as PNG and as SVG: (.*?);", " ".join(PAGE.split()))
    assert listed is not None
    per = (
        *full().per,
        *heads(("h.0.attn",), 2),
        *(p.__class__("qk", "kind", None, None, "qk", 0.1, None) for p in full().per[:1]),
    )
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(pictures(full(per=per)))
