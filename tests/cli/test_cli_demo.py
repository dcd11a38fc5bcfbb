"""``hf-geosharp demo`` and the shipped demos behind it, on stand-in folders."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from hf_geosharp import demos
from hf_geosharp.errors import GeosharpError, UsageError

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "shipped"
    for name, task in (("letters-vit", "image-classification"), ("words-bert", "text-classification")):
        (root / name / "data").mkdir(parents=True)
        (root / name / "data" / "train.txt").write_text("data")
        description = {
            "schema": 1,
            "name": name,
            "title": f"The {name}",
            "task": task,
            "license": "MIT",
            "source": "somewhere",
            "train": {"examples": 10, "accuracy": 0.987, "loss": 0.1},
            "test": {"examples": 5, "accuracy": 0.9, "loss": 0.2},
            "parameters": 12345,
            "seed": 0,
        }
        (root / name / "demo.json").write_text(json.dumps(description))
    (root / "prose" / "data").mkdir(parents=True)
    (root / "prose" / "data" / "train.txt").write_text("data")
    prose = {
        "schema": 1,
        "name": "prose",
        "title": "Some prose",
        "task": "text",
        "license": "public-domain",
        "source": "somewhere",
        "train": {"examples": 3, "accuracy": None, "loss": None},
        "test": None,
        "parameters": None,
        "seed": None,
    }
    (root / "prose" / "demo.json").write_text(json.dumps(prose))
    (root / "__pycache__").mkdir()
    monkeypatch.setattr(demos, "_root", lambda: root)
    return root


def test_list(run: Run) -> None:
    done = run("demo")
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    flat = " ".join(done.stdout.split())
    for part in (
        "letters-vit",
        "words-bert",
        "98.7% train",
        "90.0% test",
        "12,345",
        "MIT",
        "-twin",
        "prose",
        "(data only)",
    ):
        assert part in flat


@pytest.mark.parametrize("name", ["words-bert", "demo:words-bert"])
def test_copy(run: Run, tmp_path: Path, shipped: Path, name: str) -> None:
    target = tmp_path / "new" / "copy"
    done = run("demo", name, "--output", str(target))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{target}\n"
    assert (target / "demo.json").read_bytes() == (shipped / "words-bert" / "demo.json").read_bytes()
    assert (target / "data" / "train.txt").read_text() == "data"
    assert list(target.parent.iterdir()) == [target]


def test_copy_to_the_current_folder_by_default(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("demo", "words-bert")
    assert done.exit_code == 0
    assert (tmp_path / "words-bert" / "demo.json").is_file()
    # A copy has no card that names its data.
    assert done.stderr.strip() == "Score it with: hf-geosharp score ./words-bert --data ./words-bert/data"


@pytest.mark.parametrize("place", ["empty", "."])
def test_copy_into_an_empty_folder(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty if place == "." else tmp_path)
    assert run("demo", "words-bert", "--output", place).exit_code == 0
    assert sorted(entry.name for entry in empty.iterdir()) == ["data", "demo.json"]


def test_copy_refuses_what_is_in_use(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("precious")
    done = run("demo", "words-bert", "--output", str(tmp_path / "mine"))
    assert done.exit_code == 1
    assert "not an empty folder" in done.stderr
    assert [entry.name for entry in (tmp_path / "mine").iterdir()] == ["precious.txt"]
    with pytest.raises(GeosharpError, match="not an empty folder"):
        demos.copy("words-bert", tmp_path / "mine" / "precious.txt")


def test_data_alone_are_copied_but_are_no_model(run: Run, tmp_path: Path) -> None:
    done = run("demo", "prose", "--output", str(tmp_path / "prose"))
    assert done.exit_code == 0
    assert done.stderr == f"Score a model on it with: hf-geosharp score MODEL --data {tmp_path / 'prose' / 'data'}\n"
    assert (tmp_path / "prose" / "data" / "train.txt").is_file()
    assert demos.info("prose")["license"] == "public-domain"
    with pytest.raises(UsageError, match="no demo 'prose'"):
        demos.base_name("prose")


def test_unknown_demo(run: Run) -> None:
    done = run("demo", "numbers")
    assert done.exit_code == 2
    assert "letters-vit, words-bert" in done.stderr


def test_twin_has_no_files(run: Run, tmp_path: Path) -> None:
    done = run("demo", "words-bert-twin", "--output", str(tmp_path / "twin"))
    assert done.exit_code == 2
    assert "derived" in done.stderr
    assert not (tmp_path / "twin").exists()


def test_output_needs_a_name(run: Run) -> None:
    assert run("demo", "--output", "somewhere").exit_code == 2


def test_names_and_twins(shipped: Path) -> None:
    assert demos.names() == ["letters-vit", "words-bert"]
    assert demos.shipped() == ["letters-vit", "prose", "words-bert"]
    assert demos.base_name("words-bert") == ("words-bert", False)
    assert demos.base_name("words-bert-twin") == ("words-bert", True)
    assert demos.path("words-bert-twin") == shipped / "words-bert"
    assert demos.info("letters-vit")["task"] == "image-classification"
    for unknown in ("", "-twin", "words-bert-twin-twin", "../words-bert"):
        with pytest.raises(UsageError, match="letters-vit"):
            demos.base_name(unknown)


def test_what_really_ships_can_be_listed() -> None:
    done = subprocess.run([sys.executable, "-m", "hf_geosharp.cli", "demo"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("digits-vit", "vader-bert", "text"):
        assert name in done.stdout
