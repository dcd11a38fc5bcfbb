"""Every folder with modules is a package of the wheel, and what is not Python in it ships."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

DATA = {"hf_geosharp.demos.text", "hf_geosharp.demos.text.data"}
"""Listed though they have no modules: setuptools warns of folders that could be packages and are not."""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_every_folder_with_modules_is_listed() -> None:
    import tomllib

    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = set()
    for name, folder in tool["package-dir"].items():
        for module in (ROOT / folder).rglob("*.py"):
            parts = module.parent.relative_to(ROOT / folder).parts
            if "__pycache__" not in parts:
                found.add(".".join((name, *parts)))
    assert found == set(tool["packages"]) - DATA


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_the_least_versions_that_are_promised_are_those_that_are_tested() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints-minimum.txt").read_text(encoding="utf-8").splitlines()
    tested = dict(line.lower().split("==") for line in lines if "==" in line)
    promised = [
        *project["dependencies"],
        *(x for n, own in project["optional-dependencies"].items() if n != "lint" for x in own),
    ]
    for requirement in promised:
        name, version = requirement.split(">=")
        assert padded(tested[name.replace("_", "-")]) == padded(version), requirement


def padded(version: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in version.split("."))
    return numbers + (0,) * (3 - len(numbers))
