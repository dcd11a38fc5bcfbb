"""Imports go down only: each module imports what is below it in the order of CONTRIBUTING.md, and nothing above it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the top to the bottom; packages stand for all that is in them.
ORDER = (
    "__init__", "cli", "metrics", "metric", "trainer", "report", "cards",
    "charts", "comparison", "correlation", "members", "comparable", "checkpoints",
    "heatmaps", "plots", "figures", "places", "inspection", "example_batches", "site_report", "scoring",
    "tasks", "sharpness", "parallel", "launchers", "symmetry", "geometry",
    "demos", "registration", "record", "wrappers", "evaluating", "carried", "atomic", "paths", "layers",
    "untouched", "randomness", "arguments", "errors",
)  # fmt: skip


def unit(path: str) -> str:
    """The name of ORDER that a file belongs to; ``cli`` and ``metrics`` are installed as parts of hf_geosharp."""
    return path.removeprefix("hf_geosharp/").split("/")[0].removesuffix(".py")


FILES = {
    file: unit(file.relative_to(ROOT).as_posix())
    for folder in ("hf_geosharp", "cli", "metrics")
    for file in sorted((ROOT / folder).glob("**/*.py"))
}


def imported(file: Path) -> Iterator[tuple[int, str]]:
    """Line and unit of every import of this package, those inside functions and for type checkers included."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            assert not name.startswith("."), f"{file}:{node.lineno}: a relative import"
            package, _, rest = f"{name}.".partition(".")
            if package == "hf_geosharp":
                below = rest.split(".")[0]
                yield node.lineno, below if below in ORDER else "__init__"


def test_every_module_has_its_place() -> None:
    assert set(FILES.values()) == set(ORDER)
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down_only(name: str) -> None:
    place = ORDER.index(name)
    up = [
        f"{file.relative_to(ROOT)}:{line} imports {other}"
        for file, own in FILES.items()
        if own == name
        for line, other in imported(file)
        if ORDER.index(other) < place
    ]
    assert not up, "\n".join(up)


def test_contributing_has_the_same_order() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Layers")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", re.sub(r"\(.*?\)", "", row))]
    assert tuple(map(unit, named)) == ORDER
