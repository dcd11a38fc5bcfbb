"""The page about comparisons: its snippets run one after the other, its commands parse."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from hf_geosharp.cli import main
from tests.docs.page import fenced, parse, run_snippets

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compare.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return fenced(PAGE, language)


@pytest.mark.slow
def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_snippets("docs/compare.md", 3)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines[:2]] == ["1 (1, 2)", "2 (1, 2)"]
    assert lines[2].endswith(" False")
    assert [line.split(" None")[0] for line in lines[3:]] == ["Kendall tau-b", "Spearman rho", "Pearson r"]


def test_the_commands_parse() -> None:
    lines = [line.removeprefix("$ hf-geosharp ") for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 13
    for line in lines:
        parse(line)


def test_options_that_are_named_exist() -> None:
    commands = [main.get_command(click.Context(main), name) for name in ("score", "compare", "correlate")]
    known = {option for command in commands if command for parameter in command.params for option in parameter.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGE)) <= known


def test_the_smallest_p_value_of_four_models() -> None:
    from hf_geosharp.correlation import correlate
    from tests.results import many

    found = correlate(many(a=[1.0], b=[2.0], c=[3.0], d=[4.0]), {"a": 1, "b": 2, "c": 3, "d": 4})
    assert found.statistics[0].p_value == pytest.approx(1 / 12)
