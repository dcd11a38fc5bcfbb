"""The page about model cards: its snippets run one after the other, its commands parse, what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click

from hf_geosharp.cli import main
from tests.docs.page import fenced, run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "model-cards.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return fenced(PAGE, language)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines() if line.startswith("$ ")]
    return [line[2:].split(" #")[0].strip() for line in lines]


def test_the_snippets_run(capsys: Any) -> None:
    run_snippets("docs/model-cards.md", 3)
    printed = capsys.readouterr().out
    assert printed.startswith("geodesic_sharpness 0.")
    assert "Into the front matter:" in printed


def test_the_commands_parse() -> None:
    group = click.Context(main)
    assert len(commands()) >= 10
    for line in commands():
        program, name, *arguments = shlex.split(line)
        command = main.get_command(group, name)
        assert (program, command is not None) == ("hf-geosharp", True), line
        assert command is not None
        command.make_context(name, arguments, parent=group)


def test_options_that_are_named_exist() -> None:
    found = [main.get_command(click.Context(main), name) for name in ("card", "score")]
    options = {o for c in found if c for p in c.params for o in (*p.opts, *p.secondary_opts)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) <= options


def test_what_counts_as_the_same_score_is_said() -> None:
    from hf_geosharp.cards import entry
    from tests.cards.results import make_result

    (metric,) = entry.entry(make_result())["metrics"]
    said = re.search(r"the same settings \(([^)]*)\)", " ".join(PAGE.split()))
    assert said is not None
    words = [name.replace("rho", "ρ").replace("_", " ") for name in metric["args"]]
    assert said[1].split(", ") == [*words, "task", "data"]
