"""The page about scale: its snippets run one after the other, its commands parse."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from hf_geosharp import score_pretrained
from hf_geosharp.cli import main
from tests.docs.page import fenced, parse, run_snippets
from tests.worlds import finished, launch

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return fenced(PAGE, language)


@pytest.mark.slow
def test_the_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_snippets("docs/scale.md", 3)
    assert capsys.readouterr().out == f"{names['result'].geodesic_sharpness}\n"


@pytest.mark.slow
def test_the_script_for_sharded_models_runs(tmp_path: Path) -> None:
    (script,) = blocks("py")
    (tmp_path / "sharded_model.py").write_text(script, encoding="utf-8")
    ranks = finished(launch(2, "run_script", str(tmp_path / "sharded_model.py"), module="tests.worlds"))
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    whole = score_pretrained("demo:vader-bert", samples=64, batch_size=32, steps=3, device="cpu")
    assert float(ranks[0][1]) == pytest.approx(whole.geodesic_sharpness, rel=1e-3)
    assert ranks[1][1] == ""


def test_the_commands_parse() -> None:
    lines = [line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines()]
    assert len(lines) == 8
    for line in lines:
        # Whatever launches it: what follows is the command and its options.
        _, arguments = re.split(r"hf-geosharp |hf_geosharp\.cli ", line, maxsplit=1)
        parse(arguments)


def test_options_that_are_named_exist() -> None:
    command = main.get_command(click.Context(main), "score")
    assert command is not None
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {"--nproc-per-node", "--multi_gpu", "--num_processes", "--ntasks", "--cpu"}  # the launchers' own
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z_-]+", PAGE)) <= known
