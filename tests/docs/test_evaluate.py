"""The page about evaluate: its snippets run one after the other, its commands parse."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from hf_geosharp import registration, score
from hf_geosharp.cli import main
from hf_geosharp.sharpness.settings import Settings
from tests.docs.page import fenced, run_snippets
from tests.metrics.caches import ACCURACY, evaluate_cache, put_metric

__all__ = ["evaluate_cache"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("evaluate.md", "cli.md")}


def blocks(page: str, language: str) -> list[str]:
    return fenced(PAGES[page], language)


@pytest.mark.slow
def test_the_snippets_run(evaluate_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    registration.register()
    put_metric("accuracy", ACCURACY)
    names = run_snippets("docs/evaluate.md", 10)
    assert names["result"]["details"]["ascent"] == "secant"
    [saved] = (tmp_path / "results").iterdir()
    assert json.loads(saved.read_text())["geodesic_sharpness"] > 0


def test_the_cost_that_is_named_is_the_cost() -> None:
    defaults = score.__kwdefaults__
    named = f"{defaults['samples']} `samples` in batches of {defaults['batch_size']}"
    (_, most), (_, more) = Settings().first, Settings().rough or ("", 0)
    text = " ".join(PAGES["evaluate.md"].split())
    assert f"{named}. Each batch is searched by at most {most} steps of the secant ascent" in text
    assert f"by {more} steps of Auto-PGD as well" in text
    assert Settings(steps=most).rough is None is Settings(ascent="secant").rough
    assert f"{most} or fewer leave Auto-PGD out" in text


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_parse(page: str) -> None:
    lines = [line[2:].split("#")[0].strip() for block in blocks(page, "console") for line in block.splitlines()]
    group = click.Context(main)
    assert lines
    for line in lines:
        name, *arguments = shlex.split(line.removeprefix("hf-geosharp").removeprefix("hf geosharp"))
        command = main.get_command(group, name)
        assert command is not None, line
        command.make_context(name, arguments, parent=group)


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page: str) -> None:
    options = {o for name in main.list_commands(click.Context(main)) for o in _options(name)}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGES[page])) - {"--help"} <= options


def _options(name: str) -> set[str]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}
